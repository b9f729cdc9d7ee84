import dataclasses
import json
import math
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intraskill.skills import assignment, gate, pairing, statistics
from intraskill.skills.__main__ import main
from intraskill.skills.bank import Bank, Candidate, CandidatePool, Operation
from intraskill.skills.refit import refit
from intraskill.types import Chunk, InputError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "gate"
IDENTITY = pairing.Identity("weights", "sampling", "prompt", "environment")


def chunk(name: str, version: int = 1) -> Chunk:
    return Chunk(name, version, title=name, applies_when="", procedure=f"do {name} {version}")


BANK = Bank((chunk("a"), chunk("b"), chunk("c")))
POOL = CandidatePool(
    BANK, (Candidate(chunk("b", 2), Operation.REWRITE), Candidate(chunk("n"), Operation.ADD), Candidate(chunk("b", 3), Operation.REWRITE))
)
EFFECTS = {"a@1": 0.2, "b@1": 0.05, "b@2": 0.3, "b@3": 0.1, "c@1": -0.2, "n@1": 0.1}


def plan(num: int = 40, samples: int = 1, pool=POOL, seed=0):
    return assignment.assign(pool, seed=seed, split="validation", task_ids=[f"t{i}" for i in range(num)], samples=samples)


def episodes(a_plan, effects=EFFECTS, noise=0.0, base=0.5, seed=0):
    """Bare and masked episodes whose difference is exactly additive, plus noise."""
    rng = np.random.default_rng(seed)
    bare, masked = [], []
    for a in a_plan.assignments:
        gain = sum(effects[i] for i in a.chunk_ids) + noise * rng.standard_normal()
        bare.append(pairing.Observed(a.task_id, a.sample, (), {"reward": base, "success": 0.0}, IDENTITY))
        masked.append(pairing.Observed(a.task_id, a.sample, a.chunk_ids, {"reward": base + gain, "success": 1.0 * (gain > 0.3)}, IDENTITY))
    return bare, masked


# ------------------------------------------------------------------------------------------------------------ assignments


def test_columns_follow_the_prompt_order():
    assert [c.id for c in assignment.columns(POOL)] == ["a@1", "b@1", "b@2", "b@3", "c@1", "n@1"]
    assert [c.current for c in assignment.columns(POOL)] == [True, True, False, False, True, False]


def test_families_exclude_each_other_with_equal_shares():
    drawn = plan(2500)
    design = drawn.design
    num = len(design)
    for j in (0, 4, 5):
        assert abs(design[:, j].mean() - 1 / 2) < 5 * math.sqrt(1 / 4 / num)
    family = design[:, 1:4]
    assert family.sum(1).max() == 1
    for share in (*family.mean(0), (family.sum(1) == 0).mean()):
        assert abs(share - 1 / 4) < 5 * math.sqrt(3 / 16 / num)
    correlation = np.corrcoef(design[:, [0, 1, 4, 5]].T) - np.eye(4)
    assert np.abs(correlation).max() < 5 / math.sqrt(num)


def test_assignments_are_pure_in_task_sample_and_family():
    drawn = {(a.task_id, a.sample): a.chunk_ids for a in plan(30, samples=2).assignments}
    few = assignment.assign(POOL, seed=0, split="validation", task_ids=["t7", "t3"])
    assert all(drawn[a.task_id, a.sample] == a.chunk_ids for a in few.assignments)
    smaller = CandidatePool(BANK, POOL.candidates[::2])  # without the ADD: every other family keeps its draws
    for a in plan(30, pool=smaller).assignments:
        assert a.chunk_ids == tuple(i for i in drawn[a.task_id, 0] if i != "n@1")
    assert plan(30, seed=1).record.sha256 != plan(30).record.sha256
    assert any(drawn[f"t{i}", 0] != drawn[f"t{i}", 1] for i in range(30))


def test_bad_plans_are_refused():
    for bad in ({"task_ids": ["x", "x"]}, {"task_ids": []}, {"task_ids": ["x"], "samples": 0}):
        with pytest.raises(InputError):
            assignment.assign(POOL, seed=0, split="validation", **bad)


# -------------------------------------------------------------------------------------------------------------- published


