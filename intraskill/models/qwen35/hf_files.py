"""safetensors files read and written piece by piece.

The safetensors library maps a whole file for reading and wants a whole file's tensors for writing. A 4B shard is as large as the machine's memory
is short, so bytes move here in small blocks at known offsets instead; the library still judges whether a file is sound. Blocks also make the
transposition between the two layouts several times faster than numpy's own, since what a block touches stays in cache.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from intraskill.types import InputError

DTYPES = {"F32": np.dtype(np.float32), "BF16": jnp.dtype(jnp.bfloat16)}
"""What a parameter may be stored in. Tensors that are only passed through may have any dtype."""

INDEX = "model.safetensors.index.json"
_BLOCK = 1 << 19
_TILE = 256
_COPY = 1 << 22
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """A safetensors file by what it holds: (name, dtype, shape, number of bytes) of its tensors in their order, and its free-form metadata."""

    file: str
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    metadata: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for *_, num_bytes in self.tensors)


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """The first few items, and how many more there are."""
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return separator.join(items[:_MAX_LISTED]) + more


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; anything else is an InputError."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the directory of a Hugging Face checkpoint, which holds one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}); copy the checkpoint again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds {type(content).__name__}, expected an object; copy the checkpoint again")
    return content


# ------------------------------------------------------------------------------------------------------------------ read


def read_file(path: Path) -> tuple[Shard, list[Stored]]:
    """What a safetensors file holds, from its header alone.

    Raises:
      InputError: the file is truncated, or not a safetensors file.
    """
    try:
        with safe_open(path, framework="np"):  # checks header, offsets and length
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: truncated, or not a safetensors file ({error}); copy it again") from None
    metadata = header.pop("__metadata__", None) or {}
    stored = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        stored.append(Stored(name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + start, end - start))
    stored.sort(key=lambda tensor: tensor.offset)
    return Shard(path.name, tuple((t.name, t.dtype, t.shape, t.num_bytes) for t in stored), metadata), stored


def read_directory(directory: Path) -> tuple[list[Shard], dict[str, Stored], dict[str, Any] | None]:
    """The shards of a checkpoint directory, their tensors by name, and the index's own metadata (None without an index).

    Raises:
      InputError: a shard is missing or broken, or index and shards disagree.
    """
    index = directory / INDEX
    content = read_json(index) if index.exists() else None
    weight_map: Any = None
    if content is not None:
        weight_map = content.get("weight_map")
        named = isinstance(weight_map, dict) and all(isinstance(f, str) and os.path.basename(f) == f for f in weight_map.values())
        if not named or not all(f.endswith(".safetensors") for f in weight_map.values()):
            raise InputError(f"{index}: holds no weight_map from tensor names to names of safetensors files; copy the checkpoint again")
    files = sorted(set(weight_map.values())) if weight_map is not None else ["model.safetensors"]
    absent = [file for file in files if not (directory / file).exists()]
    if absent or not files:
        raise InputError(f"{directory}: lacks {listed(absent) or 'weights'}; only safetensors checkpoints can be loaded, with all their shards")
    shards, tensors = [], {}
    for file in files:
        shard, stored = read_file(directory / file)
        twice = [tensor.name for tensor in stored if tensor.name in tensors]
        if twice:
            raise InputError(f"{directory / file}: {listed(twice)} is in another shard too; copy the checkpoint again")
        shards.append(shard)
        tensors |= {tensor.name: tensor for tensor in stored}
    if weight_map is not None:
        astray = sorted(name for name in weight_map.keys() | tensors.keys() if name not in tensors or weight_map.get(name) != tensors[name].file.name)
        if astray:
            raise InputError(f"{index}: index and shards disagree about {listed(astray)}; copy the checkpoint again")
    metadata = content.get("metadata") if content is not None else None
    return shards, tensors, (metadata if isinstance(metadata, dict) else {}) if content is not None else None


def _blocks(view: np.ndarray) -> Iterator[np.ndarray]:
    """Views of at most about _BLOCK bytes that make up `view` in row-major order."""
    if view.nbytes <= _BLOCK or not view.size:
        yield view
        return
    rows = _BLOCK // view[0].nbytes
    if rows == 0:
        for row in view:
            yield from _blocks(row)
        return
    for start in range(0, len(view), rows):
        yield view[start : start + rows]


def _gather(target: np.ndarray, block: np.ndarray) -> None:
    """`target[...] = block` for a contiguous target.

    numpy walks in the target's order, which in a transposed block of a large matrix means another page of memory for each entry. A tile's pages
    and cache lines stay at hand until all their entries are used.
    """
    if block.ndim < 2 or block.strides[-1] == block.itemsize:
        target[...] = block
        return
    for start in range(0, block.shape[-1], _TILE):
        target[..., start : start + _TILE] = block[..., start : start + _TILE]


def fill(views: Sequence[np.ndarray], tensor: np.ndarray) -> None:
    """Lays a published tensor out into the views that make it up, converting its dtype to theirs."""
    flat, start = np.asarray(tensor).reshape(-1), 0
    for view in views:
        view[...] = flat[start : start + view.size].reshape(view.shape)
        start += view.size


def read_into(views: Sequence[np.ndarray], tensor: Stored) -> None:
    """`fill` from disk, block by block.

    Raises:
      InputError: the file has become shorter than its header says.
    """
    dtype, offset = DTYPES[tensor.dtype], tensor.offset
    with tensor.file.open("rb", buffering=0) as file:
        for block in (block for view in views for block in _blocks(view)):
            buffer = np.empty(block.size * dtype.itemsize, np.uint8)
            _read_exactly(file.fileno(), buffer, offset, tensor)
            offset += len(buffer)
            _bits(block, dtype)[...] = _bits(buffer.view(dtype), block.dtype).reshape(block.shape)


def _bits(array: np.ndarray, other: np.dtype) -> np.ndarray:
    """bfloat16 as integers where it meets `other` bfloat16: numpy copies those much faster."""
    return array.view(np.uint16) if array.dtype == other == DTYPES["BF16"] else array


def _read_exactly(descriptor: int, buffer: np.ndarray, offset: int, tensor: Stored) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:].data], offset + done)
        if count == 0:
            raise InputError(f"{tensor.file}: ends within {tensor.name}; it was cut short while it was read, copy it again")
        done += count


def _pieces(tensor: Stored) -> Iterator[np.ndarray]:
    """A tensor's bytes as they lie on disk, a few megabytes at a time."""
    with tensor.file.open("rb", buffering=0) as file:
        for start in range(0, tensor.num_bytes, _COPY):
            buffer = np.empty(min(_COPY, tensor.num_bytes - start), np.uint8)
            _read_exactly(file.fileno(), buffer, tensor.offset + start, tensor)
            yield buffer


