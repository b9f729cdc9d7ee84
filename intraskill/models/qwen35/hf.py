"""Hugging Face checkpoints in and out: tensors by published name, directories of safetensors, and their imported form in Orbax.

    Hugging Face directory ── import_hf ──► imported directory ── export_imported ──► Hugging Face directory
              │                                    │                                           ▲
              └───────────── load_hf ──────────────┴──► parameters ─ training ─ save_hf ───────┘

Tensors are read, rearranged and written in small blocks: beyond the parameters themselves, where a function holds them, memory is bounded by the
largest single array. What is not the text tower (vision, multi-token prediction, tokenizer, config.json, even the cut into files) goes from the
source to the export untouched.
"""

import copy
import dataclasses
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from intraskill.models.qwen35 import hf_directory, hf_files, hf_orbax
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.hf_directory import Source, is_other_tower
from intraskill.models.qwen35.hf_files import DTYPES, Shard, listed
from intraskill.models.qwen35.hf_layout import Parameter, parameters, published_shapes
from intraskill.models.qwen35.params import Params, abstract_params
from intraskill.run_directory import write_json
from intraskill.types import InputError

_log = logging.getLogger(__name__)

_PREFIXES = ("model.language_model.", "model.")  # multimodal and text-only layout, longest first
_ALWAYS_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")  # published in float32 beside bfloat16 weights
_CODES = {dtype.name: code for code, dtype in DTYPES.items()}
_SHARD_BYTES = 4 << 30
MTP_NOTE = "MTP_IS_STALE.txt"
"""Written beside trained weights whose source has a multi-token prediction head."""


# --------------------------------------------------------------------------------------------------------------- by name


