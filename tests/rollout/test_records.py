import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.fakes import TASK
from rollout.groups import group

from intraskill.rollout.records import from_json, to_json
from intraskill.types import Completion, Group, InputError, Mask, MaskKind, Status, ToolCall, Trajectory, Turn

finite = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(st.integers(0, 250_000), min_size=1, max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(), lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(), v, max_size=2)
)
objects = st.dictionaries(st.text(), values, max_size=3)


turns = st.fixed_dictionaries(
    {
        "prompt": ids,
        "sampled": st.lists(st.tuples(st.integers(0, 250_000), finite), min_size=1, max_size=4),
        "reason": st.sampled_from(["stop", "length"]),
        "versions": ids,
        "cached": st.integers(0, 99),
        "latency": finite,
        "call": st.none() | st.tuples(st.text(), objects),
        "texts": st.tuples(st.text(), st.text(), st.text(), st.text()),
    }
)
episodes = st.fixed_dictionaries(
    {
        "turns": st.lists(turns, max_size=3),
        "status": st.sampled_from(Status),
        "reward": st.floats(0, 1),
        "detail": objects,
        "error": st.text(),
        "injected": st.lists(st.text(), max_size=2),
        "weights": st.lists(st.text(), max_size=2),
    }
)


def build(episode) -> Trajectory:
    tokens, mask, logprobs, built = (), (), (), ()
    for t in episode["turns"]:
        sampled, lps = zip(*t["sampled"], strict=True)
        completion = Completion(sampled, lps, t["reason"], tuple(t["versions"]), t["cached"], t["latency"])
        text, error, feedback, observation = t["texts"]
        tokens += tuple(t["prompt"])
        built += (Turn(len(tokens), completion, text, t["call"] and ToolCall(*t["call"]), error, feedback, observation),)
        tokens += sampled
        mask += (False,) * len(t["prompt"]) + (True,) * len(sampled)
        logprobs += (0.0,) * len(t["prompt"]) + lps
    reward = episode["reward"]
    seen = {"injected": tuple(episode["injected"]), "weights": tuple(episode["weights"])}
    return Trajectory(tokens, mask, logprobs, built, episode["status"], reward, reward == 1, episode["detail"], episode["error"], **seen)


@given(st.lists(episodes, max_size=3))
def test_round_trip_through_text(drawn):
    trajectories = tuple(build(e) for e in drawn)
    before = Group(17, TASK, Mask(MaskKind.ASSISTED, ("a@1", "b@2")), trajectories)
    text = json.dumps(to_json(before), allow_nan=False)
    assert from_json(json.loads(text)) == before
    own = tuple(Mask(MaskKind.ASSISTED, ("a@1",)) if i % 2 else Mask.skill_free() for i in range(len(drawn)))
    mixed = Group(17, TASK, Mask(MaskKind.MIXED), trajectories, own)
    assert from_json(json.loads(json.dumps(to_json(mixed)))) == mixed


def test_what_is_stored():
    record = to_json(group(3, 1.0))["trajectories"][0]
    assert record["tokens"] == [7, 1, 0] and record["loss_mask"] == "011" and record["logprobs"] == [-0.5, -1.5]
    assert record["turns"][0]["num_tokens"] == 2 and record["status"] == "purchase"


def test_another_schema_is_refused():
    with pytest.raises(InputError, match="schema 9, this version reads 1"):
        from_json({**to_json(group(0, 1.0)), "schema": 9})


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.pop("task"),
        lambda r: r["trajectories"][0].pop("tokens"),
        lambda r: r["trajectories"][0]["logprobs"].pop(),
        lambda r: r["trajectories"][0].update(loss_mask="01"),
        lambda r: r["trajectories"][0]["turns"][0].update(num_tokens=1),
        lambda r: r.update(trajectories=[3]),
    ],
)
def test_a_damaged_record_is_refused(damage):
    record = to_json(group(0, 1.0))
    damage(record)
    with pytest.raises(InputError, match="is damaged"):
        from_json(record)


def test_log_probs_that_disagree_are_never_written():
    good = group(0, 1.0).trajectories[0]
    other = Trajectory(good.tokens, good.loss_mask, (0.0, -0.5, -9.0), good.turns, good.status, 1.0, True)
    with pytest.raises(ValueError, match="log-probs differ"):
        to_json(Group(0, TASK, Mask(MaskKind.SKILL_FREE), (other,)))