def same(a: Stored, b: Stored) -> bool:
    """Whether two tensors are equal bit for bit."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(np.array_equal(x, y) for x, y in zip(_pieces(a), _pieces(b), strict=True))


def assemble(views: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """The contiguous array that `views` make up."""
    whole = np.empty(math.prod(shape), views[0].dtype)
    start = 0
    for block in (block for view in views for block in _blocks(view)):
        _gather(_bits(whole[start : start + block.size], block.dtype).reshape(block.shape), _bits(block, block.dtype))
        start += block.size
    return whole.reshape(tuple(shape))


# ----------------------------------------------------------------------------------------------------------------- write


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a parameter on disk."""
    return math.prod(shape) * DTYPES[dtype].itemsize


class Writer:
    """Writes shards whose tensors come in any order; a context manager that syncs and closes the files, and insists that they are full.

    Example::

        with Writer(directory, shards) as writer:
            writer.write("model.norm.weight", [array])
            writer.copy(tower_tensor)
    """

    def __init__(self, directory: Path, shards: Sequence[Shard]):
        self._where: dict[str, tuple[int, int, str]] = {}  # descriptor, offset, dtype
        self._stack = contextlib.ExitStack()
        try:
            for shard in shards:
                self._create(directory / shard.file, shard)
        except BaseException:
            self._stack.close()
            raise

    def _create(self, path: Path, shard: Shard) -> None:
        header: dict[str, Any] = {"__metadata__": dict(shard.metadata)} if shard.metadata else {}
        offset = 0
        for name, dtype, shape, size in shard.tensors:
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        file = self._stack.enter_context(path.open("xb", buffering=0))
        _write_exactly(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
        start = 8 + len(text)
        os.ftruncate(file.fileno(), start + offset)
        for name, dtype, _, size in shard.tensors:
            self._where[name] = (file.fileno(), start, dtype)
            start += size
        self._stack.callback(os.fsync, file.fileno())

    def write(self, name: str, views: Sequence[np.ndarray]) -> None:
        """Writes a parameter from the views that make it up, in the dtype that its shard declares."""
        descriptor, offset, stored = self._where.pop(name)
        dtype = DTYPES[stored]
        for block in (block for view in views for block in _blocks(view)):
            data = np.empty(block.shape, dtype)
            _gather(_bits(data, block.dtype), _bits(block, dtype))
            _write_exactly(descriptor, data.reshape(-1).view(np.uint8).data, offset)
            offset += data.nbytes

    def copy(self, tensor: Stored) -> str:
        """Copies a tensor byte by byte, and returns the sha256 of its bytes."""
        descriptor, offset, _ = self._where.pop(tensor.name)
        digest = hashlib.sha256()
        for piece in _pieces(tensor):
            _write_exactly(descriptor, piece.data, offset)
            offset += len(piece)
            digest.update(piece.data)
        return digest.hexdigest()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                self._stack.close()
            return
        self._stack.close()
        if self._where:
            raise RuntimeError(f"never written: {listed(sorted(self._where))}")


def _write_exactly(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        count = os.pwrite(descriptor, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "nothing could be written")
        done += count


def write_index(directory: Path, shards: Iterable[Shard], metadata: Mapping[str, Any]) -> None:
    """The index that goes with several shards."""
    shards = list(shards)
    weight_map = {name: shard.file for shard in shards for name, *_ in shard.tensors}
    content = {"metadata": {**metadata, "total_size": sum(shard.num_bytes for shard in shards)}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(content, indent=2) + "\n")
