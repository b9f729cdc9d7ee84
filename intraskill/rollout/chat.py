"""Messages to token ids and sampled ids back to tool calls, in the chat template that the tokenizer carries.

The template renders the first prompt once. After that a conversation only grows: the sampled ids stay as they are and `tool_result`
appends the text that the template would put between two assistant turns. Nothing sampled is ever tokenised again, so the ids that the
trainer sees are the ids that the engine sampled.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from intraskill.types import Chunk, InputError, Task, ToolCall

NEEDED_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
_SENTINEL = "sentinelquestion"
_OPENING = [{"role": "system", "content": "persona"}, {"role": "user", "content": "question"}]
_MARKUP = re.compile(r"<(?=[|/A-Za-z])")
_JSON_TYPES = {"integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


@dataclasses.dataclass(frozen=True)
class ProtocolError:
    """Why a sampled text is not one tool call.

    `kind` is one of no_tool_call, several_tool_calls, unknown_tool, missing_argument, wrong_type, unclosed_tag, text_after_call.
    """

    kind: str
    message: str


def load_tokenizer(directory: str | Path):
    """The tokenizer of a checkpoint directory. Raises InputError when it is missing or lacks Qwen3.5's chat tokens."""
    from transformers import AutoTokenizer  # imported late: it takes seconds, and only entry points need it

    directory = Path(directory)
    if not (directory / "tokenizer.json").is_file():
        raise InputError(f"{directory} has no tokenizer.json: a checkpoint directory carries its tokenizer; point to a complete HF directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers raises many types for a broken file
        raise InputError(f"{directory}: the tokenizer cannot be read ({type(error).__name__}: {error}); restore its files") from error
    vocabulary = tokenizer.get_vocab()
    missing = [t for t in (*NEEDED_TOKENS, *STOP_TOKENS) if t not in vocabulary]
    if missing:
        raise InputError(f"{directory}: the tokenizer lacks the chat tokens {missing}; use one with Qwen3.5's special tokens")
    if not tokenizer.chat_template:
        raise InputError(f"{directory}: the tokenizer has no chat template; add chat_template.jinja next to tokenizer.json")
    return tokenizer


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def neutralise(text: str) -> str:
    """Breaks anything that looks like chat markup, so that a product title or a skill can never open a turn or a tool call."""
    return _MARKUP.sub("< ", text)


def persona_lines(persona: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`key value` lines in the persona's own order; nested keys are joined by a space, lists by commas."""
    for key, value in persona.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from persona_lines(value, f"{name} ")
        elif isinstance(value, (list, tuple)):
            yield f"{name} {', '.join(str(v) for v in value)}"
        else:
            yield f"{name} {value}"


def system_text(persona: Mapping[str, Any], chunks: Sequence[Chunk]) -> str:
    """The system message's text after the tool description: the persona, then the skills, if any, in prompt order."""
    lines = ["persona", *persona_lines(persona)]
    if chunks:
        lines += ["skills", *(f"- {chunk.text}" for chunk in chunks)]
    return neutralise("\n".join(lines))


class Chat:
    """One tokenizer, one set of tools, one thinking mode.

    Args:
      tokenizer: a transformers tokenizer with a chat template (see `load_tokenizer`).
      tools: JSON schemas in the OpenAI function format; fixed for all episodes.
      thinking: opens a think block in every generation prompt (the 4B default); otherwise an empty, closed one.
    """

    def __init__(self, tokenizer, tools: Sequence[Mapping[str, Any]], *, thinking: bool = True):
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._thinking = thinking
        # The tokenizer proper: transformers' wrapper around it costs more than the rest of a turn. A group sees the same pages many times.
        backend = tokenizer.backend_tokenizer
        self._cached_encode = functools.lru_cache(maxsize=16384)(lambda text: tuple(backend.encode(text, add_special_tokens=False).ids))
        self._parameters = {t["function"]["name"]: t["function"]["parameters"] for t in self._tools}
        vocabulary = tokenizer.get_vocab()
        self.stop_ids: tuple[int, ...] = tuple(vocabulary[t] for t in STOP_TOKENS)
        self._before, self._after = self._result_fragments()
        unknown = tokenizer.unk_token_id
        if unknown is not None and unknown in self._render([{"role": "system", "content": "persona"}, {"role": "user", "content": "search page"}]):
            raise InputError("the tokenizer cannot spell the tool description; use the tokenizer that was made for these tools")

    def _text(self, messages: list[dict], generate: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=self._tools, add_generation_prompt=generate, tokenize=False, enable_thinking=self._thinking
        )

    def _render(self, messages: list[dict]) -> list[int]:
        return self._encode(self._text(messages))

    def _encode(self, text: str) -> list[int]:
        return list(self._cached_encode(text))

    def _result_fragments(self) -> tuple[str, str]:
        """What the template writes before and after a tool result that follows an assistant turn's stop token."""
        call = {"type": "function", "function": {"name": self._tools[0]["function"]["name"], "arguments": {}}}
        thought = "thought" if self._thinking else ""
        turn = {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]}
        result = {"role": "tool", "content": _SENTINEL}
        try:
            before = self._text([*_OPENING, turn], generate=False).rstrip("\n")
            whole = self._text([*_OPENING, turn, result])
            twice = self._text([*_OPENING, turn, result, turn, result])
            opening = self._opening
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template cannot render a tool call and its result ({' '.join(str(error).split())}); use Qwen3.5's") from error
        appends = before.startswith(opening) and before.endswith(STOP_TOKENS[0]) and whole.startswith(before) and whole.count(_SENTINEL) == 1
        # A second round trip, because a template may drop the thoughts of all turns but the latest few.
        if not appends or twice != whole + before[len(opening) :] + whole[len(before) :]:
            raise InputError("the chat template rewrites earlier turns when a tool result is added; use one that only appends")
        head, tail = whole[len(before) :].split(_SENTINEL)
        return head, tail

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer owns; a model's embedding may have more rows."""
        return len(self._tokenizer)

    @property
    def identity(self) -> dict[str, Any]:
        """What, besides tasks and skills, decides the prompts: recorded with every evaluation, compared before episodes are paired."""
        return {"tools": self._tools, "template": self._tokenizer.chat_template, "thinking": self._thinking}

    def messages(self, task: Task, chunks: Sequence[Chunk], observation: str) -> list[dict]:
        """The two messages that open an episode."""
        return [
            {"role": "system", "content": system_text(task.persona, chunks)},
            {"role": "user", "content": neutralise(f"{task.instruction}\n{observation}")},
        ]

    def prompt(self, task: Task, chunks: Sequence[Chunk], observation: str) -> list[int]:
        """The ids of an episode's first prompt, up to where the assistant starts to write."""
        return self._render(self.messages(task, chunks, observation))

    def tool_result(self, text: str) -> list[int]:
        """The ids to append after a sampled stop token: the result and the next generation prompt."""
        return self._encode(f"{self._before}{neutralise(text)}{self._after}")

    def assistant(self, thought: str, call: ToolCall) -> list[int]:
        """The canonical ids of an assistant turn, stop token included: what a demonstration teaches the policy to write."""
        whole = self._text(
            [
                *_OPENING,
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": thought,
                    "tool_calls": [{"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}],
                },
            ],
            generate=False,
        )
        return self._encode(whole[len(self._opening) :].rstrip("\n"))

    @functools.cached_property
    def _opening(self) -> str:
        return self._text(_OPENING)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included. A view: never encoded again."""
        return self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)

    def banned_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Ids that no turn may sample: rows of the embedding that no token owns, the unknown token, and whatever opens a turn or a result."""
        size = len(self._tokenizer)
        opens = [i for token, i in self._tokenizer.get_vocab().items() if "<|im_start|>" in token or "tool_response>" in token]
        unknown = self._tokenizer.unk_token_id
        banned = {*range(size, vocab_size), *opens, *(() if unknown is None else (unknown,))}
        return tuple(sorted(banned - set(self.stop_ids)))

    def parse(self, ids: Sequence[int]) -> ToolCall | ProtocolError:
        """The one tool call that a sampled turn makes, or the typed reason why it makes none."""
        text = self.decode(ids)
        for stop in STOP_TOKENS:
            text = text.removesuffix(stop)
        if self._thinking:
            _, closed, text = text.rpartition("</think>")
            if not closed:
                return ProtocolError("unclosed_tag", "close the think block with </think>, then make one call")
        opened = text.count("<tool_call>")
        if opened == 0:
            return ProtocolError("no_tool_call", "make exactly one call")
        if opened > 1:
            return ProtocolError("several_tool_calls", f"make exactly one call, not {opened}")
        body, closed, rest = text.partition("<tool_call>")[2].partition("</tool_call>")
        if not closed:
            return ProtocolError("unclosed_tag", "close the call with </tool_call>")
        if rest.strip():
            return ProtocolError("text_after_call", "write nothing after </tool_call>")
        return self._parse_body(body)

    def _parse_body(self, body: str) -> ToolCall | ProtocolError:
        match = re.fullmatch(r"\s*<function=([^>\n]*)>(.*)</function>\s*", body, re.DOTALL)
        if match is None:
            return ProtocolError("unclosed_tag", "a call holds one <function=NAME> block")
        name, inner = match.group(1).strip(), match.group(2)
        if name not in self._parameters:
            return ProtocolError("unknown_tool", f"tools are {', '.join(self._parameters)}")
        found = re.findall(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", inner, re.DOTALL)
        if inner.count("<parameter=") != len(found) or re.sub(r"<parameter=[^>\n]*>.*?</parameter>", "", inner, flags=re.DOTALL).strip():
            return ProtocolError("unclosed_tag", "every parameter is <parameter=NAME> value </parameter>")
        return self._typed(name, found)

    def _typed(self, name: str, found: list[tuple[str, str]]) -> ToolCall | ProtocolError:
        properties = self._parameters[name].get("properties", {})
        arguments: dict[str, Any] = {}
        for key, raw in found:
            key = key.strip()
            if key not in properties or key in arguments:
                return ProtocolError("wrong_type", f"{name} takes {', '.join(properties)}, each once")
            kind = properties[key].get("type", "string")
            value: Any = raw.strip()
            if kind != "string":
                try:
                    value = json.loads(raw, parse_constant=_no_number)
                except ValueError:
                    return ProtocolError("wrong_type", f"{key} must be {kind}")
                if not isinstance(value, _JSON_TYPES.get(kind, object)) or (kind != "boolean" and isinstance(value, bool)):
                    return ProtocolError("wrong_type", f"{key} must be {kind}")
            arguments[key] = value
        missing = [key for key in self._parameters[name].get("required", ()) if key not in arguments]
        if missing:
            return ProtocolError("missing_argument", f"{name} needs {', '.join(missing)}")
        return ToolCall(name, arguments)
