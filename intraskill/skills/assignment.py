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
from jaxtyping import Float

from intraskill.run_directory import plain
from intraskill.skills import draws, records
from intraskill.skills.bank import CandidatePool
from intraskill.types import InputError, Mask, MaskKind, require

POWER_FACTOR = 2.8015852181299967  # z(0.975) + z(0.8): an effect of this many standard errors is found four times in five


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
class Power:
    """What a gate will be able to see, worked out before its masked episodes are paid for.

    Attributes:
      sigma: assumed standard deviation of a pair's unexplained difference.
      source: where sigma comes from.
      detectable: column id -> smallest true contribution that is found four times in five; see `detectable_effects`.
    """

    sigma: float
    source: str
    detectable: Mapping[str, float]

    def describe(self, num_pairs: int) -> str:
        """One line for people."""
        values = sorted(self.detectable.values())
        seen = f"of {values[0]:.3f} to {values[-1]:.3f}" if values else "of nothing: there is no chunk to measure"
        return f"a gate of {num_pairs} pairs finds effects {seen} four times in five (sd {self.sigma:.2f}, {self.source})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """All assignments of one gate, fixed before any episode runs; `power` is for the record and moves no assignment."""

    seed: int
    split: str
    columns: tuple[Column, ...]
    assignments: tuple[Assignment, ...]
    inputs: Mapping[str, str]
    power: Power | None = None

    def __post_init__(self):
        keys = [(a.task_id, a.sample) for a in self.assignments]
        require(len(set(keys)) == len(keys), "a task and sample is assigned twice")

    @property
    def design(self) -> Float[np.ndarray, "N K"]:
        """1 where the assignment carries the column's chunk."""
        rows = [[float(c.id in a.chunk_ids) for c in self.columns] for a in self.assignments]
        return np.array(rows, np.float64).reshape(len(self.assignments), len(self.columns))

    @property
    def problem(self) -> str:
        """Why no gate can conclude anything from this plan, "" when one can."""
        rank = _rank(self.design)
        return f"the design has rank {rank} for {len(self.columns)} columns: use more tasks or samples" if rank < len(self.columns) else ""

    @property
    def record(self) -> records.Record:
        content: dict[str, Any] = {
            "seed": self.seed,
            "split": self.split,
            "columns": [dataclasses.asdict(c) for c in self.columns],
            "rows": [[a.task_id, a.sample, list(a.chunk_ids)] for a in self.assignments],
        }
        if self.power is not None:
            content["power"] = plain(self.power)  # an infinite effect becomes null
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


def detectable_effects(plan: Plan, sigma: float) -> dict[str, float]:
    """The smallest true contribution of each column that this plan finds with 80% power at the 5% level.

    (z_{0.975} + z_{0.8}) * sigma * sqrt([(C'C)^-1]_jj), with C the plan's own design and sigma the standard deviation of a pair's
    unexplained difference. Infinite for a design that cannot tell its columns apart. Ask before paying for the episodes.
    """
    return dict(zip((c.id for c in plan.columns), (POWER_FACTOR * sigma * standard_scale(plan.design)).tolist(), strict=True))


def expected_effect(num_pairs: int, num_columns: int, sigma: float) -> float:
    """`detectable_effects` of ordinary chunks before anything is assigned.

    Each is present with probability one half, so C'C is N/4 (I + 11') in expectation, and the diagonal of its inverse 4K / (N (K + 1)).
    """
    if num_pairs < num_columns:
        return math.inf
    return POWER_FACTOR * sigma * math.sqrt(4 * num_columns / (num_pairs * (num_columns + 1)))


def with_power(plan: Plan, sigma: float, source: str) -> Plan:
    """The plan with a note of what it will be able to see."""
    return dataclasses.replace(plan, power=Power(sigma, source, detectable_effects(plan, sigma)))


def standard_scale(design: Float[np.ndarray, "N K"]) -> Float[np.ndarray, " K"]:
    """Root of the diagonal of (C'C)^-1: standard errors in units of the residual's; infinite everywhere when C lacks full rank."""
    if _rank(design) < design.shape[1]:
        return np.full(design.shape[1], np.inf)
    return np.sqrt(np.diag(np.linalg.inv(design.T @ design)))


def _rank(design: Float[np.ndarray, "N K"]) -> int:
    return int(np.linalg.matrix_rank(design)) if design.size else 0  # numpy refuses an empty matrix
