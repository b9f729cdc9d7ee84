"""What an interrupted run left is taken as it is where it still holds: groups and retries of the same weights, tasks and masks. Garbage is not."""

import json
import types
from pathlib import Path

import pytest
from loop.parts_of_fakes import BANK, TASKS, Engine, chunk, make_parts
from rollout.fakes import BUY, CLICK, NOISE, STOP, completion

from configs import pocket
from intraskill import evaluation, fast_loop, loop, slow_loop, summary
from intraskill.evaluation import Case
from intraskill.fast_loop import Position
from intraskill.grpo.learner import TrainState
from intraskill.parts import RETRY, TRAIN
from intraskill.rollout import records
from intraskill.run_directory import read_json
from intraskill.skills import triage
from intraskill.skills.bank import Bank
from intraskill.skills.ledger import Ledger
from intraskill.types import Health, InputError, Mask, Published

GROUPS, SIZE = 6, 3
PUBLISHED = Published(3, "nowhere", "w3")


class Killed(BaseException):
    """What a kill is to code that cannot see it."""


class SGLangLike(Engine):
    """As a server that samples anew each time it is asked: `life` decides what it samples, whatever the noise that it is given."""

    def __init__(self, life: int, broken=()):
        super().__init__(broken)
        self.life = life

    async def generate(self, prompt_ids, *, session, sampling):
        await super().generate(prompt_ids, session=session, sampling=sampling)  # counts, and fails where it shall
        choice = hash((self.life, session.noise, len(prompt_ids))) % 3
        return completion((BUY, CLICK, NOISE)[choice], STOP)


def settings(**changes):
    config = pocket.get_config()
    config.rollout.update({"group_size": SIZE, "oversample": GROUPS, "groups_per_step": 4, "max_context": 200, "max_steps": 2, "attempts": 1})
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


async def step(path: Path, engine: Engine, *, first=0, bank=BANK, **changes):
    """One step's rollout: groups, admission, and what was said."""
    config = settings(**changes)
    parts, lines = make_parts(path, config, engine)
    played = await fast_loop.rollout(parts, bank, slow_loop.make_curriculum(config, bank, {}), 0, 0, first)
    return played.groups, played.admission, [line["said"] for line in lines if "said" in line]


def file_of(path: Path, index: int) -> Path:
    return path / f"rounds/000/groups/{index:08d}.json"


async def test_finished_groups_are_read_and_only_the_others_are_played(tmp_path):
    whole, admission, said = await step(tmp_path, Engine())
    assert not said
    stamps = {i: file_of(tmp_path, i).stat().st_mtime_ns for i in range(GROUPS)}
    for index in (2, 5):
        file_of(tmp_path, index).unlink()
    engine = Engine()
    groups, again, said = await step(tmp_path, engine)
    assert groups == whole and again == admission
    assert {int(s.split("-")[2]) for s in engine.released} == {2, 5} and len(engine.released) == 2 * SIZE
    assert said == [f"step 0: 4 of {GROUPS} groups were finished before the interruption and were not played again"]
    assert all(file_of(tmp_path, i).stat().st_mtime_ns == stamps[i] for i in stamps if i not in (2, 5))


async def test_a_further_wave_is_reused_as_well(tmp_path):
    """Groups 1 to 3 fail technically, so one more is needed; the first life fills the step, the second plays nothing but the failures."""
    broken = [(TRAIN, i) for i in (1, 2, 3)]
    whole, admission, _ = await step(tmp_path, Engine(broken))
    assert len(whole) == GROUPS + 1 and len(admission.technical) == 3
    engine = Engine(broken)
    groups, again, _ = await step(tmp_path, engine)
    assert groups == whole and again == admission
    assert {int(s.split("-")[2]) for s in engine.released} == {1, 2, 3}, "a technical failure may have been the outage that ended the first life"


