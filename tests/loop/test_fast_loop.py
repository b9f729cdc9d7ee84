"""The fast loop's bookkeeping: which task a group plays, where a run stands, and what is said about the groups of a step."""

import dataclasses
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
from rollout.fakes import completion
from rollout.groups import group, trajectory

from configs import pocket
from intraskill import slow_loop
from intraskill.fast_loop import Position, chunks_of, task_of
from intraskill.parts import Parts
from intraskill.skills.bank import Bank
from intraskill.skills.curriculum import Curriculum
from intraskill.step_metrics import prefilled_per_new_token, rollout_metrics, rollout_speed
from intraskill.types import Chunk, Group, InputError, Mask, MaskKind, Status, Task, ToolCall, Trajectory, Turn

BANK = Bank((Chunk("a", 1, "a", "", "do a"), Chunk("b", 2, "b", "", "do b"), Chunk("c", 1, "c", "", "do c")))
CURRICULUM = Curriculum(BANK.sha256, 0, 0.25, BANK.ids, (0.5, 0.75, 1.0), (None,) * 3, None)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 5))
def test_every_epoch_is_a_permutation_of_the_tasks(num_tasks, seed, epoch):
    tasks = [Task(f"t{i}", "x", {}) for i in range(num_tasks)]
    played = [task_of(tasks, seed, epoch * num_tasks + i).id for i in range(num_tasks)]
    assert sorted(played) == sorted(t.id for t in tasks)
    assert played == [task_of(tasks, seed, epoch * num_tasks + i).id for i in range(num_tasks)]


def test_epochs_and_seeds_have_orders_of_their_own():
    tasks = [Task(f"t{i}", "x", {}) for i in range(20)]
    orders = {tuple(task_of(tasks, seed, epoch * 20 + i).id for i in range(20)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_chunks_come_in_the_mask_s_order():
    assert [c.id for c in chunks_of(BANK, Mask(MaskKind.ASSISTED, ("c@1", "a@1")))] == ["c@1", "a@1"]
    assert chunks_of(BANK, Mask.skill_free()) == ()
    with pytest.raises(KeyError):
        chunks_of(BANK, Mask(MaskKind.ASSISTED, ("b@1",)))


def test_a_position_moves_by_rounds_and_steps_and_survives_json():
    start = Position().enter(0)
    assert start == Position(0, 0, (0,), {})
    one = start.after(5, {"num_lines": 3})
    two = one.after(4, {"num_lines": 6})
    assert (two.step, two.next_group, two.round_starts, two.metrics) == (2, 9, (0,), {"num_lines": 6})
    assert two.enter(0) == two, "entering a round that has begun changes nothing"
    assert two.enter(1).round_starts == (0, 9)
    assert Position.from_json(two.enter(1).to_json()) == two.enter(1)


def test_the_figures_of_a_step_by_hand():
    error = Turn(1, trajectory(0.0).turns[0].completion, "x", None, "no_tool_call", "", "")
    refused = Turn(1, error.completion, "x", ToolCall("click", {}), "", "unavailable_target", "")
    fine = Turn(1, error.completion, "x", ToolCall("click", {}), "", "ok", "")

    def episode(reward: float, *turns: Turn) -> Trajectory:
        tokens = [7, *(i for t in turns for i in t.completion.ids)]
        mask = [False, *(True for t in turns for _ in t.completion.ids)]
        logprobs = [0.0, *(p for t in turns for p in t.completion.logprobs)]
        return Trajectory(tuple(tokens), tuple(mask), tuple(logprobs), turns, Status.PURCHASE, reward, reward == 1.0)

    def of(index, mask, *episodes):
        return Group(index, group(0, 0).task, mask, episodes)

    groups = [
        of(0, Mask.skill_free(), episode(1.0, fine), episode(0.0, error, refused, fine)),
        of(1, Mask(MaskKind.ASSISTED, ("a@1", "b@2")), episode(0.0, fine), episode(0.0, fine)),
        of(2, Mask(MaskKind.ASSISTED), episode(0.5, fine), trajectory(0.0, Status.TECHNICAL)),
    ]
    found = rollout_metrics(groups, CURRICULUM, step=5)
    # Five of six episodes are scored: rewards 1, 0, 0, 0, 0.5; turns 1, 3, 1, 1, 1; every turn has two sampled tokens.
    assert found == {
        "reward": pytest.approx(0.3),
        "success": pytest.approx(0.2),
        "scored_rate": pytest.approx(5 / 6),
        "all_wrong_rate": pytest.approx(1 / 3),
        "zero_variance_share": pytest.approx(0.5),
        "generated_groups": 3,
        "mean_turns": pytest.approx(7 / 5),
        "tokens_per_turn": pytest.approx(2.0),
        # These turns all claim a prompt of one token, nothing cached: 7 computed; of an episode's three prompts 2 x 2 tokens were known.
        "prefilled_per_new_token": pytest.approx(7 / 3),
        "tokens_sampled": 14,
        "weight_lag": 2.0,  # every completion says that version 3 sampled it
        "protocol_errors": pytest.approx(1 / 5),
        "invalid_actions": pytest.approx(1 / 5),
        "skill_free_rate": pytest.approx(1 / 3),
        "q": 0.25,
        "inclusion": {"a@1": 0.5, "b@2": 0.5, "c@1": 0.0},
        "rho": {"a@1": 0.5, "b@2": 0.75, "c@1": 1.0},
        "mixed_groups": 0,
    }
    assert rollout_speed(groups, 4.0) == {"tokens_per_second": 14 / 4, "prefill_tokens_per_second": 7 / 4, "seconds": 4.0}
    assert rollout_speed(groups[:1], 4.0)["tokens_per_second"] == 8 / 4, "what a resumed run read from disk is no speed"


def test_the_lag_of_weights_is_a_mean_over_tokens():
    """Three tokens by version 4, one by version 5, and one by both, of which the older counts: (3 x 3 + 2 + 3) / 5 steps behind step 7."""
    sampled = [((4,), (1, 2, 0)), ((5,), (0,)), ((4, 5), (0,)), ((9,), ())]
    turns = tuple(Turn(1, completion(*ids, weight_versions=v), "", None, "no_tool_call", "", "") for v, ids in sampled)
    tokens, mask = (7, 1, 2, 0, 0, 0), (False, *[True] * 5)
    logprobs = (0.0, *(p for t in turns for p in t.completion.logprobs))
    episode = Trajectory(tokens, mask, logprobs, turns, Status.GENERATION_LENGTH, 0.0, False)
    assert rollout_metrics([Group(0, group(0, 0).task, Mask.skill_free(), (episode,))], CURRICULUM, 7)["weight_lag"] == pytest.approx(14 / 5)


@pytest.mark.parametrize("treatment", [{"withdraw_over": 9}, {"retrieve": 2}])
def test_no_rho_is_reported_where_it_is_not_one_number(treatment):
    found = rollout_metrics([group(0, 0.0, 1.0)], dataclasses.replace(CURRICULUM, **treatment), 0)
    assert "rho" not in found and found["q"] == 0.25 and set(found["inclusion"]) == set(BANK.ids)


@pytest.mark.parametrize(("cached", "ratio"), [(12, 1.0), (2, 28 / 18)])
def test_tokens_prefilled_for_each_new_one_by_hand(cached, ratio):
    """A prompt of 10, 3 sampled, of which the last never entered a cache; then a prompt of 20, of which 12 could have been there."""
    first, second = (Turn(n, completion(1, 2, 0, cached_tokens=c), "", None, "no_tool_call", "", "") for n, c in ((10, 0), (20, cached)))
    tokens = (*range(10), 1, 2, 0, *range(7), 1, 2, 0)
    mask = (*[False] * 10, *[True] * 3, *[False] * 7, *[True] * 3)
    episode = Trajectory(tokens, mask, tuple(-0.5 * m for m in mask), (first, second), Status.PURCHASE, 0.0, False)
    assert prefilled_per_new_token([episode]) == pytest.approx(ratio)
    assert prefilled_per_new_token([]) == 0


def test_figures_exist_when_nothing_was_scored_or_assisted():
    found = rollout_metrics([group(0, None, None)], CURRICULUM, 0)
    assert found["scored_rate"] == 0 and found["reward"] == 0 and found["zero_variance_share"] == 0
    assert found["inclusion"] == {"a@1": 0.0, "b@2": 0.0, "c@1": 0.0}


def test_a_resumed_run_must_be_given_the_bank_it_began_with(tmp_path):
    one, other = (Bank((Chunk(name, 1, "title", "", "procedure"),)) for name in ("one", "other"))
    settings = {"seed": 0, "bank": {"path": "given.json"}, "curriculum": pocket.get_config().curriculum.to_dict()}
    run = types.SimpleNamespace(round=lambda index: tmp_path / f"{index:03d}")

    def parts(bank):
        made = object.__new__(Parts)  # the three attributes that matter here, without an engine and a learner
        made.run, made.initial_bank, made.config = run, bank, ConfigDict(settings)
        return made

    slow_loop.begin(parts(one))
    before = (tmp_path / "000" / "bank.json").read_bytes()
    slow_loop.begin(parts(one))
    with pytest.raises(InputError, match="given.json is not the bank that this run began with"):
        slow_loop.begin(parts(other))
    assert (tmp_path / "000" / "bank.json").read_bytes() == before
