"""Evaluations are recorded once and read back as they were, refuse another manifest, and compare task by task."""

import dataclasses
import json

import numpy as np
import pytest
from rollout import fakes
from rollout.fakes import BUY, CLICK, NOISE, STOP, completion

from intraskill import evaluation
from intraskill.evaluation import Case, Outcome, Result
from intraskill.rollout.agent import Limits
from intraskill.rollout.collect import Rollout
from intraskill.skills import assignment, gate
from intraskill.skills.bank import Bank, CandidatePool
from intraskill.skills.gate import Identity
from intraskill.types import Chunk, EngineError, Health, InputError, Mask, MaskKind, ShopError, Task

IDENTITY = Identity(weights="w3", sampling="s", prompt="p", environment="e")
TASKS = [Task(f"task-{i}", "a lamp", {}) for i in range(3)]
CHUNKS = (Chunk("a", 1, "a", "", "do a"), Chunk("b", 2, "b", "", "do b"))


def make_rollout(turns=None, shop=None, **changes) -> Rollout:
    engine = fakes.Engine(turns or (lambda session, turn: completion(CLICK, STOP) if turn == 0 else completion(BUY, STOP)))
    return Rollout(
        engine, shop or fakes.Shop(), fakes.Chat(), fakes.SAMPLING, Limits(200, 5), (1, 4), **{"group_size": 8, "concurrency": 4, **changes}
    )


async def run(directory, planned=None, *, rollout=None, identity=IDENTITY, bank="bank-1", condition="base"):
    planned = evaluation.cases(TASKS, 2, Mask.skill_free(), ()) if planned is None else planned
    return await evaluation.run(directory, condition, rollout or make_rollout(), planned, identity, bank)


def test_cases_are_every_task_as_often_as_asked():
    planned = evaluation.cases(TASKS[:2], 2, Mask(MaskKind.FULL, ("a@1",)), CHUNKS[:1])
    assert [(c.task.id, c.sample) for c in planned] == [("task-0", 0), ("task-0", 1), ("task-1", 0), ("task-1", 1)]
    assert all(c.mask.chunk_ids == ("a@1",) and c.chunks == CHUNKS[:1] for c in planned)


async def test_what_is_read_back_equals_what_was_played(tmp_path):
    seen = []
    mask = Mask(MaskKind.ASSISTED, ("a@1", "b@2"))
    planned = [Case(TASKS[0], 0, mask, CHUNKS), Case(TASKS[1], 0, Mask(MaskKind.ASSISTED), ())]
    played = await evaluation.run(tmp_path / "e", "base", make_rollout(), planned, IDENTITY, "bank-1", lambda: seen.append(1))
    assert len(seen) == 2
    assert evaluation.read(tmp_path / "e") == played
    first = played.outcomes[0]
    assert first == Outcome(
        "task-0", 0, ("a@1", "b@2"), ("w3",), "purchase", 1.0, True, {"r_type": 1.0, "r_att": 0.0, "r_opt": 0.0, "r_price": 0.0}, 2, 4, 0, 0
    )
    assert sorted(p.name for p in (tmp_path / "e").iterdir()) == ["episodes.jsonl", "manifest.json", "summary.json"]


async def test_a_complete_evaluation_is_read_and_not_played_again(tmp_path):
    first = await run(tmp_path / "e")
    idle = make_rollout(turns=())  # would fail on its first turn
    seen = []
    planned = evaluation.cases(TASKS, 2, Mask.skill_free(), ())
    again = await evaluation.run(tmp_path / "e", "base", idle, planned, IDENTITY, "bank-1", lambda: seen.append(1))
    assert again == first and idle.engine.prompts == [] and len(seen) == 6


