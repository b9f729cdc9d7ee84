"""How a process becomes one of a job's: where it belongs, and the start of JAX's own service."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax._src import distributed  # its public face has no word for where process 0 is

from intraskill.types import InputError, ProcessError

_FAILED = 2  # the exit status of expected errors, see launch/entry.py


@dataclasses.dataclass(frozen=True)
class Place:
    """Which of a job's processes this is, as its starter says; all None where that is left to the cluster.

    Attributes:
      coordinator: HOST:PORT of process 0, for JAX's service.
      num_processes: of the whole job.
      process_id: 0 is the one that runs the loop.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self):
        given = [getattr(self, f.name) is not None for f in dataclasses.fields(self)]
        if any(given) and not all(given):
            raise InputError("--coordinator, --num_processes and --process_id go together: give all three, or none where the cluster knows them")
        if self.num_processes is not None and self.process_id is not None and not 0 <= self.process_id < self.num_processes:
            raise InputError(f"--process_id={self.process_id} with --num_processes={self.num_processes}: must be 0 to {self.num_processes - 1}")
        if self.coordinator is not None and not _is_address(self.coordinator):
            raise InputError(f"--coordinator={self.coordinator}: must be HOST:PORT of process 0, with a port from 1 to 65535")


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 1 << 16


def end_process(message: str) -> NoReturn:
    """Ends this process whatever its other threads wait for."""
    os.write(2, f"error: {' '.join(message.split())}\n".encode())
    os._exit(_FAILED)


def coordinator() -> str:
    """HOST:PORT of process 0, once JAX has been told or has found it."""
    return str(distributed.global_state.coordinator_address)


def initialize(place: Place, settings: Any) -> bool:
    """Starts JAX's own service; False where nobody asked for several processes and there is no cluster to ask.

    Args:
      place: given on the command line, or not.
      settings: `config.distributed`.

    Raises:
      InputError: the cluster cannot be asked.
      ProcessError: this process cannot join. Where another one does not come in time, JAX's start cannot be left: this process ends, with one line.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself and goes on
    try:
        if place.coordinator and place.process_id == 0:  # JAX, whose service gets no port, crashes at times instead of saying so
            socket.create_server(("", int(place.coordinator.rpartition(":")[2]))).close()
        with _no_longer_than(settings.start_seconds):
            jax.distributed.initialize(
                place.coordinator,
                place.num_processes,
                place.process_id,
                initialization_timeout=int(settings.start_seconds) + 600,  # ours comes first
                heartbeat_timeout_seconds=2 * max(1, int(settings.heartbeat_seconds)),
                shutdown_timeout_seconds=max(1, int(settings.heartbeat_seconds)),
                cluster_detection_method="deactivate" if place.coordinator else None,
            )
        return True
    except ValueError as error:
        if place.coordinator is None and "coordinator_address" in str(error):  # JAX knows no cluster here
            return False
        raise InputError(f"the job's processes are not known: {error}; give --coordinator, --num_processes and --process_id") from error
    except (OSError, RuntimeError) as error:
        where = place.coordinator or coordinator()
        raise ProcessError(f"this process could not join the job at {where}: {str(error)[:300]}; see that the port is free at process 0") from error


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Around JAX's own start, which aborts with a stack trace where the others do not come, and does not hear Ctrl-C while it waits."""

    def give_up() -> None:
        where = coordinator()
        same = "with the same address and number of processes, and can reach that address"
        end_process(f"not all processes of the job have come to {where} within {seconds:g} s: see that each was started, {same}")

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    at_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, at_interrupt)
