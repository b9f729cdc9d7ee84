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
from intraskill.types import Chunk, Engine, EngineError, Group, Mask, MaskKind, Sampling, Session, Shop, Task, Trajectory, require

if TYPE_CHECKING:
    from intraskill.rollout.chat import Chat

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A group before it is played. `chunks` are the mask's chunks, in its order.

    Under a MIXED mask `own` has a mask and its chunks for each episode of the group.
    """

    index: int
    task: Task
    mask: Mask
    chunks: tuple[Chunk, ...]
    own: tuple[tuple[Mask, tuple[Chunk, ...]], ...] = ()

    def __post_init__(self):
        require((self.mask.kind == MaskKind.MIXED) == bool(self.own), f"group {self.index}: a mask for each episode belongs to a mixed group only")
        for mask, chunks in ((self.mask, self.chunks), *self.own):
            ids = tuple(c.id for c in chunks)
            require(ids == mask.chunk_ids, f"group {self.index}: chunks {ids} are not those of the mask, {mask.chunk_ids}")

    def chunks_of(self, episode: int) -> tuple[Chunk, ...]:
        """What the prompt of one episode carries."""
        return self.own[episode][1] if self.own else self.chunks


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
    places, served = asyncio.Semaphore(rollout.concurrency), _Served(rollout.engine)
    await served.ask()

    async def collect(assignment: Assignment) -> Group:
        group = await _collect_group(rollout, assignment, places, served)
        on_group(group)
        return group

    return await gather(collect(a) for a in assignments)


async def collect_until(
    rollout: Rollout,
    assign: Callable[[int], Assignment],
    first_index: int,
    num_groups: int,
    missing: Callable[[Sequence[Group]], int],
    on_group: Callable[[Group], None],
    recorded: Callable[[Assignment], Group | None] = lambda _: None,
) -> list[Group]:
    """Plays `num_groups` groups, then as many further ones as `missing` asks for, until it asks for none.

    Every wave is played to its end before `missing` sees it, so what is played depends on the groups' outcomes, never on their timing. A group that
    `recorded` has, since an interrupted collection finished it, is taken as it is: neither played nor given to `on_group`.

    Returns:
      All groups, `first_index`, `first_index + 1`, ... without a gap; the next collection starts after the last.
    """
    groups: list[Group] = []
    wave = num_groups
    while wave:
        start = first_index + len(groups)
        assignments = [assign(i) for i in range(start, start + wave)]
        known = {a.index: group for a in assignments if (group := recorded(a)) is not None}
        played = await collect_groups(rollout, [a for a in assignments if a.index not in known], on_group)
        wanted = known | {g.index: g for g in played}
        groups += [wanted[a.index] for a in assignments]
        wave = missing(groups)
    return groups


class _Served:
    """Which weights the engine served while a collection was played, by the engine's own word."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._digests: dict[int, str] = {}

    async def ask(self) -> None:
        try:
            health = await self._engine.healthy()
        except EngineError as e:  # its episodes will tell; without an answer their weights stay unconfirmed
            log.warning("the engine does not say which weights it serves: %s", e)
        else:
            if health.ok:
                self._digests[health.weight_version] = health.digest

    async def confirmed(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the digest of every version that sampled it."""
        versions = dict.fromkeys(v for turn in trajectory.turns for v in turn.completion.weight_versions)
        if not versions.keys() <= self._digests.keys():  # the weights changed meanwhile
            await self.ask()
        return dataclasses.replace(trajectory, weights=tuple(self._digests.get(v, "") for v in versions))


async def _collect_group(rollout: Rollout, assignment: Assignment, places: asyncio.Semaphore, served: _Served) -> Group:
    """Plays one group; each of its episodes takes one of `places` while it is in play."""
    size = rollout.group_size
    require(len(assignment.own) in (0, size), f"group {assignment.index} has masks for {len(assignment.own)} episodes, and {size} to play")
    trajectories = await gather(_collect_episode(rollout, assignment, e, places, served) for e in range(size))
    return Group(assignment.index, assignment.task, assignment.mask, tuple(trajectories), tuple(mask for mask, _ in assignment.own))


async def _collect_episode(rollout: Rollout, assignment: Assignment, episode: int, places: asyncio.Semaphore, served: _Served) -> Trajectory:
    noise = (*rollout.noise, assignment.index, episode)
    name = "-".join(map(str, noise))
    for attempt in itertools.count(1):
        session = Session(f"{name}-{attempt}", noise)
        async with places:
            trajectory = await run_episode(
                rollout.engine, rollout.shop, rollout.chat, assignment.task, assignment.chunks_of(episode), session, rollout.sampling, rollout.limits
            )
        if trajectory.scored or attempt == rollout.attempts:
            return await served.confirmed(trajectory)
        log.warning("episode %s, attempt %d of %d: %s", name, attempt, rollout.attempts, trajectory.error)
        await asyncio.sleep(rollout.backoff * 2 ** (attempt - 1))
    raise AssertionError("unreachable: the attempts are counted above")


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once and returns their results in order; the first error cancels the others, waits for them, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(c) for c in coroutines]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [t.result() for t in running]
