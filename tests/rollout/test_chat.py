"""Messages to ids and back, over the pocket tokenizer and over one that has a token for each character."""

import json
import shutil
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from intraskill.rollout.chat import NEEDED_TOKENS, STOP_TOKENS, Chat, ProtocolError, load_tokenizer, neutralise, persona_lines, system_text
from intraskill.types import Chunk, InputError, Task, ToolCall
from pocket import tokenizer as pocket_tokenizer
from pocket import vocabulary
from pocket.skills import mechanisms
from shop_env import synthetic
from shop_env.session import TOOLS

TEMPLATE = pocket_tokenizer.TEMPLATE.read_text()
TASK = Task("t1", "find a wool hat in size small under $30", {"age": "40", "likes colour": "red"})
OPEN = "</think>\n\n<tool_call>\n"
SEARCH = "<function=search>\n<parameter=query>\nwool hat\n</parameter>\n</function>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("pocket-tokenizer")
    pocket_tokenizer.save(pocket_tokenizer.build(vocabulary.words(), TOOLS), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, TOOLS)


def make_spelling(template: str = TEMPLATE, unknown: str | None = None) -> PreTrainedTokenizerFast:
    """A token for each ASCII character and for each of the chat's own: any text survives encode and decode."""
    characters = [*string.printable, *([unknown] if unknown else [])]
    model = models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=unknown or "?")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in (*NEEDED_TOKENS, *STOP_TOKENS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, chat_template=template, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def spelling():
    return Chat(make_spelling(), TOOLS)


def encode(chat: Chat, text: str) -> list[int]:
    return chat._encode(text)


def call_message(thought: str, call: ToolCall) -> dict:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [{"type": "function", "function": function}]}


# -------------------------------------------------------------------------------------------------------- conversations

_WORLD = (*synthetic.TYPES, *synthetic.ATTRIBUTES, *synthetic.BRANDS, *synthetic.COLOURS, *synthetic.SIZES)
# The last kind is spelled by letters; its alphabet avoids the ends of the phrases that are one token.
_word = st.one_of(st.sampled_from([*_WORLD, "A", "|", "has", "$24", "$24-$29", "colour=red", "12"]), st.text("cdfghjk789", min_size=1, max_size=6))
_line = st.lists(_word, min_size=1, max_size=8).map(" ".join)
_text = st.lists(_line, min_size=1, max_size=3).map("\n".join)
_phrase = st.sampled_from([*pocket_tokenizer.PHRASES, "search page", "buy now"])
_observation = st.one_of(_text, _phrase, st.tuples(_line, _phrase).map(" ".join))
_call = st.builds(
    lambda name, value: ToolCall(name, {{"search": "query", "click": "target"}[name]: value}),
    st.sampled_from(["search", "click"]),
    st.one_of(_line, st.just("buy now")),
)
_turns = st.lists(st.tuples(st.one_of(st.just(""), _line), _call, _observation), min_size=1, max_size=4)
_persona = st.dictionaries(st.sampled_from(["age", "likes brand", "likes colour", "gfd"]), _word, max_size=3)
_chunks = st.lists(st.sampled_from([c for m in mechanisms().values() for c in (*m.paraphrases, *m.held_out)]), unique_by=lambda c: c.logical_id)


@settings(max_examples=60)
@given(_line, _persona, _chunks, _observation, _turns)
def test_a_conversation_built_turn_by_turn_is_the_template_s_rendering_of_the_whole(instruction, persona, chunks, observation, turns):
    for chat in _chats():
        task = Task("t", instruction, persona)
        messages = chat.messages(task, chunks, observation)
        ids = chat.prompt(task, chunks, observation)
        for thought, call, result in turns:
            turn = chat.assistant(thought, call)
            assert chat.parse(turn) == call
            ids += [*turn, *chat.tool_result(result)]
            messages += [call_message(thought, call), {"role": "tool", "content": result}]
        whole = chat._tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=True)
        assert ids == list(whole["input_ids"])
        assert chat.decode(ids) == chat._tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)


_CHATS: list[Chat] = []


def _chats() -> list[Chat]:
    return _CHATS


@pytest.fixture(scope="module", autouse=True)
def _both_chats(chat, spelling):
    """Hypothesis and fixtures do not mix; the property above reads these."""
    _CHATS[:] = [chat, spelling]
    yield
    _CHATS.clear()


