"""The gate: measures active chunks and candidates together at one frozen checkpoint, and decides who is active next.

    masked reward - bare reward = C beta + noise          ordinary least squares, no intercept, no centring

The difference is taken within a task, so a task's difficulty cancels; an all-zero row of C is a valid observation of pure noise. The point
estimates decide; HC3 errors, task-bootstrap intervals and the rest stand beside them so that a reader can see how much a decision is worth.
Pairs that break the contract (other weights, another prompt, a mask that was not injected, ...) are never dropped silently: the gate then is
incomplete, says what is missing and selects nothing, and can be run again once the missing episodes exist.
"""

import dataclasses
import enum
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from statsmodels.regression.linear_model import OLS

from intraskill.skills import records, statistics
from intraskill.skills.assignment import POWER_FACTOR, Column, Plan, families, standard_scale
from intraskill.skills.bank import MAX_ACTIVE, Bank, CandidatePool
from intraskill.skills.pairing import Identity, Observed, Pairs, pair
from intraskill.types import InputError, require

DIGITS = 12  # coefficients are compared to this many decimals: below lies the solver's rounding, not a preference


# -------------------------------------------------------------------------------------------------------------- estimation


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One column's contribution; a statistic that does not exist (no residual variance, full leverage) is None.

    Attributes:
      id: the chunk.
      coefficient: the least-squares contribution.
      error: HC3 standard error.
      t: coefficient / error.
      low: lower end of the task-bootstrap 95% interval.
      high: upper end.
      present: share of the rows that carry the chunk.
      detectable: the true contribution that a gate of this design and this residual finds with 80% power at 5%.
    """

    id: str
    coefficient: float
    error: float | None
    t: float | None
    low: float
    high: float
    present: float
    detectable: float | None


@dataclasses.dataclass(frozen=True)
class Fit:
    """One outcome's regression over all columns.

    Attributes:
      outcome: what was regressed.
      rows: pairs.
      rank: of the design; below the number of columns nothing can be concluded.
      condition: the design's condition number.
      sigma: residual standard deviation.
      differing: share of pairs whose masked and bare outcome differ; only they carry information.
      mean_masked: mean masked outcome.
      mean_bare: mean bare outcome.
      estimates: one per column, in column order.
    """

    outcome: str
    rows: int
    rank: int
    condition: float | None
    sigma: float | None
    differing: float
    mean_masked: float
    mean_bare: float
    estimates: tuple[Estimate, ...]


def fit(pairs: Pairs, outcome: str = "reward", *, draws: int = 2000, seed: int = 0) -> Fit:
    """No-intercept least squares of masked - bare on the design, with HC3 errors and a task bootstrap."""
    design, delta = pairs.design, pairs.masked[outcome] - pairs.bare[outcome]
    num_rows, num_columns = design.shape
    shares = {
        "differing": float(np.mean(delta != 0)) if num_rows else 0.0,
        "mean_masked": float(pairs.masked[outcome].mean()) if num_rows else 0.0,
        "mean_bare": float(pairs.bare[outcome].mean()) if num_rows else 0.0,
    }
    if not num_rows or not num_columns:
        return Fit(outcome, num_rows, 0, None, None, estimates=(), **shares)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Degenerate designs (a row of leverage one, no residual at all) are legal here; their statistics come out as None below.
        warnings.simplefilter("ignore")
        result = OLS(delta, design).fit(cov_type="HC3")
        errors, ts = np.asarray(result.bse), np.asarray(result.tvalues)
    rank = int(np.linalg.matrix_rank(design))
    sigma = float(math.sqrt(result.ssr / (num_rows - rank))) if num_rows > rank else None
    scale = standard_scale(design).tolist()
    low, high = statistics.percentile_interval(_bootstrap(pairs.tasks, design, delta, draws, seed), 0.95)
    estimates = tuple(
        Estimate(
            id=column.id,
            coefficient=float(result.params[j]),
            error=_finite(errors[j]),
            t=_finite(ts[j]),
            low=float(low[j]),
            high=float(high[j]),
            present=float(design[:, j].mean()),
            detectable=None if sigma is None or math.isinf(scale[j]) else POWER_FACTOR * sigma * scale[j],
        )
        for j, column in enumerate(pairs.columns)
    )
    return Fit(outcome, num_rows, rank, _finite(np.linalg.cond(design)), sigma, estimates=estimates, **shares)


def interaction(pairs: Pairs, first: str, second: str, outcome: str = "reward", *, draws: int = 2000) -> Estimate:
    """What two chunks contribute together beyond the sum of their own contributions: the additive fit with their product as one more column.

    Chunks of one family never share a prompt and so have no interaction.
    """
    index = {c.id: i for i, c in enumerate(pairs.columns)}
    unknown = sorted({first, second} - set(index))
    if unknown or pairs.columns[index[first]].family == pairs.columns[index[second]].family:
        raise InputError(f"{first} and {second}: name two measured chunks of different families; measured are {', '.join(index)}")
    column = Column(f"{first} x {second}", f"{first} x {second}", False)
    product = pairs.design[:, index[first]] * pairs.design[:, index[second]]
    extended = dataclasses.replace(pairs, columns=(*pairs.columns, column), design=np.column_stack([pairs.design, product]))
    fitted = fit(extended, outcome, draws=draws)
    if fitted.rank < len(extended.columns):
        raise InputError(f"{column.id}: {fitted.rows} pairs cannot tell it from the other columns: use more tasks or samples")
    return fitted.estimates[-1]


def _bootstrap(
    tasks: Sequence[str], design: Float[np.ndarray, "N K"], delta: Float[np.ndarray, " N"], draws: int, seed: int
) -> Float[np.ndarray, "D K"]:
    """Coefficients over resamples of whole tasks, through each task's own normal equations; resamples that lack rank get the minimum-norm fit."""
    names = sorted(set(tasks))
    member = np.array([[name == task for task in tasks] for name in names], np.float64)  # [T, N]
    gram = np.einsum("tn,nk,nl->tkl", member, design, design, optimize=True)
    moment = member @ (design * delta[:, None])  # [T, K]
    counts = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws).astype(np.float64)
    inverse = np.linalg.pinv(np.einsum("dt,tkl->dkl", counts, gram, optimize=True), hermitian=True)
    return np.einsum("dkl,dl->dk", inverse, counts @ moment)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------------------------- decision


