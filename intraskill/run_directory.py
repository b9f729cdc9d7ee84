"""The run directory: the record of a run, written so that a kill at any instant leaves every file whole or absent.

A file is written under a temporary name, synced, and renamed over its own name. The directory itself appears the same way, with its configuration
already inside, so there is no half-created run. A lock that dies with its process keeps two processes from writing to one run.
"""

import contextlib
import dataclasses
import datetime
import enum
import errno
import fcntl
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from intraskill.types import InputError

SOURCE = pathlib.Path(__file__).resolve().parent.parent

# What can change a run's numbers; a package that is not installed is not listed in versions.json.
PACKAGES = (
    "intraskill aiohttp flax jax jaxlib ml_collections ml_dtypes numpy optax orbax-checkpoint rapidfuzz safetensors scipy sglang statsmodels "
    "tensorstore tokenizers torch transformers"
).split()


# Settings that a resumed run may be given anew, since they say where and with what the run is computed and not what it is. Another mesh adds in
# another order, so its numbers differ in their last bits from then on.
MAY_CHANGE = (
    *("runs_directory", "mesh.", "distributed.", "checkpoint.", "shop.port"),
    *("engine.addresses", "engine.turn_seconds", "engine.start_seconds", "engine.load_seconds"),
)


# ------------------------------------------------------------------------------------------------------------------ JSON


