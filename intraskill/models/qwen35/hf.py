"""Hugging Face checkpoints in and out: tensors by published name, and directories of safetensors.

Tensors are read and written one parameter at a time; only the parameters themselves are held in full.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.hf_layout import Rule, end_rules, layer_rules, published_shapes
from intraskill.models.qwen35.params import Params, join_layers, layer_params
from intraskill.types import InputError

_log = logging.getLogger(__name__)

_PREFIXES = ("model.language_model.", "model.")  # multimodal and text-only layout, longest first
_OTHER_TOWERS = ("model.visual.", "visual.", "mtp.", "model.mtp.")
_ALWAYS_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")  # published in float32 beside bfloat16 weights
_SHARD_BYTES = 4 << 30
_MAX_LISTED = 8


# --------------------------------------------------------------------------------------------------------------- by name


def _bare_name(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _full_name(name: str, prefix: str) -> str:
    return name if name == "lm_head.weight" else prefix + name


def check_tensors(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, str]:
    """Raises InputError unless the tensors are exactly this model's; returns full names by bare name."""
    own = {_bare_name(n): n for n in shapes if not n.startswith(_OTHER_TOWERS)}
    expected = dict(published_shapes(config))
    missing = [f"missing {name}" for name in expected if name not in own]
    # Some exports spell the tied head out.
    foreign = [f"unexpected {full}" for n, full in own.items() if n not in expected and not (n == "lm_head.weight" and config.tie_embeddings)]
    wrong = [f"{own[n]} is {list(shapes[own[n]])}, expected {list(s)}" for n, s in expected.items() if n in own and tuple(shapes[own[n]]) != s]
    found = missing + foreign + wrong
    if found:
        more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise InputError(
            f"{source}: {len(found)} tensors differ from what the config asks for: {'; '.join(found[:_MAX_LISTED])}{more}. "
            "Use the config.json that belongs to these weights"
        )
    if len(own) < len(shapes):
        _log.info("%s: left out %d tensors of other towers (vision, multi-token prediction)", source, len(shapes) - len(own))
    return own


def _load(config: ModelConfig, get: Callable[[str], Any]) -> Params:
    """Builds the parameters from a function that returns a tensor by bare name."""

    def load(rules: list[Rule]) -> Params:
        tree: Params = {}
        for rule in rules:
            node = tree
            for key in rule.path[:-1]:
                node = node.setdefault(key, {})
            node[rule.path[-1]] = jnp.asarray(rule.load([np.asarray(get(name)) for name in rule.names]), config.param_dtype)
        return tree

    return {**load(end_rules(config)), "layers": join_layers(config, [load(layer_rules(config, i)) for i in range(config.num_layers)])}


def from_hf_tensors(config: ModelConfig, tensors: Mapping[str, Any], source: str = "tensors") -> Params:
    """Published tensors (arrays by name, with either prefix) -> parameters in config.param_dtype.

    Raises:
      InputError: names or shapes are not exactly this model's; the message lists the differences.
    """
    names = check_tensors(config, {name: tuple(t.shape) for name, t in tensors.items()}, source)
    return _load(config, lambda bare: tensors[names[bare]])


def to_hf_tensors(config: ModelConfig, params: Params, prefix: str = "model.") -> Iterator[tuple[str, np.ndarray]]:
    """Yields (published name, contiguous host array in the parameter's dtype), one parameter at a time."""

    def save(rules: list[Rule], tree: Params) -> Iterator[tuple[str, np.ndarray]]:
        for rule in rules:
            leaf: Any = tree
            for key in rule.path:
                leaf = leaf[key]
            for name, tensor in zip(rule.names, rule.save(np.asarray(leaf)), strict=True):
                yield _full_name(name, prefix), np.ascontiguousarray(tensor)

    yield from save(end_rules(config), params)
    for i in range(config.num_layers):
        yield from save(layer_rules(config, i), layer_params(config, params, i))


