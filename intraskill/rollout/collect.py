"""Groups of episodes, many at once.

Concurrency is bounded over episodes, not groups: a slow episode holds one place and nothing else. What fails technically is played again
from its start, with the same noise, so that with the embedded engine a dropped connection does not change what is learned; after a fixed
number of attempts it stays technical and so does its group. Nothing here decides which groups train; see `grpo.sampling_filter`.
"""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from intraskill.rollout.agent import Limits, run_episode
from intraskill.types import Chunk, Engine, Group, Mask, Sampling, Session, Shop, Task, Trajectory, require

if TYPE_CHECKING:
    from intraskill.rollout.chat import Chat

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A group before it is played. `chunks` are the mask's chunks, in its order."""

    index: int
    task: Task
    mask: Mask
    chunks: tuple[Chunk, ...]

    def __post_init__(self):
        ids = tuple(c.id for c in self.chunks)
        require(ids == self.mask.chunk_ids, f"group {self.index}: chunks {ids} are not those of the mask, {self.mask.chunk_ids}")


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Everything that all episodes of a collection share.

    Attributes:
      noise: (run seed, stream): with the group's and the episode's index it keys the engine's random numbers. Give each use of the
        same groups (training, bare and masked evaluation, retries) a stream of its own.
      group_size: episodes a group.
      concurrency: episodes in play at a time. More than the embedded engine has slots makes it evict and rebuild.
      attempts: how often an episode is played before it stays technical.
      backoff: seconds before the second attempt, doubled for each further one.
    """

    engine: Engine
    shop: Shop
    chat: "Chat"
    sampling: Sampling
    limits: Limits
    noise: tuple[int, ...]
    group_size: int
    concurrency: int
    attempts: int = 3
    backoff: float = 0.5

    def __post_init__(self):
        counts = {n: getattr(self, n) for n in ("group_size", "concurrency", "attempts")}
        require(min(counts.values()) >= 1 and self.backoff >= 0, f"{counts} must be >= 1 and backoff >= 0, got {self.backoff}")


async def collect_groups(rollout: Rollout, assignments: Iterable[Assignment], on_group: Callable[[Group], None]) -> list[Group]:
    """Plays all assignments.

    Args:
      rollout: engine, shop and budgets.
      assignments: groups to play; their episodes queue up in this order.
      on_group: called with each group as soon as it is complete, to put it on disk. What it raises ends the collection.

    Returns:
      The groups in the order of `assignments`, whichever finished first. When anything raises, or the caller is cancelled, every
      episode still in play is closed before this raises.
    """
    places = asyncio.Semaphore(rollout.concurrency)

    async def collect(assignment: Assignment) -> Group:
        group = await collect_group(rollout, assignment, places)
        on_group(group)
        return group

    return await _all(collect(a) for a in assignments)


async def collect_until(
    rollout: Rollout,
    assign: Callable[[int], Assignment],
    first_index: int,
    num_groups: int,
    missing: Callable[[Sequence[Group]], int],
    on_group: Callable[[Group], None],
) -> list[Group]:
    """Plays `num_groups` groups, then as many further ones as `missing` asks for, until it asks for none.

    Every wave is played to its end before `missing` sees it, so what is played depends on the groups' outcomes, never on their timing.

    Returns:
      All groups, `first_index`, `first_index + 1`, ... without a gap; the next collection starts after the last.
    """
    groups: list[Group] = []
    wave = num_groups
    while wave:
        start = first_index + len(groups)
        groups += await collect_groups(rollout, [assign(i) for i in range(start, start + wave)], on_group)
        wave = missing(groups)
    return groups


async def collect_group(rollout: Rollout, assignment: Assignment, places: asyncio.Semaphore) -> Group:
    """Plays one group; each of its episodes takes one of `places` while it is in play."""
    trajectories = await _all(_collect_episode(rollout, assignment, e, places) for e in range(rollout.group_size))
    return Group(assignment.index, assignment.task, assignment.mask, tuple(trajectories))


async def _collect_episode(rollout: Rollout, assignment: Assignment, episode: int, places: asyncio.Semaphore) -> Trajectory:
    noise = (*rollout.noise, assignment.index, episode)
    name = "-".join(map(str, noise))
    for attempt in itertools.count(1):
        session = Session(f"{name}-{attempt}", noise)
        async with places:
            trajectory = await run_episode(
                rollout.engine, rollout.shop, rollout.chat, assignment.task, assignment.chunks, session, rollout.sampling, rollout.limits
            )
        if trajectory.scored or attempt == rollout.attempts:
            return trajectory
        log.warning("episode %s, attempt %d of %d: %s", name, attempt, rollout.attempts, trajectory.error)
        await asyncio.sleep(rollout.backoff * 2 ** (attempt - 1))
    raise AssertionError("unreachable: the attempts are counted above")


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once and returns their results in order; the first error cancels the others, waits for them, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(c) for c in coroutines]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [t.result() for t in running]
