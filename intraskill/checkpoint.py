"""Training state and loop position, saved and restored together.

A step's directory holds the arrays (Orbax) and one JSON record: the caller's position (loop, bank, curriculum, random numbers, ...), the
model config, and for each array its shape, dtype and a checksum. Saving copies the arrays to the host and returns; a thread writes them while the
next step is played. Orbax writes under a temporary name and renames at the end, so a directory with a step's name is complete; a process killed while
saving leaves the previous step as the latest, since older ones are dropped only afterwards.

Orbax alone is not enough against a bad disk: a flipped byte in an array's data comes back as another number, without an error. Hence the
checksums, integer sums over the arrays' bits that do not depend on the mesh and that each process computes for its own part.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree, UInt32

from intraskill.run_directory import reason, require_disk
from intraskill.types import InputError

_SCHEMA = 1
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` gives back: the arrays on the present mesh and the position that was saved with them."""

    step: int
    state: PyTree
    position: dict[str, Any]


class _Corrupt(Exception):
    """A step's directory is complete by name but not in content."""


class Checkpointer:
    """The checkpoints of one run.

    Example::

        checkpoints = Checkpointer(run / "checkpoints", model_config=dataclasses.asdict(config))
        restored = checkpoints.restore(learner.abstract_state(abstract_params(config)))
        checkpoints.save(restored.step + 1, state, position)
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        model_config: Mapping[str, Any],
        keep_last: int = 3,
        keep_every: int | None = None,
        read_only: bool = False,
    ):
        """Opens `directory`, creating it when missing, and removes what interrupted saves left in it.

        Args:
          directory: belongs to this run alone.
          model_config: JSON-like; a checkpoint with another one is refused. Leave out what may change between two starts of a run.
          keep_last: number of newest checkpoints that are kept.
          keep_every: steps divisible by this are kept for good.
          read_only: changes nothing, so that a run that is saving in another process is not disturbed.
        """
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise InputError(f"keep_last is {keep_last} and keep_every {keep_every}: both must be >= 1 (keep_every may be None)")
        self._directory = pathlib.Path(directory).absolute()
        self._model_config = _as_json(dict(model_config), "model_config")
        self._read_only = read_only
        logging.getLogger("absl").addFilter(_is_news)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            keep_period=keep_every,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(self, step: int, state: PyTree[Array], position: Mapping[str, Any]) -> None:
        """Starts to write a checkpoint and returns once nothing in it depends on `state` any more, which may then be donated.

        It is complete after `wait`, at the latest when the next `save` returns; then those beyond the number to keep are dropped.

        Args:
          step: greater than every step saved before.
          state: arrays, on any mesh.
          position: JSON-like, what the loop needs to go on exactly here.

        Raises:
          InputError: too little space is left on the disk, or this or the previous checkpoint could not be written.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"step {step} is not after the latest checkpoint, {latest}")
        leaves = {
            path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(_checksum(leaf))} for path, leaf in _leaves(state).items()
        }
        record = {
            "schema": _SCHEMA,
            "step": step,
            "model_config": self._model_config,
            "leaves": leaves,
            "position": _as_json(dict(position), "position"),
        }
        record["sha256"] = _digest(record)
        require_disk(self._directory, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        with self._write_errors():
            saved = self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)))
        if not saved:
            raise RuntimeError(f"Orbax declined to save step {step} in {self._directory}")

    def wait(self) -> None:
        """Returns when what `save` began is on disk. Raises InputError when it could not be written."""
        with self._write_errors():
            self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The newest step, None when there is none; it may still be being written."""
        return self._manager.latest_step()

    def restore(self, abstract_state: PyTree[jax.ShapeDtypeStruct]) -> Restored:
        """The newest checkpoint whose content is sound, on the mesh that `abstract_state`'s shardings name.

        A corrupt one is passed over with a warning; once an older one is read, it is set aside as `<step>.corrupt`, so that its step can be
        saved again.

        Raises:
          InputError: there is no checkpoint, none is sound, or it belongs to another model or optimizer.
        """
        self.wait()
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            raise InputError(f"no checkpoint in {self._directory}: start without resuming, or give the directory of a run that has saved one")
        failed: dict[int, _Corrupt] = {}
        for step in steps:
            try:
                restored = self._restore(step, abstract_state)
            except _Corrupt as error:
                _log.warning("checkpoint %d in %s is corrupt and is passed over: %s", step, self._directory, error)
                failed[step] = error
                continue
            if not self._read_only:
                self._set_aside(list(failed))
            return restored
        reasons = "; ".join(f"step {step}: {error}" for step, error in failed.items())
        raise InputError(f"all checkpoints in {self._directory} are corrupt ({reasons}): restore the directory from a copy, or start a new run")

    def close(self) -> None:
        """Waits for what is being written, as `wait` does, and lets go of the directory."""
        with self._write_errors():
            self._manager.close()

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turns what Orbax's threads raise, of many types, into an InputError."""
        try:
            yield
        except Exception as error:
            raise InputError(f"a checkpoint in {self._directory} could not be written ({reason(error)}): check the disk, then resume") from error

    def _restore(self, step: int, abstract_state: PyTree[jax.ShapeDtypeStruct]) -> Restored:
        record = self._record(step)
        self._check_model(step, record["model_config"])
        self._check_leaves(step, record["leaves"], _leaves(abstract_state))
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
            state = self._manager.restore(step, args=args)["state"]
        except Exception as error:  # TensorStore raises whatever the first unreadable byte breaks, ValueError to bare Exception
            raise _Corrupt(f"the arrays cannot be read: {str(error)[:200]} ...") from error  # the rest is a dump of TensorStore's settings
        wrong = [path for path, leaf in _leaves(state).items() if int(_checksum(leaf)) != record["leaves"][path]["checksum"]]
        if wrong:
            raise _Corrupt(f"checksums differ: {', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}")
        return Restored(step, state, record["position"])

    def _record(self, step: int) -> dict[str, Any]:
        try:
            record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        except (OSError, ValueError, KeyError) as error:  # missing, or not JSON
            raise _Corrupt(f"the record cannot be read: {error}") from error
        if not isinstance(record, dict) or record.get("sha256") != _digest({k: v for k, v in record.items() if k != "sha256"}):
            raise _Corrupt("the record's hash does not match its content")
        if record["schema"] != _SCHEMA:
            raise InputError(f"checkpoint {step} in {self._directory} has schema {record['schema']}, this version reads {_SCHEMA}")
        return record

    def _check_model(self, step: int, saved: dict[str, Any]) -> None:
        keys = [k for k in sorted(saved.keys() | self._model_config.keys()) if saved.get(k) != self._model_config.get(k)]
        if keys:
            differences = ", ".join(f"{k} is {saved.get(k)!r} there and {self._model_config.get(k)!r} here" for k in keys)
            raise InputError(
                f"checkpoint {step} in {self._directory} belongs to another model: {differences}. "
                "Resume with the config that the run was started with, or start a new run"
            )

    def _check_leaves(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        there = {path: (tuple(leaf["shape"]), leaf["dtype"]) for path, leaf in saved.items()}
        here = {path: (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in wanted.items()}
        paths = [path for path in sorted(there.keys() | here.keys()) if there.get(path) != here.get(path)]
        if paths:
            path = paths[0]
            raise InputError(
                f"checkpoint {step} in {self._directory} holds other arrays than this run: {path} is {there.get(path, 'absent')} there and "
                f"{here.get(path, 'absent')} here ({len(paths)} differ). Resume with the model and optimizer that the run was started with"
            )

    def _set_aside(self, steps: list[int]) -> None:
        if steps and jax.process_index() == 0:
            for step in steps:
                (self._directory / str(step)).rename(self._unused_name(f"{step}.corrupt"))
        if steps:
            self._manager.reload()

    def _unused_name(self, name: str) -> pathlib.Path:
        number, path = 1, self._directory / name
        while path.exists():
            number += 1
            path = self._directory / f"{name}-{number}"
        return path


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback that Orbax logs, in its threads, of an error which it raises as well: who catches the error says what it means."""
    return record.exc_info is None


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def checksums(tree: PyTree) -> dict[str, int]:
    """A number for each array, by its path, that another number for one of its elements would change."""
    return {path: int(_checksum(leaf)) for path, leaf in _leaves(tree).items()}


@jax.jit
def _checksum(x: Array) -> UInt32[Array, ""]:
    """Sum over the elements of bits * (2 * index + 1) modulo 2**32: exact in any order, so the same on every mesh.

    The factors are odd, hence invertible: no change of a single element leaves the sum as it was, and swapped elements show as well.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)
    index, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        index = index + jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        stride *= x.shape[axis]
    return jnp.sum(bits * (index * jnp.uint32(2) + jnp.uint32(1)), dtype=jnp.uint32)


def _as_json(value: dict[str, Any], name: str) -> dict[str, Any]:
    """`value` as JSON gives it back; refuses what would come back as something else (tuples, integer keys, NaN, arrays)."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be JSON: {error}") from error
    changed = [k for k in value if k not in copy or copy[k] != value[k]]
    if changed:
        raise ValueError(f"{name} must survive JSON unchanged (lists instead of tuples, strings as keys); not so: {changed[:5]}")
    return copy


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
