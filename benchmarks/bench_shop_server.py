"""The shop service against a threaded Flask server with the same pages and one FTS5 query per search: steps a second in one run.

    pip install -e '.[bench]'
    python benchmarks/bench_shop_server.py [--catalogue DIR] [--seconds 12] [--rounds 3] [--workers 1]

Both serve one catalogue, each in a process of its own, to one load generator that turns from one to the other: 32 episodes at once. Then 64 at once
on the service alone, for its latency. Resident memory is that of the service's processes after all that (of memory that they share, a share).
"""

import contextlib
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import shop_world
import uvloop
from shop_load import Load, LoadGenerator

from shop_env.tasks import World

EPISODES, CROWD = 32, 64
SPEEDUP, P99_SECONDS, RESIDENT_MB = 10.0, 0.150, 600


@contextlib.contextmanager
def _server(*command: str) -> Iterator[tuple[str, int]]:
    """A server process that prints its address once it answers; yields address and process id."""
    environment = {**os.environ, "PYTHONPATH": str(shop_world.ROOT)}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=shop_world.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        if address is None:
            raise RuntimeError(f"{' '.join(command)} did not start; run it by hand to see why")
        yield address[0], process.pid
    finally:
        process.terminate()
        process.wait(30)


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _cpu_seconds(pid: int) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in _family(pid)))


def _resident_mb(pid: int) -> float:
    family = _family(pid)
    if len(family) == 1:
        return family[0].memory_info().rss / 2**20
    return sum(process.memory_full_info().pss for process in family) / 2**20


@dataclasses.dataclass
class _Side:
    """One server and what was measured of it."""

    name: str
    url: str
    pid: int
    loads: list[Load] = dataclasses.field(default_factory=list)
    cpu: float = 0.0

    async def load(self, world: World, episodes: int, seed: int, seconds: float) -> None:
        before = _cpu_seconds(self.pid)
        self.loads.append(await LoadGenerator(world, self.url, episodes, seed).run(seconds))
        self.cpu += _cpu_seconds(self.pid) - before

    @property
    def latencies(self) -> list[float]:
        return [latency for load in self.loads for latency in load.latencies]

    @property
    def rate(self) -> float:
        return statistics.median(load.rate for load in self.loads)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.latencies, n=100)[98]

    def row(self) -> str:
        median, per_step = statistics.median(self.latencies), self.cpu / len(self.latencies)
        return f"{self.name:12s} {self.rate:9.1f} {median * 1e3:10.2f} {self.p99 * 1e3:8.2f} {per_step * 1e3:16.2f}"


async def _measure(world: World, service: _Side, flask: _Side, crowd: _Side, seconds: float, rounds: int) -> None:
    for side in (service, flask):
        await LoadGenerator(world, side.url, EPISODES, seed=0).run(min(2.0, seconds))  # warm-up
    for number in range(rounds):
        for side in (service, flask):
            await side.load(world, EPISODES, number + 1, seconds)
    await crowd.load(world, CROWD, rounds + 1, seconds)


def main() -> int:
    parser = shop_world.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each side in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes of the service")
    arguments = parser.parse_args()
    world = shop_world.load(arguments)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        catalogue = arguments.catalogue or Path(directory)
        if not arguments.catalogue:
            world.save(catalogue)
        here = ("--catalogue", str(catalogue), "--port", "0")
        flask = _Side("Flask", *stack.enter_context(_server("benchmarks/peers/flask_shop.py", *here)))
        launcher = ("-m", "launch.serve_env", *here, "--index_cache=", f"--workers={arguments.workers}")
        service = _Side("service", *stack.enter_context(_server(*launcher)))
        crowd = _Side(f"service, {CROWD}", service.url, service.pid)
        uvloop.run(_measure(world, service, flask, crowd, arguments.seconds, arguments.rounds))
        resident = _resident_mb(service.pid)

    print(f"{len(world.catalog)} products, {EPISODES} episodes at once, {arguments.rounds} rounds of {arguments.seconds:g} s a side")
    print(f"{'':12s} {'steps/s':>9s} {'median ms':>10s} {'p99 ms':>8s} {'CPU ms a step':>16s}")
    for side in (service, flask, crowd):
        print(side.row())
    print(f"resident {resident:.0f} MB, {arguments.workers} worker(s)")
    ratio = service.rate / flask.rate
    met = ratio >= SPEEDUP and crowd.p99 <= P99_SECONDS and resident <= RESIDENT_MB
    figures = f"p99_ms_at_{CROWD}={crowd.p99 * 1e3:.1f} resident_mb={resident:.0f}"
    print(f"shop_server ratio={ratio:.1f} {figures} target={SPEEDUP:g}/{P99_SECONDS * 1e3:g}/{RESIDENT_MB} {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
