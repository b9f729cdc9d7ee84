"""From a run directory to pandas tables: one function per question, each reading only the files that it needs.

A file that is absent, because the run was cut short or never made it, is an `InputError` that names it; the report turns that into a note in the
place of the section. Estimates and intervals come from `intraskill.skills`, so that a figure here and a decision in the loop cannot disagree.

What the files of `rounds/NNN` mean: `bank.json` and `curriculum.json` are those that trained in round NNN, `candidates.json` and `gate.json` what was
measured at its end. The bank that the last gate chose lies in the directory after the last trained round.
"""

import json
import os
import pathlib
import re
import statistics as stdlib_statistics
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from intraskill.run_directory import read_json
from intraskill.skills import records, statistics
from intraskill.skills.bank import Bank
from intraskill.skills.curriculum import Curriculum
from intraskill.types import InputError

BASE_VALIDATION = "base-validation"
VALIDATION = re.compile(r"base-validation|round\d{3}-(bare|masked)")  # what lies in eval/ beside the test conditions
Z95 = stdlib_statistics.NormalDist().inv_cdf(0.975)


# --------------------------------------------------------------------------------------------------------------- metrics


def metrics(run: str | os.PathLike[str], kind: str) -> pd.DataFrame:
    """The records of one kind in metrics.jsonl, in order, with `index` counting them from 0."""
    found = [r for r in read_lines(pathlib.Path(run) / "metrics.jsonl") if r.get("kind") == kind]
    if not found:
        raise InputError(f"{os.fspath(run)}/metrics.jsonl has no record of kind {kind!r}; the run did not get that far")
    return pd.DataFrame(found).assign(index=range(len(found)))


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a file of one JSON object a line; a last line that is being written, or that a kill cut short, is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; is this the directory of a run?") from None
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except json.JSONDecodeError as e:
        raise InputError(f"{path} has a line that is not JSON ({e}); restore it from a copy") from None


def inclusion(run: str | os.PathLike[str]) -> pd.DataFrame:
    """How often each chunk was in an assisted group's mask, beside its rho, and how often a group was skill-free, beside q.

    Columns: round, id ("skill-free" or a chunk's), groups, observed, expected, low, high. Between low and high lie 95% of rounds of that many groups
    whose masks are drawn as promised.
    """
    rollouts = metrics(run, "rollout")
    rows = []
    for round_index, curriculum in _curricula(run).items():
        steps = rollouts[rollouts["round"] == round_index]
        if not len(steps) or curriculum.withdraw_over or curriculum.retrieve:
            continue  # nothing played yet; or, under these treatments, a promise that changes with every group
        groups = steps["generated_groups"]
        free = steps["skill_free_rate"] * groups
        rows.append(_rate(round_index, "skill-free", curriculum.q, float(free.sum()), float(groups.sum())))
        for chunk_id, rho in zip(curriculum.chunk_ids, curriculum.rho, strict=True):
            carried = steps["inclusion"].map(lambda rates, i=chunk_id: rates.get(i, 0.0)) * (groups - free)
            rows.append(_rate(round_index, chunk_id, rho, float(carried.sum()), float((groups - free).sum())))
    if not rows:
        raise InputError(f"no round of {os.fspath(run)} has both a constant curriculum and rollouts; nothing to compare")
    return pd.DataFrame(rows)


def _rate(round_index: int, chunk_id: str, expected: float, count: float, groups: float) -> dict[str, Any]:
    half = Z95 * float(np.sqrt(expected * (1 - expected) / groups)) if groups else np.nan
    observed = count / groups if groups else np.nan
    row = {"round": round_index, "id": chunk_id, "groups": round(groups), "observed": observed, "expected": expected}
    return {**row, "low": max(0.0, expected - half), "high": min(1.0, expected + half)}


# ---------------------------------------------------------------------------------------------------------------- rounds


def banks(run: str | os.PathLike[str]) -> pd.DataFrame:
    """One row per round and active chunk: round, position, id, logical_id, version, title, text, rho, contribution, q.

    rho is missing where the round has no curriculum, contribution where no gate had measured the chunk.
    """
    curricula = _curricula(run, required=False)
    rows = []
    for round_index, path in _round_files(run, "bank.json").items():
        bank = Bank.load(path)
        curriculum = curricula.get(round_index)
        rho = dict(zip(curriculum.chunk_ids, curriculum.rho, strict=True)) if curriculum else {}
        contribution = dict(zip(curriculum.chunk_ids, curriculum.contributions, strict=True)) if curriculum else {}
        for position, chunk in enumerate(bank.chunks):
            row = {"round": round_index, "position": position, "id": chunk.id, "logical_id": chunk.logical_id, "version": chunk.version}
            numbers = {"rho": rho.get(chunk.id), "contribution": contribution.get(chunk.id), "q": curriculum.q if curriculum else None}
            rows.append({**row, "title": chunk.title, "text": chunk.text, **numbers})
    columns = ["round", "position", "id", "logical_id", "version", "title", "text", "rho", "contribution", "q"]
    return pd.DataFrame(rows, columns=columns).astype({"rho": float, "contribution": float, "q": float})


