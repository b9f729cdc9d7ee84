"""The text tower's parameters as an Orbax checkpoint, one array in memory at a time.

Orbax saves a tree of arrays that all exist. Here the leaves are functions that make an array, and a type handler calls them one after the other;
on disk it is an ordinary checkpoint of a nested dict that any Orbax restores, sharded or not. Reading goes to TensorStore, which Orbax stores
through, since Orbax itself opens a whole checkpoint per restored leaf.

Arrays are uncompressed and cut into chunks, so that a device that needs a slice reads about that slice. Orbax does not notice a flipped byte or a
missing chunk (zeros come back): hence a checksum per array.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from intraskill.types import InputError

_CHUNK_BYTES = 64 << 20
_T = TypeVar("_T")


def checksum(array: np.ndarray) -> int:
    """Sum of the array's bytes taken as 64-bit words (the last few bytes as 8-bit ones) modulo 2**64: no change of one word leaves it as it was."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = len(data) // 8 * 8
    return (int(np.sum(data[:whole].view(np.uint64), dtype=np.uint64)) + int(np.sum(data[whole:], dtype=np.uint64))) % 2**64


def ahead(items: Iterable[_T]) -> Iterator[_T]:
    """The same items, each made in a thread while the one before it is used."""
    iterator, end = iter(items), object()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, iterator, end)
            yield item  # type: ignore[misc]
            del item


# ----------------------------------------------------------------------------------------------------------------- write


@dataclasses.dataclass(frozen=True)
class _Unmade:
    make: Callable[[], np.ndarray]


class _OneByOne(ocp.type_handlers.NumpyHandler):
    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        # No sync per file: `hf_directory.created` syncs everything once, before the directory gets its name. No cache: it would fill with what was
        # written and is never read.
        context = tensorstore.Context({"file_io_sync": False, "cache_pool#ocdbt": {"total_bytes_limit": 0}})
        for array, info, arg in zip(ahead(value.make() for value in values), infos, args, strict=True):
            for written in await super().serialize([array], [info.replace(ts_context=context)], [arg]):
                await asyncio.to_thread(written.result)
            del array
        return []


def write(directory: Path, leaves: Mapping[str, Callable[[], np.ndarray]]) -> None:
    """Writes arrays under dotted paths as a checkpoint of a nested dict.

    Raises:
      OSError: the disk refuses.
    """
    tree: dict[str, Any] = {}
    for name, make in leaves.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = _Unmade(make)
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Unmade, _OneByOne(deepcopy_host_arrays=False)), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False, type_handler_registry=registry)
    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    try:
        with _no_echo(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(tree, save_args=chunked))
    except Exception as error:  # TensorStore reports what the system said as text, in many types
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """Orbax logs the traceback of an error that it raises as well; who catches the error says what it means."""

    def is_news(record: logging.LogRecord) -> bool:
        return record.module != "future"

    logger = logging.getLogger("absl")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


# ------------------------------------------------------------------------------------------------------------------ read


class Store:
    """Reads single arrays of what `write` wrote."""

    def __init__(self, directory: Path, entries: Mapping[str, Any]):
        """`entries`: what `describe` said of each array when it was written."""
        self._entries = entries
        self._base = f"file://{directory.absolute()}/"
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})

    def read(self, name: str) -> np.ndarray:
        """The array under a dotted path.

        Raises:
          InputError: it cannot be read, or is not what was written.
        """
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._base, "path": f"{name}/"}}
        try:
            array = tensorstore.open(spec, open=True, read=True, context=self._context).result().read().result()
        except Exception as error:  # TensorStore raises many types for files that are damaged or gone
            raise InputError(f"{self._base}: {name} cannot be read ({json.dumps(str(error)[:200])}); import the checkpoint again") from error
        if describe(array) != self._entries[name]:
            raise InputError(f"{self._base}: {name} is not what was imported (shape, dtype or checksum differ); import the checkpoint again")
        return array


def describe(array: np.ndarray) -> dict[str, Any]:
    """A parameter's entry in the record of an import."""
    return {"dtype": str(array.dtype), "shape": list(array.shape), "checksum": checksum(array)}