def _bare_name(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _full_name(name: str, prefix: str) -> str:
    return name if name == "lm_head.weight" else prefix + name


def check_tensors(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: str, dtypes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Raises InputError unless the tensors are exactly this model's; returns full names by bare name.

    Args:
      config: of the model.
      shapes: by full name, with either prefix. Tensors of other towers are passed over, and so is a spelled-out head of tied embeddings.
      source: what the message starts with.
      dtypes: safetensors codes by full name, where those are to be checked too.
    """
    if config.num_layers > len(shapes):  # said here, since all names of a number that is a slip may fill the memory
        raise InputError(
            f"{source}: holds {len(shapes)} tensors and config.json asks for {config.num_layers} layers; use the one that belongs to these weights"
        )
    full: dict[str, str] = {}
    found = []
    for name in shapes:
        if is_other_tower(name):
            continue
        bare = _bare_name(name)
        if bare in full:
            found.append(f"{name} is there as {full[bare]} too")
        full[bare] = name
    expected = published_shapes(config)
    found += [f"missing {name}" for name in expected if name not in full]
    found += [f"unexpected {n}" for bare, n in full.items() if bare not in expected and not (bare == "lm_head.weight" and config.tie_embeddings)]
    own = {bare: full[bare] for bare in expected if bare in full}
    found += [f"{n} is {list(shapes[n])}, expected {list(expected[b])}" for b, n in own.items() if tuple(shapes[n]) != expected[b]]
    found += [f"{n} is {dtypes[n]}, expected {' or '.join(DTYPES)}" for n in own.values() if dtypes is not None and dtypes[n] not in DTYPES]
    if found:
        raise InputError(
            f"{source}: {len(found)} tensors differ from what the config asks for: {listed(found, '; ')}. "
            "Use the config.json that belongs to these weights"
        )
    return own


def _check_source(config: ModelConfig, source: Source) -> dict[str, str]:
    published = source.published
    shapes, dtypes = {name: shape for name, (_, shape) in published.items()}, {name: dtype for name, (dtype, _) in published.items()}
    names = check_tensors(config, shapes, str(source.directory), dtypes)
    head, embed = source.tensors.get("lm_head.weight"), source.tensors.get(names["embed_tokens.weight"])
    if config.tie_embeddings and head is not None and embed is not None and not hf_files.same(head, embed):
        raise InputError(
            f"{source.directory}: config.json ties the embeddings, but lm_head.weight is another matrix than {embed.name}; "
            "set tie_word_embeddings to false there, or remove that tensor"
        )
    return names


def _leaf(config: ModelConfig) -> Callable[[Parameter], jax.ShapeDtypeStruct]:
    """Shape and dtype of any entry of the tree. Blocks are alike, so that one is traced: all of them take seconds at 32 layers."""
    one = abstract_params(dataclasses.replace(config, num_layers=config.full_attention_interval, scan_layers=False))

    def leaf(parameter: Parameter) -> jax.ShapeDtypeStruct:
        part: Any = one
        for key in parameter.path:
            part = part[str(int(key) % config.full_attention_interval) if key.isdigit() else key]
        return jax.ShapeDtypeStruct(((len(parameter.rules),) if parameter.stacked else ()) + part.shape, part.dtype)

    return leaf


def _build(config: ModelConfig, read: Callable[[Parameter, jax.ShapeDtypeStruct], np.ndarray]) -> Params:
    """Parameters from a function that makes the array of one entry of the tree, of the given shape and dtype."""
    leaf, tree = _leaf(config), {}
    for parameter in parameters(config):
        node = tree
        for key in parameter.path[:-1]:
            node = node.setdefault(key, {})
        # A copy, since an alias of memory that is not JAX's own cannot be donated; and not `jnp.array`, which compiles a copy for every shape.
        node[parameter.path[-1]] = jax.device_put(read(parameter, leaf(parameter)), may_alias=False)
    return tree


def from_hf_tensors(config: ModelConfig, tensors: Mapping[str, Any], source: str = "tensors") -> Params:
    """Published tensors (arrays by name, with either prefix) -> parameters in config.param_dtype.

    Raises:
      InputError: names or shapes are not exactly this model's; the message lists the differences.
    """
    names = check_tensors(config, {name: tuple(t.shape) for name, t in tensors.items()}, source)

    def read(parameter: Parameter, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        array = np.empty(leaf.shape, leaf.dtype)
        for name, _, views in parameter.tensors(array):
            hf_files.fill(views, np.asarray(tensors[names[name]]))
        return array

    return _build(config, read)


def to_hf_tensors(config: ModelConfig, params: Params, prefix: str = "model.") -> Iterator[tuple[str, np.ndarray]]:
    """Yields (published name, contiguous host array in the parameter's dtype), one parameter at a time."""
    for parameter in parameters(config):
        for name, shape, views in parameter.tensors(np.asarray(parameter.of(params))):
            yield _full_name(name, prefix), hf_files.assemble(views, shape)


# ------------------------------------------------------------------------------------------------------------------ read


def _to_config(directory: Path, content: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    if content.get("quantization_config") is not None:
        raise InputError(f"{directory / hf_directory.CONFIG}: has a quantization_config; give the checkpoint that is not quantised")
    try:
        return ModelConfig.from_hf(content, **overrides)
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:  # a value of another kind than its key asks for
        said = str(error).removeprefix(f"{hf_directory.CONFIG}: ")
        raise InputError(f"{directory / hf_directory.CONFIG}: {said}; copy the checkpoint again") from None


def load_config(directory: str | os.PathLike[str], **overrides: Any) -> ModelConfig:
    """The model config of a checkpoint directory of either kind; `overrides` set numerics such as dtype or remat."""
    return _to_config(Path(directory), hf_directory.read_config(Path(directory)), **overrides)


def load_hf(directory: str | os.PathLike[str], **overrides: Any) -> tuple[ModelConfig, Params]:
    """Loads a checkpoint directory: text-only or multimodal (of which the text tower is taken), Hugging Face or imported.

    Args:
      directory: holds config.json and model.safetensors, or shards with their index, or what `import_hf` wrote.
      **overrides: ModelConfig fields that the checkpoint does not settle, such as param_dtype (float32 unless given), dtype or remat.

    Raises:
      InputError: the directory or a file is missing, truncated or of another model.
    """
    source = Source.open(Path(directory))
    config = _to_config(source.directory, source.config, **overrides)
    names = _check_source(config, source)
    store = None if source.record is None else _open_store(config, source)

    def read(parameter: Parameter, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if store is not None and not parameter.stacked:
            return store.read(parameter.names[0]).astype(leaf.dtype, copy=False)
        array = np.empty(leaf.shape, leaf.dtype)
        if store is not None:
            for name, part in zip(parameter.names, parameter.parts(array), strict=True):
                part[...] = store.read(name)
        else:
            for name, _, views in parameter.tensors(array):
                hf_files.read_into(views, source.tensors[names[name]])
        return array

    if source.towers:
        _log.info("%s: left out %d tensors of other towers (vision, multi-token prediction)", source.directory, len(source.towers))
    return config, _build(config, read)


def _unstacked(config: ModelConfig) -> ModelConfig:
    """How an imported directory holds the parameters, whatever the run does."""
    return dataclasses.replace(config, scan_layers=False)


def _open_store(config: ModelConfig, source: Source) -> hf_orbax.Store:
    assert source.record is not None
    leaf = _leaf(_unstacked(config))
    expected = {parameter.names[0]: list(leaf(parameter).shape) for parameter in parameters(_unstacked(config))}
    entries = source.record["parameters"]
    found = {name: entry.get("shape") for name, entry in entries.items() if isinstance(entry, dict)}
    if found != expected:
        astray = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise InputError(f"{source.directory}: was imported with another parameter layout ({listed(astray)}); import the checkpoint again")
    return hf_orbax.Store(source.directory / hf_directory.PARAMS, entries)


# ----------------------------------------------------------------------------------------------------------------- write


def import_hf(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Makes an imported directory of a Hugging Face one: Orbax parameters in the published dtypes, everything else as it is.

    Args:
      source: a Hugging Face directory.
      directory: must not exist yet; it appears complete or not at all.

    Raises:
      InputError: a directory is not as it should be, or the disk is full.
    """
    source, directory = Path(source), Path(directory)
    hf_directory.refuse_existing(directory)
    opened = Source.open(source)
    if opened.record is not None:
        raise InputError(f"{source}: is an imported directory already; give the directory of a Hugging Face checkpoint")
    config = _unstacked(_to_config(source, opened.config))
    names, leaf, entries = _check_source(config, opened), _leaf(config), {}

    def make(parameter: Parameter) -> np.ndarray:
        dtypes = {opened.tensors[names[name]].dtype for rule in parameter.rules for name in rule.names}
        array = np.empty(leaf(parameter).shape, DTYPES["F32" if "F32" in dtypes else "BF16"])
        for name, _, views in parameter.tensors(array):
            hf_files.read_into(views, opened.tensors[names[name]])
        entries[parameter.names[0]] = hf_orbax.describe(array)
        return array

    with hf_directory.created(directory, sum(shard.num_bytes for shard in opened.shards)) as stage:
        hf_orbax.write(stage / hf_directory.PARAMS, {p.names[0]: functools.partial(make, p) for p in parameters(config)})
        towers = {}
        if opened.towers:
            shard = Shard(hf_directory.TOWERS, tuple((t.name, t.dtype, t.shape, t.num_bytes) for t in opened.towers), {"format": "pt"})
            with hf_files.Writer(stage, [shard]) as writer:
                towers = {tower.name: writer.copy(tower) for tower in opened.towers}
        shutil.copyfile(source / hf_directory.CONFIG, stage / hf_directory.CONFIG)
        opened.copy_companions(stage)
        record = {"schema": hf_directory.SCHEMA, "shards": opened.shards, "index_metadata": opened.index_metadata}
        write_json(stage / hf_directory.RECORD, {**record, "parameters": entries, "towers": towers})


def export_imported(source: str | os.PathLike[str], directory: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Makes a Hugging Face directory of an imported one; with dtype None every tensor is, bit for bit, what was imported.

    Args:
      source: what `import_hf` wrote.
      directory: must not exist yet; it appears complete or not at all.
      dtype: as in `save_hf`.
    """
    hf_directory.refuse_existing(Path(directory))
    opened = Source.open(Path(source))
    if opened.record is None:
        raise InputError(f"{source}: is not an imported directory; give one that launch/import_hf.py wrote")
    config = _unstacked(_to_config(opened.directory, opened.config))
    store = _open_store(config, opened)
    leaves = hf_orbax.ahead((parameter, store.read(parameter.names[0])) for parameter in parameters(config))
    _write(Path(directory), config, leaves, _plan(config, opened, dtype, _SHARD_BYTES), dtype, opened)


def save_hf(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    dtype: str | None = None,
    extra_files: Sequence[str | os.PathLike[str]] = (),
    shard_bytes: int = _SHARD_BYTES,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a checkpoint that transformers and SGLang load. The directory appears complete or not at all.

    Args:
      directory: must not exist yet.
      config: of `params`.
      params: tree of `init_params`.
      dtype: "float32" or "bfloat16" for the text tower. The decay rates and the norm inside linear layers are float32 beside bfloat16, as
        published. Unless given, each tensor has the dtype that it has in `source`, or that of config.param_dtype.
      extra_files: copied beside the weights, e.g. the tokenizer's files.
      shard_bytes: without a source, the size beyond which weights are cut into several files.
      source: the directory, of either kind, that training started from. Its architecture, config.json, other towers, tokenizer and cut into
        files are kept. Without it a text-only checkpoint is written.

    Raises:
      InputError: the directory exists, an extra file does not, or params, config and source are not of one model.
    """
    directory = Path(directory)
    if dtype is not None and dtype not in _CODES:
        raise InputError(f"dtype of a checkpoint is {dtype!r}: choose {' or '.join(_CODES)}")
    hf_directory.refuse_existing(directory)
    absent = [str(file) for file in extra_files if not Path(file).is_file()]
    if absent:
        raise InputError(f"extra files not found: {listed(absent)}")
    _check_params(config, params)
    opened = None if source is None else Source.open(Path(source))
    leaves = ((parameter, np.asarray(parameter.of(params))) for parameter in parameters(config))
    _write(directory, config, leaves, _plan(config, opened, dtype, shard_bytes), dtype, opened, extra_files, trained=True)


def _check_params(config: ModelConfig, params: Params) -> None:
    leaf = _leaf(config)
    expected = {".".join(parameter.path): leaf(parameter).shape for parameter in parameters(config)}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {jax.tree_util.keystr(path, simple=True, separator="."): tuple(array.shape) for path, array in leaves}
    astray = [
        f"{n} is {found.get(n, 'absent')}, expected {expected.get(n, 'absent')}" for n in {**expected, **found} if expected.get(n) != found.get(n)
    ]
    if astray:
        raise InputError(f"{len(astray)} parameters are not the config's: {listed(astray, '; ')}")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The files of an export, and its full tensor names by bare name."""

    shards: list[Shard]
    names: dict[str, str]


def _plan(config: ModelConfig, source: Source | None, dtype: str | None, shard_bytes: int) -> _Plan:
    def entry(name: str, shape: tuple[int, ...], code: str) -> tuple[str, str, tuple[int, ...], int]:
        if dtype is not None:
            code = "F32" if name.endswith(_ALWAYS_FLOAT32) else _CODES[dtype]
        return name, code, shape, hf_files.num_bytes(code, shape)

    if source is None:
        names = {bare: _full_name(bare, "model.") for bare in published_shapes(config)}
        own = config.param_dtype
        codes = {bare: "F32" if bare.endswith(_ALWAYS_FLOAT32) else _CODES[own] for bare in names}
        return _Plan(_cut([entry(names[bare], shape, codes[bare]) for bare, shape in published_shapes(config).items()], shard_bytes), names)

    theirs, ours = (c.to_hf() for c in (_to_config(source.directory, source.config, param_dtype=config.param_dtype), config))
    astray = [f"{key} is {theirs[key]} there, {ours[key]} here" for key in ours if ours[key] != theirs[key]]
    if astray:
        raise InputError(
            f"{source.directory}: is another model than the parameters ({listed(astray, '; ')}); give the checkpoint that training began with"
        )
    names = _check_source(config, source)
    text, shards = set(names.values()), []
    for shard in source.shards:
        kept = (t if is_other_tower(t[0]) else entry(t[0], t[2], t[1]) for t in shard.tensors if is_other_tower(t[0]) or t[0] in text)
        shards.append(dataclasses.replace(shard, tensors=tuple(kept)))
    return _Plan([shard for shard in shards if shard.tensors], names)


def _cut(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], limit: int) -> list[Shard]:
    """Consecutive shards of at most `limit` bytes (or one tensor)."""
    groups: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t[3] for t in groups[-1]) + tensor[3] > limit:
            groups.append([])
        groups[-1].append(tensor)
    total = len(groups)
    files = ["model.safetensors"] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    return [Shard(file, tuple(group), {"format": "pt"}) for file, group in zip(files, groups, strict=True)]


def _write(
    directory: Path,
    config: ModelConfig,
    leaves: Iterable[tuple[Parameter, np.ndarray]],
    plan: _Plan,
    dtype: str | None,
    source: Source | None,
    extra_files: Sequence[str | os.PathLike[str]] = (),
    trained: bool = False,
) -> None:
    with hf_directory.created(directory, sum(shard.num_bytes for shard in plan.shards)) as stage:
        with hf_files.Writer(stage, plan.shards) as writer:
            for parameter, array in leaves:
                for name, _, views in parameter.tensors(array):
                    writer.write(plan.names[name], views)
                del array, views
            for tower in source.towers if source is not None else ():
                digest = writer.copy(tower)
                if source is not None and source.record is not None and source.record["towers"][tower.name] != digest:
                    raise InputError(f"{tower.file}: {tower.name} is not what was imported (its sha256 differs); import the checkpoint again")
        index_metadata = source.index_metadata if source is not None else None
        if len(plan.shards) > 1 or index_metadata is not None:
            hf_files.write_index(stage, plan.shards, index_metadata or {})
        content = {**config.to_hf(), "dtype": dtype or config.param_dtype} if source is None else _exported_config(source, config, dtype)
        (stage / hf_directory.CONFIG).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        if source is not None:
            source.copy_companions(stage)
        for file in extra_files:
            shutil.copy(file, stage)
        if trained and source is not None and source.mtp_names:
            (stage / MTP_NOTE).write_text(
                "The text tower was trained further; the multi-token prediction tensors (mtp.*) are those of the original checkpoint, which was\n"
                "not trained with it. Speculative decoding with them is correct but accepts fewer tokens.\n"
            )


def _exported_config(source: Source, config: ModelConfig, dtype: str | None) -> dict[str, Any]:
    """The source's config.json with the layers named in both ways, and with the dtype of the text tower where that changes."""
    content = copy.deepcopy(source.config)
    text = content.get("text_config", content)
    own = config.to_hf()
    for key in ("layer_types", "full_attention_interval"):
        text.setdefault(key, own[key])
    for node in (content, text):
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and key in node:
                node[key] = dtype
    return content
