"""The figures of a round and of a run, as files: the last thing written, so that their presence says that everything before is complete."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intraskill import evaluation
from intraskill.evaluation import Result
from intraskill.parts import Parts
from intraskill.run_directory import read_json, write_json
from intraskill.skills import gate, triage
from intraskill.skills.bank import Bank, CandidatePool
from intraskill.types import InputError

SCHEMA = 1


def _round_path(parts: Parts, index: int) -> Path:
    return parts.run.round(index) / "summary.json"


def _read_round(path: Path, index: int) -> dict[str, Any]:
    record = read_json(path)
    if not isinstance(record, dict) or (record.get("schema_version"), record.get("round")) != (SCHEMA, index):
        raise InputError(
            f"{path} is no summary of round {index}; restore it from a copy; that of the last round may be removed, to have it written again"
        )
    return record


def round_done(parts: Parts, index: int) -> bool:
    """Whether the round's last file is there."""
    return _round_path(parts, index).is_file()


def write_round(
    parts: Parts,
    index: int,
    bare: Result,
    masked: Result | None,
    pool: CandidatePool,
    result: gate.GateResult | None,
    next_bank: Bank,
    cases: Sequence[triage.Case],
    seconds: float,
) -> None:
    """`rounds/NNN/summary.json`; what only a gate measures is null where none ran."""
    record = {
        "schema_version": SCHEMA,
        "round": index,
        "bare_success": bare.summary["success"],
        "masked_success": masked.summary["success"] if masked else None,
        "bare_reward": bare.summary["reward"],
        "masked_reward": masked.summary["reward"] if masked else None,
        "num_pairs": len(result.pairs.tasks) if result else 0,
        "bank_size": len(pool.bank.chunks),
        "candidates": [c.chunk.id for c in pool.candidates],
        "admitted": [i for i in next_bank.ids if i not in pool.bank.ids],
        "selected": list(result.selected) if result else list(next_bank.ids),
        "gate": result.status if result else "none",
        "triage": triage.counts(cases),
        "seconds": seconds,
    }
    write_json(_round_path(parts, index), record)


def write(parts: Parts, base: Mapping[str, Result], final: Mapping[str, Result], seconds: float) -> dict[str, Any]:
    """`summary.json`: rounds, test conditions, the paired comparisons, versions."""
    rounds = [_read_round(_round_path(parts, i), i) for i in range(parts.config.schedule.rounds)]
    try:
        last = evaluation.read(parts.run.path / "eval" / f"round{len(rounds) - 1:03d}-bare")
    except InputError as error:
        raise InputError(f"{error}, and {_round_path(parts, len(rounds) - 1)} with it, since the round is done") from error
    test = {name: result for name, result in {**base, **final}.items() if name != "base-validation"}
    seed = parts.config.seed
    record = {
        "schema_version": SCHEMA,
        "name": parts.config.name,
        "seed": seed,
        "within_context": not parts.config.curriculum.mixed,  # whether advantages compared episodes of one context only
        "base_validation": dict(base["base-validation"].summary),
        "rounds": rounds,
        "test": {name: dict(result.summary) for name, result in test.items()},
        "comparisons": [
            evaluation.compare("validation, bare: final - base", base["base-validation"], last, seed=seed),
            evaluation.compare("test: final - base", test["base"], test["final"], seed=seed),
            evaluation.compare("test: base + initial bank - base", test["base"], test["base-initial"], seed=seed),
            evaluation.compare("test: final + final bank - final", test["final"], test["final-full"], seed=seed),
        ],
        "seconds": seconds,
        "versions": read_json(parts.run.path / "versions.json"),
    }
    write_json(parts.run.path / "summary.json", record)
    return record
