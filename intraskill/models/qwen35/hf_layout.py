"""How each of our parameters lies in a Hugging Face checkpoint: names, shapes, and the permutation between the two, in one table.

Torch keeps matrices as [out, in]; here the input comes first. The published linear layers hold all queries, then all keys, then all
values; here each key head keeps its own query, key and values together.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from intraskill.models.qwen35.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter and the published tensors that it is made of.

    Attributes:
      path: keys in the parameter tree (in a layer's own tree, for rules of a layer).
      names: tensor names without the tower's prefix.
      shapes: their shapes as published.
      load: published tensors -> our array.
      save: our array -> published tensors.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    load: Callable[[Sequence[np.ndarray]], np.ndarray]
    save: Callable[[np.ndarray], Sequence[np.ndarray]]


def _plain(path: Sequence[str], name: str, shape: tuple[int, ...], ours: tuple[int, ...] | None = None) -> Rule:
    """Same order of entries on both sides."""
    return Rule(tuple(path), (name,), (shape,), lambda t: t[0].reshape(ours or shape), lambda x: [x.reshape(shape)])


def _head_rows(path: Sequence[str], names: Sequence[str], heads: int, widths: Sequence[int], columns: int) -> Rule:
    """Matrices whose rows are heads x width, joined per head and transposed: [heads * width_i, in] each -> [in, heads, sum of widths]."""
    shapes = tuple((heads * w, columns) for w in widths)

    def load(tensors: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([t.reshape(heads, w, columns) for t, w in zip(tensors, widths, strict=True)], axis=1).transpose(2, 0, 1)

    def save(x: np.ndarray) -> list[np.ndarray]:
        parts = np.split(x.transpose(1, 2, 0), np.cumsum(widths)[:-1], axis=1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    return Rule(tuple(path), tuple(names), shapes, load, save)


def _one_tensor(rule: Rule, name: str, shape: tuple[int, ...]) -> Rule:
    """The same as `rule`, with its tensors lying one after the other along the rows of a single published tensor of `shape`."""
    ends = np.cumsum([s[0] for s in rule.shapes])[:-1]
    columns = rule.shapes[0][1]

    def load(tensors: Sequence[np.ndarray]) -> np.ndarray:
        return rule.load(np.split(tensors[0].reshape(-1, columns), ends))

    def save(x: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate(rule.save(x)).reshape(shape)]

    return Rule(rule.path, (name,), (shape,), load, save)


def _columns(path: Sequence[str], name: str, out: int, ours: tuple[int, ...]) -> Rule:
    """An output projection: [out, in...] -> [in..., out]."""
    columns = int(np.prod(ours[:-1]))
    return Rule(tuple(path), (name,), ((out, columns),), lambda t: t[0].T.reshape(ours), lambda x: [x.reshape(columns, out).T])


def _linear_rules(c: ModelConfig) -> list[Rule]:
    d, heads, group = c.hidden_size, c.linear_num_key_heads, c.value_heads_per_key_head
    key, value = c.linear_key_head_dim, c.linear_value_head_dim
    widths, channels = (key, key, group * value), heads * c.conv_channels_per_head
    at, parts = "linear_attn", ("q", "k", "v")
    return [
        _one_tensor(_head_rows(("linear", "qkv"), parts, heads, widths, d), f"{at}.in_proj_qkv.weight", (channels, d)),
        _one_tensor(_head_rows(("linear", "conv"), parts, heads, widths, c.conv_kernel), f"{at}.conv1d.weight", (channels, 1, c.conv_kernel)),
        _head_rows(("linear", "z"), [f"{at}.in_proj_z.weight"], heads, [group * value], d),
        _head_rows(("linear", "ba"), [f"{at}.in_proj_b.weight", f"{at}.in_proj_a.weight"], heads, [group, group], d),
        _plain(("linear", "a_log"), f"{at}.A_log", (heads * group,), (heads, group)),
        _plain(("linear", "dt_bias"), f"{at}.dt_bias", (heads * group,), (heads, group)),
        _plain(("linear", "norm"), f"{at}.norm.weight", (value,)),
        _columns(("linear", "out"), f"{at}.out_proj.weight", d, (heads, group * value, d)),
    ]


def _full_rules(c: ModelConfig) -> list[Rule]:
    d, width, at = c.hidden_size, c.head_dim, "self_attn"
    return [
        _head_rows(("full", "q"), [f"{at}.q_proj.weight"], c.num_heads, [2 * width], d),
        _head_rows(("full", "kv"), [f"{at}.k_proj.weight", f"{at}.v_proj.weight"], c.num_kv_heads, [width, width], d),
        _plain(("full", "q_norm"), f"{at}.q_norm.weight", (width,)),
        _plain(("full", "k_norm"), f"{at}.k_norm.weight", (width,)),
        _columns(("full", "out"), f"{at}.o_proj.weight", d, (c.num_heads, width, d)),
    ]


def layer_rules(config: ModelConfig, layer: int) -> list[Rule]:
    """Rules of one layer; names carry the layer's index, paths are relative to the layer's own tree."""
    d, f = config.hidden_size, config.intermediate_size
    mixer = _full_rules(config) if config.is_full(layer) else _linear_rules(config)
    rules = [
        _plain(("attention_norm",), "input_layernorm.weight", (d,)),
        *mixer,
        _plain(("mlp_norm",), "post_attention_layernorm.weight", (d,)),
        _head_rows(("mlp", "gate_up"), ["mlp.gate_proj.weight", "mlp.up_proj.weight"], 1, [f, f], d),
        _columns(("mlp", "down"), "mlp.down_proj.weight", d, (f, d)),
    ]
    return [dataclasses.replace(_as_pair(r, f) if r.path == ("mlp", "gate_up") else r, names=_prefixed(r.names, layer)) for r in rules]


def _prefixed(names: Sequence[str], layer: int) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.{name}" for name in names)


def _as_pair(rule: Rule, f: int) -> Rule:
    """gate_up keeps its two halves on an own axis: [in, 2, F]."""
    return dataclasses.replace(rule, load=lambda t: rule.load(t).reshape(-1, 2, f), save=lambda x: rule.save(x.reshape(x.shape[0], 1, 2 * f)))


def end_rules(config: ModelConfig) -> list[Rule]:
    """Rules of what lies around the layers. `lm_head.weight` alone has no tower prefix."""
    table = (config.vocab_size, config.hidden_size)
    rules = [_plain(("embed",), "embed_tokens.weight", table), _plain(("final_norm",), "norm.weight", (config.hidden_size,))]
    return rules if config.tie_embeddings else [*rules, _plain(("head",), "lm_head.weight", table)]


def published_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor name (no prefix) of this model with its shape."""
    groups = [end_rules(config), *(layer_rules(config, i) for i in range(config.num_layers))]
    for rule in (rule for rules in groups for rule in rules):
        yield from zip(rule.names, rule.shapes, strict=True)
