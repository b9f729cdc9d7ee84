"""Makes the pocket model's tokenizer: a few hundred whole words, and one token for each fixed span of the rendered template.

Words carry no space of their own, so a word has one id wherever it stands (after a space, a line break or a tag), which is what lets a
tiny model copy. Text survives encode and decode exactly when it is spelled the way the shop and the template spell it: single spaces
between words, none beside a line break. Words outside the vocabulary fall back to letters.
"""

import json
import shutil
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN = "<|unknown|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Fixed spans of a rendered conversation. None starts with the stop token unless it can only follow a prompt, so that the ids the agent
# builds turn by turn are the ids of the whole conversation rendered at once.
SPANS = (
    "<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "\n<|im_start|>user\n",
    "\n<|im_start|>user\n<tool_response>\n",
    "\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    "\n</think>\n\n<tool_call>\n<function=search>\n<parameter=query>\n",
    "\n</think>\n\n<tool_call>\n<function=click>\n<parameter=target>\n",
    "\n</parameter>\n</function>\n</tool_call>",
)
PHRASES = (
    "| next | back to search",
    "| next | previous | back to search",
    "| previous | back to search",
    "| back to search",
    "| buy now",
    "back to search",
    "buy now",
    "search page",
)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def tool_block(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that the template writes before the system message's own text."""
    scratch = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({UNKNOWN: 0}, UNKNOWN)), chat_template=TEMPLATE.read_text())
    messages = [{"role": "system", "content": "persona"}, {"role": "user", "content": "x"}]
    text = str(scratch.apply_chat_template(messages, tools=[dict(tool) for tool in tools], tokenize=False))
    return text.partition("persona")[0]


def build(words: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is `words` (in their order), letters, and the fixed spans for `tools`."""
    letters = string.ascii_letters + string.digits + string.punctuation
    pieces = [UNKNOWN, "\n", *dict.fromkeys(words), *letters, *(f"##{c}" for c in letters)]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(dict.fromkeys(pieces))}, unk_token=UNKNOWN, continuing_subword_prefix="##"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Split(Regex(" +"), "removed"),
            pre_tokenizers.Split(Regex("[a-z]+="), "isolated"),
            pre_tokenizers.Split(Regex(r"\$\d+-(?=\$)"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
            decoders.Replace(Regex(" (?=<)"), ""),
            decoders.Replace("= ", "="),
            decoders.Replace(Regex(r"(?<=\d)- (?=\$)"), "-"),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    spans = (*MARKUP, *SPANS, tool_block(tools), *PHRASES)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in spans])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE.read_text(),
        clean_up_tokenization_spaces=False,
    )


def save(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, with the same bytes each time."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        tokenizer.save_pretrained(str(directory))
    except Exception as error:  # the tokenizers library raises a bare Exception for a full disk as for a path that cannot be written
        raise OSError(f"{directory}: the tokenizer cannot be written ({error})") from error
    shutil.copyfile(TEMPLATE, directory / "chat_template.jinja")
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=2, sort_keys=True) + "\n")
