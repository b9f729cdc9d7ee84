"""Fits a recorded gate again and compares every figure: the published gate files, and the `gate.json` of a run.

A published file holds `mask_columns` (id, kind, family, coefficient, rank, status; numbers may be strings, an empty string is none) and `rows` of
(task, inclusion vector, masked reward, bare reward).
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from intraskill.run_directory import read_json
from intraskill.skills import gate
from intraskill.skills.assignment import Column
from intraskill.skills.bank import MAX_ACTIVE
from intraskill.skills.pairing import Pairs
from intraskill.types import InputError

TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class Refit:
    """The new fit of a recorded gate, and in words where the record differs from it."""

    fitted: gate.Fit
    decisions: tuple[gate.Decision, ...]
    differences: tuple[str, ...]


def refit(path: str | os.PathLike, *, draws: int = 2000) -> Refit:
    """Reads a gate file of either form, fits it again and compares."""
    raw = read_json(path)
    try:
        if isinstance(raw, dict) and raw.get("schema") == "gate":
            return _refit_run(gate.GateResult.load(path), draws)
        return _refit_published(raw, draws)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(
            f"{path}: is not a gate file ({type(error).__name__}: {error}); expected mask_columns and rows, or a run's gate.json"
        ) from error


def _refit_published(raw: Mapping[str, Any], draws: int) -> Refit:
    recorded = raw["mask_columns"]
    columns = tuple(Column(c["intervention_id"], c["logical_chunk_id"], c["kind"] == "current") for c in recorded)
    rows = raw["rows"]
    design = np.array([r[1] for r in rows], np.float64).reshape(len(rows), len(columns))
    masked, bare = ({"reward": np.array([r[i] for r in rows], np.float64)} for i in (2, 3))
    tasks = tuple(str(r[0]) for r in rows)
    if len(set(tasks)) != len(tasks):
        raise InputError("a task occurs in two rows; each task has one pair: remove the duplicate")
    fitted = gate.fit(Pairs(columns, tasks, (0,) * len(rows), design, masked, bare), draws=draws)
    decisions = gate.decide(fitted, columns, MAX_ACTIVE)
    differences = []
    for old, new in zip(recorded, decisions, strict=True):
        rank = int(old["rank"]) if old["rank"] not in ("", None) else None
        differences += _compare(f"{new.id} coefficient", float(old["coefficient"]), new.coefficient)
        differences += _compare(f"{new.id} rank", rank, new.rank)
        differences += _compare(f"{new.id} status", old["status"], str(new.verdict))
    recorded_ids = [c["intervention_id"] for c in recorded if c["status"] == "selected"]
    differences += _compare("selected ids", recorded_ids, [d.id for d in decisions if d.verdict == gate.Verdict.SELECTED])
    winners = [c["intervention_id"] for c in recorded if c["status"] != "rewrite_loser"]
    differences += _compare("family winners", winners, [d.id for d in decisions if d.rank is not None])
    new_checks = {"n": fitted.rows, "rank": fitted.rank, "mean_R": fitted.mean_masked, "mean_B": fitted.mean_bare}
    for name, value in new_checks.items():
        differences += _compare(name, raw["checks"][name], value) if name in raw.get("checks", {}) else []
    return Refit(fitted, decisions, tuple(differences))


def _refit_run(old: gate.GateResult, draws: int) -> Refit:
    if old.outcome not in old.pairs.masked:
        raise InputError(f"an incomplete gate without a pair of {old.outcome!r}: nothing to fit; its problems begin {old.problems[:2]}")
    fits = {name: gate.fit(old.pairs, name, draws=draws) for name in old.pairs.masked}
    differences = []
    for name, fitted in fits.items():
        for recorded, new in zip(old.fits[name].estimates, fitted.estimates, strict=True):
            for field in ("coefficient", "error", "t", "present"):
                differences += _compare(f"{name} {new.id} {field}", getattr(recorded, field), getattr(new, field))
    decisions = gate.decide(fits[old.outcome], old.pairs.columns, old.max_active) if old.status == "complete" else ()
    for field in ("id", "rank", "verdict"):
        differences += _compare(f"decisions' {field}", [str(getattr(d, field)) for d in old.decisions], [str(getattr(d, field)) for d in decisions])
    return Refit(fits[old.outcome], decisions, tuple(differences))


def _compare(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, float) and isinstance(new, float | int):
        same = abs(old - new) <= TOLERANCE * max(1.0, abs(old))
    else:
        same = old == new
    return [] if same else [f"{name}: recorded {old}, fitted {new}"]


def table(result: Refit) -> str:
    """The fit for people, in column order."""
    fitted = result.fitted
    condition = "none" if fitted.condition is None else f"{fitted.condition:.2f}"
    lines = [
        f"{fitted.outcome}: {fitted.rows} pairs, {fitted.differing:.1%} of them differ; rank {fitted.rank}, condition {condition}",
        f"mean masked {fitted.mean_masked:.4f}, bare {fitted.mean_bare:.4f}",
        f"{'chunk':28} {'coef':>9} {'HC3':>8} {'t':>6} {'95% of tasks':>20} {'detectable':>10} rank verdict",
    ]
    fate = {d.id: d for d in result.decisions}
    for e in fitted.estimates:
        error, t, seen = (("-" if x is None else format(x, f)) for x, f in ((e.error, ".4f"), (e.t, "+.2f"), (e.detectable, ".4f")))
        rank, verdict = (str(fate[e.id].rank or "-"), str(fate[e.id].verdict)) if e.id in fate else ("-", "undecided")
        lines.append(f"{e.id:28} {e.coefficient:+9.5f} {error:>8} {t:>6} [{e.low:+.4f}, {e.high:+.4f}]{'':2} {seen:>10} {rank:>4} {verdict}")
    return "\n".join(lines)
