"""Training over several processes: process 0 runs the loop, the others follow it.

What runs on arrays that are spread over all processes has to be called by every process, in the same order: old log-probs, updates, saving,
restoring, gathering. `Lead` is process 0's end of the lines to the others: it tells them each such call, with the batches, and makes it itself.
`follow` is all that the others do. Only process 0 knows shop, engines, analyst and the run's files; the others write their share of Orbax
checkpoints and nothing else.

When a process dies, hangs or fails, every other prints one line that says which and why, and ends: at once where the kernel closes a connection,
after `distributed.heartbeat_seconds` where there is only silence. They end without tidying up, because the thread that would do it may wait in a
collective for ever; to a run that is the same as a kill, and `--resume` goes on from its last complete step. JAX's own service watches too, with
twice the time limit; where process 0 dies, its message ("another task died") may be printed beside ours.
"""

import contextlib
import dataclasses
import enum
import io
import json
import queue
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from intraskill import lines
from intraskill.checkpoint import Checkpointer, Restored, checksums
from intraskill.grpo.learner import Learner, TrainState
from intraskill.process_start import Place, coordinator, end_process, initialize
from intraskill.run_directory import differences, plain
from intraskill.types import Batch, EngineError, InputError, ProcessError, ShopError

_GRACE_SECONDS = 15.0  # for a process that fails to say so in its own words, and to close what it holds, before it is ended
_NEWS_SECONDS = 3.0  # within which the end of a process shows at the others, once a collective with it has failed
# What ends a run by its own words; anything else may be a collective's failure because another process has died.
_OWN_WORDS = (InputError, EngineError, ShopError, ProcessError, KeyboardInterrupt)
_BATCH_FIELDS = tuple(f.name for f in dataclasses.fields(Batch))


class Command(enum.StrEnum):
    """What process 0 tells the others to do."""

    PREPARE = "prepare"
    INIT = "init"
    RESTORE = "restore"
    WARM_UP = "warm_up"
    REFERENCE = "reference"
    OLD_LOG_PROBS = "old_log_probs"
    REFERENCE_LOG_PROBS = "reference_log_probs"
    UPDATE = "update"
    GATHER = "gather"
    SAVE = "save"
    WAIT = "wait"
    CLOSE = "close"
    STOP = "stop"


# ------------------------------------------------------------------------------------------------------------- messages


def _encode(command: Command, values: Mapping[str, Any], batches: Sequence[Batch]) -> bytes:
    header = json.dumps({"command": command, "values": values, "batches": len(batches)}, allow_nan=False).encode()
    arrays = io.BytesIO()
    np.savez(arrays, allow_pickle=False, **{f"{i}.{name}": getattr(b, name) for i, b in enumerate(batches) for name in _BATCH_FIELDS})
    return len(header).to_bytes(4, "big") + header + arrays.getvalue()


def _decode(message: bytes) -> tuple[Command, dict[str, Any], list[Batch]]:
    end = 4 + int.from_bytes(message[:4], "big")
    header = json.loads(message[4:end])
    with np.load(io.BytesIO(message[end:]), allow_pickle=False) as arrays:
        batches = [Batch(**{name: arrays[f"{i}.{name}"] for name in _BATCH_FIELDS}) for i in range(header["batches"])]
    return Command(header["command"]), header["values"], batches


# ------------------------------------------------------------------------------------------------------------ both ends


