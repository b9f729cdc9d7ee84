"""Groups as JSON: the run's record of what was played, from which every later stage can be run again.

Lossless: floats keep all their digits, and what is read back equals what was written. A turn's ids and log-probs are not stored twice;
they are the trajectory's own under its loss mask, in order.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from intraskill.types import Completion, Group, InputError, Mask, MaskKind, Status, Task, ToolCall, Trajectory, Turn, require

SCHEMA = 1


def to_json(group: Group) -> dict[str, Any]:
    """The group as JSON types."""
    record = {
        "schema": SCHEMA,
        "index": group.index,
        "task": {"id": group.task.id, "instruction": group.task.instruction, "persona": group.task.persona},
        "mask": _mask_to_json(group.mask),
        "trajectories": [trajectory_to_json(t) for t in group.trajectories],
    }
    return record | ({"own_masks": [_mask_to_json(m) for m in group.own_masks]} if group.own_masks else {})


def from_json(record: Any) -> Group:
    """The group that `to_json` wrote. Raises InputError for another schema or a record that is not whole."""
    _check_schema(record)
    with _whole("group"):
        own_masks = tuple(_mask_from_json(m) for m in record.get("own_masks", ()))
        trajectories = tuple(trajectory_from_json(t) for t in record["trajectories"])
        return Group(record["index"], Task(**record["task"]), _mask_from_json(record["mask"]), trajectories, own_masks)


def _mask_to_json(mask: Mask) -> dict[str, Any]:
    return {"kind": mask.kind.value, "chunk_ids": list(mask.chunk_ids)}


def _mask_from_json(record: Mapping[str, Any]) -> Mask:
    return Mask(MaskKind(record["kind"]), tuple(record["chunk_ids"]))


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """One trajectory as JSON types."""
    sampled = [p for p, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if m]
    require(sampled == [p for t in trajectory.turns for p in t.completion.logprobs], "the turns' log-probs differ from the trajectory's")
    return {
        "schema": SCHEMA,
        "status": trajectory.status.value,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "reward_detail": trajectory.reward_detail,
        "error": trajectory.error,
        "injected": list(trajectory.injected),
        "weights": list(trajectory.weights),
        "tokens": list(trajectory.tokens),
        "loss_mask": "".join("01"[m] for m in trajectory.loss_mask),
        "logprobs": sampled,
        "turns": [_turn_to_json(t) for t in trajectory.turns],
    }


def trajectory_from_json(record: Any) -> Trajectory:
    """The trajectory that `trajectory_to_json` wrote. Raises InputError for another schema or a record that is not whole."""
    _check_schema(record)
    with _whole("trajectory"):
        tokens, mask = tuple(record["tokens"]), tuple(c == "1" for c in record["loss_mask"])
        ids = iter([t for t, m in zip(tokens, mask, strict=True) if m])
        turn_logprobs, logprobs = iter(record["logprobs"]), iter(record["logprobs"])
        return Trajectory(
            tokens=tokens,
            loss_mask=mask,
            logprobs=tuple(next(logprobs) if m else 0.0 for m in mask),
            turns=tuple(_turn_from_json(t, ids, turn_logprobs) for t in record["turns"]),
            status=Status(record["status"]),
            reward=record["reward"],
            success=record["success"],
            reward_detail=record["reward_detail"],
            error=record["error"],
            injected=tuple(record.get("injected", ())),  # records from before these two were kept have neither
            weights=tuple(record.get("weights", ())),
        )


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    c = turn.completion
    return {
        "prompt_length": turn.prompt_length,
        "num_tokens": len(c.ids),
        "finish_reason": c.finish_reason,
        "weight_versions": list(c.weight_versions),
        "cached_tokens": c.cached_tokens,
        "latency": c.latency,
        "text": turn.text,
        "call": None if turn.call is None else dataclasses.asdict(turn.call),
        "protocol_error": turn.protocol_error,
        "feedback": turn.feedback,
        "observation": turn.observation,
    }


def _turn_from_json(record: Mapping[str, Any], ids: Iterator[int], logprobs: Iterator[float]) -> Turn:
    completion = Completion(
        ids=tuple(itertools.islice(ids, record["num_tokens"])),
        logprobs=tuple(itertools.islice(logprobs, record["num_tokens"])),
        finish_reason=record["finish_reason"],
        weight_versions=tuple(record["weight_versions"]),
        cached_tokens=record["cached_tokens"],
        latency=record["latency"],
    )
    call = record["call"] and ToolCall(**record["call"])
    views = {name: record[name] for name in ("text", "protocol_error", "feedback", "observation")}
    return Turn(record["prompt_length"], completion, call=call, **views)


def _check_schema(record: Any) -> None:
    if not isinstance(record, Mapping):
        raise InputError(f"the record is damaged ({str(record)[:40]!r} where an object belongs): restore the file, or play the group again")
    found = record.get("schema")
    if found != SCHEMA:
        raise InputError(f"the record has schema {found!r}, this version reads {SCHEMA}: read it with the version that wrote it")


@contextlib.contextmanager
def _whole(what: str) -> Iterator[None]:
    """Turns what a damaged record raises while it is taken apart into one InputError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"the {what} record is damaged ({type(e).__name__}: {e}): restore the file, or play the group again") from e