class Verdict(enum.StrEnum):
    """What the gate made of one column."""

    SELECTED = "selected"
    REWRITE_LOSER = "rewrite_loser"  # another version of its family did better
    RETIRED = "retired"  # active until now, not strictly positive
    NON_POSITIVE = "non_positive"  # a candidate that is not strictly positive
    OVER_CAPACITY = "over_capacity"  # positive, but more than max_active were better


@dataclasses.dataclass(frozen=True)
class Decision:
    """One column's fate; rank counts family winners by coefficient from 1 and is None for the others."""

    id: str
    family: str
    current: bool
    coefficient: float
    rank: int | None
    verdict: Verdict


def decide(fitted: Fit, columns: Sequence[Column], max_active: int = MAX_ACTIVE) -> tuple[Decision, ...]:
    """Family winners, then the strictly positive ones, then the best `max_active`; never padded."""
    value = {e.id: round(e.coefficient, DIGITS) for e in fitted.estimates}
    order = {c.id: i for i, c in enumerate(columns)}

    def preference(column: Column) -> tuple[float, bool, int]:
        return (-value[column.id], not column.current, order[column.id])  # ties keep what is active, then the earlier column

    winners = sorted((min(members, key=preference) for members in families(columns).values()), key=preference)
    rank = {c.id: i for i, c in enumerate(winners, 1)}

    def verdict(column: Column) -> Verdict:
        if column.id not in rank:
            return Verdict.REWRITE_LOSER
        if value[column.id] <= 0:
            return Verdict.RETIRED if column.current else Verdict.NON_POSITIVE
        return Verdict.SELECTED if rank[column.id] <= max_active else Verdict.OVER_CAPACITY

    raw = {e.id: e.coefficient for e in fitted.estimates}
    return tuple(Decision(c.id, c.family, c.current, raw[c.id], rank.get(c.id), verdict(c)) for c in columns)


