"""Checkpoint directories: what one holds, and how a new one comes into being.

There are two kinds. A *Hugging Face* directory has safetensors. An *imported* one, written by `hf.import_hf`, has the text tower as an Orbax
checkpoint in this project's layout, the other towers' tensors beside it, and a record of the directory that it was made from. Both have the same
config.json, tokenizer and companions, so either can be where a run starts and what an export takes everything but the parameters from.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from intraskill.models.qwen35 import hf_files
from intraskill.models.qwen35.hf_files import Shard, Stored
from intraskill.run_directory import require_disk
from intraskill.types import InputError

CONFIG = "config.json"
RECORD = "published.json"
TOWERS = "towers.safetensors"
PARAMS = "params"
SCHEMA = 1

COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
"""Files of a checkpoint beside weights and config.json that are part of the model: tokenizer, chat template, processors, generation settings."""

_OTHER_TOWERS = ("model.visual.", "visual.", "mtp.", "model.mtp.")
_MTP = ("mtp.", "model.mtp.")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_other_tower(name: str) -> bool:
    """Whether a tensor belongs to vision or multi-token prediction, which are passed through untouched."""
    return name.startswith(_OTHER_TOWERS)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint directory, opened by its headers alone.

    Attributes:
      directory: where it is.
      config: its config.json.
      shards: its safetensors files as they were published.
      index_metadata: of the published index; None when there was no index.
      tensors: those that can be read from safetensors here: all of them, or of an imported directory those of the other towers.
      record: of an imported directory; None for a Hugging Face one. `parameters` holds dtype, shape and checksum of each parameter, `towers`
        the sha256 of each of the other towers' tensors.
    """

    directory: Path
    config: dict[str, Any]
    shards: list[Shard]
    index_metadata: dict[str, Any] | None
    tensors: dict[str, Stored]
    record: dict[str, Any] | None

    @classmethod
    def open(cls, directory: Path) -> "Source":
        """Raises InputError when the directory, or a file of it, is missing or broken."""
        config = read_config(directory)
        if not (directory / RECORD).exists():
            shards, tensors, metadata = hf_files.read_directory(directory)
            return cls(directory, config, shards, metadata, tensors, None)
        record = hf_files.read_json(directory / RECORD)
        if record.get("schema") != SCHEMA:
            raise InputError(f"{directory / RECORD}: schema is {record.get('schema')!r}, this version reads {SCHEMA}; import the checkpoint again")
        try:
            shards = [
                Shard(s["file"], tuple((name, dtype, tuple(shape), size) for name, dtype, shape, size in s["tensors"]), s["metadata"])
                for s in record["shards"]
            ]
            towers, metadata = set(record["towers"]), record["index_metadata"]
            record["parameters"].items()
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{directory / RECORD}: is not the record of an import; import the checkpoint again") from None
        tensors = {t.name: t for t in hf_files.read_file(directory / TOWERS)[1]} if towers else {}
        if tensors.keys() != towers:
            raise InputError(f"{directory / TOWERS}: holds other tensors than were imported; import the checkpoint again")
        return cls(directory, config, shards, metadata, tensors, record)

    @property
    def published(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of every published tensor by name."""
        return {name: (dtype, shape) for shard in self.shards for name, dtype, shape, _ in shard.tensors}

    @property
    def towers(self) -> list[Stored]:
        """The tensors of the other towers."""
        return [tensor for name, tensor in self.tensors.items() if is_other_tower(name)]

    @property
    def mtp_names(self) -> list[str]:
        """Tensors of the multi-token prediction head, which follows the text tower's weights and is stale once those have been trained."""
        return sorted(tensor.name for tensor in self.towers if tensor.name.startswith(_MTP))

    def copy_companions(self, directory: Path) -> None:
        """Copies the files of COMPANIONS that are here."""
        for name in COMPANIONS:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, directory / name)


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of either kind of directory."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give the directory of a Hugging Face checkpoint")
    return hf_files.read_json(directory / CONFIG)


# ------------------------------------------------------------------------------------------------------------------- new


def refuse_existing(directory: Path) -> None:
    """Nothing is ever overwritten."""
    if directory.exists() or directory.is_symlink():
        raise InputError(f"{directory}: exists already; remove it or give a new name")


@contextlib.contextmanager
def created(directory: Path, num_bytes: int) -> Iterator[Path]:
    """A directory to write to that becomes `directory`, synced to disk, when the block ends without an error, and otherwise disappears.

    A process that is killed leaves `NAME.partial`, which the next attempt clears away.

    Raises:
      InputError: `directory` exists, another process is writing it, or the disk has or leaves too little space.
    """
    refuse_existing(directory)
    require_disk(directory.parent, num_bytes)
    partial = directory.with_name(directory.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _hold(held, partial, directory)
        try:
            yield partial
            _sync(partial)
            os.rename(partial, directory)
            _sync_one(directory.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno in _FULL_DISK:
            raise InputError(f"{directory}: {error.strerror}; nothing was left there, free some space or choose another disk") from error
        raise
    finally:
        os.close(held)


def _hold(held: int, partial: Path, directory: Path) -> None:
    """Takes the lock on `partial`, which the kernel lets go of when a process ends, and removes what a killed one left in it."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{directory}: another process is writing it; wait for that one, or give a new name") from None
    for left in partial.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _sync(directory: Path) -> None:
    for path, _, files in os.walk(directory):
        for name in files:
            _sync_one(Path(path, name))
        _sync_one(Path(path))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
