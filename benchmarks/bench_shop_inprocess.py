"""The shop without HTTP: steps a second in one thread, with full pages of 20 rows and their texts.

    python benchmarks/bench_shop_inprocess.py [--catalogue DIR] [--seconds 5] [--rounds 3]

The same episodes as in bench_shop_server.py, each with a search of its own. The median of the rounds counts, in seconds of this thread's CPU time: it
is what a step costs, whatever else the machine does. Wall-clock seconds are printed beside it.
"""

import random
import statistics
import sys
import time

import shop_world
from shop_load import shopping

from shop_env.session import Session, Shop
from shop_env.tasks import World

TARGET = 2000.0


def _round(shop: Shop, world: World, ids: list[str], tasks: list[str], rng: random.Random, seconds: float) -> tuple[float, float]:
    """Steps per second of CPU time, and of wall-clock time."""
    steps = 0
    cpu, wall = time.thread_time(), time.perf_counter()
    while time.thread_time() - cpu < seconds:
        session, actions, state = Session(shop, shop.task(rng.choice(tasks))), shopping(world, ids, rng), None
        while not session.done:
            step = session.step(*actions.send(state))  # type: ignore[attr-defined]
            if step.feedback != "ok":
                raise RuntimeError(f"an action was answered by {step.feedback}: {step.observation}")
            state = step.state
            steps += 1
    return steps / (time.thread_time() - cpu), steps / (time.perf_counter() - wall)


def main() -> int:
    parser = shop_world.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of CPU time in each round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    world = shop_world.load(arguments)
    shop = Shop(world)
    ids, tasks, rng = list(world.catalog), list(world.tasks), random.Random(0)
    _round(shop, world, ids, tasks, rng, min(1.0, arguments.seconds))  # warm-up
    rounds = [_round(shop, world, ids, tasks, rng, arguments.seconds) for _ in range(arguments.rounds)]
    cpu, wall = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    print(f"{len(ids)} products, pages of {shop.page_size} rows: {cpu:.0f} steps a CPU second, {wall:.0f} steps a second of wall-clock time")
    print(f"shop_inprocess ratio={cpu / TARGET:.2f} steps_per_second={cpu:.0f} target={TARGET:g} {'met' if cpu >= TARGET else 'missed'}")
    return 0 if cpu >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
