"""Runs a policy over a split under given masks, and compares conditions task by task.

A condition's directory is its record: `manifest.json` says what was run (weights, bank, sampling, prompts, shop), `episodes.jsonl` holds
one line an episode, `summary.json` the figures. A condition whose summary is there, for the same manifest, is read instead of played again;
only what failed technically is played once more, so that a gate with gaps can be completed.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intraskill.rollout.collect import Assignment, Rollout, collect_groups
from intraskill.run_directory import plain, read_json, write_json, write_text
from intraskill.skills import gate, statistics
from intraskill.types import Chunk, Group, InputError, Mask, Task, Trajectory

COMPONENTS = ("r_type", "r_att", "r_opt", "r_price")
SCHEMA = 2
_PASSES = 2  # over the episodes: what failed technically is played again when all others have ended


@dataclasses.dataclass(frozen=True)
class Case:
    """One episode to play: the task, which repetition of it, and what its prompt carries."""

    task: Task
    sample: int
    mask: Mask
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One episode as every later stage needs it. `injected` and `weights` are the trajectory's own, not what was planned."""

    task_id: str
    sample: int
    injected: tuple[str, ...]
    weights: tuple[str, ...]
    status: str
    reward: float
    success: bool
    components: Mapping[str, float]
    turns: int
    tokens: int
    protocol_errors: int
    invalid_actions: int
    error: str = ""

    @property
    def scored(self) -> bool:
        return self.status != "technical"

    def observed(self, identity: gate.Identity) -> gate.Observed:
        """The gate's view of this episode: under the weights that sampled it, the rest of `identity` as its condition's manifest has it."""
        values = {"reward": self.reward, "success": float(self.success), **self.components}
        own = dataclasses.replace(identity, weights="+".join(self.weights))
        return gate.Observed(self.task_id, self.sample, self.injected, values, own, self.scored)


@dataclasses.dataclass(frozen=True)
class Result:
    """One condition, played."""

    condition: str
    identity: gate.Identity
    outcomes: tuple[Outcome, ...]
    summary: Mapping[str, Any]

    @property
    def observed(self) -> list[gate.Observed]:
        """The gate's view of every episode."""
        return [o.observed(self.identity) for o in self.outcomes]

    def by_task(self, field: str) -> dict[str, float]:
        """Mean of `reward` or `success` by task, over scored episodes."""
        return statistics.task_means((o.task_id, float(getattr(o, field))) for o in self.outcomes if o.scored)


def cases(tasks: Sequence[Task], samples: int, mask: Mask, chunks: tuple[Chunk, ...]) -> list[Case]:
    """Every task, `samples` times, under one mask."""
    return [Case(task, sample, mask, chunks) for task in tasks for sample in range(samples)]


async def run(
    directory: Path,
    condition: str,
    rollout: Rollout,
    planned: Sequence[Case],
    identity: gate.Identity,
    bank_sha256: str,
    on_episode: Callable[[], None] = lambda: None,
) -> Result:
    """Plays `planned`, except what an earlier run of the same manifest recorded as scored, and writes the condition's directory.

    Raises InputError, and leaves the directory as it was, when it holds another evaluation, when most episodes fail technically, and when the
    engine served other weights than `identity` names.

    Args:
      directory: the condition's own.
      condition: its name, for people.
      rollout: engine, shop, sampling; its noise must be a stream of this condition's split.
      planned: the episodes; the order decides their noise.
      identity: what makes episodes comparable, weights first.
      bank_sha256: the bank that masks refer to.
      on_episode: called once for each episode, played now or before.
    """
    manifest = {
        "schema_version": SCHEMA,
        "condition": condition,
        "identity": dataclasses.asdict(identity),
        "bank_sha256": bank_sha256,
        "noise": list(rollout.noise),
        "episodes": [[c.task.id, c.sample, list(c.mask.chunk_ids)] for c in planned],
    }
    outcomes: dict[int, Outcome] = {}
    if (directory / "summary.json").exists():
        _require_same(directory, manifest)
        recorded = read(directory)
        outcomes = dict(enumerate(recorded.outcomes))
        for _ in outcomes:
            on_episode()
        if all(o.scored for o in recorded.outcomes):
            return recorded

    def keep(group: Group) -> None:
        if group.index not in outcomes:
            on_episode()
        outcomes[group.index] = outcome(group, planned[group.index].sample)

    for _ in range(_PASSES):
        missing = [i for i in range(len(planned)) if i not in outcomes or not outcomes[i].scored]
        if not missing:
            break
        assigned = [Assignment(i, planned[i].task, planned[i].mask, planned[i].chunks) for i in missing]
        await collect_groups(dataclasses.replace(rollout, group_size=1), assigned, keep)
    ordered = tuple(outcomes[i] for i in range(len(planned)))
    _refuse_outage(condition, ordered)
    _refuse_other_weights(condition, ordered, identity.weights)
    summary = summarise(condition, ordered, identity, bank_sha256)
    (directory / "summary.json").unlink(missing_ok=True)  # it says that the other two are whole, and belong together
    write_json(directory / "manifest.json", manifest)
    write_text(directory / "episodes.jsonl", "".join(json.dumps(plain(dataclasses.asdict(o))) + "\n" for o in ordered))
    write_json(directory / "summary.json", summary)
    return Result(condition, identity, ordered, summary)