async def test_an_interrupted_evaluation_is_played_again(tmp_path):
    first = await run(tmp_path / "e")
    (tmp_path / "e" / "summary.json").unlink()  # the last file written
    (tmp_path / "e" / "episodes.jsonl").write_text("half")
    assert await run(tmp_path / "e") == first == evaluation.read(tmp_path / "e")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"identity": dataclasses.replace(IDENTITY, weights="w2")}, "identity"),
        ({"bank": "bank-2"}, "bank_sha256"),
        ({"condition": "final"}, "condition"),
        ({"rollout": make_rollout()}, None),
        ({"planned": evaluation.cases(TASKS, 1, Mask.skill_free(), ())}, "episodes"),
        ({"planned": evaluation.cases(TASKS, 2, Mask(MaskKind.FULL, ("a@1",)), CHUNKS[:1])}, "episodes"),
    ],
)
async def test_another_manifest_is_refused(tmp_path, change, name):
    await run(tmp_path / "e")
    if name is None:
        change = {"rollout": dataclasses.replace(change["rollout"], noise=(2, 4))}
        name = "noise"
    before = {p.name: p.read_bytes() for p in (tmp_path / "e").iterdir()}
    with pytest.raises(InputError, match=name) as error:
        await run(tmp_path / "e", **change)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert {p.name: p.read_bytes() for p in (tmp_path / "e").iterdir()} == before


async def test_a_summary_has_the_means_over_scored_episodes(tmp_path):
    def turns(session, turn):
        index = session.noise[2]
        if index == 0:
            raise EngineError("gone")
        script = {1: [NOISE, BUY], 2: [CLICK, CLICK, CLICK, CLICK, CLICK]}.get(index, [BUY])
        return completion(script[turn], STOP)

    shop = fakes.Shop(reward=lambda task_id: 0.5)
    planned = evaluation.cases(TASKS, 1, Mask.skill_free(), ())
    result = await run(tmp_path / "e", planned, rollout=make_rollout(turns, shop, attempts=1, concurrency=1))
    assert [o.status for o in result.outcomes] == ["technical", "purchase", "action_limit"]
    # By hand: the second buys for 0.5 after one protocol error; the third runs out of steps. Each turn has two sampled tokens.
    assert result.summary == {
        "schema_version": 2,
        "condition": "base",
        "success": 0.0,
        "reward": 0.25,
        "turns": 3.5,
        "tokens": 7.0,
        "protocol_errors": 0.5,
        "invalid_actions": 0.0,
        "num_episodes": 3,
        "num_technical": 1,
        "num_tasks": 2,
        "weights_digest": "w3",
        "bank_sha256": "bank-1",
    }
    assert result.outcomes[0].error and not result.outcomes[0].scored
    assert result.by_task("reward") == {"task-1": 0.5, "task-2": 0.0}


def test_a_summary_of_nothing_scored_has_no_means():
    technical = Outcome("t", 0, (), (), "technical", 0.0, False, {}, 0, 0, 0, 0, "gone")
    summary = evaluation.summarise("base", [technical], IDENTITY, "b")
    assert summary["success"] is None and summary["num_technical"] == 1 and summary["num_tasks"] == 0


def result_of(successes: dict[str, list[int | None]]) -> Result:
    outcomes = [
        Outcome(task, i, (), ("w3",), "technical" if s is None else "purchase", float(s or 0), bool(s), {}, 1, 1, 0, 0)
        for task, values in successes.items()
        for i, s in enumerate(values)
    ]
    return Result("c", IDENTITY, tuple(outcomes), {})


def test_a_comparison_is_paired_by_task_and_averages_repeated_episodes_first():
    # Task means: 0, 1, 0.5 -> 1, 1, 1. Differences 1, 0, 0.5, mean 0.5. The technical episode does not count.
    first = result_of({"a": [0, 0], "b": [1, 1], "c": [0, 1]})
    second = result_of({"a": [1, 1], "b": [1, None], "c": [1, 1]})
    found = evaluation.compare("second - first", first, second, seed=3)
    assert (found["name"], found["difference"], found["tasks"]) == ("second - first", 0.5, 3)
    assert (found["first"], found["second"]) == (0.5, 1.0)
    assert (found["gains"], found["losses"], found["ties"]) == (2, 0, 1)
    # The bootstrap resamples three tasks: means are sums of three draws from {1, 0, 0.5} over 3; 2.5% and 97.5% cut at 1/27 = 3.7%.
    assert found["interval"] == [found["low"], found["high"]] == [0.0, 1.0]
    assert found == evaluation.compare("second - first", first, second, seed=3)


