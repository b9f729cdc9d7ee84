"""Several worker processes behind one port: forked from one parent that loaded the catalogue, so that they share its memory. Linux only.

The parent serves nothing: it starts the workers, starts one anew when it dies (its episodes are lost, and their clients are told so), and stops them
all on SIGINT or SIGTERM. Each worker holds the reading end of a pipe whose writing end only the parent has, so that even a parent that is killed
outright takes its workers with it.
"""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import uvloop

from shop_env.errors import InvalidSetting, ShopEnvError
from shop_env.peers import Peers
from shop_env.server import cannot_listen, make_app, start
from shop_env.session import Shop

MIN_LIFE_SECONDS = 5.0  # a worker that dies sooner would die again
_STOP_SECONDS = 10.0  # for a worker to finish what it does
_log = logging.getLogger(__name__)
_fork = multiprocessing.get_context("fork")


class WorkersFailed(ShopEnvError):
    """A worker that could not be kept alive."""


def serve(
    shop: Shop, host: str, port: int, started: Callable[[int], None], *, parent: int | None = None, peers: Peers | None = None, **settings: Any
) -> None:
    """Serves in this process until SIGINT or SIGTERM; with a parent, until SIGTERM or the parent's end.

    Args:
      shop: what is served.
      host: address to bind.
      port: port to bind; 0 for any free one.
      started: called with the port once requests are answered.
      parent: file descriptor that reaches its end when the parent is gone.
      peers: the other workers, if any.
      **settings: those of `shop_env.server.Service`.
    """
    # Half of what a step costs here is the event loop: uvloop's takes a third of the time of asyncio's own.
    uvloop.run(_serve(shop, host, port, started, parent, peers, settings))


async def _serve(
    shop: Shop, host: str, port: int, started: Callable[[int], None], parent: int | None, peers: Peers | None, settings: dict[str, Any]
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if parent is None:
        loop.add_signal_handler(signal.SIGINT, stop.set)
    else:
        loop.add_reader(parent, stop.set)
    runner, bound = await start(make_app(shop, peers=peers, **settings), host, port)
    started(bound)
    await stop.wait()
    if parent is not None:
        loop.remove_reader(parent)
    await runner.cleanup()


class Workers:
    """The parent's side.

    Args:
      shop: what is served.
      num_workers: processes.
      host: address to bind.
      port: port to bind; 0 for any free one.
      capacity: episodes at once, over all workers.
      **settings: further settings of `shop_env.server.Service`.
    """

    def __init__(self, shop: Shop, num_workers: int, host: str, port: int, *, capacity: int, **settings: Any):
        if not 2 <= num_workers <= 1024:
            raise InvalidSetting(f"num_workers must be in 2..1024 here, got {num_workers}; one process needs no Workers")
        if capacity < num_workers:
            raise InvalidSetting(f"capacity must be at least one episode per worker, got {capacity} for {num_workers} workers")
        self._shop, self._num, self._host = shop, num_workers, host
        self._shares = [capacity // num_workers + (i < capacity % num_workers) for i in range(num_workers)]
        self._settings = settings
        self._reserved = _reserve(host, port)
        self.port: int = self._reserved.getsockname()[1]
        self._directory = Path(tempfile.mkdtemp(prefix="shop-workers-"))
        self._sockets = [self._directory / f"{i}.sock" for i in range(num_workers)]
        self._life = os.pipe()
        self._running: dict[int, tuple[Any, float]] = {}  # worker -> process, when it was started

    def run(self, started: Callable[[int], None]) -> None:
        """Serves until SIGINT or SIGTERM; calls `started` with the port once every worker answers."""
        gc.freeze()  # a collection in a worker would otherwise touch, and so copy, every page of the catalogue
        stop_read, stop_write = _fork.Pipe(duplex=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop_write.send_bytes(b"stop"))
        try:
            for connection in [self._start(number) for number in range(self._num)]:
                if stop_read in wait([connection, stop_read]):
                    return
                self._wait_for(connection)
            started(self.port)
            self._watch(stop_read)
        finally:
            self._stop()

    def _start(self, number: int) -> Connection:
        ready_read, ready_write = _fork.Pipe(duplex=False)
        process = _fork.Process(target=self._work, args=(number, ready_write), name=f"shop-worker-{number}")
        process.start()
        ready_write.close()
        self._running[number] = process, time.monotonic()
        return ready_read

    @staticmethod
    def _wait_for(ready: Connection) -> None:
        try:
            with ready:
                problem = ready.recv()
        except EOFError:
            problem = "it died while starting"
        if problem:
            raise WorkersFailed(f"a worker could not start: {problem}")

    def _work(self, number: int, ready: Connection) -> None:
        """A worker's whole life."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        os.close(self._life[1])
        socket_path = self._sockets[number]
        socket_path.unlink(missing_ok=True)  # of a predecessor that died
        settings = {**self._settings, "capacity": self._shares[number], "parent": self._life[0], "peers": Peers(number, self._sockets)}
        try:
            serve(self._shop, self._host, self.port, lambda _: ready.send(""), **settings)
        except ShopEnvError as e:
            ready.send(str(e))
        finally:
            socket_path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others still have theirs in it, or the parent was faster
                self._directory.rmdir()

    def _watch(self, stop: Connection) -> None:
        """Starts workers that die anew, until `stop` has something to read."""
        while True:
            sentinels = {process.sentinel: number for number, (process, _) in self._running.items()}
            woken = wait([stop, *sentinels])
            if stop in woken or stop.poll():  # a SIGTERM to the whole group ends workers as early as it gets here
                return
            for number in (sentinels[sentinel] for sentinel in woken if isinstance(sentinel, int)):
                process, since = self._running[number]
                process.join()
                how = f"worker {number} ended with status {process.exitcode}"
                if time.monotonic() - since < MIN_LIFE_SECONDS:
                    raise WorkersFailed(f"{how} within {MIN_LIFE_SECONDS:g} s of its start; the log above may say why")
                _log.warning("%s; its episodes are lost, it is started anew", how)
                self._wait_for(self._start(number))

    def _stop(self) -> None:
        processes = [process for process, _ in self._running.values()]
        for process in processes:
            process.terminate()
        end = time.monotonic() + _STOP_SECONDS
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._reserved.close()
        for end_of_pipe in self._life:
            os.close(end_of_pipe)
        shutil.rmtree(self._directory, ignore_errors=True)


def _reserve(host: str, port: int) -> socket.socket:
    """A bound socket that never listens: it holds the port for the workers, which share it with SO_REUSEPORT.

    Another service that shares its port in the same way would not be noticed by that bind, so the port is first bound without sharing.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise InvalidSetting("several workers need SO_REUSEPORT, which this system lacks; run one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may linger
            probe.bind(address)
        reserved = socket.socket(family, kind, protocol)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
        return reserved
    except OSError as e:
        raise cannot_listen(host, port, e) from None