class Lead:
    """Process 0's end. Alone in its run, it has nobody to tell, and all that it does is cheap."""

    def __init__(self, callers: Mapping[int, tuple[socket.socket, str]] | None = None, heartbeat_seconds: float = 0.0):
        self._names: dict[int, str] = {}
        self._lines: dict[int, lines.Line] = {}
        self._over = self._stopping = False
        for number, (connection, host) in sorted((callers or {}).items()):
            self._names[number] = f"process {number} on {host}"
            self._lines[number] = lines.Line(
                connection,
                heartbeat_seconds,
                lambda message, n=number: self._failed(n, message),
                lambda why, n=number: self._stop_all(f"{self._names[n]} {why}"),
            )
        for line in self._lines.values():
            line.start()

    @property
    def num_processes(self) -> int:
        return 1 + len(self._lines)

    def tell(self, command: Command, values: Mapping[str, Any] | None = None, batches: Sequence[Batch] = ()) -> None:
        """Has every follower make the call that this process makes next."""
        if self._lines:
            message = _encode(command, values or {}, batches)
            for line in self._lines.values():
                line.send(message)

    def prepare(self, config: Any, params: PyTree, values: Mapping[str, Any]) -> None:
        """The first call: what the others need besides their config and checkpoint, and by what to know that both are this process's."""
        if self._lines:
            self.tell(Command.PREPARE, {**values, "config": plain(config.to_dict()), "parameters": _fingerprint(params)})

    def whole(self, params: PyTree) -> PyTree:
        """Parameters that this host can read: gathered from all processes, or as they are where there is one."""
        if not self._lines:
            return params
        self.tell(Command.GATHER)
        return _gather(params)

    def _failed(self, number: int, message: bytes) -> None:
        """A follower says that it failed. Most failures are everybody's, and process 0 has the better words for them."""

        def stop() -> None:
            time.sleep(_GRACE_SECONDS)
            if not self._over:
                self._stop_all(f"{self._names[number]} failed: {message.decode()}")

        threading.Thread(target=stop, daemon=True).start()  # the line goes on listening

    def _stop_all(self, why: str) -> NoReturn:
        self._stopping = True
        self._end(why, now=True)
        end = time.monotonic() + _GRACE_SECONDS
        for line in self._lines.values():  # JAX's service ends with this process, and its clients would speak of nothing else
            line.wait_until_gone(max(0.0, end - time.monotonic()))
        end_process(f"{why}; look at that process's log, then start all processes again with --resume")

    def _end(self, why: str, now: bool = False) -> None:
        self._over = True
        for line in self._lines.values():
            line.end(_encode(Command.STOP, {"why": why, "now": now}, ()))

    def __enter__(self) -> "Lead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._lines and kind is not None and not isinstance(error, _OWN_WORDS):
            time.sleep(_NEWS_SECONDS)  # where another process has died, the line to it ends this one
        if self._stopping:
            time.sleep(2 * _GRACE_SECONDS)  # it is about to
        self._end("" if kind is None else f"process 0 has ended the run: {str(error) or 'interrupted'}")


class Follower:
    """The end of any other process."""

    def __init__(self, connection: socket.socket, heartbeat_seconds: float):
        self._inbox: queue.SimpleQueue[tuple[Command, dict[str, Any], list[Batch]]] = queue.SimpleQueue()
        self._over = False  # this process ends by itself
        self._alone = False  # and process 0 does not end with it
        self._line = lines.Line(connection, heartbeat_seconds, self._received, self._lost)
        self._line.start()

    def receive(self) -> tuple[Command, dict[str, Any], list[Batch]]:
        """The next call to make. Raises ProcessError when process 0 has failed."""
        command, values, batches = self._inbox.get()
        if command == Command.STOP and values["why"]:
            raise ProcessError(values["why"])
        return command, values, batches

    def _received(self, message: bytes) -> None:
        told = command, values, _ = _decode(message)
        self._inbox.put(told)
        if command == Command.STOP and values["why"]:
            if not values["now"]:  # process 0 failed and ends in good order; so does this one, unless it is in a call that process 0 will never make
                time.sleep(_NEWS_SECONDS)
            if not self._over:
                end_process(values["why"])

    def _lost(self, why: str) -> None:
        if not self._over:
            end_process(f"process 0 {why}; start all processes again with --resume")
        self._inbox.put((Command.STOP, {"why": why, "now": True}, []))

    def report(self, error: BaseException) -> bool:
        """Tells process 0 that this one has failed; True where process 0, failing too, closes the checkpoints and needs this process for it."""
        if self._over:
            return False
        if not isinstance(error, _OWN_WORDS):
            time.sleep(_NEWS_SECONDS)  # where this comes from the loss of another process, that ends this one meanwhile
        self._over = True
        self._line.send(("interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}").encode())
        # Process 0 would report a closed connection, were this process gone before it has taken note.
        closing = self._end_within(2 * _GRACE_SECONDS) == Command.CLOSE
        self._alone = not closing
        return closing

    def _end_within(self, seconds: float) -> Command | None:
        """The first word of process 0 that ends the run, if it comes in time."""
        with contextlib.suppress(queue.Empty):
            while True:
                command, _, _ = self._inbox.get(timeout=seconds)
                if command in (Command.CLOSE, Command.STOP):
                    return command
        return None

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, ProcessError):
            self.report(error)
        self._over = True
        if self._alone:  # leaving JAX in good order would mean waiting for the others
            if not isinstance(error, _OWN_WORDS):
                traceback.print_exception(error)
            end_process(str(error) or "interrupted")


