"""What each careful procedure is worth in the pocket shop: scripted shoppers with everything, without one procedure, and random clicking.

    python benchmarks/bench_scripted.py [--tasks=1200]

Targets: the careful shopper succeeds on at least 93% of tasks, random clicking on less than 1%, and leaving out any one procedure costs at
least 8 points. In process, on the dev world (a catalogue that no run uses), seeded.
"""

import argparse
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs import pocket  # noqa: E402
from pocket.warm_start import DEV_SEED  # noqa: E402
from shop_env import synthetic  # noqa: E402
from shop_env.scripted import PROCEDURES, Shopper, play  # noqa: E402
from shop_env.session import Session, Shop  # noqa: E402

CAREFUL, RANDOM, COST = 0.93, 0.01, 0.08


def _success(shop: Shop, tasks: list, does: set[str], *, skip_first: bool = False) -> float:
    rng = random.Random(0)
    ends = [play(Session(shop, t), Shopper(t.instruction, t.persona, does, rng, skip_first=skip_first))[1] for t in tasks]
    return sum(end.success for end in ends) / len(ends)


def _random_success(shop: Shop, tasks: list) -> float:
    """Searches for the type, then clicks whatever the pages offer."""
    rng = random.Random(0)
    wins = 0
    for task in tasks:
        session = Session(shop, task)
        step = session.step("search", {"query": task.instruction.split()[4]})
        while not step.done:
            offered = ["back to search", "previous", *re.findall(r"^([A-E]) ", step.observation, re.MULTILINE)]
            for line in step.observation.split("\n")[2:]:
                axis, *values = line.split(" ")
                offered += [f"{axis}={v}" for v in values if axis in ("colour", "size") and not v.startswith("$")]
            offered += [phrase for phrase in ("next", "buy now") if f"| {phrase}" in step.observation]
            home = step.observation.startswith("search page")
            step = session.step("search", {"query": task.instruction.split()[4]}) if home else session.step("click", {"target": rng.choice(offered)})
        wins += step.success
    return wins / len(tasks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1200)
    arguments = parser.parse_args()
    settings = pocket.get_config().shop
    world = synthetic.generate(synthetic.SyntheticConfig(seed=DEV_SEED))
    shop = Shop(world, page_size=settings.page_size, max_actions=settings.max_actions)
    tasks = [world.tasks[i] for i in sorted(world.tasks)[: arguments.tasks]]
    everything = set(PROCEDURES)
    careful = _success(shop, tasks, everything)
    print(f"{'shopper':28s} success   cost")
    print(f"{'careful':28s} {careful:7.3f}")
    costs = {}
    for procedure in PROCEDURES:
        without = _success(shop, tasks, everything - {procedure})
        costs[procedure] = careful - without
        print(f"{'careful without ' + procedure:28s} {without:7.3f} {costs[procedure]:6.3f}")
    print(f"{'careful, second row first':28s} {_success(shop, tasks, everything, skip_first=True):7.3f}")
    print(f"{'no procedure':28s} {_success(shop, tasks, set()):7.3f}")
    clicking = _random_success(shop, tasks)
    print(f"{'random clicking':28s} {clicking:7.3f}")
    met = careful >= CAREFUL and clicking < RANDOM and min(costs.values()) >= COST
    figures = f"careful={careful:.3f} random={clicking:.3f} least_cost={min(costs.values()):.3f}"
    print(f"scripted {figures} target={CAREFUL}/{RANDOM}/{COST} {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