def _refuse_other_weights(condition: str, outcomes: Sequence[Outcome], digest: str) -> None:
    """Raises when an episode was sampled by weights that the engine did not confirm to be the frozen checkpoint's."""
    others = [o for o in outcomes if o.scored and o.weights != (digest,)]
    if others:
        found = "+".join(w[:12] or "unconfirmed" for w in others[0].weights) or "none"
        raise InputError(
            f"{condition}: {len(others)} of {len(outcomes)} episodes were sampled by other weights than {digest[:12]}, "
            f"e.g. task {others[0].task_id} by {found}; nothing is recorded: see that no engine restarts meanwhile, then resume the run"
        )


def _refuse_outage(condition: str, outcomes: Sequence[Outcome]) -> None:
    """Raises before anything is recorded when most episodes failed technically: that is an outage, not a gap to be filled later."""
    errors = [o.error for o in outcomes if not o.scored]
    if 2 * len(errors) > len(outcomes):
        raise InputError(
            f"{condition}: {len(errors)} of {len(outcomes)} episodes failed technically, the last with: {errors[-1]}; "
            "look at the engine's and the shop's logs, then resume the run"
        )


def _read_json(directory: Path, name: str) -> Any:
    try:
        return read_json(directory / name)
    except InputError as error:
        raise InputError(f"{error}, or remove {directory} to have it played again") from None


def _require_same(directory: Path, manifest: Mapping[str, Any]) -> None:
    recorded = _read_json(directory, "manifest.json")
    if not isinstance(recorded, dict):
        raise InputError(f"{directory / 'manifest.json'} is damaged (no object); remove {directory} to have it played again")
    differ = [k for k in manifest if recorded.get(k) != plain(manifest)[k]]
    if differ:
        raise InputError(f"{directory} holds another evaluation (its {', '.join(differ)} differ); choose another name or remove the directory")


def read(directory: Path) -> Result:
    """The condition that `run` recorded in `directory`. Raises InputError for a damaged record, one with an episode twice among others."""
    manifest, path = _read_json(directory, "manifest.json"), directory / "episodes.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_bytes().decode("utf-8").splitlines()]
        outcomes = tuple(Outcome(**{**row, "injected": tuple(row["injected"]), "weights": tuple(row["weights"])}) for row in rows)
        identity, planned = gate.Identity(**manifest["identity"]), [(task, sample) for task, sample, _ in manifest["episodes"]]
        summary = summarise(manifest["condition"], outcomes, identity, manifest["bank_sha256"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); remove {directory} to have it played again") from error
    if [(o.task_id, o.sample) for o in outcomes] != planned:
        raise InputError(f"{path} does not hold each episode of its manifest once, in order; remove {directory} to have it played again")
    recorded = _read_json(directory, "summary.json")
    counted = {k: v for k, v in summary.items() if not isinstance(v, float)}  # a mean's last bit may be another machine's
    if not isinstance(recorded, dict) or {k: recorded.get(k) for k in counted} != counted:
        raise InputError(f"{directory / 'summary.json'} does not hold the figures of {path}; remove {directory} to have it played again")
    return Result(manifest["condition"], identity, outcomes, summary)


def outcome(group: Group, sample: int) -> Outcome:
    """The record of a group of one episode."""
    (trajectory,) = group.trajectories
    detail = trajectory.reward_detail
    return Outcome(
        task_id=group.task.id,
        sample=sample,
        injected=trajectory.injected,
        weights=trajectory.weights,
        status=str(trajectory.status),
        reward=trajectory.reward,
        success=trajectory.success,
        components={name: float(detail.get(name, 0.0)) for name in COMPONENTS},
        turns=len(trajectory.turns),
        tokens=sum(trajectory.loss_mask),
        protocol_errors=num_protocol_errors(trajectory),
        invalid_actions=num_invalid_actions(trajectory),
        error=trajectory.error,
    )


def num_protocol_errors(trajectory: Trajectory) -> int:
    """Turns whose text was no tool call."""
    return sum(bool(t.protocol_error) for t in trajectory.turns)


def num_invalid_actions(trajectory: Trajectory) -> int:
    """Turns whose call the shop refused."""
    return sum(t.feedback not in ("", "ok") for t in trajectory.turns)


def summarise(condition: str, outcomes: Sequence[Outcome], identity: gate.Identity, bank_sha256: str) -> dict[str, Any]:
    """Means over scored episodes, and how many there were."""
    scored = [o for o in outcomes if o.scored]

    def mean(field: str) -> float | None:
        return float(np.mean([float(getattr(o, field)) for o in scored])) if scored else None

    return {
        "schema_version": SCHEMA,
        "condition": condition,
        **{field: mean(field) for field in ("success", "reward", "turns", "tokens", "protocol_errors", "invalid_actions")},
        "num_episodes": len(outcomes),
        "num_technical": len(outcomes) - len(scored),
        "num_tasks": len({o.task_id for o in scored}),
        "weights_digest": identity.weights,
        "bank_sha256": bank_sha256,
    }


def compare(name: str, first: Result, second: Result, *, seed: int = 0) -> dict[str, Any]:
    """Second - first in success, paired by task, with a percentile bootstrap interval.

    A task without a scored episode on either side has no pair: it is left out and counted, since one technical failure must not cost the run.
    """
    a, b = first.by_task("success"), second.by_task("success")
    both = a.keys() & b.keys()
    paired = statistics.paired_difference({t: a[t] for t in both}, {t: b[t] for t in both}, seed=seed)
    unpaired = len({o.task_id for o in (*first.outcomes, *second.outcomes)}) - len(both)
    found = {"name": name, "difference": paired.difference, "interval": [paired.low, paired.high], "unpaired": unpaired}
    return {**found, **dataclasses.asdict(paired)}
