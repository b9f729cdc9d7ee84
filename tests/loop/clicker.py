"""A policy written by hand: it searches for the type that the prompt names, then clicks at random until it has bought something.

An untrained model never makes a call, so nothing that a loop does with rewards would run. This one is a table of which kind of token follows
which, spelled through embedding and head, and one uniform attention head that carries the type from the prompt to the query. It earns partial
rewards now and then, is small enough to compile in seconds, and every one of its parameters can learn.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.model import init_params
from intraskill.rollout.chat import Chat
from intraskill.types import Task, ToolCall
from pocket.warm_start import make_chat
from shop_env.synthetic import COLOURS, SIZES, TYPES

HIDDEN, WIDTH = 64, 32
_FOLLOWERS = {
    "first prompt": ("search",),
    "later prompt": ("click",),
    "search": ("type",),
    "type": ("close",),
    "click": ("row", "buy", "colour=", "size="),
    "row": ("close",),
    "buy": ("close",),
    "colour=": ("colour",),
    "colour": ("close",),
    "size=": ("size",),
    "size": ("close",),
    "close": ("stop",),
}


def model_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=-(-vocab_size // 16) * 16,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_layers=2,
        full_attention_interval=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=WIDTH,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        tie_embeddings=False,
        max_positions=1024,
        chunk_size=16,
    )


def kinds_of_tokens(chat: Chat) -> dict[str, list[int]]:
    """The ids of each kind, taken from what the chat itself writes."""

    def words(tool: str, argument: str) -> tuple[int, list[int]]:
        opening, *spelled, _, _ = chat.assistant("", ToolCall(tool, {"query" if tool == "search" else "target": argument}))
        return opening, spelled

    search, click = (words(tool, "lamp")[0] for tool in ("search", "click"))
    axes = {axis: [words("click", f"{axis}={value}")[1] for value in values] for axis, values in (("colour", COLOURS), ("size", SIZES))}
    return {
        "first prompt": [chat.prompt(Task("t", "find a lamp", {}), (), "search page")[-1]],
        "later prompt": [chat.tool_result("search page")[-1]],
        "search": [search],
        "click": [click],
        "close": [chat.assistant("", ToolCall("search", {"query": "lamp"}))[-2]],
        "stop": [chat.stop_ids[0]],
        "type": [words("search", kind)[1][0] for kind in TYPES],
        "row": [words("click", label)[1][0] for label in "ABCDE"],
        "buy": words("click", "buy now")[1],
        **{f"{axis}=": [spelled[0][0]] for axis, spelled in axes.items()},
        **{axis: [ids[1] for ids in spelled] for axis, spelled in axes.items()},
    }


def make_params(config: ModelConfig, chat: Chat):
    """Residual stream: a coordinate for each kind of token, then one for each type of product; the layers write nothing but types.

    Nothing that a norm divides by is near zero, or the first small update would change everything.
    """
    kinds = kinds_of_tokens(chat)
    place = {kind: i for i, kind in enumerate((*_FOLLOWERS, "other"))}
    types = np.arange(len(TYPES)) + len(place)
    embed, head = np.zeros((2, config.vocab_size, HIDDEN), np.float32)
    embed[:, place["other"]] = 1
    for kind, ids in kinds.items():
        if kind in place:
            embed[ids, place["other"]], embed[ids, place[kind]] = 0, 1
    embed[kinds["type"], types] = 1
    head[:, : len(place)] = -8
    head[kinds["type"], : len(place)] = -14  # more than what attention adds where a page is full of the type
    for kind, followers in _FOLLOWERS.items():
        for follower in followers:
            head[kinds[follower], place[kind]] = -np.log(len(kinds[follower])) / HIDDEN**0.5
    head[kinds["type"], types] = 3
    params = init_params(config, jax.random.key(0))
    for layer in params["layers"].values():
        layer["mlp"]["down"] = jnp.zeros_like(layer["mlp"]["down"])
    linear, full = params["layers"]["0"]["linear"], params["layers"]["1"]["full"]
    linear["out"] = jnp.zeros_like(linear["out"])
    query, key_value = np.zeros((2, HIDDEN, 1, 2 * WIDTH), np.float32)
    out = np.zeros((1, WIDTH, HIDDEN), np.float32)
    # Every query and key point the same way, along coordinates that no rotation moves: attention is uniform.
    query[: len(place), 0, config.rotary_dim : WIDTH] = key_value[: len(place), 0, config.rotary_dim : WIDTH] = 1
    key_value[types, 0, WIDTH + np.arange(len(TYPES))] = 1
    out[0, np.arange(len(TYPES)), types] = 6  # a prompt has 33 to 100 tokens, the type's value is about 5.7, the gate is half open
    full.update(q=jnp.asarray(query), kv=jnp.asarray(key_value), out=jnp.asarray(out))
    return {**params, "embed": jnp.asarray(embed), "head": jnp.asarray(head)}


def write_checkpoint(directory: Path) -> None:
    """The policy and the pocket tokenizer as a Hugging Face directory."""
    with tempfile.TemporaryDirectory() as scratch:
        chat = make_chat(Path(scratch))
        config = model_config(chat.vocab_size)
        hf.save_hf(directory, config, make_params(config, chat), "float32", sorted(p for p in Path(scratch).iterdir() if p.is_file()))
