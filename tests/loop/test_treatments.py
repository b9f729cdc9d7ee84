"""Every treatment is a config, and what its config defines is what prompts carried: read from the files that a run leaves."""

import json

import pytest
from loop.parts_of_fakes import BANK, NEW, TASKS, Engine, chunk, make_parts, seen_in

from configs import coevolve, pocket
from intraskill import evaluation, fast_loop, plan, slow_loop
from intraskill.parts import VALIDATE_MASKED, check_settings
from intraskill.rollout import records
from intraskill.run_directory import read_json, write_json
from intraskill.skills import assignment, gate, retrieval, triage
from intraskill.skills import curriculum as curricula
from intraskill.skills.__main__ import main
from intraskill.skills.bank import Bank, Candidate, CandidatePool, Operation
from intraskill.skills.ledger import Entry, Fate, Ledger
from intraskill.types import InputError, MaskKind, Published, Task

GROUPS = 24
PUBLISHED = Published(3, "nowhere", "w3")


def settings_of(variant: str, source=pocket, **changes):
    config = source.get_config(variant)
    config.rollout.update({"group_size": 3, "oversample": GROUPS, "groups_per_step": 4, "max_context": 200, "max_steps": 2, "attempts": 1})
    config.validation.update({"tasks": len(TASKS), "samples": 1})
    config.test.update({"tasks": 4, "samples": 1})
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    check_settings(config)
    return config


async def play(tmp_path, variant: str, *, bank: Bank = BANK, round_index: int = 0, source=pocket, **changes):
    """One step of the variant's fast loop: its groups as they lie on disk, its curriculum, its metrics."""
    config = settings_of(variant, source, **changes)
    parts, lines = make_parts(tmp_path, config)
    curriculum = slow_loop.make_curriculum(config, bank, {})
    played = await fast_loop.rollout(parts, bank, curriculum, round_index, 0, 0)
    lines.append(dict(played.record))
    files = sorted((tmp_path / f"rounds/{round_index:03d}/groups").glob("*.json"))
    groups = [records.from_json(read_json(path)) for path in files]
    assert [g.index for g in groups] == list(range(config.rollout.oversample))
    for group in groups:
        for mask, trajectory in zip(group.masks, group.trajectories, strict=True):
            # What the prompt's tokens show, what was noted as injected, and what the mask says are three records of one thing.
            assert seen_in(trajectory.tokens) == trajectory.injected == mask.chunk_ids
            assert trajectory.weights == ("w3",)
    return groups, curriculum, lines


# ------------------------------------------------------------------------------------------------- what the fast loop injects


async def test_the_method_draws_one_mask_for_a_group(tmp_path):
    groups, curriculum, lines = await play(tmp_path, "")
    assert [g.mask for g in groups] == [curricula.mask(curriculum, i) for i in range(GROUPS)]
    assert {g.mask.kind for g in groups} == {MaskKind.SKILL_FREE, MaskKind.ASSISTED}
    assert all(len({t.injected for t in g.trajectories}) == 1 for g in groups)
    assert lines[-1]["mixed_groups"] == 0


@pytest.mark.parametrize("source", [pocket, coevolve])
async def test_plain_grpo_injects_nothing(tmp_path, source):
    groups, _, _ = await play(tmp_path, "plain_grpo", source=source)
    assert {g.mask.kind for g in groups} == {MaskKind.SKILL_FREE}
    assert {t.injected for g in groups for t in g.trajectories} == {()}


async def test_without_a_mask_every_prompt_carries_the_whole_bank(tmp_path):
    groups, _, _ = await play(tmp_path, "no_mask")
    assert {t.injected for g in groups for t in g.trajectories} == {BANK.ids}


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
async def test_any_q(tmp_path, q):
    groups, curriculum, lines = await play(tmp_path, f"q={q}", rollout__oversample=100)
    free = sum(g.mask.kind == MaskKind.SKILL_FREE for g in groups)
    assert curriculum.q == q and abs(free - 100 * q) <= 5 * (100 * q * (1 - q)) ** 0.5
    assert lines[-1]["skill_free_rate"] == free / 100