def plain(value: Any) -> Any:
    """Returns `value` as JSON types: dataclasses are objects, arrays and tuples lists, enums and paths text, NaN and ±inf null."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} has no JSON form; convert it where the record is built")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file; one that is missing, unreadable or broken is an `InputError`, and so is NaN, which `write_json` never writes."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON value")

    try:
        return json.loads(pathlib.Path(path).read_bytes().decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as e:
        raise InputError(f"{os.fspath(path)} cannot be read ({e}); check the path") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{os.fspath(path)} is not JSON ({e}); restore it from a copy, or write it again") from None
    except OSError as e:
        raise InputError(f"{os.fspath(path)} cannot be read ({e}); check the path") from None


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `plain(value)` atomically, indented, in UTF-8."""
    write_text(path, json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file so that readers, and a run killed meanwhile, see the old content or the new one and nothing between."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: pathlib.Path) -> None:
    """Makes a rename in `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ----------------------------------------------------------------------------------------------------- what the run needs


def require_disk(path: str | os.PathLike[str], num_bytes: int) -> None:
    """Raises `InputError` unless `num_bytes` are free where `path` is, or will be."""
    existing, free = _free(path)
    if free < num_bytes:
        raise InputError(
            f"{os.fspath(path)} needs {_size(num_bytes)} of disk and {_size(free)} are free at {existing}; "
            "free some space, or choose a directory elsewhere"
        )


@contextlib.contextmanager
def full_disk_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what writes under `path`: a full disk's own error names no place, so it becomes an `InputError` with place and remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing, free = _free(path)
        raise InputError(
            f"{os.fspath(path)} could not be written: {error.strerror}, {_size(free)} are free at {existing}; free some space there, "
            "then start again, a training run with --resume: what was finished is kept"
        ) from error


def reason(error: Exception) -> str:
    """Why something could not be written: the kernel's words where a library has buried them under its own, else the beginning of the error's."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
        if os.strerror(number) in str(error):
            return os.strerror(number)
    return f"{type(error).__name__}: {str(error)[:300]}"


def _free(path: str | os.PathLike[str]) -> tuple[pathlib.Path, int]:
    """The first directory of those above `path`, or itself, that exists, and the bytes that are free there."""
    existing = pathlib.Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    return existing, shutil.disk_usage(existing).free


def size_on_disk(path: str | os.PathLike[str]) -> int:
    """Bytes of all files under `path`; 0 where there is no such directory."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process may be at work there
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def versions() -> dict[str, Any]:
    """What the run was made with: package versions, git revision, Python, platform."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {"packages": packages, "git": _git_revision(), "python": platform.python_version(), "platform": platform.platform()}


def _git_revision() -> dict[str, Any] | None:
    """The commit of the source and whether files differ from it; None where the source is not a git checkout of its own."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(SOURCE), *arguments], check=True, capture_output=True, text=True, timeout=20).stdout.strip()

    try:
        if pathlib.Path(git("rev-parse", "--show-toplevel")).resolve() != SOURCE:
            return None
        return {"revision": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _recorded_versions(path: pathlib.Path) -> dict[str, Any]:
    """What `versions` found when the run began. Raises InputError when the file says something else."""
    record = read_json(path)
    known = isinstance(record, dict) and {"packages", "git", "python", "platform"} <= record.keys()
    if not known or not isinstance(record["packages"], dict) or not isinstance(record.get("resumed", []), list):
        raise InputError(f"{path} does not say what the run was made with (packages, git, python, platform); restore it from a copy")
    return record


def version_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """`{name: [old, new]}` for everything `versions()` reports that differs."""
    flat_old, flat_new = ({**v["packages"], **{k: v[k] for k in ("git", "python", "platform")}} for v in (old, new))
    return {k: [flat_old.get(k), flat_new.get(k)] for k in sorted(flat_old.keys() | flat_new.keys()) if flat_old.get(k) != flat_new.get(k)}


# ------------------------------------------------------------------------------------------------------------- directory


class RunDirectory:
    """A run's directory, held by this process until `close` (or the end of a `with` block).

    Attributes:
      path: the directory.
      config: the run's resolved configuration, as plain JSON types.
      changed: `version_changes` between the run's creation and this process, and the settings of `MAY_CHANGE` that differ; empty for a new run.
        Where it is not, a resumed run need not repeat bit for bit what an uninterrupted one would have done.
    """

    def __init__(self, path: pathlib.Path, config: Mapping[str, Any], changed: Mapping[str, list[Any]], lock: int):
        self.path = path
        self.config = config
        self.changed = changed
        self._lock = lock

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> "RunDirectory":
        """Makes a new run; a directory that already holds anything is refused."""
        path = pathlib.Path(path).absolute()
        _refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        lock = take_lock(draft)
        try:
            write_json(draft / "versions.json", versions())
            write_json(draft / "config.json", config)
            os.rename(draft, path)  # replaces an empty directory, fails on any other
        except OSError as e:
            os.close(lock)
            shutil.rmtree(draft, ignore_errors=True)
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # another process was quicker
                _refuse_existing(path)
            raise
        _sync_directory(path.parent)
        return cls(path, plain(config), {}, lock)

    @classmethod
    def resume(cls, path: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> "RunDirectory":
        """Opens an existing run to go on with it; `config`, where given, must be the one that the run was started with, but for `MAY_CHANGE`."""
        path = pathlib.Path(path).absolute()
        if not (path / "config.json").is_file():
            if path.is_dir() and any(path.iterdir()):
                raise InputError(f"{path} cannot be resumed: its config.json is gone; restore it from a copy, or start a run of another name")
            raise InputError(f"there is no run to resume in {path} (no config.json); leave out --resume to start one, or give the directory of a run")
        lock = take_lock(path)
        try:
            stored = read_json(path / "config.json")
            if not isinstance(stored, dict):
                raise InputError(f"{path / 'config.json'} holds no object of settings; restore it from a copy")
            moved = _require_same_config(path, stored, plain(config)) if config is not None else {}
            for leftover in path.rglob(".*-*.tmp"):  # files that a kill left half-written; nobody is writing them, we hold the lock
                leftover.unlink()
            record = _recorded_versions(path / "versions.json")
            changed = {**version_changes(record, versions()), **moved}
            if changed:
                entry = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "changed": changed}
                write_json(path / "versions.json", {**record, "resumed": [*record.get("resumed", []), entry]})
            return cls(path, stored, changed, lock)
        except BaseException:
            os.close(lock)
            raise

    def round(self, index: int) -> pathlib.Path:
        """The directory of one round, `rounds/NNN`."""
        return self.path / "rounds" / f"{index:03d}"

    def write_json(self, name: str, value: Any) -> None:
        """`write_json` for a name inside the run."""
        write_json(self.path / name, value)

    def close(self) -> None:
        """Lets another process have the run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_existing(path: pathlib.Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} already exists, and a run is never overwritten; pass --resume to go on with it, or choose another name")


def _require_same_config(path: pathlib.Path, stored: Any, given: Any) -> dict[str, list[Any]]:
    """Raises InputError for a difference that changes the run; returns the others as `{key: [old, new]}`."""
    moved = {}
    for key, old, new in differences(stored, given):
        if not key.startswith(MAY_CHANGE):
            raise InputError(
                f"{path} was started with {key}={json.dumps(old)}, not {json.dumps(new)}, and a run keeps its configuration; resume with the one in "
                f"{path / 'config.json'}, or start a new run"
            )
        moved[key] = [old, new]
    return moved


def differences(old: Any, new: Any, prefix: str = ""):
    """Yields `(dotted key, old, new)` for each leaf that differs; an absent one counts as None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield prefix, old, new


def take_lock(path: pathlib.Path) -> int:
    """Locks `path` for this process and returns the descriptor that holds the lock; the kernel lets go when the process ends, however it ends."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 200).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise InputError(f"{path} is in use by {owner}, and only one process may write to a run; wait for it to end, or stop it") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd
