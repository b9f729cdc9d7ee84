"""The fast loop's arrows: rollout, batch, update, sync. Each takes values and returns values; what they share is in `Parts`."""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intraskill import weights
from intraskill.evaluation import num_invalid_actions, num_protocol_errors
from intraskill.grpo.advantages import group_advantages
from intraskill.grpo.learner import TrainState
from intraskill.grpo.packing import Episode, pack, split_rows
from intraskill.grpo.sampling_filter import Admission, admit, is_uniform
from intraskill.parts import TRAIN, Parts, packing_options, publish
from intraskill.rollout import records
from intraskill.rollout.collect import Assignment, collect_until
from intraskill.run_directory import write_json
from intraskill.skills import curriculum as curricula
from intraskill.skills import retrieval
from intraskill.skills.bank import Bank
from intraskill.skills.curriculum import Curriculum
from intraskill.types import Chunk, Group, Mask, MaskKind, Published, Task, Trajectory


def chunks_of(bank: Bank, mask: Mask) -> tuple[Chunk, ...]:
    """The mask's chunks, in its order."""
    known = {c.id: c for c in bank.chunks}
    return tuple(known[i] for i in mask.chunk_ids)


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int, num_tasks: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, num_tasks]).permutation(num_tasks)


def task_of(tasks: Sequence[Task], seed: int, group_index: int) -> Task:
    """The task of a group: every epoch is a permutation of its own, and a pure function of the seed."""
    epoch, place = divmod(group_index, len(tasks))
    return tasks[_order(seed, epoch, len(tasks))[place]]


def guide(curriculum: Curriculum, bank: Bank, index: int, task: Task, group_size: int) -> Assignment:
    """The group as the curriculum wants it: one mask for all its episodes, except where guidance is mixed."""
    if curriculum.mixed:
        masks = [curricula.mask(curriculum, index, episode=e) for e in range(group_size)]
        return Assignment(index, task, Mask(MaskKind.MIXED), (), tuple((m, chunks_of(bank, m)) for m in masks))
    retrieved = retrieval.nearest(bank, task, curriculum.retrieve) if curriculum.retrieve else None
    mask = curricula.mask(curriculum, index, retrieved=retrieved)
    return Assignment(index, task, mask, chunks_of(bank, mask))


def group_path(parts: Parts, round_index: int, index: int) -> Path:
    return parts.run.round(round_index) / "groups" / f"{index:08d}.json"


async def rollout(parts: Parts, bank: Bank, curriculum: Curriculum, round_index: int, step: int, first_group: int) -> tuple[list[Group], Admission]:
    """Plays the groups of one step, and as many more as it takes to fill it; every finished group is on disk before it is admitted."""
    settings = parts.config.rollout
    start = time.monotonic()
    parts.progress.start(f"step {step}: rollout", settings.oversample)

    def assign(index: int) -> Assignment:
        return guide(curriculum, bank, index, task_of(parts.tasks["train"], parts.config.seed, index), settings.group_size)

    def keep(group: Group) -> None:
        write_json(group_path(parts, round_index, group.index), records.to_json(group))
        parts.progress.advance(f"step {step}: rollout")

    def decide(groups: Sequence[Group]) -> Admission:
        return admit(groups, settings.groups_per_step, settings.max_technical_in_a_row)

    groups = await collect_until(parts.rollout(TRAIN), assign, first_group, settings.oversample, lambda g: decide(g).missing, keep)
    admission = decide(groups)
    parts.progress.finish(f"step {step}: rollout")
    figures = rollout_metrics(groups, bank) | admission.metrics()
    parts.metrics.write({"kind": "rollout", "round": round_index, "step": step, **figures, "seconds": time.monotonic() - start})
    return groups, admission


def rollout_metrics(groups: Sequence[Group], bank: Bank) -> dict[str, Any]:
    """Figures over ALL generated, scored episodes; what the trainer admitted is counted apart."""
    episodes = [t for g in groups for t in g.trajectories]
    scored = [t for t in episodes if t.scored]
    masks = [m for g in groups for m in g.masks]
    assisted = [m for m in masks if m.kind != MaskKind.SKILL_FREE]
    included = Counter(i for m in assisted for i in m.chunk_ids)

    def mean(values: list[float]) -> float:
        return float(np.mean(values)) if values else 0.0

    return {
        "reward": mean([t.reward for t in scored]),
        "success": mean([float(t.success) for t in scored]),
        "scored_rate": len(scored) / len(episodes),
        "all_wrong_rate": mean([float(g.all_wrong) for g in groups]),
        "zero_variance_share": mean([float(is_uniform(g)) for g in groups if g.scored]),
        "generated_groups": len(groups),
        "mean_turns": mean([len(t.turns) for t in scored]),
        "tokens_per_turn": mean([sum(t.loss_mask) / len(t.turns) for t in scored if t.turns]),
        "prefilled_per_new_token": prefilled_per_new_token(episodes),
        "tokens_sampled": sum(sum(t.loss_mask) for t in episodes),
        "protocol_errors": mean([num_protocol_errors(t) for t in scored]),
        "invalid_actions": mean([num_invalid_actions(t) for t in scored]),
        "skill_free_rate": mean([float(m.kind == MaskKind.SKILL_FREE) for m in masks]),
        "inclusion": {i: included[i] / len(assisted) if assisted else 0.0 for i in bank.ids},
        "mixed_groups": sum(g.mask.kind == MaskKind.MIXED for g in groups),  # their advantages compare contexts
    }