def test_a_comparison_of_equals_is_zero_and_leaves_out_tasks_without_a_pair():
    one = result_of({"a": [0], "b": [1]})
    found = evaluation.compare("same", one, one)
    assert found["difference"] == 0 and found["interval"] == [0.0, 0.0] and found["unpaired"] == 0
    found = evaluation.compare("gaps", one, result_of({"a": [1], "b": [None]}))
    assert (found["difference"], found["tasks"], found["unpaired"]) == (1.0, 1, 1)
    with pytest.raises(InputError, match="compare runs of one task list"):
        evaluation.compare("nothing shared", one, result_of({"c": [1]}))


async def test_an_outage_is_not_recorded(tmp_path):
    def fault(step):
        raise ShopError("the shop is gone")

    with pytest.raises(InputError, match="6 of 6 episodes failed technically.*the shop is gone.*resume"):
        await run(tmp_path / "e", rollout=make_rollout(shop=fakes.Shop(fault=fault), attempts=1))
    assert not (tmp_path / "e").exists()


async def test_what_the_gate_sees_of_an_episode(tmp_path):
    result = await run(tmp_path / "e", [Case(TASKS[0], 1, Mask(MaskKind.ASSISTED, ("a@1",)), CHUNKS[:1])])
    (observed,) = result.observed
    assert (observed.task_id, observed.sample, observed.injected, observed.identity, observed.scored) == ("task-0", 1, ("a@1",), IDENTITY, True)
    assert observed.outcomes == {"reward": 1.0, "success": 1.0, "r_type": 1.0, "r_att": 0.0, "r_opt": 0.0, "r_price": 0.0}