def test_a_finished_conversation_ends_with_the_sampled_stop_token(chat, tokenizer):
    buy = ToolCall("click", {"target": "buy now"})
    ids = [*chat.prompt(TASK, (), "search page"), *chat.assistant("", buy)]
    messages = [*chat.messages(TASK, (), "search page"), call_message("", buy)]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert text == chat.decode(ids) + "\n"  # the template's own line break follows only when another turn does
    assert ids[-1] == chat.stop_ids[0]


def test_the_fixed_spans_of_a_turn_are_one_token_each(chat):
    opening, word, close, stop = chat.assistant("", ToolCall("click", {"target": "A"}))
    assert chat.decode([opening]) == "\n</think>\n\n<tool_call>\n<function=click>\n<parameter=target>\n"
    assert (chat.decode([word]), chat.decode([close])) == ("A", "\n</parameter>\n</function>\n</tool_call>")
    assert chat.decode([stop]) == "<|im_end|>"
    assert len(chat.tool_result("done")) == 3


def test_a_bare_prompt_has_at_most_100_tokens_for_every_task(chat):
    world = synthetic.generate(synthetic.SyntheticConfig(seed=3, num_products=400, split_sizes=(("train", 400),)))
    lengths = {len(chat.prompt(Task(t.id, t.instruction, t.persona), (), "search page")) for t in world.tasks.values()}
    assert len(world.tasks) == 400 and max(lengths) <= 100


def test_thinking_off_closes_the_block_in_the_prompt_and_expects_none_in_the_turn():
    chat = Chat(make_spelling(), TOOLS, thinking=False)
    assert chat.decode(chat.prompt(TASK, (), "search page")).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert chat.decode(chat.tool_result("x")).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert chat.parse(encode(chat, f"<tool_call>\n{SEARCH}\n</tool_call><|im_end|>")) == ToolCall("search", {"query": "wool hat"})


def test_system_text_lists_persona_then_skills():
    chunk = Chunk("a", 1, "check", "a page is open", "read it", "twice", "haste")
    persona = {"age": 40, "likes": {"colour": ["red", "blue"], "size": "small"}}
    assert list(persona_lines(persona)) == ["age 40", "likes colour red, blue", "likes size small"]
    assert system_text({"age": 40}, [chunk]) == "persona\nage 40\nskills\n- check: when a page is open read it check twice avoid haste"
    assert system_text({}, ()) == "persona"


# --------------------------------------------------------------------------------------------------------------- parsing


def turn(body: str, *, think: str = "so\n", end: str = "<|im_end|>") -> str:
    return f"{think}{OPEN}{body}{end}"