async def test_withdrawal_ends_in_nothing_when_the_run_does(tmp_path):
    # The config counts the run's groups itself: 3 rounds of 2 steps of 10.
    groups, curriculum, _ = await play(tmp_path, "withdrawal", schedule__rounds=3, schedule__steps_per_round=2, rollout__oversample=10)
    assert curriculum.withdraw_over == 60 and groups[0].trajectories[0].injected == BANK.ids
    groups, curriculum, _ = await play(tmp_path / "b", "withdrawal", schedule__rounds=1, schedule__steps_per_round=1, rollout__oversample=80)
    sizes = [len(g.trajectories[0].injected) for g in groups]
    # Linear: 80 groups of 4 chunks at mean inclusion 7/8, 5/8, 3/8, 1/8; a quarter has a standard deviation below 0.06.
    for quarter, expected in enumerate((7 / 8, 5 / 8, 3 / 8, 1 / 8)):
        assert abs(sum(sizes[20 * quarter : 20 * quarter + 20]) / 80 - expected) < 5 * 0.06
    assert {curricula.mask(curriculum, i).chunk_ids for i in range(80, 120)} == {()}
    assert all(g.mask.kind == MaskKind.ASSISTED for g in groups)


async def test_mixed_guidance_differs_within_groups_and_is_marked(tmp_path):
    groups, curriculum, lines = await play(tmp_path, "mixed")
    for group in groups:
        assert group.mask.kind == MaskKind.MIXED
        assert group.masks == tuple(curricula.mask(curriculum, group.index, episode=e) for e in range(3))
    mixed = [g for g in groups if len({t.injected for t in g.trajectories}) > 1]
    assert len(mixed) > GROUPS / 2, "most groups compare contexts, which is what the mark says"
    assert lines[-1]["mixed_groups"] == GROUPS
    assert read_json(tmp_path / "rounds/000/groups/00000000.json")["mask"] == {"kind": "mixed", "chunk_ids": []}
    assert {m.kind for g in groups for m in g.masks} == {MaskKind.SKILL_FREE, MaskKind.ASSISTED}


async def test_retrieval_injects_the_chunks_nearest_to_the_task(tmp_path):
    groups, _, _ = await play(tmp_path, "retrieval")
    by_word = {"budget": "a@1", "colour": "b@1", "size": "c@1"}
    for group in groups:
        named = {by_word[w] for w in group.task.instruction.split() if w in by_word}
        injected = group.trajectories[0].injected
        assert group.mask.kind == MaskKind.RETRIEVED and len(injected) == 2 and named <= set(injected)
    assert {g.mask.chunk_ids for g in groups} == {("a@1", "b@1"), ("a@1", "c@1"), ("b@1", "c@1")}  # d@1 speaks of nothing that tasks ask for


def test_retrieval_by_hand():
    """Words that every chunk has count log 2, one that only one of three has log 4; ties go to the first; ids come in prompt order."""
    bank = Bank((chunk("x", text="read red"), chunk("y", text="read blue"), chunk("z", text="read green blue")))
    for instruction, num, expected in [
        ("green lamp", 1, ("z@1",)),
        ("a blue lamp", 1, ("y@1",)),
        ("a blue lamp", 2, ("y@1", "z@1")),
        ("a Green or red lamp", 2, ("x@1", "z@1")),
        ("read", 2, ("x@1", "y@1")),
        ("nothing in common", 1, ("x@1",)),
        ("blue and green", 1, ("z@1",)),
        ("blue", 9, ("x@1", "y@1", "z@1")),
    ]:
        assert retrieval.nearest(bank, Task("t", instruction, {}), num) == expected, instruction
    assert retrieval.nearest(bank, Task("t", "a lamp", {"likes": "green"}), 1) == ("z@1",)
    assert retrieval.nearest(Bank(), Task("t", "a lamp", {}), 2) == ()