# -------------------------------------------------------------------------------------------------------------- joining


def join(place: Place, settings: Any) -> Lead | Follower:
    """Makes this process part of its job: the first thing that a process does with JAX.

    Args:
      place: given on the command line, or not.
      settings: `config.distributed`: detect, start_seconds, heartbeat_seconds.

    Raises:
      InputError: the cluster cannot be asked.
      ProcessError: this process cannot join, or another one that has joined does not connect in time. Where one does not join in time, JAX's start
        cannot be left: this process ends with that as its one line.
    """
    alone = place.num_processes == 1 or place.coordinator is None and not settings.detect
    if alone or not initialize(place, settings) or jax.process_count() == 1:
        return Lead()
    host = coordinator().rpartition(":")[0].strip("[]")
    others, number = jax.process_count() - 1, jax.process_index()
    if number == 0:
        with lines.open_door(host) as door:
            token = secrets.token_hex(16)
            _from_process_0(f"{door.getsockname()[1]} {token}")
            return Lead(lines.let_in(door, token, others, settings.start_seconds), settings.heartbeat_seconds)
    port, token = _from_process_0("").split()
    return Follower(lines.call(host, int(port), token, number, settings.start_seconds), settings.heartbeat_seconds)


def _from_process_0(text: str) -> str:
    """What process 0 gives, on every process. A collective."""
    letters = np.zeros(64, np.uint8)
    letters[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(letters))).rstrip(b"\0").decode()


# -------------------------------------------------------------------------------------------------------- common calls


def _same(x: jax.Array) -> jax.Array:
    return x


def _gather(params: PyTree) -> PyTree:
    """Every parameter whole: host arrays on process 0, None elsewhere. A collective; one parameter at a time is whole on a device."""

    def one(x: jax.Array) -> np.ndarray | None:
        sharding: Any = x.sharding
        whole = jax.jit(_same, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(x)
        if jax.process_index() == 0:
            return np.asarray(whole)
        whole.block_until_ready()  # so that the next one is not gathered beside it
        return None

    return jax.tree.map(one, params)


def _spread(learner: Learner, params: PyTree) -> PyTree:
    """Parameters that each process holds whole, on the learner's mesh; each device is given its own part and no more."""
    shardings = learner.state_shardings(params).params
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, lambda part: np.asarray(x)[part]), params, shardings)