@pytest.mark.parametrize(
    ("text", "kind", "word"),
    [
        ("", "unclosed_tag", "</think>"),
        (f"<tool_call>\n{SEARCH}\n</tool_call><|im_end|>", "unclosed_tag", "</think>"),
        ("so\n</think>\n\nI would search<|im_end|>", "no_tool_call", "exactly one"),
        # What is inside the think block is no call, however well formed.
        (f"<tool_call>\n{SEARCH}\n</tool_call></think><|im_end|>", "no_tool_call", "exactly one"),
        (turn(f"{SEARCH}\n</tool_call>\n<tool_call>\n{SEARCH}\n</tool_call>"), "several_tool_calls", "not 2"),
        (turn(f"{SEARCH}\n</tool_call>\n<tool_call>"), "several_tool_calls", "not 2"),
        (turn(SEARCH), "unclosed_tag", "</tool_call>"),
        (turn(f"{SEARCH}\n</tool_call> thanks"), "text_after_call", "nothing after"),
        (turn(f"{SEARCH}\n</tool_call><|im_end|> more"), "text_after_call", "nothing after"),
        (turn("wool hat\n</tool_call>"), "unclosed_tag", "<function=NAME>"),
        (turn("<function=search>\n<parameter=query>\nhat\n</parameter>\n</tool_call>"), "unclosed_tag", "<function=NAME>"),
        (turn("<function=search>\n<parameter=query>\nhat\n</function>\n</tool_call>"), "unclosed_tag", "every parameter"),
        (turn("<function=search>\nhat\n</function>\n</tool_call>"), "unclosed_tag", "every parameter"),
        (turn(f"{SEARCH}\n{SEARCH}\n</tool_call>"), "unclosed_tag", "every parameter"),
        (turn("<function=buy>\n</function>\n</tool_call>"), "unknown_tool", "search, click"),
        (turn("<function=>\n</function>\n</tool_call>"), "unknown_tool", "search, click"),
        (turn("<function=search>\n</function>\n</tool_call>"), "missing_argument", "query"),
        (turn("<function=click>\n<parameter=query>\nhat\n</parameter>\n</function>\n</tool_call>"), "wrong_type", "target"),
        (turn(SEARCH.replace("</function>", "<parameter=query>\nhat\n</parameter>\n</function>") + "\n</tool_call>"), "wrong_type", "once"),
    ],
)
def test_what_is_not_one_call_gets_its_typed_reason(spelling, text, kind, word):
    parsed = spelling.parse(encode(spelling, text))
    assert isinstance(parsed, ProtocolError), parsed
    assert parsed.kind == kind and word in parsed.message


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (turn(f"{SEARCH}\n</tool_call>"), ToolCall("search", {"query": "wool hat"})),
        (turn(f"{SEARCH}\n</tool_call>", end="<|endoftext|>"), ToolCall("search", {"query": "wool hat"})),
        (turn(f"{SEARCH}\n</tool_call>", end=""), ToolCall("search", {"query": "wool hat"})),
        (turn(f"{SEARCH}\n</tool_call>", think="first </think> then\n"), ToolCall("search", {"query": "wool hat"})),
        (f"so\n</think>\n\nI search. <tool_call>\n{SEARCH}\n</tool_call>\n<|im_end|>", ToolCall("search", {"query": "wool hat"})),
        (turn("<function=search><parameter=query> a\nb </parameter></function></tool_call>"), ToolCall("search", {"query": "a\nb"})),
        (turn("<function=click>\n<parameter=target>\n\n</parameter>\n</function>\n</tool_call>"), ToolCall("click", {"target": ""})),
    ],
)
def test_calls_that_the_format_allows(spelling, text, call):
    assert spelling.parse(encode(spelling, text)) == call


_TYPED = [
    {
        "type": "function",
        "function": {
            "name": "rate",
            "parameters": {
                "type": "object",
                "properties": {
                    "stars": {"type": "integer"},
                    "weight": {"type": "number"},
                    "sure": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "note": {},
                },
            },
        },
    }
]


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("stars", "4", 4),
        ("weight", "0.5", 0.5),
        ("weight", "2", 2),
        ("sure", "true", True),
        ("tags", '["a"]', ["a"]),
        ("note", "4", "4"),
        ("stars", "4.5", None),
        ("stars", "four", None),
        ("stars", "true", None),
        ("weight", "true", None),
        ("weight", "NaN", None),
        ("sure", "1", None),
        ("sure", "yes", None),
        ("tags", "a, b", None),
        ("tags", "{}", None),
    ],
)
def test_arguments_have_the_type_that_the_schema_says(name, raw, value):
    chat = Chat(make_spelling(), _TYPED)
    parsed = chat.parse(encode(chat, turn(f"<function=rate>\n<parameter={name}>\n{raw}\n</parameter>\n</function>\n</tool_call>")))
    if value is None:
        assert isinstance(parsed, ProtocolError) and parsed.kind == "wrong_type" and name in parsed.message
    else:
        assert parsed == ToolCall("rate", {name: value}) and type(parsed.arguments[name]) is type(value)


# ---------------------------------------------------------------------------------------------------------------- markup

_markup = st.sampled_from([*STOP_TOKENS, *NEEDED_TOKENS, *pocket_tokenizer.SPANS, "<function=click>", "<", "</", "<|", "im_end|>", "think>", "\n"])
_attack = st.lists(st.one_of(_markup, _line), min_size=1, max_size=6).map("".join)


@settings(max_examples=80)
@given(_attack, _attack, _attack, _attack)
def test_no_outside_text_yields_a_chat_token(instruction, value, procedure, observation):
    """The chat tokens of a prompt are those of a harmless prompt, in number and order."""
    for chat in _chats():
        known = {i for token, i in chat._tokenizer.get_vocab().items() if any(mark in token for mark in (*NEEDED_TOKENS, *STOP_TOKENS))}

        def chat_tokens(ids, known=known):
            return [i for i in ids if i in known]

        harmless = chat.prompt(Task("t", "x", {"likes": "x", "x": "x"}), [Chunk("c", 1, "x", "x", "x")], "x")
        chunk = Chunk("c", 1, f"{value}.", procedure, f"{instruction}.", value, observation)
        attacked = chat.prompt(Task("t", instruction, {"likes": value, f"{procedure}": [value, procedure]}), [chunk], observation)
        assert chat_tokens(attacked) == chat_tokens(harmless)
        assert chat_tokens(chat.tool_result(observation)) == chat_tokens(chat.tool_result("x"))


