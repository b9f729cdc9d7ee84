"""Hugging Face checkpoints in and out: tensors by published name, and directories of safetensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.hf_layout import Rule, end_rules, layer_rules, published_shapes
from intraskill.models.qwen35.params import Params, join_layers, layer_params
from intraskill.types import InputError

_PREFIXES = ("model.language_model.", "model.")  # multimodal and text-only layout, longest first
_OTHER_TOWERS = ("model.visual.", "visual.", "mtp.", "model.mtp.")
_MAX_LISTED = 8


def _bare_name(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _set(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _differences(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What a checkpoint lacks, has too much, or has in another shape, in words. `shapes` goes by bare name."""
    expected = dict(published_shapes(config))
    if config.tie_embeddings and "lm_head.weight" in shapes:  # some exports spell the tied head out
        expected["lm_head.weight"] = expected["embed_tokens.weight"]
    missing = [f"missing {name}" for name in expected if name not in shapes]
    foreign = [f"unexpected {name}" for name in shapes if name not in expected]
    wrong = [f"{n} is {list(shapes[n])}, expected {list(s)}" for n, s in expected.items() if n in shapes and tuple(shapes[n]) != tuple(s)]
    return missing + foreign + wrong


def check_names(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> int:
    """Raises InputError unless the tensors are exactly this model's; returns how many of other towers were left out."""
    own = {_bare_name(n): tuple(s) for n, s in shapes.items() if not n.startswith(_OTHER_TOWERS)}
    found = _differences(config, own)
    if found:
        more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise InputError(f"{source}: {len(found)} tensors differ from config.json: {'; '.join(found[:_MAX_LISTED])}{more}. Check that both belong together")
    return len(shapes) - len(own)


def from_hf_tensors(config: ModelConfig, tensors: Mapping[str, Any], source: str = "tensors") -> Params:
    """Published tensors (arrays by name, with either prefix) -> parameters in config.param_dtype.

    Raises:
      InputError: names or shapes are not exactly this model's; the message lists the differences.
    """
    check_names(config, {name: tuple(t.shape) for name, t in tensors.items()}, source)
    by_name = {_bare_name(name): name for name in tensors}

    def load(rules: list[Rule]) -> Params:
        tree: Params = {}
        for rule in rules:
            array = rule.load([np.asarray(tensors[by_name[name]]) for name in rule.names])
            _set(tree, rule.path, jnp.asarray(array, config.param_dtype))
        return tree

    return {**load(end_rules(config)), "layers": join_layers(config, [load(layer_rules(config, i)) for i in range(config.num_layers)])}


def to_hf_tensors(config: ModelConfig, params: Params, prefix: str = "model.") -> Iterator[tuple[str, np.ndarray]]:
    """Yields (published name, host array in the parameter's dtype), one parameter at a time."""
    groups = [(end_rules(config), params)] + [(layer_rules(config, i), i) for i in range(config.num_layers)]
    for rules, where in groups:
        tree = layer_params(config, params, where) if isinstance(where, int) else where
        for rule in rules:
            for name, tensor in zip(rule.names, rule.save(np.asarray(_get(tree, rule.path))), strict=True):
                yield (name if name == "lm_head.weight" else prefix + name), tensor
