"""Runs one test condition: any policy, any bank or none, any split.

    python launch/eval.py --config=configs/eval.py:CONDITION [--config.KEY=VALUE ...]

Writes RUNS/NAME/{manifest.json,episodes.jsonl,summary.json} and prints the summary. A directory that holds the same evaluation is read,
one that holds another is refused.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

import asyncio  # noqa: E402
from pathlib import Path  # noqa: E402

import rich.console  # noqa: E402
import rich.table  # noqa: E402

from intraskill import evaluation, parts  # noqa: E402
from intraskill.run_directory import full_disk_named  # noqa: E402
from intraskill.skills.bank import Bank  # noqa: E402
from intraskill.telemetry import Progress  # noqa: E402
from intraskill.types import InputError, Mask  # noqa: E402
from launch import shop as shops  # noqa: E402
from shop_env.client import ShopClient  # noqa: E402

_CONFIG = entry.define_config("configs/eval.py:base")


async def _evaluate(config, served: shops.Served) -> evaluation.Result:
    condition = config.condition
    async with ShopClient(served.url, served.key) as client:
        shop = shops.ClientShop(client)
        policy = parts.load_policy(config, await shop.tools())
        bank = Bank.load(condition.bank) if condition.bank else Bank(())
        if condition.samples < 1:
            raise InputError(f"condition.samples = {condition.samples}: give at least 1")
        tasks = await shop.tasks(condition.split)
        if not 0 < condition.tasks <= len(tasks):
            raise InputError(f"condition.tasks = {condition.tasks}, but split {condition.split!r} has {len(tasks)} tasks: choose 1 to {len(tasks)}")
        engine = parts.make_engine(config, policy)
        directory = Path(config.runs_directory) / config.name
        try:
            digest = await parts.serve_checkpoint(config, policy, engine, directory / "weights")
            identity = parts.make_identity(config, policy, digest, served.identity)
            mask = bank.full_mask if condition.bank else Mask.skill_free()
            planned = evaluation.cases(tasks[: condition.tasks], condition.samples, mask, bank.chunks)
            rollout = parts.make_rollout(config, policy, engine, shop, parts.TEST, 1)
            with Progress() as progress:
                progress.start(config.name, len(planned))
                return await evaluation.run(directory, config.name, rollout, planned, identity, bank.sha256, lambda: progress.advance(config.name))
        finally:
            await engine.close()


def main(_) -> None:
    config = _CONFIG.value
    with entry.one_line_errors(), full_disk_named(Path(config.runs_directory) / config.name):
        parts.check_sizes(config, parts.ROLLOUT_SIZES)
        with shops.serve(config) as served:
            result = asyncio.run(_evaluate(config, served))
        table = rich.table.Table(title=config.name, show_header=False)
        for key, value in result.summary.items():
            table.add_row(key, f"{value:.4f}" if isinstance(value, float) else str(value))
        rich.console.Console().print(table)


if __name__ == "__main__":
    entry.run(main)
