"""Paired comparisons over tasks: the one implementation that evaluation, the gate and the analysis share.

Two conditions are compared on the same tasks, and the task is the unit that is resampled: repeated episodes of a task are averaged first, because
they are not independent of one another.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float

from intraskill.types import InputError

DRAWS = 10_000


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """second - first over the same tasks, with a percentile interval, and how many tasks moved.

    A task counts as a gain when the second condition's mean is higher, as a loss when it is lower; `level` is the interval's coverage.
    """

    tasks: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    level: float
    gains: int
    losses: int
    ties: int


def percentile_interval(values: Float[np.ndarray, "D *K"], level: float) -> tuple[Float[np.ndarray, "*K"], Float[np.ndarray, "*K"]]:
    """The central `level` range of bootstrap draws."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return np.asarray(low), np.asarray(high)  # of one-dimensional draws numpy makes scalars


def bootstrap_means(values: Float[np.ndarray, " N"], *, draws: int = DRAWS, seed: int = 0) -> Float[np.ndarray, " D"]:
    """Means of `draws` resamples with replacement of N values."""
    rng = np.random.default_rng(seed)
    # In slices: a (10000, 1600) index matrix at once would need more memory than the rest of a pocket run.
    sizes = [min(500, draws - start) for start in range(0, draws, 500)]
    return np.concatenate([values[rng.integers(len(values), size=(size, len(values)))].mean(axis=1) for size in sizes])


def task_means(outcomes: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean outcome of each task, from (task id, outcome) pairs in any order."""
    found: dict[str, list[float]] = {}
    for task, value in outcomes:
        found.setdefault(task, []).append(float(value))
    return {task: float(np.mean(values)) for task, values in found.items()}


def paired_difference(
    first: Mapping[str, float], second: Mapping[str, float], *, draws: int = DRAWS, seed: int = 0, level: float = 0.95
) -> PairedDifference:
    """Compares two conditions by task (see `task_means`); both must cover exactly the same tasks."""
    if set(first) != set(second) or not first:
        odd = sorted(set(first) ^ set(second))
        raise InputError(
            f"{len(odd)} tasks are in one condition only, e.g. {odd[:5]}, of {len(first)} and {len(second)}: compare runs of one task list"
        )
    tasks = sorted(first)  # so that the resamples do not depend on the order in which episodes ended
    a, b = (np.array([x[t] for t in tasks], np.float64) for x in (first, second))
    low, high = percentile_interval(bootstrap_means(b - a, draws=draws, seed=seed), level)
    return PairedDifference(
        tasks=len(tasks),
        first=float(a.mean()),
        second=float(b.mean()),
        difference=float((b - a).mean()),
        low=float(low),
        high=float(high),
        level=level,
        gains=int((b > a).sum()),
        losses=int((b < a).sum()),
        ties=int((b == a).sum()),
    )
