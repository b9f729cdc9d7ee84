"""The fast loop's arrows: rollout, batch, update, sync. Each takes values and returns values; what they share is in `Parts`."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intraskill import weights
from intraskill.grpo import batch_file
from intraskill.grpo.advantages import group_advantages
from intraskill.grpo.learner import NonFiniteUpdate, TrainState
from intraskill.grpo.packing import Episode, PackingReport, pack_microbatches
from intraskill.grpo.sampling_filter import Admission, admit
from intraskill.parts import TRAIN, Parts, packing_options, publish
from intraskill.rollout import records
from intraskill.rollout.collect import Assignment, collect_until
from intraskill.run_directory import read_json, write_json
from intraskill.skills import curriculum as curricula
from intraskill.skills import retrieval
from intraskill.skills.bank import Bank
from intraskill.skills.curriculum import Curriculum
from intraskill.step_metrics import rollout_metrics, rollout_speed, update_figures
from intraskill.types import Batch, Chunk, Group, InputError, Mask, MaskKind, Published, Task


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


def read_group(path: Path) -> Group:
    """The group in a file. Raises InputError, naming the file, when it is damaged."""
    record = read_json(path)
    try:
        return records.from_json(record)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def recorded(parts: Parts, path: Path, assignment: Assignment, digest: str) -> Group | None:
    """The group that an interrupted run finished, where it is the one to play now: same task and masks, sampled by the weights `digest`.

    None where there is none, and where it would be played otherwise: by other weights (an earlier life of the run went on from another checkpoint),
    or better, since an episode failed technically. A damaged file is as good as none, and is replaced by the group that is played now.
    """
    if not path.is_file():
        return None
    try:
        group = read_group(path)
    except InputError as error:
        parts.progress.say(f"group {assignment.index} is played again: {error}")
        return None
    planned = (assignment.index, assignment.task, assignment.mask, tuple(mask for mask, _ in assignment.own))
    same = (group.index, group.task, group.mask, group.own_masks) == planned and len(group.trajectories) == parts.config.rollout.group_size
    return group if same and all(t.scored and set(t.weights) <= {digest} for t in group.trajectories) else None


@dataclasses.dataclass(frozen=True)
class Played:
    """A step's groups, what the trainer admits of them, and the step's line in metrics.jsonl, to be written when the step's turn has come."""

    groups: Sequence[Group]
    admission: Admission
    record: Mapping[str, Any]


async def rollout(parts: Parts, bank: Bank, curriculum: Curriculum, round_index: int, step: int, first_group: int) -> Played:
    """Plays the groups of one step, and as many more as it takes to fill it; every finished group is on disk before it is admitted.

    Groups that an interrupted run finished are read, not played again, where the engine serves the weights that sampled them.
    """
    settings = parts.config.rollout
    start = time.monotonic()
    parts.progress.start(f"step {step}: rollout", settings.oversample)
    served = (await parts.engine.healthy()).digest

    def assign(index: int) -> Assignment:
        return guide(curriculum, bank, index, task_of(parts.tasks["train"], parts.config.seed, index), settings.group_size)

    fresh: list[Group] = []

    def keep(group: Group) -> None:
        fresh.append(group)
        write_json(group_path(parts, round_index, group.index), records.to_json(group))
        parts.progress.advance(f"step {step}: rollout")

    def known(assignment: Assignment) -> Group | None:
        group = recorded(parts, group_path(parts, round_index, assignment.index), assignment, served)
        if group is not None:
            parts.progress.advance(f"step {step}: rollout")
        return group

    def decide(groups: Sequence[Group]) -> Admission:
        return admit(groups, settings.groups_per_step, settings.max_technical_in_a_row)

    groups = await collect_until(parts.rollout(TRAIN), assign, first_group, settings.oversample, lambda g: decide(g).missing, keep, known)
    admission = decide(groups)
    parts.progress.finish(f"step {step}: rollout")
    if len(fresh) < len(groups):
        read = len(groups) - len(fresh)
        parts.progress.say(f"step {step}: {read} of {len(groups)} groups were finished before the interruption and were not played again")
    figures = rollout_metrics(groups, curriculum, step) | admission.metrics() | rollout_speed(fresh, time.monotonic() - start)
    return Played(groups, admission, {"kind": "rollout", "round": round_index, "step": step, **figures})


@dataclasses.dataclass(frozen=True)
class OptimizerBatch:
    """What one optimizer update trains on: microbatches, what became of the episodes, and where each came from."""

    microbatches: list[Batch]
    report: PackingReport
    origins: batch_file.Origins