@dataclasses.dataclass(frozen=True)
class GateResult:
    """Everything one gate saw and concluded. Complete exactly when `problems` is empty; an incomplete gate decides nothing."""

    problems: tuple[str, ...]
    outcome: str  # the outcome whose coefficients decide
    max_active: int
    identity: Identity
    pairs: Pairs
    fits: Mapping[str, Fit]
    decisions: tuple[Decision, ...]
    inputs: Mapping[str, str]

    def __post_init__(self):
        require(not (self.problems and self.decisions), "an incomplete gate may not decide")

    @property
    def status(self) -> str:
        return "incomplete" if self.problems else "complete"

    @property
    def selected(self) -> tuple[str, ...]:
        """The next bank's chunks in its order."""
        return tuple(d.id for d in self.decisions if d.verdict == Verdict.SELECTED)

    @property
    def contributions(self) -> dict[str, float]:
        """Chunk id -> coefficient, for the next curriculum; empty when incomplete."""
        return {d.id: d.coefficient for d in self.decisions}

    @property
    def record(self) -> records.Record:
        names = list(self.pairs.masked)
        rows = [
            [
                task,
                sample,
                self.pairs.design[i].astype(int).tolist(),
                *([float(x[n][i]) for n in names] for x in (self.pairs.masked, self.pairs.bare)),
            ]
            for i, (task, sample) in enumerate(zip(self.pairs.tasks, self.pairs.samples, strict=True))
        ]
        content: dict[str, Any] = {
            "status": self.status,
            "problems": list(self.problems),
            "outcome": self.outcome,
            "max_active": self.max_active,
            "identity": dataclasses.asdict(self.identity),
            "selected": list(self.selected),
            "decisions": [{**dataclasses.asdict(d), "verdict": str(d.verdict)} for d in self.decisions],
            "columns": [dataclasses.asdict(c) for c in self.pairs.columns],
            "fits": {k: {**dataclasses.asdict(f), "estimates": [dataclasses.asdict(e) for e in f.estimates]} for k, f in self.fits.items()},
            "outcomes": names,
            "rows": rows,  # task, sample, mask, masked outcomes, bare outcomes
        }
        return records.Record("gate", content, self.inputs)

    def save(self, path: str | os.PathLike) -> str:
        """Writes the result atomically and returns its sha256."""
        return records.write(path, self.record)

    @staticmethod
    def load(path: str | os.PathLike) -> "GateResult":
        """Reads a result, refusing an edited file."""
        record = records.read(path, "gate")
        content = record.content
        try:
            names, rows, columns = content["outcomes"], content["rows"], tuple(Column(**c) for c in content["columns"])
            design = np.array([r[2] for r in rows], np.float64).reshape(len(rows), len(columns))
            masked, bare = ({n: np.array([r[i][j] for r in rows], np.float64) for j, n in enumerate(names)} for i in (3, 4))
            return GateResult(
                tuple(content["problems"]),
                content["outcome"],
                content["max_active"],
                Identity(**content["identity"]),
                Pairs(columns, tuple(r[0] for r in rows), tuple(r[1] for r in rows), design, masked, bare),
                {k: Fit(**{**f, "estimates": tuple(Estimate(**e) for e in f["estimates"])}) for k, f in content["fits"].items()},
                tuple(Decision(**{**d, "verdict": Verdict(d["verdict"])}) for d in content["decisions"]),
                record.inputs,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"{path}: is not a gate result ({type(error).__name__}: {error}); restore it or run the gate again") from error


def run(
    plan: Plan,
    bare: Iterable[Observed],
    masked: Iterable[Observed],
    identity: Identity,
    *,
    outcome: str = "reward",
    max_active: int = MAX_ACTIVE,
    draws: int = 2000,
) -> GateResult:
    """Pairs, fits every outcome on its own, and decides by `outcome`.

    Args:
      plan: the assignments that the masked episodes were to follow.
      bare: skill-free episodes; those of an earlier evaluation count when their identity is this one.
      masked: episodes under the plan's masks.
      identity: the frozen checkpoint's verified identity, the sampling, the prompt and the environment.
      outcome: the outcome that decides.
      max_active: at most this many chunks stay active.
      draws: bootstrap resamples.
    """
    if not 0 <= max_active <= MAX_ACTIVE:
        raise InputError(f"max_active = {max_active}: a bank holds 0 to {MAX_ACTIVE} chunks")
    pairs, problems = pair(plan, bare, masked, identity)
    fits = {name: fit(pairs, name, draws=draws) for name in pairs.masked}
    if plan.problem:
        problems = (plan.problem,)  # no episode is missed where none could tell the columns apart
    elif outcome not in fits:
        problems += (f"no pair reports the deciding outcome {outcome!r}; there are {list(fits)}",)
    decisions = () if problems else decide(fits[outcome], plan.columns, max_active)
    inputs = {**plan.inputs, "assignments": plan.record.sha256}
    return GateResult(problems, outcome, max_active, identity, pairs, fits, decisions, inputs)


def next_bank(pool: CandidatePool, result: GateResult, *, round_index: int) -> Bank:
    """The bank that a complete gate chose, each chunk with this gate's measurement appended to its history."""
    require(result.status == "complete", f"the gate is incomplete and selects nothing: {result.problems[:3]}")
    require(result.inputs.get("candidates") == pool.record.sha256, "the gate measured another pool of candidates than the one given")
    decided = {d.id: d for d in result.decisions}
    measured = {e.id: e for e in result.fits[result.outcome].estimates}

    def with_history(chunk_id: str):
        chunk, estimate = pool.chunks[chunk_id], measured[chunk_id]
        entry = {
            "round": round_index,
            "coefficient": estimate.coefficient,
            "error": estimate.error,
            "low": estimate.low,
            "high": estimate.high,
            "rank": decided[chunk_id].rank,
        }
        return dataclasses.replace(chunk, history=(*chunk.history, entry))

    return Bank(tuple(with_history(i) for i in result.selected), {"bank": pool.bank.sha256, "gate": result.record.sha256})