def test_the_condition_with_skills_follows_the_treatment(tmp_path):
    """A policy that was trained on retrieved chunks is tested with retrieved chunks."""
    for variant, expected in [("", lambda task: BANK.ids), ("retrieval", lambda task: retrieval.nearest(BANK, task, 2))]:
        parts, _ = make_parts(tmp_path, settings_of(variant))
        cases = slow_loop.guided_cases(parts, BANK, TASKS, 2)
        assert [(c.task.id, c.sample) for c in cases] == [(t.id, s) for t in TASKS for s in (0, 1)]
        assert all(c.mask.chunk_ids == expected(c.task) == tuple(x.id for x in c.chunks) for c in cases)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bank__revision": "sometimes"}, "bank.revision = 'sometimes'"),
        ({"curriculum__retrieve": 2, "curriculum__mixed": True}, "choose one"),
        ({"curriculum__retrieve": 2, "curriculum__withdraw_over": 9}, "choose one"),
        ({"curriculum__retrieve": -1}, "curriculum.retrieve = -1"),
        ({"curriculum__withdraw_over": -1}, "curriculum.withdraw_over = -1"),
    ],
)
@pytest.mark.parametrize("source", [pocket, coevolve])
def test_treatments_that_contradict_one_another_are_refused(source, changes, words):
    with pytest.raises(InputError, match=words):
        settings_of("", source, **changes)


def test_variants_are_words_and_name_the_run():
    assert pocket.get_config("demo,plain_grpo").name == "pocket-demo-plain-grpo"
    assert pocket.get_config("demo,q=0.5").schedule == pocket.get_config("demo").schedule
    assert coevolve.get_config("retrieval,no_gate").name == "coevolve-retrieval-no-gate"
    for source, bad in ((pocket, "demo,nope"), (pocket, "plain_grpo,demo"), (pocket, "q=x"), (coevolve, "demo")):
        with pytest.raises(ValueError, match=f"configs/{source.__name__.split('.')[1]}.py.*{bad.split(',')[-1]}"):
            source.get_config(bad)


# ------------------------------------------------------------------------------------------------- who decides about the bank

POOL = CandidatePool(BANK, (Candidate(NEW[0], Operation.REWRITE), Candidate(NEW[1], Operation.ADD)))


async def decide(tmp_path, variant: str, pool: CandidatePool = POOL, engine: Engine | None = None, **changes):
    """A round's end: gate or not, next bank and curriculum; what was said meanwhile."""
    config = settings_of(variant, **changes)
    parts, lines = make_parts(tmp_path, config, engine)
    curriculum = slow_loop.make_curriculum(config, pool.bank, {})
    bare, masked, result = await slow_loop.gate_round(parts, PUBLISHED, pool, 0)
    bank, after = slow_loop.next_round(parts, pool.bank, curriculum, pool, result, 0)
    assert (bank, after) == slow_loop.load_round(parts, 1)
    said = [line["said"] for line in lines if "said" in line]
    return {"masked": masked, "result": result, "bank": bank, "before": curriculum, "after": after, "said": said, "parts": parts}


async def test_the_method_measures_and_the_gate_decides(tmp_path):
    found = await decide(tmp_path, "")
    assert found["result"].status == "complete"
    # Chunk a@1 is what makes the fake policy succeed; nothing else does anything.
    assert found["bank"].ids == ("a@1",) and found["result"].contributions["a@1"] == pytest.approx(1, abs=1e-9)
    plan = read_json(tmp_path / "rounds/000/assignments.json")["content"]
    rows = [json.loads(line) for line in (tmp_path / "eval/round000-masked/episodes.jsonl").read_text().splitlines()]
    assert [[r["task_id"], r["sample"], r["injected"]] for r in rows] == plan["rows"] and {tuple(r["weights"]) for r in rows} == {("w3",)}
    assert len({tuple(r["injected"]) for r in rows}) > 8
    bare = [json.loads(line) for line in (tmp_path / "eval/round000-bare/episodes.jsonl").read_text().splitlines()]
    assert {tuple(r["injected"]) for r in bare} == {()} and len(bare) == len(rows) == len(TASKS)


