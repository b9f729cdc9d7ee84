"""Runs entry points as processes of their own without paying for their imports each time.

Started as a script it imports what every entry point imports and then answers one JSON line with another: `{"start": ...}` forks a child that
runs `python SCRIPT ARGS` from there, `{"poll": pid}` tells its exit status. No JAX backend exists before the fork. `ForkServer` is the other end.
"""

import dataclasses
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loop.kills import Kill

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Process:
    """A running or finished entry point."""

    server: "ForkServer"
    pid: int
    directory: Path
    status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.status is None:
            self.status = self.server.ask({"poll": self.pid})
        return self.status

    def wait(self, timeout: float = 600) -> int:
        status = self.wait_until(lambda: False, timeout)
        assert status is not None
        return status

    def wait_until(self, condition: Callable[[], bool], timeout: float = 600) -> int | None:
        """Returns at once when `condition` holds (None) or the process ends (its status)."""
        end = time.monotonic() + timeout
        while self.poll() is None and not condition():
            if time.monotonic() > end:
                os.kill(self.pid, 9)
                raise TimeoutError(f"{timeout} s passed; stdout ends {self.stdout[-2000:]!r}, stderr ends {self.stderr[-2000:]!r}")
            time.sleep(0.005)
        return self.status

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    @property
    def connections(self) -> list[tuple[str, int]]:
        """Host and port of each connection that it made, where it was started to note them."""
        return [(host, port) for host, port in map(json.loads, (self.directory / "connections").read_text().splitlines())]


class ForkServer:
    """The end that tests hold."""

    def __init__(self, scratch: Path, **environment: str):
        from launch import entry  # not at the top: the script that runs this file has no such package yet

        self._scratch, self._count = scratch, 0
        # With the allocator's settings there, launch/entry.py does not start the interpreter anew.
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env={**os.environ, **entry.ALLOCATOR, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None and self._server.stdout.readline() == "ready\n"

    def ask(self, request: dict):
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def start(self, script: str, *arguments: str, kill: "Kill | None" = None, batches: Path | None = None, connections: bool = False) -> Process:
        """Runs `python SCRIPT ARGUMENTS` in the source's root; returns at once. The process may kill itself, and note its batches or connections."""
        self._count += 1
        directory = self._scratch / f"{self._count:03d}"
        directory.mkdir(parents=True)
        hooks = {"kill": kill and dataclasses.astuple(kill), "batches": batches and str(batches), "connections": connections}
        return Process(self, self.ask({"start": [script, *arguments], "directory": str(directory), **hooks}), directory)

    def run(self, script: str, *arguments: str, timeout: float = 600, kill: "Kill | None" = None, batches: Path | None = None) -> Process:
        """Runs it to its end."""
        process = self.start(script, *arguments, kill=kill, batches=batches)
        process.wait(timeout)
        return process

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)


def _serve() -> None:
    import altair  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import transformers.models.auto.tokenization_auto  # noqa: F401
    from ml_collections import config_flags  # noqa: F401

    sys.path.insert(0, str(ROOT))
    import analysis.report  # noqa: F401
    import intraskill.loop  # noqa: F401
    import shop_env.server  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of everything imported here
    print("ready", flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _become(Path(request["directory"]), request["start"], request["kill"], request["batches"], request["connections"])
        print(json.dumps(answer), flush=True)


def _become(directory: Path, command: list[str], kill: list | None, batches: str | None, connections: bool) -> None:
    """Runs the script and ends the process.

    The child has standard streams of its own, and Ctrl-C as at a terminal: what a shell starts in the background ignores it. It ends at once, because
    taking the interpreter down would copy everything that the server has imported.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    streams = (os.open(os.devnull, os.O_RDONLY), *(os.open(directory / name, os.O_WRONLY | os.O_CREAT, 0o644) for name in ("stdout", "stderr")))
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    sys.argv, sys.path[0] = command, str(ROOT / "launch")
    status: object = 0
    try:
        import kills  # beside this script

        if batches:
            kills.note_batches(batches)
        if connections:
            kills.note_connections(str(directory / "connections"))
        if kill:
            kills.Kill(*kill).arm()
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    _serve()