def gates(run: str | os.PathLike[str], outcome: str | None = None) -> pd.DataFrame:
    """One row per round and measured chunk, for `outcome` or, by default, the one that decided.

    Columns: round, outcome, id, family, current, coefficient, error, t, hc3_low, hc3_high, low, high (task bootstrap), present, detectable, rank,
    status. The status is the gate's verdict, "undecided" where the gate was incomplete.
    """
    rows = []
    for round_index, content in _gates(run).items():
        name = outcome or content["outcome"]
        fate = {d["id"]: d for d in content["decisions"]}
        columns = {c["id"]: c for c in content["columns"]}
        for estimate in content["fits"].get(name, {"estimates": []})["estimates"]:
            column, decision = columns[estimate["id"]], fate.get(estimate["id"], {})
            half = np.nan if estimate["error"] is None else Z95 * estimate["error"]
            interval = {"hc3_low": estimate["coefficient"] - half, "hc3_high": estimate["coefficient"] + half}
            about = {"round": round_index, "outcome": name, "family": column["family"], "current": column["current"]}
            rows.append({**about, **estimate, **interval, "rank": decision.get("rank"), "status": decision.get("verdict", "undecided")})
    names = ["round", "outcome", "id", "family", "current", "coefficient", "error", "t", "hc3_low", "hc3_high", "low", "high"]
    return pd.DataFrame(rows, columns=[*names, "present", "detectable", "rank", "status"])


def gate_fits(run: str | os.PathLike[str]) -> pd.DataFrame:
    """One row per gate: round, status, outcome, pairs, condition, sigma, differing, mean_bare, mean_masked, detectable (median), problems."""
    rows = []
    for round_index, content in _gates(run).items():
        fit = content["fits"].get(content["outcome"], {})
        detectable = [e["detectable"] for e in fit.get("estimates", ()) if e["detectable"] is not None]
        row = {"round": round_index, "status": content["status"], "outcome": content["outcome"], "pairs": fit.get("rows", 0)}
        row |= {k: fit.get(k) for k in ("condition", "sigma", "differing", "mean_bare", "mean_masked")}
        rows.append({**row, "detectable": float(np.median(detectable)) if detectable else None, "problems": len(content["problems"])})
    return pd.DataFrame(rows)


def validation(run: str | os.PathLike[str], outcome: str = "success") -> pd.DataFrame:
    """Validation before training and at each round's frozen checkpoint: at, arm, tasks, mean, low, high (task bootstrap).

    A round's rows are the gate's own pairs; of a run without a gate, the round's bare evaluation. `at` is "start" or "round N".
    """
    rows = []
    if (pathlib.Path(run) / "eval" / BASE_VALIDATION).is_dir():
        rows.append({"at": "start", "arm": "bare", **summarize(scores(run, BASE_VALIDATION, outcome))})
    measured = _gates(run, required=False)
    if not measured:
        for name in sorted(p.parent.name for p in pathlib.Path(run).glob("eval/round[0-9][0-9][0-9]-bare/episodes.jsonl")):
            rows.append({"at": f"round {int(name[5:8])}", "arm": "bare", **summarize(scores(run, name, outcome))})
    for round_index, content in measured.items():
        if outcome not in content["outcomes"]:
            continue
        column = content["outcomes"].index(outcome)
        for arm, field in (("bare", 4), ("masked", 3)):  # a row is task, sample, mask, masked outcomes, bare outcomes
            means = statistics.task_means((r[0], float(r[field][column])) for r in content["rows"])
            rows.append({"at": f"round {round_index}", "arm": arm, **summarize(means)})
    if not rows:
        raise InputError(f"{os.fspath(run)} has no validation that reports {outcome!r}; the run did not get that far")
    return pd.DataFrame(rows)


def progress(run: str | os.PathLike[str], outcome: str = "success") -> pd.DataFrame:
    """Bare validation at each round's frozen checkpoint against the policy before training, paired by task; columns as in `comparisons`."""
    names = sorted(p.parent.name for p in pathlib.Path(run).glob("eval/round[0-9][0-9][0-9]-bare/episodes.jsonl"))
    return _compare(run, [(BASE_VALIDATION, name) for name in names], outcome)


def _gates(run: str | os.PathLike[str], *, required: bool = True) -> dict[int, Mapping[str, Any]]:
    return {i: records.read(path, "gate").content for i, path in _round_files(run, "gate.json", required=required).items()}


