"""Which chunks each validation prompt carries, so that the gate can tell their contributions apart.

An ordinary chunk is absent or present with probability one half. The versions of one family (an active chunk and its rewrites) exclude one another:
absent, old and each new version are equally likely, and no prompt ever carries two of them.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Float

from intraskill.skills import draws, records
from intraskill.skills.bank import CandidatePool
from intraskill.types import InputError, Mask, MaskKind, require


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of the design: a chunk, its family, and whether it is active now."""

    id: str
    family: str
    current: bool


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The mask of one masked validation episode. Empty is a valid row of the design."""

    task_id: str
    sample: int
    chunk_ids: tuple[str, ...]

    @property
    def mask(self) -> Mask:
        return Mask(MaskKind.ASSISTED, self.chunk_ids)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All assignments of one gate, fixed before any episode runs."""

    seed: int
    split: str
    columns: tuple[Column, ...]
    assignments: tuple[Assignment, ...]
    inputs: Mapping[str, str]

    def __post_init__(self):
        keys = [(a.task_id, a.sample) for a in self.assignments]
        require(len(set(keys)) == len(keys), "a task and sample is assigned twice")

    @property
    def design(self) -> Float[np.ndarray, "N K"]:
        """1 where the assignment carries the column's chunk."""
        rows = [[float(c.id in a.chunk_ids) for c in self.columns] for a in self.assignments]
        return np.array(rows, np.float64).reshape(len(self.assignments), len(self.columns))

    @property
    def record(self) -> records.Record:
        content: dict[str, Any] = {
            "seed": self.seed,
            "split": self.split,
            "columns": [dataclasses.asdict(c) for c in self.columns],
            "rows": [[a.task_id, a.sample, list(a.chunk_ids)] for a in self.assignments],
        }
        return records.Record("assignments", content, self.inputs)

    def save(self, path: str | os.PathLike) -> str:
        """Writes the plan atomically and returns its sha256."""
        return records.write(path, self.record)


def columns(pool: CandidatePool) -> tuple[Column, ...]:
    """The design's columns in prompt order: the bank's order, a rewrite right behind the chunk it wants to replace, then additions."""
    found = []
    for chunk in pool.bank.chunks:
        found.append(Column(chunk.id, chunk.logical_id, True))
        found += [Column(c.chunk.id, c.family, False) for c in pool.candidates if c.family == chunk.logical_id]
    active = {c.logical_id for c in pool.bank.chunks}
    return (*found, *(Column(c.chunk.id, c.family, False) for c in pool.candidates if c.family not in active))


def families(cols: Sequence[Column]) -> dict[str, list[Column]]:
    """The columns by family, families and members in column order."""
    found: dict[str, list[Column]] = {}
    for column in cols:
        found.setdefault(column.family, []).append(column)
    return found


def assign(pool: CandidatePool, *, seed: int, split: str, task_ids: Sequence[str], samples: int = 1) -> Plan:
    """The assignments of `samples` masked episodes for each task.

    Each family's draw is a pure function of (seed, split, task id, sample, family): it does not move when tasks, samples or other families come
    and go. Give every round its own seed, or a chunk that stays active meets the same tasks again.
    """
    if samples < 1 or not task_ids or len(set(task_ids)) != len(task_ids):
        raise InputError(f"{len(task_ids)} task ids ({len(set(task_ids))} distinct), {samples} samples: give distinct tasks and samples >= 1")
    cols = columns(pool)
    grouped = families(cols)

    def drawn(task: str, sample: int) -> tuple[str, ...]:
        chosen = set()
        for family, members in grouped.items():
            slot = int(draws.uniform("gate", seed, split, task, sample, family) * (len(members) + 1))
            chosen |= {members[slot - 1].id} if slot else set()
        return tuple(c.id for c in cols if c.id in chosen)

    assignments = tuple(Assignment(task, sample, drawn(task, sample)) for task in task_ids for sample in range(samples))
    return Plan(seed, split, cols, assignments, {"bank": pool.bank.sha256, "candidates": pool.record.sha256})


def independent_sigma(success: float) -> float:
    """Standard deviation of masked - bare when the two are independent 0/1 outcomes of this rate.

    It is the pessimistic stand-in before a first gate has measured a residual: tasks differ in difficulty, so real pairs agree more often.
    """
    return math.sqrt(2 * success * (1 - success))


def detectable_effects(plan: Plan, sigma: float, *, power: float = 0.8, significance: float = 0.05) -> dict[str, float]:
    """The smallest true contribution of each column that this plan would find.

    (z_{1 - significance/2} + z_{power}) * sigma * sqrt([(C'C)^-1]_jj), with C the plan's own design and sigma the standard deviation of a pair's
    unexplained difference. Infinite for a column that the design cannot tell apart. Ask before paying for the episodes.
    """
    factor = float(scipy.stats.norm.ppf(1 - significance / 2) + scipy.stats.norm.ppf(power)) * sigma
    return dict(zip((c.id for c in plan.columns), (factor * standard_scale(plan.design)).tolist(), strict=True))


def standard_scale(design: Float[np.ndarray, "N K"]) -> Float[np.ndarray, " K"]:
    """Root of the diagonal of (C'C)^-1: standard errors in units of the residual's; infinite everywhere when C lacks full rank."""
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return np.full(design.shape[1], np.inf)
    return np.sqrt(np.diag(np.linalg.inv(design.T @ design)))
