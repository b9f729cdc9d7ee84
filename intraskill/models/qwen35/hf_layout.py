"""How each of our parameters lies in a Hugging Face checkpoint: names, shapes, and where each entry goes, in one table for both directions.

Torch keeps matrices as [out, in]; here the input comes first. The published linear layers hold all queries, then all keys, then all
values; here each key head keeps its own query, key and values together. Every such rearrangement is a strided view of our array, so a rule is
one function: reading assigns to its views, writing copies from them, and neither needs a second array of the parameter's size.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from intraskill.models.qwen35.config import ModelConfig

Views = list[list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter of one layer (or around the layers) and the published tensors that it is made of.

    Attributes:
      path: keys in the parameter tree (in a layer's own tree, for rules of a layer).
      names: tensor names without the tower's prefix.
      shapes: their shapes as published.
      views: our contiguous array -> for each tensor the views of the array that, each in row-major order and one after the other, are the
        tensor's entries in row-major order.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    views: Callable[[np.ndarray], Views]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An entry of the parameter tree.

    Attributes:
      path: keys in the tree.
      rules: one for each layer that the entry stacks, in order, or the only one.
      layers: numbers of those layers; none for what lies around the layers.
      stacked: whether the array's first axis runs over `rules`.
    """

    path: tuple[str, ...]
    rules: tuple[Rule, ...]
    layers: tuple[int, ...]
    stacked: bool

    @property
    def names(self) -> list[str]:
        """Of each rule, the dotted path that it has in a tree whose layers are not stacked."""
        return [".".join(("layers", str(layer), *self.path[2:])) for layer in self.layers] or [".".join(self.path)]

    def of(self, tree: Any) -> Any:
        """This entry of a tree; KeyError when there is none."""
        for key in self.path:
            tree = tree[key]
        return tree

    def parts(self, array: np.ndarray) -> Sequence[np.ndarray]:
        """Of each rule, the part of the entry's array."""
        return list(array) if self.stacked else [array]

    def tensors(self, array: np.ndarray) -> Iterator[tuple[str, tuple[int, ...], list[np.ndarray]]]:
        """(bare name, published shape, views) of each published tensor that lies in the entry's array."""
        for rule, part in zip(self.rules, self.parts(array), strict=True):
            yield from zip(rule.names, rule.shapes, rule.views(part), strict=True)


def _plain(path: Sequence[str], name: str, shape: tuple[int, ...]) -> Rule:
    """Same order of entries on both sides."""
    return Rule(tuple(path), (name,), (shape,), lambda x: [[x.reshape(shape)]])


def _head_rows(path: Sequence[str], names: Sequence[str], heads: int, widths: Sequence[int], columns: int) -> Rule:
    """Matrices whose rows are heads x width, joined per head and transposed: [heads * width_i, in] each -> [in, heads, sum of widths]."""

    def views(x: np.ndarray) -> Views:
        by_head = x.reshape(columns, heads, sum(widths)).transpose(1, 2, 0)
        return [[part] for part in np.split(by_head, np.cumsum(widths)[:-1], axis=1)]

    return Rule(tuple(path), tuple(names), tuple((heads * w, columns) for w in widths), views)


def _one_tensor(rule: Rule, name: str, shape: tuple[int, ...]) -> Rule:
    """The same as `rule`, with its tensors lying one after the other along the rows of a single published tensor of `shape`."""
    return Rule(rule.path, (name,), (shape,), lambda x: [[view for views in rule.views(x) for view in views]])


def _columns(path: Sequence[str], name: str, columns: int, out: int) -> Rule:
    """An output projection: [out, columns] -> [columns (heads x width, where there are heads), out]."""
    return Rule(tuple(path), (name,), ((out, columns),), lambda x: [[x.reshape(columns, out).T]])


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
        _plain(("linear", "a_log"), f"{at}.A_log", (heads * group,)),
        _plain(("linear", "dt_bias"), f"{at}.dt_bias", (heads * group,)),
        _plain(("linear", "norm"), f"{at}.norm.weight", (value,)),
        _columns(("linear", "out"), f"{at}.out_proj.weight", heads * group * value, d),
    ]


def _full_rules(c: ModelConfig) -> list[Rule]:
    d, width, at = c.hidden_size, c.head_dim, "self_attn"
    return [
        _head_rows(("full", "q"), [f"{at}.q_proj.weight"], c.num_heads, [2 * width], d),
        _head_rows(("full", "kv"), [f"{at}.k_proj.weight", f"{at}.v_proj.weight"], c.num_kv_heads, [width, width], d),
        _plain(("full", "q_norm"), f"{at}.q_norm.weight", (width,)),
        _plain(("full", "k_norm"), f"{at}.k_norm.weight", (width,)),
        _columns(("full", "out"), f"{at}.o_proj.weight", c.num_heads * width, d),
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
        _columns(("mlp", "down"), "mlp.down_proj.weight", f, d),
    ]
    return [dataclasses.replace(rule, names=tuple(f"layers.{layer}.{name}" for name in rule.names)) for rule in rules]


def end_rules(config: ModelConfig) -> list[Rule]:
    """Rules of what lies around the layers. `lm_head.weight` alone has no tower prefix."""
    table = (config.vocab_size, config.hidden_size)
    rules = [_plain(("embed",), "embed_tokens.weight", table), _plain(("final_norm",), "norm.weight", (config.hidden_size,))]
    return rules if config.tie_embeddings else [*rules, _plain(("head",), "lm_head.weight", table)]


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every entry of the tree of `init_params`."""
    for rule in end_rules(config):
        yield Parameter(rule.path, (rule,), (), False)
    for entry in range(config.num_entries):
        layers = tuple(range(entry, config.num_layers, config.num_entries))
        for rules in zip(*(layer_rules(config, i) for i in layers), strict=True):
            yield Parameter(("layers", str(entry), *rules[0].path), rules, layers, config.scan_layers)


def published_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of this model by name (no prefix), embeddings first, then layer by layer."""
    groups = [end_rules(config), *(layer_rules(config, i) for i in range(config.num_layers))]
    return {name: shape for rules in groups for rule in rules for name, shape in zip(rule.names, rule.shapes, strict=True)}