def _fingerprint(params: PyTree) -> dict[str, int]:
    """A checksum of each parameter, computed where they lie before they are spread: in this host's memory."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return checksums(params)


def require_same(told: Mapping[str, Any], config: Any, params: PyTree) -> None:
    """Raises InputError unless this process was started like process 0: with other settings or weights it would train another policy, unseen."""
    for key, there, here in differences(told["config"], plain(config.to_dict())):
        raise InputError(f"{key} = {json.dumps(here)} here and {json.dumps(there)} at process 0: start all processes with the same --config flags")
    here = _fingerprint(params)
    wrong = [name for name in sorted(here.keys() | told["parameters"].keys()) if here.get(name) != told["parameters"].get(name)]
    if wrong:
        raise InputError(
            f"{config.model.checkpoint} holds other weights here than at process 0 ({len(wrong)} arrays differ, e.g. {wrong[0]}): copy it again"
        )


class LedLearner:
    """The learner as process 0 uses it: `Learner`'s calls, made by every process."""

    def __init__(self, lead: Lead, learner: Learner):
        self._lead, self._learner = lead, learner

    def init(self, params: PyTree) -> TrainState:
        self._lead.tell(Command.INIT)
        return self._learner.init(_spread(self._learner, params))

    def abstract_state(self, params: PyTree) -> TrainState:
        return self._learner.abstract_state(params)

    def warm_up(self, state: TrainState, microbatches: Sequence[Batch]) -> None:
        self._lead.tell(Command.WARM_UP, batches=microbatches)
        self._learner.warm_up(state, microbatches)

    def reference(self, params: PyTree) -> PyTree:
        self._lead.tell(Command.REFERENCE)
        return self._learner.reference(_spread(self._learner, params))

    def reference_log_probs(self, reference: PyTree, step: int, microbatches: Sequence[Batch]) -> list[Batch]:
        self._lead.tell(Command.REFERENCE_LOG_PROBS, {"step": step}, microbatches)
        return self._learner.reference_log_probs(reference, step, microbatches)

    def old_log_probs(self, state: TrainState, microbatches: Sequence[Batch]) -> list[Batch]:
        self._lead.tell(Command.OLD_LOG_PROBS, batches=microbatches)
        return self._learner.old_log_probs(state, microbatches)

    def update(self, state: TrainState, microbatches: Sequence[Batch]) -> tuple[TrainState, dict[str, float]]:
        self._lead.tell(Command.UPDATE, batches=microbatches)
        return self._learner.update(state, microbatches)


class LedCheckpointer:
    """The checkpoints as process 0 uses them: `Checkpointer`'s calls, made by every process."""

    def __init__(self, lead: Lead, checkpoints: Checkpointer):
        self._lead, self._checkpoints = lead, checkpoints

    def save(self, step: int, state: TrainState, position: Mapping[str, Any]) -> None:
        self._lead.tell(Command.SAVE, {"step": step, "position": position})
        self._checkpoints.save(step, state, position)

    def wait(self) -> None:
        self._lead.tell(Command.WAIT)
        self._checkpoints.wait()

    def latest(self) -> int | None:
        return self._checkpoints.latest()

    def restore(self, abstract_state: TrainState) -> Restored:
        self._lead.tell(Command.RESTORE)
        return self._checkpoints.restore(abstract_state)

    def close(self) -> None:
        self._lead.tell(Command.CLOSE)
        self._checkpoints.close()


def follow(follower: Follower, learner: Learner, checkpoints: Checkpointer, params: PyTree) -> None:
    """Makes each call that process 0 tells, on this process's part of the state, until it is told to stop.

    Args:
      follower: the line to process 0.
      learner: built like process 0's.
      checkpoints: of the run's directory; closed when process 0 closes its own, since the processes wait for each other in that.
      params: as they come from disk, the same on every process.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state: Any = None
    reference: Any = None
    try:
        while True:
            command, values, batches = follower.receive()
            match command:
                case Command.INIT:
                    state = learner.init(_spread(learner, params))
                case Command.RESTORE:
                    state = checkpoints.restore(learner.abstract_state(shapes)).state
                case Command.WARM_UP:
                    learner.warm_up(state, batches)
                case Command.REFERENCE:
                    reference = learner.reference(_spread(learner, params))
                case Command.OLD_LOG_PROBS:
                    learner.old_log_probs(state, batches)
                case Command.REFERENCE_LOG_PROBS:
                    learner.reference_log_probs(reference, values["step"], batches)
                case Command.UPDATE:
                    state, _ = learner.update(state, batches)
                case Command.GATHER:
                    _gather(state.params)
                case Command.SAVE:
                    checkpoints.save(values["step"], state, values["position"])
                case Command.WAIT:
                    checkpoints.wait()
                case Command.CLOSE:
                    checkpoints.close()
                case Command.STOP:
                    return
                case Command.PREPARE:
                    raise AssertionError("process 0 prepares its followers once, before they follow")
    except ProcessError:
        raise
    except BaseException as error:
        if follower.report(error):
            checkpoints.close()
        raise
