"""What a rollout computes per token that is new to it: pocket policy, pocket shop, embedded engine.

    python benchmarks/bench_rollout.py [--groups=8]

Target: at most 1.02 tokens enter a cache for each new token of a prompt or a tool result. 1 means that no prefix was ever computed twice;
a client that sends its context anew with each turn pays several times that. What a group's first prompt saves by being copied counts as
computed here, so that the figure does not depend on the group's size. Counts, not times: one run is enough.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/intraskill/jax"))

from configs import pocket  # noqa: E402
from intraskill import parts  # noqa: E402
from intraskill.rollout.collect import Assignment, collect_groups  # noqa: E402
from intraskill.types import Mask  # noqa: E402
from launch import shop as shops  # noqa: E402
from shop_env.client import ShopClient  # noqa: E402

TARGET = 1.02


async def _play(config, served: shops.Served, num_groups: int) -> dict[str, float]:
    async with ShopClient(served.url, served.key) as client:
        shop = shops.ClientShop(client)
        policy = parts.load_policy(config, await shop.tools())
        tasks = await shop.tasks("train")
        engine = parts.make_engine(config, policy)
        rollout = parts.make_rollout(config, policy, engine, shop, parts.TRAIN, config.rollout.group_size)
        try:
            groups = await collect_groups(rollout, [Assignment(i, tasks[i], Mask.skill_free(), ()) for i in range(num_groups)], lambda group: None)
            episodes = [t for g in groups for t in g.trajectories]
            return {"episodes": len(episodes), "turns": sum(len(t.turns) for t in episodes), **engine.metrics()}
        finally:
            await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    arguments = parser.parse_args()
    config = pocket.get_config("demo")
    with shops.serve(config) as served:
        figures = asyncio.run(_play(config, served, arguments.groups))
    for name, value in figures.items():
        print(f"{name:20s} {value:12.6g}")
    ratio = (figures["prefilled_tokens"] + figures["copied_tokens"]) / figures["new_tokens"]
    met = ratio <= TARGET
    print(f"rollout ratio={ratio:.3f} target={TARGET} {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
