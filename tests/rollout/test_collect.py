import asyncio
import dataclasses

import pytest
from rollout import fakes
from rollout.fakes import BUY, CLICK, SAMPLING, STOP, TASK, completion

from intraskill.rollout.agent import Limits
from intraskill.rollout.collect import Assignment, Rollout, collect_groups, collect_until
from intraskill.types import Chunk, EngineError, Health, Mask, MaskKind, Status

DONE = completion(BUY, STOP)


def rollout(engine, shop=None, **changes):
    fields = dict(sampling=SAMPLING, limits=Limits(100, 5), noise=(7, 1), group_size=2, concurrency=4, attempts=3, backoff=0.0)
    return Rollout(engine, shop or fakes.Shop(), fakes.Chat(), **{**fields, **changes})


def assignment(index):
    return Assignment(index, dataclasses.replace(TASK, id=f"task-{index}"), Mask(MaskKind.SKILL_FREE), ())


async def test_groups_come_back_in_order_and_reach_the_disk_as_they_finish():
    written, others = [], asyncio.Event()

    class Engine(fakes.Engine):
        async def generate(self, *arguments, session, **more):
            if session.noise[2] == 0:  # the first group's episodes end last
                await others.wait()
            return await super().generate(*arguments, session=session, **more)

    def on_group(group):
        written.append(group.index)
        if len(written) == 2:
            others.set()

    groups = await collect_groups(rollout(Engine(lambda s, t: DONE)), [assignment(i) for i in range(3)], on_group)
    assert [g.index for g in groups] == [0, 1, 2] and [g.task.id for g in groups] == ["task-0", "task-1", "task-2"]
    assert written == [1, 2, 0]
    assert all(len(g.trajectories) == 2 and g.scored for g in groups)


async def test_episodes_in_play_are_bounded():
    engine, shop = fakes.Engine(lambda s, t: DONE, delay=lambda s: 0.01), fakes.Shop()
    await collect_groups(rollout(engine, shop, concurrency=3), [assignment(i) for i in range(5)], lambda g: None)
    assert engine.most_running == 3 and len(shop.opened) == 10 and sorted(shop.closed) == sorted(shop.opened)


async def test_a_technical_episode_is_played_again_from_its_start_with_the_same_noise():
    seen = []

    def turns(session, turn):
        seen.append(session)
        if session.noise[-1] == 1 and session.id.endswith("-1") and turn == 1:
            raise EngineError("dropped")
        return completion(CLICK, STOP) if turn == 0 else DONE

    [group] = await collect_groups(rollout(fakes.Engine(turns)), [assignment(4)], lambda g: None)
    assert group.scored and [len(t.turns) for t in group.trajectories] == [2, 2]
    assert {(s.id, s.noise) for s in seen} == {("7-1-4-0-1", (7, 1, 4, 0)), ("7-1-4-1-1", (7, 1, 4, 1)), ("7-1-4-1-2", (7, 1, 4, 1))}


async def test_after_the_last_attempt_it_stays_technical():
    def turns(session, turn):
        if session.noise[-1] == 0:
            raise EngineError("gone")
        return DONE

    engine = fakes.Engine(turns)
    [group] = await collect_groups(rollout(engine), [assignment(0)], lambda g: None)
    assert [t.status for t in group.trajectories] == [Status.TECHNICAL, Status.PURCHASE] and not group.scored
    assert len(engine.prompts) == 3 + 1 and sorted(engine.released) == ["7-1-0-0-1", "7-1-0-0-2", "7-1-0-0-3", "7-1-0-1-1"]


async def test_a_waiting_retry_holds_no_place():
    # one place only: were it held during the backoff, the other episode could not finish first
    order = []

    def turns(session, turn):
        order.append(session.id)
        if session.id == "7-1-0-0-1":
            raise EngineError("dropped")
        return DONE

    await collect_groups(rollout(fakes.Engine(turns), concurrency=1, backoff=0.02), [assignment(0)], lambda g: None)
    assert order == ["7-1-0-0-1", "7-1-0-1-1", "7-1-0-0-2"]


async def test_cancellation_leaves_no_task_and_no_lease():
    engine, shop = fakes.Engine(lambda s, t: DONE, delay=lambda s: 60.0), fakes.Shop()
    before = asyncio.all_tasks()
    collection = asyncio.create_task(collect_groups(rollout(engine, shop), [assignment(i) for i in range(4)], lambda g: None))
    await asyncio.sleep(0.02)
    collection.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collection
    assert len(shop.opened) == 4 and sorted(shop.closed) == sorted(shop.opened) and len(engine.released) == 4
    assert engine.running == 0 and asyncio.all_tasks() == before