def optimizer_batches(config: Any, admitted: Sequence[Group]) -> list[OptimizerBatch]:
    """The batches of one step: whole groups, dealt in turn to `grpo.updates_per_step` updates. Host arrays only."""
    settings, batches = config.grpo, []
    for share in (admitted[i :: settings.updates_per_step] for i in range(settings.updates_per_step)):
        episodes, origins = [], []
        for group in share:
            advantages = group_advantages(group.rewards, divide_by_std=settings.normalise_std)
            episodes += [Episode.of(t, a) for t, a in zip(group.trajectories, advantages, strict=True)]
            origins += [(group.index, number) for number in range(len(group.trajectories))]
        batches.append(OptimizerBatch(*pack_microbatches(episodes, **packing_options(config)), origins))
    return batches


def update(parts: Parts, state: TrainState, admitted: Sequence[Group], round_index: int, step: int) -> TrainState:
    """The optimizer updates of one step: old log-probs of the whole step first, then one update per share of whole groups."""
    learner, progress = parts.learner, parts.progress
    progress.start(f"step {step}: update", parts.config.grpo.updates_per_step)
    learner.warm_up(state, packing_options(parts.config)["rows"].empty())
    scored = []
    for batch in optimizer_batches(parts.config, admitted):
        with _stopping_at(parts, step, batch):
            microbatches = learner.old_log_probs(state, batch.microbatches)
            if parts.reference is not None:
                microbatches = learner.reference_log_probs(parts.reference, int(state.step), microbatches)
        scored.append(dataclasses.replace(batch, microbatches=microbatches))
    _say_what_is_left_out(parts, step, scored)
    for batch in scored:
        start = time.monotonic()
        with _stopping_at(parts, step, batch):
            state, metrics = learner.update(state, batch.microbatches)
        seconds = time.monotonic() - start
        speeds = update_figures(parts.config, parts.policy.config, batch.microbatches, seconds)
        figures = {**metrics, **batch.report.metrics(), **speeds, "seconds": seconds}
        parts.metrics.write({"kind": "update", "round": round_index, "step": step, **figures})
        progress.advance(f"step {step}: update")
    progress.finish(f"step {step}: update")
    return state


def _say_what_is_left_out(parts: Parts, step: int, batches: Sequence[OptimizerBatch]) -> None:
    settings, num = parts.config.grpo, sum(len(b.origins) for b in batches)
    overlong, untrained = (sum(len(getattr(b.report, name)) for b in batches) for name in ("overlong", "untrained"))
    if overlong:
        most = f"grpo.row_length = {settings.row_length} tokens, grpo.trained_per_row = {settings.trained_per_row} of them trained"
        parts.progress.say(f"step {step}: {overlong} of {num} episodes exceed a row ({most}), so grpo.overlong = {settings.overlong} was applied")
    if untrained:
        parts.progress.say(f"step {step}: {untrained} of {num} episodes have no token to train")
    for number, batch in enumerate(batches):
        if not batch.report.num_trained:
            parts.progress.say(f"step {step}: warning: no token is trained in update {number} of the step")


@contextlib.contextmanager
def _stopping_at(parts: Parts, step: int, batch: OptimizerBatch) -> Iterator[None]:
    """Turns a non-finite update of `batch` into the run's one error, and leaves the batch in a file."""
    try:
        yield
    except NonFiniteUpdate as error:
        path = parts.run.path / "failed" / f"update-{error.step:06d}.npz"
        batch_file.save(path, batch.microbatches, batch.origins)
        named = [f"group {group} episode {episode}" for group, episode in (batch.origins[n] for n in error.episodes)]
        origin = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
        raise InputError(
            f"step {step}, update {error.step}: {error.what} is not finite, from {origin}; the update was not applied. The batch is in {path}, "
            "see docs/training.md. A run keeps its configuration: start another with a lower grpo.learning_rate, or with what the batch shows mended"
        ) from error


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
        try:
            return cls(value["step"], value["next_group"], tuple(value["round_starts"]), value["metrics"])
        except (KeyError, TypeError) as error:
            raise InputError(
                f"the checkpoint's position {dict(value)} is not this version's ({type(error).__name__}: {error}): resume with the version that "
                "saved it, or start a new run"
            ) from None

    def enter(self, round_index: int) -> "Position":
        """The position at the start of a round, or the same one inside it."""
        begun = len(self.round_starts) > round_index
        return self if begun else dataclasses.replace(self, round_starts=(*self.round_starts, self.next_group))

    def after(self, num_groups: int, metrics: Mapping[str, Any]) -> "Position":
        """The position once a step is done."""
        return dataclasses.replace(self, step=self.step + 1, next_group=self.next_group + num_groups, metrics=metrics)