# ------------------------------------------------------------------------------------------------------------ directories


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the directory of a Hugging Face checkpoint, which holds one") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}); copy the checkpoint again") from None


def _shard_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{index}: holds no weight_map object; copy the checkpoint again")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / "model.safetensors"]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise InputError(f"{directory}: lacks {', '.join(absent[:_MAX_LISTED])}; only safetensors checkpoints can be loaded, with all their shards")
    return files


def load_config(directory: str | os.PathLike[str], **overrides: Any) -> ModelConfig:
    """The model config of a checkpoint directory; `overrides` set numerics such as dtype or remat."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give the directory of a Hugging Face checkpoint")
    content = _read_json(directory / "config.json")
    if not isinstance(content, dict):
        raise InputError(f"{directory / 'config.json'}: holds {type(content).__name__}, expected an object; copy the checkpoint again")
    return ModelConfig.from_hf(content, **overrides)


def load_hf(directory: str | os.PathLike[str], **overrides: Any) -> tuple[ModelConfig, Params]:
    """Loads a checkpoint directory, text-only or multimodal (of which the text tower is taken).

    Args:
      directory: holds config.json and model.safetensors, or shards with their index.
      **overrides: ModelConfig fields that the checkpoint does not settle, such as param_dtype (float32 unless given), dtype or remat.

    Raises:
      InputError: the directory or a file is missing, truncated or of another model.
    """
    config = load_config(directory, **overrides)
    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in _shard_files(Path(directory)):
            try:
                shard = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: truncated, or not a safetensors file ({error}); copy it again") from None
            for name in shard.keys():
                where[name] = shard
                shapes[name] = tuple(shard.get_slice(name).get_shape())
        names = check_tensors(config, shapes, str(directory))
        return config, _load(config, lambda bare: where[names[bare]].get_tensor(names[bare]))


def _plan_shards(config: ModelConfig, dtypes: Callable[[str], np.dtype], limit: int) -> list[list[str]]:
    """Published names cut into consecutive shards of at most `limit` bytes (or one tensor)."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in published_shapes(config):
        size = int(np.prod(shape)) * dtypes(name).itemsize
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def save_hf(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    dtype: str | None = None,
    extra_files: Sequence[str | os.PathLike[str]] = (),
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a text-only checkpoint that transformers and SGLang load. The directory appears complete or not at all.

    Args:
      directory: must not exist yet.
      config: of `params`.
      params: tree of `init_params`.
      dtype: "float32" or "bfloat16", config.param_dtype unless given. With bfloat16 the decay rates and the norm inside linear layers
        stay float32, as published.
      extra_files: copied beside the weights, e.g. the tokenizer's files.
      shard_bytes: size beyond which weights are cut into several files.

    Raises:
      InputError: the directory exists, or an extra file does not.
    """
    directory, dtype = Path(directory), dtype or config.param_dtype
    if dtype not in ("float32", "bfloat16"):
        raise InputError(f"dtype of a checkpoint is {dtype!r}: choose float32 or bfloat16")
    if directory.exists():
        raise InputError(f"{directory}: exists already; remove it or give a new name")
    absent = [str(file) for file in extra_files if not Path(file).is_file()]
    if absent:
        raise InputError(f"extra files not found: {', '.join(absent)}")

    def stored(name: str) -> np.dtype:
        return jnp.dtype("float32" if name.endswith(_ALWAYS_FLOAT32) else dtype)

    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = to_hf_tensors(config, params)
    shards = _plan_shards(config, stored, shard_bytes)
    weight_map, total = {}, 0
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {name: tensor.astype(stored(name), copy=False) for name, tensor in (next(tensors) for _ in names)}
        save_file(content, partial / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
        total += sum(tensor.nbytes for tensor in content.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (partial / "config.json").write_text(json.dumps({**config.to_hf(), "dtype": dtype}, indent=2) + "\n")
    for file in extra_files:
        shutil.copy(file, partial)
    os.replace(partial, directory)