def _curricula(run: str | os.PathLike[str], *, required: bool = True) -> dict[int, Curriculum]:
    return {i: Curriculum.load(path) for i, path in _round_files(run, "curriculum.json", required=required).items()}


def _round_files(run: str | os.PathLike[str], name: str, *, required: bool = True) -> dict[int, pathlib.Path]:
    """`{round: path}` of the rounds that have the file."""
    rounds = pathlib.Path(run) / "rounds"
    found = {int(p.parent.name): p for p in sorted(rounds.glob(f"[0-9][0-9][0-9]/{name}"))}
    if required and not found:
        raise InputError(f"no round under {rounds} has a {name}; the run did not get that far")
    return found


# ------------------------------------------------------------------------------------------------------------ evaluation


def episodes(run: str | os.PathLike[str], condition: str) -> pd.DataFrame:
    """The episodes of one test condition, one row each."""
    path = pathlib.Path(run) / "eval" / condition / "episodes.jsonl"
    found = read_lines(path)
    if not found:
        raise InputError(f"{path} holds no episode; evaluate the condition again")
    return pd.DataFrame(found)


def scores(run: str | os.PathLike[str], condition: str, outcome: str) -> dict[str, float]:
    """Each task's mean outcome. Technical failures are left out: they say nothing about the policy."""
    played = episodes(run, condition)
    scored = played[played["status"] != "technical"]
    return statistics.task_means(zip(scored["task_id"], scored[outcome].astype(float), strict=True))


def conditions(run: str | os.PathLike[str]) -> list[str]:
    """The test conditions in the order of summary.json, or by name where that is not written yet."""
    run = pathlib.Path(run)
    names = list(read_json(run / "summary.json")["test"]) if (run / "summary.json").exists() else []
    names = names or sorted(p.parent.name for p in run.glob("eval/*/episodes.jsonl") if not VALIDATION.fullmatch(p.parent.name))
    if not names:
        raise InputError(f"no test condition under {run / 'eval'} has an episodes.jsonl; the run did not get that far")
    return names


def condition_results(run: str | os.PathLike[str]) -> pd.DataFrame:
    """One row per test condition and outcome, over scored episodes.

    Columns: condition, outcome, tasks, mean, low, high (task bootstrap), episodes, technical, and the episodes' mean turns, tokens, protocol_errors
    and invalid_actions.
    """
    rows = []
    for condition in conditions(run):
        played = episodes(run, condition)
        scored = played[played["status"] != "technical"]
        usual = {n: float(scored[n].mean()) if n in scored else np.nan for n in ("turns", "tokens", "protocol_errors", "invalid_actions")}
        for outcome in ("success", "reward"):
            counts = {"episodes": len(scored), "technical": len(played) - len(scored)}
            rows.append({"condition": condition, "outcome": outcome, **summarize(scores(run, condition, outcome)), **counts, **usual})
    return pd.DataFrame(rows)


def comparisons(run: str | os.PathLike[str], outcome: str = "success") -> pd.DataFrame:
    """Every pair of test conditions on the tasks that they share, later minus earlier.

    Columns: comparison, tasks, difference, low, high (task-paired bootstrap), and the numbers of tasks that gained, lost and stayed.
    """
    return _compare(run, combinations(conditions(run), 2), outcome)


def _compare(run: str | os.PathLike[str], pairs: Iterable[tuple[str, str]], outcome: str) -> pd.DataFrame:
    # The run's own seed: the intervals are then, digit for digit, those of its summary.json.
    seed = read_json(pathlib.Path(run) / "config.json").get("seed", 0)
    rows = []
    for first, second in pairs:
        a, b = scores(run, first, outcome), scores(run, second, outcome)
        shared = a.keys() & b.keys()
        found = statistics.paired_difference({t: a[t] for t in shared}, {t: b[t] for t in shared}, seed=seed)
        row = {"comparison": f"{second} − {first}", "tasks": found.tasks, "difference": found.difference, "low": found.low, "high": found.high}
        rows.append({**row, "gains": found.gains, "losses": found.losses, "ties": found.ties})
    return pd.DataFrame(rows, columns=["comparison", "tasks", "difference", "low", "high", "gains", "losses", "ties"])


def summarize(means: Mapping[str, float]) -> dict[str, Any]:
    """Mean over tasks with its 95% task-bootstrap interval, from each task's mean."""
    if not means:
        return {"tasks": 0, "mean": np.nan, "low": np.nan, "high": np.nan}
    values = np.array([means[task] for task in sorted(means)], np.float64)  # sorted, so that the resamples do not depend on who finished first
    low, high = statistics.percentile_interval(statistics.bootstrap_means(values), 0.95)
    return {"tasks": len(values), "mean": float(values.mean()), "low": float(low), "high": float(high)}
