"""What the pocket policy can do bare, what S0 adds, and what each single skill is worth to it, in seen and in held-out words.

    python launch/measure_skills.py [--config=configs/pocket.py:dev] [--samples=8] [--config.model.checkpoint=DIR]

Plays every training task of the configured shop `samples` times without skills, as often with random masks over all mechanisms in a wording that
the warm start showed, as often in a wording that it never showed, and once with the full initial bank. The gate's regression does the rest, with
one difference: a masked episode is compared with the mean of its task's bare episodes, not with one of them, a quarter off the errors. The
default (the dev catalogue, 9,600 pairs a wording) takes about half an hour on one CPU core. Writes RUNS/NAME-skills/
(conditions that are complete are read, not played again) and exits with 1 when a target is missed.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

import asyncio  # noqa: E402
import dataclasses  # noqa: E402
import math  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import rich.console  # noqa: E402
import rich.table  # noqa: E402
from absl import flags  # noqa: E402

from intraskill import evaluation, parts  # noqa: E402
from intraskill.evaluation import Case, Result  # noqa: E402
from intraskill.run_directory import write_json  # noqa: E402
from intraskill.skills import assignment, gate, statistics  # noqa: E402
from intraskill.skills.bank import Bank, CandidatePool  # noqa: E402
from intraskill.skills.pairing import Pairs  # noqa: E402
from intraskill.telemetry import Progress  # noqa: E402
from intraskill.types import Chunk, Mask, Task  # noqa: E402
from launch import shop as shops  # noqa: E402
from pocket.skills import mechanisms  # noqa: E402
from shop_env.client import ShopClient  # noqa: E402

_CONFIG = entry.define_config("configs/pocket.py:dev")
_SAMPLES = flags.DEFINE_integer("samples", 8, "episodes of each task in each condition", lower_bound=1)

USEFUL, BARE, INITIAL, PLACEBO, KEPT = 3, (0.40, 0.55), 0.12, 0.03, 0.5  # the targets
_Z90, _Z95 = 1.6448536269514722, 1.959963984540054  # standard normal


@dataclasses.dataclass(frozen=True)
class Measured:
    """The conditions as played."""

    bare: Result
    initial: Result
    wordings: dict[str, gate.Fit]


def wordings() -> dict[str, tuple[Chunk, ...]]:
    """One chunk of every mechanism, in words of the warm start and in words that it never used."""
    return {
        "seen": tuple(m.paraphrases[0] for m in mechanisms().values()),
        "held_out": tuple(m.held_out[0] for m in mechanisms().values()),
    }


async def _measure(config: Any, served: shops.Served, directory: Path, progress: Progress) -> Measured:
    async with ShopClient(served.url, served.key) as client:
        shop = shops.ClientShop(client)
        policy = parts.load_policy(config, await shop.tools())
        tasks = await shop.tasks("train")
        engine = parts.make_engine(config, policy)
        try:
            identity = parts.make_identity(config, policy, (await engine.healthy()).digest, served.identity)

            async def play(name: str, stream: int, planned: Sequence[Case], bank: Bank) -> Result:
                progress.start(name, len(planned))
                rollout = parts.make_rollout(config, policy, engine, shop, stream, 1)
                result = await evaluation.run(directory / name, name, rollout, planned, identity, bank.sha256, lambda: progress.advance(name))
                progress.finish(name)
                return result

            initial = Bank.load(config.bank.path)
            bare = await play("bare", parts.VALIDATE_BARE, evaluation.cases(tasks, _SAMPLES.value, Mask.skill_free(), ()), Bank(()))
            full = await play("initial", parts.TEST, evaluation.cases(tasks, 1, initial.full_mask, initial.chunks), initial)
            fits = {}
            for name, chunks in wordings().items():
                pool = CandidatePool(Bank(chunks), ())
                plan = assignment.assign(pool, seed=config.seed, split="train", task_ids=[t.id for t in tasks], samples=_SAMPLES.value)
                masked = await play(name, parts.VALIDATE_MASKED, _cases(plan, tasks, pool), pool.bank)
                result = gate.run(plan, bare.observed, masked.observed, identity, outcome="success")
                result.save(directory / f"{name}.json")
                for problem in result.problems[:3]:
                    progress.say(f"{name}: {problem}")
                fits[name] = fit_to_task_means(result.pairs)
            return Measured(bare, full, fits)
        finally:
            await engine.close()


def _cases(plan: assignment.Plan, tasks: Sequence[Task], pool: CandidatePool) -> list[Case]:
    by_id = {t.id: t for t in tasks}
    return [Case(by_id[a.task_id], a.sample, a.mask, tuple(pool.chunks[i] for i in a.chunk_ids)) for a in plan.assignments]


def fit_to_task_means(pairs: Pairs) -> gate.Fit:
    """The gate's regression of success, each pair's bare outcome replaced by its task's mean; intervals come from resampling whole tasks."""
    mean = statistics.task_means(zip(pairs.tasks, pairs.bare["success"].tolist(), strict=True))
    bare = {"success": np.array([mean[task] for task in pairs.tasks])}
    return gate.fit(dataclasses.replace(pairs, bare=bare), "success")


