"""Runs inside SGLang: loads published weights into the live model and says, from the live parameters, what the model holds.

Start every server with this repository on PYTHONPATH and

    --custom-weight-loader intraskill.rollout.sglang_loader.load

The environment is SGLang's: torch, numpy and tensorstore, no JAX and nothing else of this project but `intraskill.manifest`. An error that
escapes a custom loader kills the server, and an update that loaded nothing is answered with success. So `load` never raises, and what
counts is only the digest that `GET /get_weights_by_name {"name": "intraskill.digest"}` computes anew from the live parameters.

`model.load_weights` places the tensors, the layout below reads them back: two descriptions of one placement, and a mistake in either shows
in the digest.
"""

# torch belongs to SGLang's environment, not to the one that is checked.
# pyright: reportMissingImports=false

import collections
import concurrent.futures
import dataclasses
import functools
import json
import logging
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore
import torch
import torch.distributed

from intraskill import manifest

log = logging.getLogger(__name__)

PATH, ATTACH = "orbax_path", "attach"
QUESTION = "intraskill.digest"
_MAX_LISTED = 8
_HASHING_THREADS = 4

# The engine's fused parameters, and the published tensors that lie one after the other in each.
_FUSED = {
    "self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "linear_attn.in_proj_qkvz.weight": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    "linear_attn.in_proj_ba.weight": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
}
_NO_MODULE = ("qkv_proj.", "o_proj.", "q_norm.", "k_norm.")  # full attention lies directly in its layer
_PREFIXES = ("model.language_model.", "model.")
_OTHER_TOWERS = ("visual.", "model.visual.", "mtp.", "model.mtp.")


class LoadError(Exception):
    """Why published weights were not loaded."""


# ---------------------------------------------------------------------------------------------------------------- layout


@dataclasses.dataclass(frozen=True)
class Split:
    """How a published tensor is cut over ranks.

    Attributes:
      shape: of the whole tensor.
      dim: the dimension that is cut; None: every rank holds all.
      sections: sizes along `dim` of parts that are each cut evenly (queries, keys and values of one matrix).
      ways: into how many pieces each section is cut; None: one a rank. Fewer than ranks where key-value heads are fewer.
      rows: what each rank holds of a padded vocabulary; then `sections` and `ways` have no meaning.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    sections: tuple[int, ...] = ()
    ways: int | None = None
    rows: int = 0

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """What `rank` of `size` holds: [start, stop) along `dim`, in the order in which the parts lie in the rank's parameter."""
        if self.dim is None:
            return [(0, self.shape[0])]
        if self.rows:
            total = self.shape[0]
            return [(min(rank * self.rows, total), min((rank + 1) * self.rows, total))]
        ways = min(self.ways or size, size)
        found, base = [], 0
        for section in self.sections:
            if section % ways or size % ways:
                raise LoadError(f"{section} rows cannot be cut into {ways} equal pieces for {size} ranks: choose another --tp-size")
            width = section // ways
            start = base + rank * ways // size * width
            found.append((start, start + width))
            base += section
        return found


def published_splits(config: Any, vocab_rows: int) -> dict[str, Split]:
    """Every tensor of the language model by its name without prefix, with its whole shape and its cut.

    Args:
      config: the text model's Hugging Face config.
      vocab_rows: rows of the embedding that a rank holds.
    """
    d, f = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    gated = 2 * queries if getattr(config, "attn_output_gate", True) else queries
    linear_keys = config.linear_num_key_heads * config.linear_key_head_dim
    values, heads = config.linear_num_value_heads * config.linear_value_head_dim, config.linear_num_value_heads
    mixed = (linear_keys, linear_keys, values)

    def rows(size: int, *columns: int, **changes: Any) -> Split:
        return Split((size, *columns), 0, (size,), **changes)

    def columns(size: int) -> Split:
        return Split((d, size), 1, (size,))

    kv = rows(keys, d, ways=config.num_key_value_heads)
    full = {
        "q_proj.weight": rows(gated, d),
        "k_proj.weight": kv,
        "v_proj.weight": kv,
        "o_proj.weight": columns(queries),
        "q_norm.weight": Split((config.head_dim,)),
        "k_norm.weight": Split((config.head_dim,)),
    }
    linear = {
        "in_proj_qkv.weight": Split((sum(mixed), d), 0, mixed),
        "conv1d.weight": Split((sum(mixed), 1, config.linear_conv_kernel_dim), 0, mixed),
        "in_proj_z.weight": rows(values, d),
        "in_proj_b.weight": rows(heads, d),
        "in_proj_a.weight": rows(heads, d),
        "A_log": rows(heads),
        "dt_bias": rows(heads),
        "norm.weight": Split((config.linear_value_head_dim,)),
        "out_proj.weight": columns(values),
    }
    every = {
        "input_layernorm.weight": Split((d,)),
        "post_attention_layernorm.weight": Split((d,)),
        "mlp.gate_proj.weight": rows(f, d),
        "mlp.up_proj.weight": rows(f, d),
        "mlp.down_proj.weight": columns(f),
    }
    table = Split((config.vocab_size, d), 0, rows=vocab_rows)
    splits = {"embed_tokens.weight": table, "norm.weight": Split((d,))}
    if not config.tie_word_embeddings:
        splits["lm_head.weight"] = table
    for layer, kind in enumerate(config.layers_block_type):  # SGLang's own word for layer_types
        mixer = ("linear_attn", linear) if kind == "linear_attention" else ("self_attn", full)
        splits |= {f"layers.{layer}.{name}": split for name, split in every.items()}
        splits |= {f"layers.{layer}.{mixer[0]}.{name}": split for name, split in mixer[1].items()}
    return splits


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this rank keeps a published tensor: `length` entries of `parameter` along the split's dimension, from `offset`."""

    split: Split
    parameter: torch.Tensor
    offset: int
    length: int

    @property
    def local(self) -> torch.Tensor:
        return self.parameter.data if self.split.dim is None else self.parameter.data.narrow(self.split.dim, self.offset, self.length)


def _bare(name: str) -> str:
    return next((name[len(p) :] for p in _PREFIXES if name.startswith(p)), name)


def live_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The language model's parameters by the published way of naming, fused ones by their fused name."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith(_OTHER_TOWERS):
            continue
        match = re.fullmatch(r"(layers\.\d+\.)(.*)", bare := _bare(name))
        if match and match[2].startswith(_NO_MODULE):
            bare = f"{match[1]}self_attn.{match[2]}"
        found[bare] = parameter
    return found


def places(model: torch.nn.Module, rank: int, size: int) -> dict[str, Place]:
    """Every published tensor's place in the live model, by name without prefix.

    Raises:
      LoadError: the model has other parameters, or other shapes, than its config asks for.
    """
    config = getattr(model.config, "text_config", model.config)
    live = live_parameters(model)
    if "embed_tokens.weight" not in live:
        raise LoadError("the server holds a part of the model only: pipeline parallelism is not supported, use --tp-size and replicas")
    splits = published_splits(config, len(live["embed_tokens.weight"]))
    found: dict[str, Place] = {}
    for name, parameter in live.items():
        match = re.fullmatch(r"(layers\.\d+\.)(.*)", name)
        parts = [f"{match[1]}{part}" for part in _FUSED[match[2]]] if match and match[2] in _FUSED else [name]
        unknown = [part for part in parts if part not in splits]
        if unknown:
            raise LoadError(f"the server's parameter {name} is not one of Qwen3.5's: serve an unquantised Qwen3.5 checkpoint")
        offset = 0
        for part in parts:
            split = splits[part]
            length = split.rows or sum(stop - start for start, stop in split.ranges(rank, size))
            found[part] = Place(split, parameter, offset, length)
            offset += length
        _check_shape(name, parameter, found[parts[0]].split, offset)
    missing = sorted(set(splits) - set(found))
    if missing:
        raise LoadError(f"the server's model lacks {_listed(missing)}: serve the checkpoint that this run trains")
    return found


def _check_shape(name: str, parameter: torch.Tensor, split: Split, length: int) -> None:
    expected = list(split.shape)
    if split.dim is not None:
        expected[split.dim] = length
    if list(parameter.shape) != expected:
        raise LoadError(f"the server's parameter {name} is {list(parameter.shape)}, expected {expected}: serve an unquantised Qwen3.5 checkpoint")


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------------ load


def check(entries: Mapping[str, Mapping[str, Any]], found: Mapping[str, Place]) -> dict[str, str]:
    """Compares the whole manifest with the live model; returns published names by name without prefix. Raises LoadError."""
    names = {_bare(name): name for name in entries}
    wrong = [f"missing {name}" for name in found if name not in names]
    wrong += [f"unexpected {full}" for name, full in names.items() if name not in found]
    for name in names.keys() & found.keys():
        entry, place = entries[names[name]], found[name]
        if list(entry["shape"]) != list(place.split.shape):
            wrong.append(f"{names[name]} is {entry['shape']}, expected {list(place.split.shape)}")
        if entry["dtype"] != _dtype(place.parameter):
            wrong.append(f"{names[name]} is {entry['dtype']}, the server holds {_dtype(place.parameter)}")
    if wrong:
        raise LoadError(f"{len(wrong)} tensors differ from what the server serves: {_listed(sorted(wrong))}. Nothing was loaded")
    return names


def read(path: pathlib.Path, names: Mapping[str, str], found: Mapping[str, Place], rank: int, size: int) -> dict[str, torch.Tensor]:
    """This rank's share of the published tensors, by name without prefix.

    A tensor comes in its whole shape, for `model.load_weights` to cut; what other ranks hold of it is neither read nor touched in memory.
    """
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": "shared"}})
    base = {"driver": "ocdbt", "base": f"file://{path.absolute()}/"}
    opening = {
        name: tensorstore.open({"driver": "zarr", "kvstore": {**base, "path": f"{full}/"}}, read=True, open=True, context=context)
        for name, full in names.items()
    }
    tensors, copies = {}, []
    for name, future in opening.items():
        store, split = future.result(), found[name].split
        ranges = split.ranges(rank, size)
        if split.dim is None or sum(stop - start for start, stop in ranges) == split.shape[split.dim]:
            target = np.empty(split.shape, store.dtype.numpy_dtype)
            copies.append(tensorstore.array(target, context=context).write(store))
        else:
            target = np.zeros(split.shape, store.dtype.numpy_dtype)  # lazily mapped: pages that nobody writes take no memory
            view = tensorstore.array(target, context=context)
            for start, stop in ranges:
                cut = (slice(None),) * split.dim + (slice(start, stop),)
                copies.append(view[cut].write(store[cut]))
        tensors[name] = target
    for copy in copies:
        copy.result()
    return {name: _to_torch(array) for name, array in tensors.items()}


def _to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang calls this for `/update_weights_from_tensor` with this function as `load_format`.

    Args:
      model: the live model of this rank.
      named_tensors: `[("orbax_path", the version directory's path as uint8)]` to load it, or `[("attach", the same)]` to be told only what
        the digest will be compared with, after `/update_weights_from_disk`.
    """
    try:
        ((kind, data),) = named_tensors
        path = pathlib.Path(bytes(data.cpu().tolist()).decode())
        _answer_with(model, path, "")
        rank, size = _rank_and_size()
        if kind == PATH:
            _load(model, path, rank, size)
        elif kind != ATTACH:
            raise LoadError(f"unknown request {kind!r}: client and loader are of different versions, install the same")
    except Exception as e:
        message = str(e) if isinstance(e, LoadError | manifest.ManifestError) else f"{type(e).__name__}: {str(e)[:400]}"
        log.exception("weights were not loaded")
        _answer_with(model, None, message)


def _answer_with(model: Any, path: pathlib.Path | None, error: str) -> None:
    """From now on the server's own route, which calls this method of the model, tells the digest, or why nothing was loaded."""
    model.get_weights_by_name = functools.partial(_answer, model, path, [error])