async def test_a_round_is_not_analysed_without_the_ledger_of_those_before(tmp_path):
    parts = (await decide(tmp_path, ""))["parts"]
    write_json(tmp_path / "rounds/000/summary.json", {"candidates": [c.chunk.id for c in POOL.candidates]})
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(InputError, match="lacks 2 entries of round 0, e.g. that .* was candidate: restore it from a copy"):
        slow_loop.require_history(parts, 1)
    Ledger(path).append([Entry(0, Fate.CANDIDATE, chunk_id=c.chunk.id) for c in POOL.candidates])
    slow_loop.require_history(parts, 1)
    lines = path.read_text().splitlines()
    assert len(lines) == len(POOL.chunks) + len(POOL.candidates)
    for number in range(len(lines)):
        path.write_text("\n".join((*lines[:number], *lines[number + 1 :])) + "\n")
        with pytest.raises(InputError, match="lacks 1 entries of round 0"):
            slow_loop.require_history(parts, 1)
    path.unlink()
    with pytest.raises(InputError, match=f"lacks {len(lines)} entries of round 0"):
        await slow_loop.analyse(parts, [], BANK, 1)
    slow_loop.require_history(parts, 0)  # of a first round nothing is known


@pytest.mark.parametrize("variant", ["fixed_bank", "plain_grpo"])
async def test_a_fixed_bank_is_neither_retried_nor_measured_nor_changed(tmp_path, variant):
    found = await decide(tmp_path, variant)
    assert found["bank"] == BANK and found["after"] == found["before"] and found["result"] is None and found["masked"] is None
    assert [p.name for p in (tmp_path / "eval").iterdir()] == ["round000-bare"] and not (tmp_path / "rounds/000/gate.json").exists()
    parts = found["parts"]
    groups, _, _ = await play(tmp_path, variant, bank=found["bank"], round_index=1)
    wrong = [g for g in groups if g.all_wrong]
    prompts = len(parts.engine.prompts)
    cases = await slow_loop.retry(parts, PUBLISHED, groups, BANK, 1)
    assert wrong and triage.counts(cases)["retry"] == len(wrong) and len(parts.engine.prompts) == prompts
    assert {i for g in groups for i in g.mask.chunk_ids} == (set(BANK.ids) if variant == "fixed_bank" else set())


async def test_without_a_gate_the_candidates_are_injected_unmeasured(tmp_path):
    found = await decide(tmp_path, "no_gate")
    assert found["result"] is None and found["masked"] is None and found["bank"].ids == ("a@1", "b@2", "c@1", "d@1", "n@1")
    assert found["after"].rho == (0.5,) * 5 and found["after"].contributions == (None,) * 5
    groups, _, _ = await play(tmp_path, "no_gate", bank=found["bank"], round_index=1)
    assert {i for g in groups for t in g.trajectories for i in t.injected} == set(found["bank"].ids)
    same = await decide(tmp_path / "none", "no_gate", CandidatePool(BANK))
    assert same["bank"] == BANK and same["after"] == same["before"]


async def test_without_a_gate_the_bank_does_not_outgrow_its_limit(tmp_path):
    both = CandidatePool(BANK, (Candidate(NEW[0], Operation.REWRITE), Candidate(NEW[1], Operation.ADD), Candidate(NEW[2], Operation.ADD)))
    assert (await decide(tmp_path, "no_gate", both, bank__max_active=5))["bank"].ids == ("a@1", "b@2", "c@1", "d@1", "n@1")
    rivals = CandidatePool(BANK, (Candidate(chunk("b", 3), Operation.REWRITE), Candidate(chunk("b", 2), Operation.REWRITE)))
    assert (await decide(tmp_path / "b", "no_gate", rivals))["bank"].ids == ("a@1", "b@3", "c@1", "d@1")


# ------------------------------------------------------------------------------------------ gates with gaps, gates that are blind


