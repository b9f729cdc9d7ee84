"""Trains a policy and its skill bank together.

    python launch/train.py --config=configs/pocket.py:demo [--config.KEY=VALUE ...] [--resume] [--dry_run] [--wandb] [--profile=A:B]

Prints a plan, runs the loop of docs/loop.md, and ends with a table and the path of the report. A run that was stopped, by Ctrl-C or a
kill, goes on from its last complete step with --resume. What is watched, and how, is in docs/training.md.

Over several processes the same command starts each of them, with --coordinator, --num_processes and --process_id where no cluster tells
(docs/training.md); all but process 0 follow.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

import asyncio  # noqa: E402
from pathlib import Path  # noqa: E402

from absl import flags  # noqa: E402

from analysis.report import write_report  # noqa: E402
from intraskill import followers, loop, parts, plan, profiler, wandb_run  # noqa: E402
from intraskill.process_start import Place  # noqa: E402
from intraskill.run_directory import RunDirectory, full_disk_named, require_disk, size_on_disk  # noqa: E402
from intraskill.telemetry import Progress, print_summary  # noqa: E402
from launch import shop as shops  # noqa: E402
from shop_env.client import ShopClient  # noqa: E402

_CONFIG = entry.define_config("configs/pocket.py:demo")
_RESUME = flags.DEFINE_bool("resume", False, "go on with the run directory that the config names")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "print the plan and stop")
_WANDB = flags.DEFINE_bool("wandb", False, "show the metrics in W&B too; its own environment variables say where")
_PROFILE = flags.DEFINE_string("profile", "", "steps to record with jax.profiler, FIRST:LAST, both included, into profile/ of the run directory")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "of several processes: HOST:PORT of process 0")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "of several processes: how many there are", 1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "of several processes: which one this is, from 0", 0)


async def _train(config, directory: Path, served: shops.Served, lead: followers.Lead, profile: range) -> tuple[dict, Path]:
    """Reads and checks every input before the run directory exists, then runs the loop in it."""
    async with ShopClient(served.url, served.key) as client:
        shop = shops.ClientShop(client)
        inputs = await parts.load(config, shop)
        settings = config.to_dict()
        with RunDirectory.resume(directory, settings) if _RESUME.value else RunDirectory.create(directory, settings) as run, Progress() as progress:
            built = parts.build(config, inputs, run, progress, shop, served.identity, lead, wandb=_WANDB.value, profile=profile)
            try:
                summary = await loop.run(built)
            finally:
                await built.close()
            return summary, write_report(run.path)


def main(_) -> None:
    config = _CONFIG.value
    directory = Path(config.runs_directory) / config.name

    def hint() -> str:
        again = " ".join([*(a for a in sys.argv if a != "--resume"), "--resume"])
        return f"; go on with: python {again}" if (directory / "config.json").is_file() else " before the run began; nothing was written"

    with entry.one_line_errors(hint), full_disk_named(directory):
        parts.check_settings(config)
        place = Place(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        profile = profiler.window(_PROFILE.value, config.schedule.rounds * config.schedule.steps_per_round)
        if _WANDB.value:
            wandb_run.load()
        if _DRY_RUN.value:
            plan.show(plan.of(config), directory)
            return
        with followers.join(place, config.distributed) as team:
            if isinstance(team, followers.Follower):
                parts.follow(config, team)
                return
            parts.check_processes(config, team)
            planned = plan.of(config)
            plan.show(planned, directory)
            require_disk(directory.parent, planned.disk_bytes - (size_on_disk(directory) if _RESUME.value else 0))
            with shops.serve(config) as served:
                summary, report = asyncio.run(_train(config, directory, served, team, profile))
        print_summary(summary)
        print(f"report: {report}")


if __name__ == "__main__":
    entry.run(main)