@pytest.mark.parametrize("number", [0, 1])
def test_the_published_gates_are_reproduced(number, capsys):
    path = GOLDEN / f"gate_round{number}.json"
    result = refit(path, draws=50)
    assert result.differences == ()
    published = [r for r in json.loads((GOLDEN / "published_coefficients.json").read_text())["rows"] if r["round"] == number]
    by_id = {d.id: d for d in result.decisions}
    assert len(published) == len(by_id)
    for row in published:
        found = by_id[row["intervention_id"]]
        assert abs(found.coefficient - row["coefficient"]) < 1e-12
        assert (found.rank, str(found.verdict), found.family) == (row["rank"], row["status"], row["logical_chunk_id"])
    assert main(["refit", str(path)]) == 0
    assert "reproduced" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["mask_columns"][0].update(coefficient="0.027016475499"),
        lambda raw: raw["mask_columns"][0].update(rank="5"),
        lambda raw: raw["mask_columns"][2].update(status="selected"),
        lambda raw: raw["rows"][0].__setitem__(2, 0.123),
        lambda raw: raw["checks"].update(mean_B=0.5),
    ],
)
def test_refit_notices_every_difference(tmp_path, change, capsys):
    raw = json.loads((GOLDEN / "gate_round0.json").read_text())
    change(raw)
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(raw))
    assert main(["refit", str(path)]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_refit_refuses_other_files(tmp_path):
    (tmp_path / "x.json").write_text('{"rows": []}')
    assert main(["refit", str(tmp_path / "x.json")]) == 2


def test_the_published_test_conditions_are_reproduced():
    raw = json.loads((GOLDEN / "test_task_outcomes.json").read_text())
    summaries = json.loads((GOLDEN / "four_condition_summaries.json").read_text())["summaries"]
    names = [c.removeprefix("reward_") for c in raw["columns"][1:]]
    reward = {n: {str(r[0]): r[i + 1] for r in raw["rows"]} for i, n in enumerate(names)}
    success = {n: {t: float(x == 1) for t, x in column.items()} for n, column in reward.items()}
    for n in names:
        assert np.mean(list(reward[n].values())) == pytest.approx(summaries[n]["reward_mean"], abs=1e-12)
        assert np.mean(list(success[n].values())) == pytest.approx(summaries[n]["success_rate"], abs=1e-12)
    # Published, in points: difference and 95% interval (reference.md); the ends are those of another bootstrap's draws.
    for first, second, difference, low, high in [
        ("base_free", "iter80_free", 32.5, 27.5, 37.5),
        ("base_free", "base_s0", 2.75, -1.5, 7.25),
        ("iter80_free", "iter80_st", 2.0, -0.5, 4.75),
    ]:
        found = statistics.paired_difference(success[first], success[second])
        assert 100 * found.difference == pytest.approx(difference, abs=1e-10)
        assert 100 * found.low == pytest.approx(low, abs=0.5) and 100 * found.high == pytest.approx(high, abs=0.5)
    moved = statistics.paired_difference(success["base_free"], success["iter80_free"])
    assert (moved.tasks, moved.gains, moved.losses, moved.ties) == (400, 139, 9, 198 + 54)


# ------------------------------------------------------------------------------------------------------------- estimation


def test_an_additive_truth_is_recovered_exactly_and_selected():
    drawn = plan(60)
    result = gate.run(drawn, *episodes(drawn), IDENTITY, draws=50)
    assert result.status == "complete"
    for estimate in result.fits["reward"].estimates:
        assert estimate.coefficient == pytest.approx(EFFECTS[estimate.id], abs=1e-12)
        assert estimate.low == pytest.approx(estimate.high, abs=1e-9)  # no noise: every resample gives the truth
    assert {d.id: str(d.verdict) for d in result.decisions} == {
        "a@1": "selected",
        "b@1": "rewrite_loser",
        "b@2": "selected",
        "b@3": "rewrite_loser",
        "c@1": "retired",
        "n@1": "selected",
    }
    assert result.selected == ("a@1", "b@2", "n@1")  # bank order, not rank order
    bank = gate.next_bank(POOL, result, round_index=3)
    assert bank.ids == result.selected and bank.active("b").procedure == "do b 2"  # the winning rewrite keeps the logical id
    assert bank.chunks[1].history[-1]["round"] == 3 and bank.chunks[1].history[-1]["rank"] == 1
    assert bank.inputs == {"bank": BANK.sha256, "gate": result.record.sha256}


def test_the_estimator_is_unbiased_and_its_errors_are_honest():
    estimates, errors = [], []
    for seed in range(40):
        drawn = plan(120, seed=seed)
        pairs, _ = pairing.pair(drawn, *episodes(drawn, noise=0.4, seed=seed), IDENTITY)
        found = gate.fit(pairs, draws=1).estimates
        estimates.append([e.coefficient for e in found])
        errors.append([e.error for e in found])
    estimates = np.array(estimates)
    truth = [EFFECTS[c.id] for c in assignment.columns(POOL)]
    spread = estimates.std(0, ddof=1)
    assert (np.abs(estimates.mean(0) - truth) < 4 * spread / math.sqrt(40)).all()
    np.testing.assert_allclose(np.mean(errors, 0), spread, rtol=0.35)


def test_hc3_and_detectable_effect_by_hand():
    """One column, four rows: beta = mean of the present rows' deltas; leverages 1/2; HC3 variance = sum of (e / (1 - h))^2 h^2 over them."""
    columns = (assignment.Column("x@1", "x", False),)
    design = np.array([[1.0], [1.0], [0.0], [0.0]])
    delta = np.array([0.9, 0.5, 0.1, -0.1])
    pairs = pairing.Pairs(columns, ("1", "2", "3", "4"), (0,) * 4, design, {"reward": delta}, {"reward": np.zeros(4)})
    fitted = gate.fit(pairs, draws=10)
    (estimate,) = fitted.estimates
    assert estimate.coefficient == pytest.approx(0.7)
    assert estimate.error == pytest.approx(math.sqrt(2 * (0.2 / 0.5) ** 2 / 4))
    assert fitted.sigma == pytest.approx(math.sqrt((0.04 + 0.04 + 0.01 + 0.01) / 3))
    assert estimate.detectable == pytest.approx((1.959963984540054 + 0.8416212335729143) * fitted.sigma * math.sqrt(1 / 2))
    assert (fitted.differing, estimate.present, fitted.condition) == (1.0, 0.5, pytest.approx(1.0))


def test_interactions_are_what_is_left_beyond_the_sum():
    drawn = plan(200)
    bare, masked = episodes(drawn)
    bonus = [
        dataclasses.replace(m, outcomes={"reward": m.outcomes["reward"] + 0.5 * ({"a@1", "n@1"} <= set(m.injected)), "success": 0.0}) for m in masked
    ]
    pairs, _ = pairing.pair(drawn, bare, bonus, IDENTITY)
    assert gate.interaction(pairs, "a@1", "n@1", draws=10).coefficient == pytest.approx(0.5, abs=1e-12)
    assert gate.interaction(pairs, "a@1", "n@1", draws=10).id == "a@1 x n@1"
    for first, second in (("b@1", "b@2"), ("a@1", "zzz")):
        with pytest.raises(InputError, match="different families"):
            gate.interaction(pairs, first, second)


def test_detectable_effects_before_a_gate_shrink_with_its_size():
    small, large = (assignment.detectable_effects(plan(n), assignment.independent_sigma(0.5)) for n in (50, 800))
    assert assignment.independent_sigma(0.5) == pytest.approx(math.sqrt(0.5))
    for i in small:
        assert small[i] / large[i] == pytest.approx(4, rel=0.25)
    # An ordinary chunk at probability one half: C'C is N/4 on and off the diagonal plus N/4 on it.
    lone = CandidatePool(Bank((chunk("a"),)))
    (value,) = assignment.detectable_effects(plan(1500, pool=lone), 1.0).values()
    assert value == pytest.approx(2.8015852 / math.sqrt(750), rel=0.08)
    assert assignment.detectable_effects(plan(1), 1.0)["a@1"] == math.inf
    # Before anything is assigned: for one chunk C'C is N/2 in expectation; for K of them the average design comes close.
    assert assignment.expected_effect(1500, 1, 1.0) == pytest.approx(2.8015852 / math.sqrt(750))
    many = CandidatePool(Bank(tuple(chunk(f"c{i}") for i in range(10))))
    drawn = plan(2000, pool=many)
    found = assignment.detectable_effects(drawn, 0.4).values()
    assert np.mean(list(found)) == pytest.approx(assignment.expected_effect(2000, 10, 0.4), rel=0.05)
    assert assignment.expected_effect(9, 10, 0.4) == math.inf
    assert assignment.with_power(drawn, 0.4, "a guess").assignments == drawn.assignments


def test_bootstrap_resamples_tasks_not_episodes():
    """Two samples of a task with equal outcomes carry no more information than one: the interval must not shrink."""
    rng = np.random.default_rng(0)
    design, delta = rng.integers(0, 2, (80, 2)).astype(float), rng.standard_normal(80)
    columns = tuple(assignment.Column(f"{n}@1", n, True) for n in "xy")
    tasks = tuple(map(str, range(80)))

    def width(repeat):
        pairs = pairing.Pairs(
            columns,
            tasks * repeat,
            (0,) * 80 * repeat,
            np.tile(design, (repeat, 1)),
            {"reward": np.tile(delta, repeat)},
            {"reward": np.zeros(80 * repeat)},
        )
        return [(e.low, e.high) for e in gate.fit(pairs, draws=400).estimates]

    np.testing.assert_allclose(width(1), width(3), atol=1e-9)


# --------------------------------------------------------------------------------------------------------------- decision


def fitted_with(coefficients):
    estimates = tuple(gate.Estimate(i, c, None, None, c, c, 0.5, None) for i, c in coefficients.items())
    return gate.Fit("reward", 10, len(estimates), 1.0, 1.0, 1.0, 0.0, 0.0, estimates)


def verdicts(coefficients, max_active=10):
    return {d.id: (str(d.verdict), d.rank) for d in gate.decide(fitted_with(coefficients), assignment.columns(POOL), max_active)}


def test_ties_keep_the_old_version_even_within_rounding():
    tied = {"a@1": 0.0, "b@1": 0.1, "b@2": 0.1 + 1e-15, "b@3": 0.1, "c@1": 1e-16, "n@1": -0.0}
    found = verdicts(tied)
    assert found["b@1"] == ("selected", 1)
    assert found["b@2"][0] == found["b@3"][0] == "rewrite_loser"
    assert found["a@1"][0] == found["c@1"][0] == "retired" and found["n@1"][0] == "non_positive"  # rounding is not a contribution


def test_top_k_never_pads():
    assert {k for k, v in verdicts(EFFECTS, max_active=2).items() if v[0] == "selected"} == {"a@1", "b@2"}
    assert verdicts(EFFECTS, max_active=2)["n@1"] == ("over_capacity", 3)
    assert not [v for v in verdicts({i: -0.1 for i in EFFECTS}).values() if v[0] == "selected"]


@given(st.lists(st.sampled_from([-0.2, -0.1, 0.0, 0.1, 0.2, 0.3]), min_size=6, max_size=6), st.integers(0, 10))
def test_decision_properties(values, max_active):
    coefficients = dict(zip((c.id for c in assignment.columns(POOL)), values, strict=True))
    decisions = gate.decide(fitted_with(coefficients), assignment.columns(POOL), max_active)
    chosen = [d for d in decisions if d.verdict == gate.Verdict.SELECTED]
    assert len(chosen) <= max_active and all(d.coefficient > 0 for d in chosen)
    assert len({d.family for d in chosen}) == len(chosen)
    assert sorted(d.rank for d in decisions if d.rank) == [1, 2, 3, 4]  # one winner a family
    for d in decisions:
        rivals = [o for o in decisions if o.family == d.family]
        if d.rank:
            assert all(o.coefficient <= d.coefficient for o in rivals)
            assert d.current or not any(o.current and o.coefficient == d.coefficient for o in rivals)
        passed_over = d.rank and d.coefficient > 0 and d.verdict != gate.Verdict.SELECTED
        assert not passed_over or len(chosen) == max_active


# --------------------------------------------------------------------------------------------------------------- contract


def replace_first(items, **changes):
    return [dataclasses.replace(items[0], **changes), *items[1:]]


BREACHES = {
    "is missing": lambda bare, masked: (bare[1:], masked),
    "masked episode of task t0 sample 0 is missing": lambda bare, masked: (bare, replace_first(masked, scored=False)),
    "completed twice": lambda bare, masked: (bare, [*masked, masked[0]]),
    "weights other != weights": lambda bare, masked: (replace_first(bare, identity=dataclasses.replace(IDENTITY, weights="other")), masked),
    "sampling other": lambda bare, masked: (bare, replace_first(masked, identity=dataclasses.replace(IDENTITY, sampling="other"))),
    "prompt other": lambda bare, masked: (bare, replace_first(masked, identity=dataclasses.replace(IDENTITY, prompt="other"))),
    "environment other": lambda bare, masked: (bare, replace_first(masked, identity=dataclasses.replace(IDENTITY, environment="other"))),
    "assigned were": lambda bare, masked: (bare, replace_first(masked, injected=("zzz@1",))),
    "carried \\['a@1'\\], assigned were \\[\\]": lambda bare, masked: (replace_first(bare, injected=("a@1",)), masked),
    "not in the plan": lambda bare, masked: ([*bare, dataclasses.replace(bare[0], task_id="elsewhere")], masked),
    "not finite": lambda bare, masked: (bare, replace_first(masked, outcomes={"reward": math.nan, "success": 0.0})),
    "different outcomes": lambda bare, masked: (bare, replace_first(masked, outcomes={"reward": 0.0})),
    "no pair reports": lambda bare, masked: ([], []),
}


@pytest.mark.parametrize("message", BREACHES)
def test_a_breach_makes_the_gate_incomplete(message, tmp_path):
    drawn = plan(30)
    result = gate.run(drawn, *BREACHES[message](*episodes(drawn)), IDENTITY, draws=20)
    assert result.status == "incomplete" and result.selected == () and result.contributions == {}
    with pytest.raises(ValueError, match="incomplete"):
        gate.next_bank(POOL, result, round_index=0)

    assert any(re.search(message, p) for p in result.problems), result.problems
    result.save(tmp_path / "gate.json")
    # ... and is complete once the right episodes are handed in.
    assert gate.run(drawn, *episodes(drawn), IDENTITY, draws=20).status == "complete"


def test_too_few_rows_decide_nothing():
    drawn = plan(4)
    result = gate.run(drawn, *episodes(drawn), IDENTITY, draws=20)
    assert result.status == "incomplete" and result.problems == (drawn.problem,)
    assert re.fullmatch(r"the design has rank [0-4] for 6 columns: use more tasks or samples", drawn.problem)
    assert gate.run(drawn, episodes(drawn)[0], (), IDENTITY).problems == (drawn.problem,)  # and no masked episode is missed


def test_all_zero_rows_stay_in_the_fit():
    """A row without a chunk observes pure noise: it moves no coefficient, but the residual, and so every error, is estimated with it."""
    drawn = plan(60)
    empty = drawn.design.sum(1) == 0
    assert empty.any()
    result = gate.run(drawn, *episodes(drawn, noise=0.3), IDENTITY, draws=20)
    fitted, pairs = result.fits["reward"], result.pairs
    assert fitted.rows == len(pairs.tasks) == 60
    delta = pairs.masked["reward"] - pairs.bare["reward"]
    beta, *_ = np.linalg.lstsq(pairs.design[~empty], delta[~empty], rcond=None)
    np.testing.assert_allclose([e.coefficient for e in fitted.estimates], beta, atol=1e-12)
    residual = delta - pairs.design @ beta
    assert fitted.sigma == pytest.approx(math.sqrt(residual @ residual / (60 - 6)))
    assert residual[empty] @ residual[empty] > 0


def test_an_empty_gate_is_complete_and_selects_nothing():
    pool = CandidatePool(Bank())
    drawn = plan(5, pool=pool)
    result = gate.run(drawn, *episodes(drawn), IDENTITY)
    assert result.status == "complete" and gate.next_bank(pool, result, round_index=0).ids == ()


def test_each_component_has_its_own_fit_and_a_run_file_refits(tmp_path):
    drawn = plan(60, samples=2)
    result = gate.run(drawn, *episodes(drawn, noise=0.3), IDENTITY, draws=30)
    assert set(result.fits) == {"reward", "success"}
    assert result.fits["reward"].estimates[0].coefficient != result.fits["success"].estimates[0].coefficient
    path = tmp_path / "gate.json"
    assert result.save(path) == result.record.sha256
    again = gate.GateResult.load(path)
    assert again.record == result.record and again.decisions == result.decisions and again.fits == result.fits
    assert main(["refit", str(path)]) == 0
    raw = json.loads(path.read_text())
    raw["content"]["fits"]["success"]["estimates"][0]["coefficient"] += 1e-9
    path.write_text(json.dumps(raw))
    assert main(["refit", str(path)]) == 2  # edited
    assert main(["rehash", str(path)]) == 0 and main(["refit", str(path)]) == 1


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_gate_is_deterministic_and_indifferent_to_order(seed):
    drawn = plan(25, seed=seed)
    bare, masked = episodes(drawn, noise=0.5, seed=seed)
    rng = np.random.default_rng(seed)
    shuffled = [[x[i] for i in rng.permutation(len(x))] for x in (bare, masked)]
    one, two = (gate.run(drawn, *x, IDENTITY, draws=5) for x in ((bare, masked), shuffled))
    assert one.record.sha256 == two.record.sha256


def test_paired_difference_by_hand():
    first, second = {"x": 0.0, "y": 1.0, "z": 0.5}, {"z": 1.0, "x": 1.0, "y": 0.5}
    found = statistics.paired_difference(first, second, draws=200)
    assert (found.first, found.second, found.difference) == (0.5, pytest.approx(2.5 / 3), pytest.approx(1 / 3))
    assert (found.gains, found.losses, found.ties) == (2, 1, 0)
    assert -0.5 <= found.low <= found.difference <= found.high <= 1.0
    assert statistics.task_means([("x", 1.0), ("y", 0.0), ("x", 0.0)]) == {"x": 0.5, "y": 0.0}
    with pytest.raises(InputError, match="one condition only"):
        statistics.paired_difference(first, {"x": 1.0})