async def test_an_incomplete_gate_stops_the_run_and_is_completed_when_it_is_resumed(tmp_path):
    whole = await decide(tmp_path / "whole", "")
    run = tmp_path / "run"
    with pytest.raises(InputError, match="round 0: the gate is incomplete.*masked episode of task task-05 sample 0 is missing.*resume") as error:
        await decide(run, "", engine=Engine(broken=[(VALIDATE_MASKED, 5)]))
    assert "\n" not in str(error.value)
    recorded = gate.GateResult.load(run / "rounds/000/gate.json")
    assert recorded.status == "incomplete" and recorded.selected == () and not (run / "rounds/001").exists()
    engine = Engine()
    found = await decide(run, "", engine=engine)
    assert found["result"].record == whole["result"].record and found["bank"].record == whole["bank"].record
    assert len(engine.released) == 1, "only the missing episode is played"


async def test_a_gate_that_cannot_be_completed_changes_nothing_and_the_run_goes_on(tmp_path):
    broken = [(VALIDATE_MASKED, 5)]
    with pytest.raises(InputError, match="incomplete"):
        await decide(tmp_path, "", engine=Engine(broken))
    found = await decide(tmp_path, "", engine=Engine(broken))
    assert found["result"].status == "incomplete" and found["bank"] == BANK and found["after"] == found["before"]
    assert any("task-05" in text and "changes nothing" in text for text in found["said"])


async def test_what_a_gate_can_see_is_said_and_stored_before_its_masked_episodes(tmp_path):
    found = await decide(tmp_path, "")
    # No bare episode succeeds: (0 + 1) / (24 + 2), taken as independent of the masked ones.
    sigma = assignment.independent_sigma(1 / 26)
    stored = read_json(tmp_path / "rounds/000/assignments.json")["content"]["power"]
    assert stored["sigma"] == pytest.approx(sigma) and stored["source"] == "as if bare and masked success, 4%, were independent"
    drawn = assignment.assign(POOL, seed=0, split="validation", task_ids=[t.id for t in TASKS])
    assert stored["detectable"] == pytest.approx(assignment.detectable_effects(drawn, sigma))
    low, high = min(stored["detectable"].values()), max(stored["detectable"].values())
    assert (
        found["said"][0] == f"round 0: a gate of 24 pairs finds effects of {low:.3f} to {high:.3f} four times in five (sd 0.27, {stored['source']})"
    )
    # The next gate goes by the residual that this one measured, once there is one.
    bare = evaluation.read(tmp_path / "eval/round000-bare")
    path = tmp_path / "rounds/000/gate.json"
    raw = read_json(path)
    raw["content"]["fits"]["reward"]["sigma"] = 0.125
    path.write_text(json.dumps(raw))
    assert main(["rehash", str(path)]) == 0
    plan = slow_loop.plan_gate(found["parts"], CandidatePool(BANK), bare, 1)
    assert (plan.power.sigma, plan.power.source) == (0.125, "the residual of round 0")


async def test_nobody_pays_for_a_gate_that_cannot_tell_its_chunks_apart(tmp_path):
    found = await decide(tmp_path, "", validation__tasks=5)
    assert found["masked"] is None and [p.name for p in (tmp_path / "eval").iterdir()] == ["round000-bare"]
    problem = assignment.assign(POOL, seed=0, split="validation", task_ids=[t.id for t in TASKS[:5]]).problem
    assert problem and found["result"].problems == (problem,)
    assert found["bank"] == BANK and found["said"][0] == f"round 0: {problem}"
    assert set(read_json(tmp_path / "rounds/000/assignments.json")["content"]["power"]["detectable"].values()) == {None}


def test_the_plan_says_what_the_gate_will_see_and_counts_what_a_treatment_plays():
    demo, fixed, small = (plan.of(pocket.get_config(variant)) for variant in ("demo", "demo,fixed_bank", "smoke"))
    # 300 pairs, 5 chunks and up to 6 candidates, two independent coins: 2.8016 * sqrt(1/2) * sqrt(4 * 11 / (300 * 12)).
    assert demo.detectable_effect == pytest.approx(0.21901, abs=1e-5) and fixed.detectable_effect == 0
    assert demo.evaluated_episodes - fixed.evaluated_episodes == 2 * 300  # two rounds' masked validation
    assert small.detectable_effect == pytest.approx(2.8016 * (44 / (2 * 16 * 12)) ** 0.5, abs=1e-3)