async def test_numbers_of_an_episode_survive_the_file_exactly(tmp_path):
    shop = fakes.Shop(reward=lambda task_id: 1 / 3)
    result = await run(tmp_path / "e", rollout=make_rollout(shop=shop))
    rows = [json.loads(line) for line in (tmp_path / "e" / "episodes.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["reward"] == 1 / 3 for row in rows)
    assert np.mean([o.reward for o in evaluation.read(tmp_path / "e").outcomes]) == result.summary["reward"]


# ------------------------------------------------------------------------------------------------------- gaps, weights, damage


def broken_at(*indices: int, passes: int = 99):
    """A policy that buys at once, behind an engine that fails the episodes with these indices, each in its first `passes` attempts."""
    failed = dict.fromkeys(indices, 0)

    def turns(session, turn):
        index = session.noise[2]
        if failed.get(index, passes) < passes:
            failed[index] += 1
            raise EngineError("gone")
        return completion(BUY, STOP)

    return make_rollout(turns, attempts=1)


async def test_what_failed_technically_is_played_once_more_when_the_rest_has_ended(tmp_path):
    whole = await run(tmp_path / "whole", rollout=broken_at())
    rollout = broken_at(2, 4, passes=1)
    assert await run(tmp_path / "e", rollout=rollout) == whole
    assert len(rollout.engine.prompts) == 6 + 2


async def test_gaps_are_filled_later_and_nothing_else_is_played_again(tmp_path):
    whole = await run(tmp_path / "whole", rollout=broken_at())
    first = await run(tmp_path / "e", rollout=broken_at(1, 3))
    assert [i for i, o in enumerate(first.outcomes) if not o.scored] == [1, 3] and first.summary["num_technical"] == 2
    assert evaluation.read(tmp_path / "e") == first
    later = broken_at()
    assert await run(tmp_path / "e", rollout=later) == whole == evaluation.read(tmp_path / "e")
    assert [released.split("-")[2] for released in later.engine.released] == ["1", "3"]


async def test_episodes_of_other_weights_are_not_recorded(tmp_path):
    rollout = make_rollout()
    rollout.engine.health = Health(True, 3, "other-weights")
    with pytest.raises(InputError, match="6 of 6 episodes were sampled by other weights than w3, e.g. task task-0 by other-weight.*resume"):
        await run(tmp_path / "e", rollout=rollout)
    moved = make_rollout(lambda session, turn: completion(BUY, STOP, weight_versions=(3, 4) if session.noise[2] == 5 else (3,)))
    moved.engine.health = Health(True, 3, "w3")
    with pytest.raises(InputError, match="1 of 6 episodes.*task task-2 by w3.unconfirmed"):
        await run(tmp_path / "e", rollout=moved)
    assert not (tmp_path / "e").exists()


async def test_a_bare_run_is_reused_for_its_own_identity_only(tmp_path):
    """Read back for the checkpoint that it was played at; refused for another, however the caller calls it."""
    await run(tmp_path / "e")
    idle = make_rollout(turns=())
    assert (await run(tmp_path / "e", rollout=idle)).identity == IDENTITY and idle.engine.prompts == []
    for field in dataclasses.fields(IDENTITY):
        other = dataclasses.replace(IDENTITY, **{field.name: "other"})
        with pytest.raises(InputError, match="holds another evaluation .its identity differ"):
            await run(tmp_path / "e", rollout=idle, identity=other)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [*lines, lines[0]], "does not hold each episode of its manifest once"),
        (lambda lines: [lines[1], *lines[1:]], "does not hold each episode of its manifest once"),
        (lambda lines: lines[1:], "does not hold each episode of its manifest once"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "is damaged"),
        (lambda lines: [*lines[:-1], '{"task_id": "task-2"}'], "is damaged"),
    ],
)
async def test_a_record_with_an_episode_twice_or_missing_is_refused(tmp_path, damage, words):
    await run(tmp_path / "e")
    path = tmp_path / "e" / "episodes.jsonl"
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(InputError, match=words):
        evaluation.read(tmp_path / "e")
    with pytest.raises(InputError, match=words):
        await run(tmp_path / "e")


@pytest.mark.parametrize("name", ["manifest.json", "summary.json"])
@pytest.mark.parametrize("damage", ["text", "bytes", "directory"])
async def test_a_damaged_record_is_refused_with_its_remedy_before_anything_is_played(tmp_path, name, damage):
    await run(tmp_path / "e")
    path = tmp_path / "e" / name
    if damage == "directory":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(b'{"half' if damage == "text" else b"\xff\x00")
    idle = make_rollout()
    with pytest.raises(InputError, match=f"{path} .*, or remove {tmp_path / 'e'} to have it played again"):
        await run(tmp_path / "e", rollout=idle)
    assert idle.engine.prompts == []


async def test_the_gate_checks_the_weights_of_each_episode_and_not_a_stamp(tmp_path):
    """A record in which one bare episode was sampled by other weights: the gate names it, whatever identity the caller expects."""
    pool = CandidatePool(Bank(CHUNKS[:1]))
    plan = assignment.assign(pool, seed=0, split="validation", task_ids=[t.id for t in TASKS])
    planned = [Case(task, 0, a.mask, CHUNKS[:1] if a.chunk_ids else ()) for task, a in zip(TASKS, plan.assignments, strict=True)]
    masked = await run(tmp_path / "masked", planned)
    bare = await run(tmp_path / "bare", evaluation.cases(TASKS, 1, Mask.skill_free(), ()))
    assert gate.run(plan, bare.observed, masked.observed, IDENTITY).problems == ()
    path = tmp_path / "bare" / "episodes.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"w3"', '"w2"'), lines[2]]) + "\n")
    result = gate.run(plan, evaluation.read(tmp_path / "bare").observed, masked.observed, IDENTITY)
    assert result.problems[0] == "bare episode of task task-1 sample 0 is of another identity: weights w2 != w3"
    assert result.status == "incomplete" and result.selected == ()