def _load(model: Any, path: pathlib.Path, rank: int, size: int) -> None:
    content = manifest.read(path)
    if content["layout"] != manifest.ORBAX:
        raise LoadError(f"{path} holds {content['layout']}: update such a version with /update_weights_from_disk")
    found = places(model, rank, size)
    names = check(content["tensors"], found)
    tensors = read(path / manifest.ARRAYS, names, found, rank, size)  # all of it, so that damaged files leave the model as it was
    model.load_weights(iter([(name if name == "lm_head.weight" else f"model.{name}", tensor) for name, tensor in tensors.items()]))


def _rank_and_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


# ---------------------------------------------------------------------------------------------------------------- digest


def whole_tensors(model: torch.nn.Module, rank: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Live parameters as published, gathered from all ranks one by one, in the host's memory. All ranks must iterate together."""
    for name, place in sorted(places(model, rank, size).items()):
        if place.split.dim is None or size == 1:
            local = place.local[: place.split.shape[0]] if place.split.rows else place.local
            yield name, local.detach().cpu().contiguous()
            continue
        mine = place.local.detach().contiguous()
        pieces = [torch.empty_like(mine) for _ in range(size)]
        torch.distributed.all_gather(pieces, mine)
        whole = torch.empty(place.split.shape, dtype=mine.dtype)
        for other, piece in enumerate(pieces):
            at = 0
            for start, stop in place.split.ranges(other, size):
                whole.narrow(place.split.dim, start, stop - start).copy_(piece.narrow(place.split.dim, at, stop - start))
                at += stop - start
        yield name, whole


def live_digest(model: torch.nn.Module, names: Mapping[str, str], rank: int, size: int) -> str:
    """The manifest digest of the live parameters under the given published names; "" on all ranks but the first."""

    def entry(tensor: torch.Tensor) -> dict[str, Any]:
        bits = tensor.reshape(-1).view(torch.uint8).numpy()
        return {**manifest.fingerprint(bits), "shape": list(tensor.shape), "dtype": _dtype(tensor)}

    entries: dict[str, concurrent.futures.Future[dict[str, Any]]] = {}
    waiting: collections.deque[concurrent.futures.Future[dict[str, Any]]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(_HASHING_THREADS) as workers:
        for name, tensor in whole_tensors(model, rank, size):
            if rank == 0:
                entries[names.get(name, name)] = future = workers.submit(entry, tensor)
                waiting.append(future)
            if len(waiting) > _HASHING_THREADS:  # so that only a few tensors lie in the host's memory
                waiting.popleft().result()
        return manifest.digest({name: future.result() for name, future in entries.items()}) if rank == 0 else ""


def _answer(
    model: torch.nn.Module, path: pathlib.Path | None, errors: list[str], name: str, truncate_size: int = 100, tp_size: int = 1
) -> list[float]:
    """What `/get_weights_by_name` returns: JSON as the list of its bytes, because SGLang's answer can hold numbers only."""
    del truncate_size
    if name != QUESTION:
        raise ValueError(f"only {QUESTION!r} can be asked, got {name!r}")
    rank, size = _rank_and_size()
    if size != tp_size:
        errors = [f"the server has {size} processes for {tp_size} tensor-parallel ranks: use --tp-size and replicas only"]
    if size == tp_size > 1:
        gathered: list[Any] = [None] * size
        torch.distributed.all_gather_object(gathered, errors[0])
        errors = [next((e for e in gathered if e), "")]
    digest = ""
    if path is not None and not errors[0]:
        names = {_bare(full): full for full in manifest.read(path)["tensors"]}
        digest = live_digest(model, names, rank, size)
    return [float(byte) for byte in json.dumps({"digest": digest, "error": errors[0]}).encode()]