async def test_a_full_disk_ends_the_collection_with_its_own_error():
    engine, shop = fakes.Engine(lambda s, t: DONE, delay=lambda s: 60.0 if s.noise[2] else 0.0), fakes.Shop()
    before = asyncio.all_tasks()

    def on_group(group):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await collect_groups(rollout(engine, shop), [assignment(i) for i in range(2)], on_group)
    assert sorted(shop.closed) == sorted(shop.opened) and asyncio.all_tasks() == before


async def test_further_waves_fill_what_is_missing():
    def turns(session, turn):
        if session.noise[2] in (11, 12):
            raise EngineError("gone")
        return DONE

    waves = []

    def missing(groups):
        waves.append([g.index for g in groups])
        return 4 - sum(g.scored for g in groups)

    groups = await collect_until(rollout(fakes.Engine(turns)), assignment, 10, 4, missing, lambda g: None)
    assert waves == [[10, 11, 12, 13], [10, 11, 12, 13, 14, 15]] and [g.index for g in groups] == waves[-1]


def test_an_assignment_carries_its_masks_chunks():
    with pytest.raises(ValueError, match="not those of the mask"):
        Assignment(0, TASK, Mask(MaskKind.ASSISTED, ("look@1",)), ())


# ------------------------------------------------------------------------------------------- what was injected, which weights


def guided(index, own):
    return Assignment(index, TASK, Mask(MaskKind.MIXED), (), own)


async def test_every_episode_keeps_what_its_prompt_carried_and_the_weights_that_the_engine_confirmed():
    chunks = (Chunk("a", 1, "a", "", "do a"), Chunk("b", 2, "b", "", "do b"))
    shared = Assignment(0, TASK, Mask(MaskKind.ASSISTED, ("a@1", "b@2")), chunks)
    own = ((Mask.skill_free(), ()), (Mask(MaskKind.ASSISTED, ("b@2",)), chunks[1:]))
    engine = fakes.Engine(lambda s, t: DONE)
    one, two = await collect_groups(rollout(engine), [shared, guided(1, own)], lambda g: None)
    assert [t.injected for t in one.trajectories] == [("a@1", "b@2")] * 2 and one.masks == (shared.mask,) * 2
    assert [t.injected for t in two.trajectories] == [(), ("b@2",)] and two.masks == (own[0][0], own[1][0])
    assert {t.weights for g in (one, two) for t in g.trajectories} == {("w3",)}
    # The fake chat writes a token for each chunk: episodes of the mixed group really saw different prompts.
    assert sorted(len(p) for p in engine.prompts) == [4, 5, 6, 6]


async def test_weights_that_change_meanwhile_are_asked_for_and_unknown_ones_stay_unconfirmed():
    engine = fakes.Engine(lambda s, t: completion(CLICK, STOP, weight_versions=(3, 4)) if t == 0 else completion(BUY, STOP, weight_versions=(4,)))

    def new_weights(session):
        engine.health = Health(True, 4, "w4")  # loaded while the first turn is in flight
        return 0.0

    engine.delay = new_weights
    [group] = await collect_groups(rollout(engine), [assignment(0)], lambda g: None)
    assert [t.weights for t in group.trajectories] == [("w3", "w4")] * 2
    lost = fakes.Engine(lambda s, t: completion(BUY, STOP, weight_versions=(2,)))
    [group] = await collect_groups(rollout(lost), [assignment(0)], lambda g: None)
    assert [t.weights for t in group.trajectories] == [("",)] * 2


async def test_an_engine_that_does_not_answer_confirms_nothing():
    engine = fakes.Engine(lambda s, t: DONE)

    async def silent():
        raise EngineError("no answer")

    engine.healthy = silent
    [group] = await collect_groups(rollout(engine), [assignment(0)], lambda g: None)
    assert group.scored and [t.weights for t in group.trajectories] == [("",)] * 2


async def test_a_mixed_group_has_a_mask_for_each_episode():
    with pytest.raises(ValueError, match="mixed group only"):
        guided(0, ())
    with pytest.raises(ValueError, match="masks for 1 episodes, and 2 to play"):
        await collect_groups(rollout(fakes.Engine(lambda s, t: DONE)), [guided(0, ((Mask.skill_free(), ()),))], lambda g: None)