def test_neutralise_breaks_markup_and_nothing_else():
    assert neutralise("<|im_end|> </think> <tool_call>") == "< |im_end|> < /think> < tool_call>"
    assert neutralise("<<|im_end|>") == "<< |im_end|>"
    assert neutralise("a < b, 5 <6, x->y") == "a < b, 5 <6, x->y"


# ----------------------------------------------------------------------------------------------------------- banned ids


def test_banned_ids_are_the_unowned_the_unknown_and_what_opens_turns_and_results(chat, tokenizer):
    rows = 16 * (chat.vocab_size // 16 + 1)
    banned = chat.banned_ids(rows)
    vocabulary_ = tokenizer.get_vocab()
    assert banned == tuple(sorted(set(banned))) and not set(banned) & set(chat.stop_ids)
    assert set(range(chat.vocab_size, rows)) <= set(banned) and vocabulary_["<|unknown|>"] in banned
    texts = [tokenizer.convert_ids_to_tokens(i) for i in banned if i < chat.vocab_size]
    assert sorted(texts) == sorted(
        ["<|unknown|>", "<|im_start|>", "<tool_response>", "</tool_response>", pocket_tokenizer.tool_block(TOOLS), *pocket_tokenizer.SPANS[:4]]
    )


@settings(max_examples=30)
@given(_turns)
def test_nothing_that_a_turn_is_made_of_is_banned(turns):
    for chat in _chats():
        banned = set(chat.banned_ids(chat.vocab_size))
        assert all(not banned & set(chat.assistant(thought, call)) for thought, call, _ in turns)


# ------------------------------------------------------------------------------------------------------------- bad input


def assert_one_line(error, *words):
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError) as error:
            load_tokenizer(path)
        assert_one_line(error, str(path), "tokenizer.json")


@pytest.mark.parametrize("content", ["", "not json", "{}", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_refused(directory, tmp_path, content):
    shutil.copytree(directory, tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text(content)
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path / "t")
    assert_one_line(error, str(tmp_path), "restore")


def test_a_tokenizer_without_the_chat_tokens_is_refused(tmp_path):
    bare = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    bare.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    PreTrainedTokenizerFast(tokenizer_object=bare, chat_template=TEMPLATE).save_pretrained(str(tmp_path))
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert_one_line(error, "<tool_call>", "<think>", "special tokens")


def test_a_tokenizer_without_a_template_is_refused(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path / "t")
    assert_one_line(error, "chat template", "chat_template.jinja")


def test_a_tokenizer_that_cannot_spell_the_tools_is_refused():
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "найти"}}]
    with pytest.raises(InputError) as error:
        Chat(make_spelling(unknown="\N{REPLACEMENT CHARACTER}"), tools)
    assert_one_line(error, "cannot spell")


# Thoughts of all turns but the last are dropped: what Qwen's older templates do between user turns, done between tool results.
_FORGETFUL = TEMPLATE.replace("loop.index0 + 1 > ns.last_query", "loop.last or not (messages[loop.index0 + 2] is defined)")
# Only the two latest turns keep theirs, so that one tool result changes nothing but a second one does.
_FORGETFUL_LATER = TEMPLATE.replace("loop.index0 + 1 > ns.last_query", "loop.index0 + 5 > messages | length")
_STRICT = TEMPLATE.replace('message.role == "tool"', 'message.role == "observation"')


@pytest.mark.parametrize("template", [_FORGETFUL, _FORGETFUL_LATER, "{{ messages[-1].content }}", _STRICT, "{% if %}"])
def test_a_template_that_does_more_than_append_is_refused(template):
    assert template != TEMPLATE
    with pytest.raises(InputError) as error:
        Chat(make_spelling(template), TOOLS)
    assert_one_line(error, "template")


def test_identity_is_what_decides_prompts_besides_tasks_and_skills(chat, spelling):
    assert chat.identity == {"tools": TOOLS, "template": TEMPLATE, "thinking": True}
    assert spelling.identity == chat.identity
    assert Chat(make_spelling(), TOOLS, thinking=False).identity != chat.identity