def prefilled_per_new_token(episodes: Sequence[Trajectory]) -> float:
    """Prompt tokens that the engine computed, per token that it had not computed on before; 1 when every prefix stayed cached."""
    computed = sum(t.prompt_length - t.completion.cached_tokens for e in episodes for t in e.turns)
    known = sum(t.prompt_length + len(t.completion.ids) - 1 for e in episodes for t in e.turns[:-1])  # the last sampled one never entered
    new = sum(t.prompt_length for e in episodes for t in e.turns) - known
    return computed / new if new else 0.0


def update(parts: Parts, state: TrainState, admitted: Sequence[Group], round_index: int, step: int) -> TrainState:
    """The optimizer updates of one step: old log-probs of the whole step first, then one update per share of whole groups."""
    settings = parts.config.grpo
    parts.progress.start(f"step {step}: update", settings.updates_per_step)
    shares = [admitted[i :: settings.updates_per_step] for i in range(settings.updates_per_step)]
    prepared = []
    for share in shares:
        episodes = [
            Episode.of(t, a)
            for g in share
            for t, a in zip(g.trajectories, group_advantages(g.rewards, divide_by_std=settings.normalise_std), strict=True)
        ]
        batch, report = pack(episodes, **packing_options(parts.config))
        prepared.append((parts.learner.old_log_probs(state, split_rows(batch, settings.rows_per_microbatch)), report))
    for microbatches, report in prepared:
        start = time.monotonic()
        state, metrics = parts.learner.update(state, microbatches)
        record = {"kind": "update", "round": round_index, "step": step, **metrics, **report.metrics()}
        parts.metrics.write({**record, "seconds": time.monotonic() - start})
        parts.progress.advance(f"step {step}: update")
    parts.progress.finish(f"step {step}: update")
    return state


async def sync(parts: Parts, params: Any, version: int) -> tuple[Published, dict[str, Any]]:
    """Publishes the parameters and returns, with a metrics record, once the engine serves exactly them; older versions are removed."""
    start = time.monotonic()
    directory = parts.run.path / "weights"
    published = publish(parts.config, directory, version, parts.policy.config, params)
    written = time.monotonic()
    await parts.engine.load_weights(published)
    health = await parts.engine.healthy()
    if health.digest != published.digest or health.weight_version != version:
        raise weights.WeightsError(
            f"the engine serves version {health.weight_version} ({health.digest[:12]}), not {version} ({published.digest[:12]}) {health.detail}"
        )
    weights.prune(directory, {version})
    record = {"version": version, "digest": published.digest, "publish_seconds": written - start, "seconds": time.monotonic() - start}
    return published, record


@dataclasses.dataclass(frozen=True)
class Position:
    """Where the run stands: saved with every checkpoint, and all that a resumed run needs besides arrays and files.

    Attributes:
      step: rollout steps done.
      next_group: index of the first group of the next step.
      round_starts: index of the first group of each round that has begun.
      metrics: how much of metrics.jsonl belongs to these steps.
    """

    step: int = 0
    next_group: int = 0
    round_starts: tuple[int, ...] = ()
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "next_group": self.next_group, "round_starts": list(self.round_starts), "metrics": dict(self.metrics)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Position":
        return cls(value["step"], value["next_group"], tuple(value["round_starts"]), value["metrics"])

    def enter(self, round_index: int) -> "Position":
        """The position at the start of a round, or the same one inside it."""
        begun = len(self.round_starts) > round_index
        return self if begun else dataclasses.replace(self, round_starts=(*self.round_starts, self.next_group))

    def after(self, num_groups: int, metrics: Mapping[str, Any]) -> "Position":
        """The position once a step is done."""
        return dataclasses.replace(self, step=self.step + 1, next_group=self.next_group + num_groups, metrics=metrics)