def narrow(estimate: gate.Estimate) -> tuple[float, float]:
    """The 90% interval: half the width of the task bootstrap's 95% interval, scaled as a normal distribution's."""
    half = (estimate.high - estimate.low) / 2 * _Z90 / _Z95
    return estimate.coefficient - half, estimate.coefficient + half


def repetitions(bare: Result) -> dict[str, float]:
    """Standard deviation of success over repetitions of all tasks, and what it would be if episodes were independent."""
    outcomes = sorted((o.sample, o.task_id, float(o.success)) for o in bare.outcomes if o.scored)
    samples = statistics.task_means((str(sample), success) for sample, _, success in outcomes)
    tasks, num = statistics.task_means((task, success) for _, task, success in outcomes), len(samples)
    variance = sum(p * (1 - p) for p in tasks.values()) / len(tasks) * num / max(1, num - 1)  # within a task
    return {"spread": float(np.std(list(samples.values()), ddof=min(1, num - 1))), "expected": math.sqrt(variance / len(tasks))}


def report(measured: Measured, directory: Path) -> bool:
    """Prints the tables, writes `skills.json`, and says whether every target is met."""
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = 140  # in a log file the intervals shall be whole
    added = evaluation.compare("initial - bare", measured.bare, measured.initial)
    success = measured.bare.summary["success"]
    console.print(
        f"bare success {success:.3f}; S0 adds {added['difference']:+.3f} [{added['low']:+.3f}, {added['high']:+.3f}] over {added['tasks']} tasks"
    )
    spread = repetitions(measured.bare)
    console.print(
        f"bare success of {_SAMPLES.value} repetitions spreads by {spread['spread']:.4f}; independent episodes would by {spread['expected']:.4f}"
    )
    table = rich.table.Table("mechanism", "kind", "seen", "95% interval", "90% interval", "held out", "95% interval", "kept")
    rows, met = [], [BARE[0] <= success <= BARE[1], added["difference"] >= INITIAL and added["low"] > 0]
    useful = 0
    for mechanism, seen, held in zip(mechanisms().values(), *(fit.estimates for fit in measured.wordings.values()), strict=True):
        kind = "placebo" if mechanism.shopper is None else "stale" if mechanism.shopper == "skip_first" else "useful"
        low, high = narrow(seen)
        kept = held.coefficient / seen.coefficient if kind == "useful" and seen.low > 0 else None
        useful += kind == "useful" and seen.low > 0
        if kind == "placebo":
            met.append(-PLACEBO <= low and high <= PLACEBO)
        if kept is not None:
            met.append(kept >= KEPT)
        rows.append({"mechanism": mechanism.name, "kind": kind, "seen": seen, "held_out": held, "interval90": (low, high), "kept": kept})
        spans = [f"[{ends[0]:+.3f}, {ends[1]:+.3f}]" for ends in ((seen.low, seen.high), (low, high), (held.low, held.high))]
        shown = "" if kept is None else f"{kept:.2f}"
        table.add_row(mechanism.name, kind, f"{seen.coefficient:+.3f}", spans[0], spans[1], f"{held.coefficient:+.3f}", spans[2], shown)
    console.print(table)
    fits = {name: {"rows": fit.rows, "mean_masked": fit.mean_masked, "mean_bare": fit.mean_bare} for name, fit in measured.wordings.items()}
    write_json(
        directory / "skills.json",
        {"bare": dict(measured.bare.summary), "repetitions": spread, "initial": added, "wordings": fits, "mechanisms": rows},
    )
    met.append(useful >= USEFUL)
    return all(met)


def main(_) -> None:
    config = _CONFIG.value
    with entry.one_line_errors():
        parts.check_settings(config)
        directory = Path(config.runs_directory) / f"{config.name}-skills"
        with shops.serve(config) as served, Progress() as progress:
            measured = asyncio.run(_measure(config, served, directory, progress))
        met = report(measured, directory)
    pairs = next(iter(measured.wordings.values())).rows
    print(f"record: {directory}/skills.json")
    targets = f"bare {BARE[0]}-{BARE[1]}, S0 {INITIAL}, {USEFUL} useful, placebo {PLACEBO}, kept {KEPT}"
    print(f"skills pairs={pairs} target=({targets}) {'met' if met else 'missed'}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    entry.run(main)
