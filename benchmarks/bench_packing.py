"""Padding in packed optimizer batches on the published length mix: median 6.5k tokens an episode, 5% at the limit of 24k.

    python benchmarks/bench_packing.py [--batches=100] [--config=coevolve]

Lengths are drawn log-normal with that median, cut at the config's `rollout.max_context`, with the spread that puts 5% there; a quarter of an
episode's tokens are trained (six turns of 282 of 6.5k). Every batch goes through `pack_microbatches` with the config's own rows, as many episodes as
one of its updates has, and every slot counts, those of rows that only make a microbatch whole included. The other lines of the table show what the
config gets on other meshes and without short rows. Target: padding over all batches <= 5%.
"""

import argparse
import dataclasses
import importlib
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402

from benchmarks import interleave  # noqa: E402
from intraskill.grpo.packing import Episode, Rows, pack_microbatches  # noqa: E402

MEDIAN, AT_LIMIT = 6500, 0.05
TRAINED = 4  # one token in so many


def lengths(rng: np.random.Generator, count: int, limit: int) -> np.ndarray:
    """Tokens of `count` episodes."""
    spread = math.log(limit / MEDIAN) / statistics.NormalDist().inv_cdf(1 - AT_LIMIT)
    return np.clip(np.round(MEDIAN * np.exp(spread * rng.standard_normal(count))), 2 * TRAINED, limit).astype(int)


def episode(num_tokens: int) -> Episode:
    mask = np.zeros(num_tokens, bool)
    mask[1::TRAINED] = True
    return Episode(np.zeros(num_tokens, np.int32), mask)


def padding(batches: list[list[Episode]], rows: Rows) -> tuple[float, list[float]]:
    """Over all batches, and of each."""
    reports = [pack_microbatches(episodes, rows)[1] for episodes in batches]
    if any(report.overlong or report.untrained for report in reports):
        raise AssertionError("an episode was left out, so the padding would be of other episodes than those drawn")
    return 1 - sum(r.num_tokens for r in reports) / sum(r.num_slots for r in reports), [r.padding for r in reports]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--config", default="coevolve", help="a module of configs/")
    arguments = parser.parse_args()
    config = importlib.import_module(f"configs.{arguments.config}").get_config()
    settings, limit = config.grpo, config.rollout.max_context
    num_episodes = config.rollout.groups_per_step * config.rollout.group_size // settings.updates_per_step
    rng = np.random.default_rng(0)
    drawn = [lengths(rng, num_episodes, limit) for _ in range(arguments.batches)]
    batches = [[episode(int(n)) for n in batch] for batch in drawn]
    every = np.concatenate(drawn)
    print(f"{num_episodes} episodes a batch: median {np.median(every):.0f} tokens, mean {every.mean():.0f}, {np.mean(every == limit):.1%} at {limit}")
    chosen = Rows(settings.rows_per_microbatch, settings.row_length, settings.trained_per_row, settings.row_unit)
    others = [dataclasses.replace(chosen, count=count, unit=unit) for count in (1, 4, 8, 16) for unit in (0, settings.row_unit)]
    print(f"{'rows a microbatch':>18s} {'lengths of a row':>17s} {'padding':>8s} {'median':>7s} {'95%':>7s}")
    for rows in [chosen, *(rows for rows in dict.fromkeys(others) if rows != chosen)]:
        whole, each = padding(batches, rows)
        if rows == chosen:
            figure = whole
        mark = "  the config's" if rows == chosen else ""
        print(f"{rows.count:18d} {len(rows.shapes):17d} {whole:8.2%} {np.median(each):7.2%} {np.quantile(each, 0.95):7.2%}{mark}")
    return interleave.verdict("packing", {"padding": (figure, 0.05, False)})


if __name__ == "__main__":
    sys.exit(main())