def rewrite(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


DAMAGES = {
    "other weights": lambda path: rewrite(path, lambda r: r["trajectories"][0].update(weights=["w2"])),
    "unconfirmed weights": lambda path: rewrite(path, lambda r: r["trajectories"][1].update(weights=[""])),
    "another mask": lambda path: rewrite(path, lambda r: r["mask"].update(kind="full", chunk_ids=[])),
    "another task": lambda path: rewrite(path, lambda r: r["task"].update(id="task-99")),
    "another group": lambda path: rewrite(path, lambda r: r.update(index=77)),
    "too few episodes": lambda path: rewrite(path, lambda r: r["trajectories"].pop()),
}
GARBAGE = {"nothing": b"", "half a file": b'{"schema": 1, "ind', "no object": b"[1]", "null": b"null", "bytes": bytes(range(256)), "NaN": b"NaN"}
GARBAGE |= {"deep": b"[" * 100_000, "no fields": b'{"schema": 1}', "digits": b"1" * 5000, "another schema": b'{"schema": 99}'}


@pytest.mark.parametrize("name", [*DAMAGES, *GARBAGE])
async def test_a_group_that_would_not_be_played_like_this_is_played_again(tmp_path, name):
    whole, _, _ = await step(tmp_path, Engine())
    path = file_of(tmp_path, 3)
    if name in DAMAGES:
        DAMAGES[name](path)
    else:
        path.write_bytes(GARBAGE[name])
    engine = Engine()
    groups, _, said = await step(tmp_path, engine)
    assert groups == whole and records.from_json(read_json(path)) == whole[3]
    assert {int(s.split("-")[2]) for s in engine.released} == {3}
    assert len(said) == (1 if name in DAMAGES else 2) and all(str(path) in line for line in said[:-1])


async def test_weights_that_the_engine_does_not_serve_any_more_count_for_nothing(tmp_path):
    await step(tmp_path, Engine())
    engine = Engine()
    engine.health = Health(True, 3, "other")
    groups, _, _ = await step(tmp_path, engine)
    assert len(engine.released) == GROUPS * SIZE and {t.weights for g in groups for t in g.trajectories} == {("other",)}


async def test_with_an_engine_that_samples_anew_tasks_masks_and_admission_rules_stay(tmp_path):
    whole, _, _ = await step(tmp_path / "whole", SGLangLike(1))
    first, _, _ = await step(tmp_path / "run", SGLangLike(2))
    for index in (1, 4, 5):  # not finished when the first life ended
        file_of(tmp_path / "run", index).unlink()
    groups, admission, _ = await step(tmp_path / "run", SGLangLike(3))
    assert [(g.index, g.task, g.mask) for g in groups[:GROUPS]] == [(g.index, g.task, g.mask) for g in whole[:GROUPS]]
    assert [groups[i] for i in (0, 2, 3)] == [first[i] for i in (0, 2, 3)], "what was finished is what trains"
    assert groups != whole and groups != first, "tokens are not the same"
    config = settings()
    assert admission == fast_loop.admit(groups, config.rollout.groups_per_step, config.rollout.max_technical_in_a_row)


# ---------------------------------------------------------------------------------------------------------------- round's end


def position(num_groups: int) -> Position:
    return Position(step=1, next_group=num_groups, round_starts=(0,))


async def test_a_round_ends_with_its_own_groups(tmp_path):
    whole, _, _ = await step(tmp_path, Engine())
    file_of(tmp_path, GROUPS).write_text("what a life that went another way left")
    parts, _ = make_parts(tmp_path, settings())
    assert slow_loop.groups_of_round(parts, 0, position(GROUPS)) == whole
    assert sorted(p.name for p in (tmp_path / "rounds/000/groups").iterdir()) == [f"{i:08d}.json" for i in range(GROUPS)]


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
async def test_a_damaged_group_of_a_step_that_is_done_is_an_error(tmp_path, content):
    await step(tmp_path, Engine())
    file_of(tmp_path, 1).write_bytes(content)
    parts, _ = make_parts(tmp_path, settings())
    with pytest.raises(InputError) as error:
        slow_loop.groups_of_round(parts, 0, position(GROUPS))
    assert str(file_of(tmp_path, 1)) in str(error.value)


async def test_retries_are_written_one_by_one_and_reused(tmp_path):
    groups, _, _ = await step(tmp_path, Engine(), bank=Bank((chunk("b"),)))  # without a@1 the fake policy never succeeds
    wrong = [g.index for g in groups if g.all_wrong]
    assert len(wrong) == GROUPS

    class Dies(Engine):
        async def generate(self, prompt_ids, *, session, sampling):
            if session.noise[2] == wrong[2]:
                raise Killed
            return await super().generate(prompt_ids, session=session, sampling=sampling)

    bank = Bank((chunk("a", text="mind the budget"),))
    config = settings(rollout__num_slots=1)  # one after the other
    parts, _ = make_parts(tmp_path, config, Dies())
    with pytest.raises(Killed):
        await slow_loop.retry(parts, PUBLISHED, groups, bank, 0)
    assert [i for i in wrong if "retry" in read_json(file_of(tmp_path, i))] == wrong[:2]

    engine = Engine()
    parts, _ = make_parts(tmp_path, config, engine)
    cases = await slow_loop.retry(parts, PUBLISHED, groups, bank, 0)
    assert sorted(int(s.split("-")[2]) for s in engine.released) == wrong[2:]
    assert [(c.group.index, c.triage) for c in cases] == [(i, triage.Triage.INTERNALISED_DEFICIT) for i in wrong]

    for digest, num_played in (("w4", len(wrong)), ("w4", 0), ("w3", len(wrong))):  # other weights, the same, the former
        engine = Engine()
        engine.health = Health(True, 3, digest)
        parts, _ = make_parts(tmp_path, config, engine)
        await slow_loop.retry(parts, Published(3, "nowhere", digest), groups, bank, 0)
        assert len(engine.released) == num_played

    rewrite(file_of(tmp_path, wrong[0]), lambda r: r.update(retry={"schema": 1}))
    engine = Engine()
    parts, lines = make_parts(tmp_path, config, engine)
    assert await slow_loop.retry(parts, PUBLISHED, groups, bank, 0) == cases
    assert len(engine.released) == 1 and any(str(file_of(tmp_path, wrong[0])) in line.get("said", "") for line in lines)


# -------------------------------------------------------------------------------------------------------- garbage, file by file


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_in_what_a_round_starts_from(tmp_path, content):
    config = settings(bank__path="given.json")
    for name in ("bank.json", "curriculum.json"):
        parts, _ = make_parts(tmp_path / name, config)
        slow_loop.begin(parts)
        path = tmp_path / name / "rounds/000" / name
        path.write_bytes(content)
        with pytest.raises(InputError) as error:
            slow_loop.begin(parts)
            slow_loop.load_round(parts, 0)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("name", ["manifest.json", "episodes.jsonl", "summary.json"])
async def test_garbage_in_an_evaluation(tmp_path, name, content):
    parts, _ = make_parts(tmp_path, settings())
    cases = [Case(task, 0, Mask.skill_free(), ()) for task in TASKS[:2]]

    async def play():
        return await evaluation.run(tmp_path / "e", "e", parts.rollout(RETRY, group_size=1), cases, parts.identity("w3"), "bank")

    await play()
    (tmp_path / "e" / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        await play()
    assert str(tmp_path / "e") in str(error.value)


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_the_ledger_and_in_a_rounds_summary(tmp_path, content):
    (tmp_path / "ledger.jsonl").write_bytes(content)
    if content:  # an empty ledger is one without entries
        with pytest.raises(InputError, match="ledger.jsonl:1: not a ledger entry"):
            Ledger(tmp_path / "ledger.jsonl").entries()
    parts, _ = make_parts(tmp_path, settings(schedule__rounds=1))
    path = tmp_path / "rounds/000/summary.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        summary.write(parts, {}, {}, 0.0)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("line", ['{"round": "0", "fate": "stale"}', '{"round": 0, "fate": "stale", "wording": []}', '{"round": 0, "fate": "x"}'])
def test_a_ledger_entry_of_other_types(tmp_path, line):
    (tmp_path / "ledger.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match="not a ledger entry"):
        Ledger(tmp_path / "ledger.jsonl").entries()


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path):
    """It would drop metrics.jsonl and play everything again; before the first round's end there may be none yet."""
    parts, _ = make_parts(tmp_path, settings())
    parts.checkpoints = types.SimpleNamespace(latest=lambda: None)
    begun = []
    parts.learner = types.SimpleNamespace(init=lambda params: object.__new__(TrainState))
    parts.metrics.restore = begun.append
    object.__setattr__(parts.policy, "params", None)
    assert loop.restore(parts)[1].step == 0 and begun == [{"num_lines": 0}]
    parts.run.round(0).mkdir(parents=True)
    (parts.run.round(0) / "summary.json").write_text("{}")
    with pytest.raises(InputError, match="checkpoints holds no checkpoint, though a round is done: restore it from a copy"):
        loop.restore(parts)
    assert len(begun) == 1


def test_a_position_of_another_version_is_refused():
    with pytest.raises(InputError, match="is not this version's .KeyError: 'next_group'.*resume with the version"):
        Position.from_json({"step": 3})
