import json
import math

import numpy as np
import pytest

from analysis import frames
from intraskill.skills import curriculum, statistics
from intraskill.types import InputError
from tests.analysis.runs import EFFECTS, NUM_ROUNDS, STEPS, TASKS, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small")


def test_metrics_are_counted_within_their_kind(run):
    assert list(frames.metrics(run, "rollout")["index"]) == list(range(NUM_ROUNDS * STEPS))
    updates = frames.metrics(run, "update")
    assert len(updates) == 2 * NUM_ROUNDS * STEPS
    assert updates["grad_norm"].isna().all()
    with pytest.raises(InputError, match="no record of kind 'sync'"):
        frames.metrics(run, "sync")


def test_a_line_cut_short_is_left_out_and_a_broken_one_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": 2')
    assert frames.read_lines(tmp_path / "x.jsonl") == [{"a": 1}]
    (tmp_path / "x.jsonl").write_text('{"a": \n{"a": 2}\n')
    with pytest.raises(InputError, match="not JSON"):
        frames.read_lines(tmp_path / "x.jsonl")


def test_banks_carry_the_curriculum_of_their_round(run):
    banks = frames.banks(run)
    assert [list(b["id"]) for _, b in banks.groupby("round")] == [
        ["budget@1", "search@1", "colour@1"],
        ["budget@1", "search@2", "return@1"],
        ["budget@1", "search@2", "return@1"],
    ]
    first, second, last = (b.set_index("id") for _, b in banks.groupby("round"))
    assert list(first["rho"]) == [0.5, 0.5, 0.5] and first["contribution"].isna().all()
    assert second.loc["budget@1", "rho"] == 0.9  # the largest contribution earns rho_max
    assert 0.2 < second.loc["return@1", "rho"] < second.loc["search@2", "rho"] < 0.9
    assert last["rho"].isna().all()  # the bank that comes out has trained nothing


def test_gates(run):
    gates = frames.gates(run)
    first = gates[gates["round"] == 0].set_index("id")
    assert dict(first["status"]) == {
        "budget@1": "selected",
        "search@1": "rewrite_loser",
        "search@2": "selected",
        "colour@1": "retired",
        "return@1": "selected",
    }
    for chunk_id, effect in EFFECTS.items():
        row = first.loc[chunk_id]
        assert abs(row["coefficient"] - effect) < 5 * row["error"]
        assert math.isclose(row["hc3_high"] - row["hc3_low"], 2 * 1.959963984540054 * row["error"], rel_tol=1e-9)
        assert math.isclose(row["hc3_high"] + row["hc3_low"], 2 * row["coefficient"], rel_tol=1e-9, abs_tol=1e-12)
    fits = frames.gate_fits(run).set_index("round")
    assert list(fits["status"]) == ["complete", "complete"] and list(fits["pairs"]) == [TASKS, TASKS]
    assert fits.loc[0, "detectable"] == np.median(first["detectable"])


def test_gates_of_another_outcome(run):
    assert set(frames.gates(run, "success")["outcome"]) == {"success"}


def test_validation_of_a_run_without_a_gate_is_its_bare_evaluations(tmp_path):
    path = write_run(tmp_path / "run")
    for gate in path.glob("rounds/*/gate.json"):
        gate.unlink()
    found = frames.validation(path)
    assert list(zip(found["at"], found["arm"], found["mean"], strict=True)) == [
        ("start", "bare", 0.3),
        ("round 0", "bare", 0.5),
        ("round 1", "bare", 0.5),
    ]


def test_validation_is_of_the_gates_pairs(run):
    validation = frames.validation(run).set_index(["at", "arm"])
    assert validation.loc[("round 0", "bare"), "mean"] == 0.5  # every second task
    assert tuple(validation.loc[("round 1", "masked"), ["mean", "low", "high"]]) == (1, 1, 1)
    # A binomial mean of 60 fair draws: standard error 0.0645, so about 0.5 +- 0.126.
    assert abs(validation.loc[("round 0", "bare"), "low"] - 0.374) < 0.02 and abs(validation.loc[("round 0", "bare"), "high"] - 0.626) < 0.02
    assert validation.loc[("start", "bare"), "mean"] == 0.3
    assert list(dict.fromkeys(validation.reset_index()["at"])) == ["start", "round 0", "round 1"]


def test_progress_is_against_the_start(run):
    gained = frames.progress(run)
    assert list(gained["comparison"]) == ["round000-bare − base-validation", "round001-bare − base-validation"]
    assert np.allclose(gained["difference"], 0.2) and list(gained["gains"]) == [12, 12]


def test_inclusion_agrees_with_the_promise(run):
    rates = frames.inclusion(run).set_index(["round", "id"])
    assert rates.loc[(0, "skill-free"), "expected"] == 0.2 and rates.loc[(0, "skill-free"), "groups"] == 40 * STEPS
    assert rates.loc[(0, "budget@1"), "expected"] == 0.5 and rates.loc[(1, "budget@1"), "expected"] == 0.9
    assisted = round(40 * STEPS * (1 - rates.loc[(0, "skill-free"), "observed"]))
    assert rates.loc[(0, "budget@1"), "groups"] == assisted
    assert math.isclose(rates.loc[(0, "budget@1"), "high"], 0.5 + 1.959963984540054 * math.sqrt(0.25 / assisted))
    masks = [curriculum.mask(curriculum.Curriculum.load(run / "rounds" / "000" / "curriculum.json"), g) for g in range(40 * STEPS)]
    assert math.isclose(rates.loc[(0, "budget@1"), "observed"], sum("budget@1" in m.chunk_ids for m in masks) / assisted)
    # Masks are pure functions of a fixed seed, so this is no gamble: four standard errors hold all eight rates.
    assert ((rates["observed"] - rates["expected"]).abs() <= 2.1 * (rates["high"] - rates["expected"])).all()


def test_conditions_and_their_order(run):
    results = frames.condition_results(run)
    success = results[results["outcome"] == "success"].set_index("condition")
    assert list(success.index) == ["base", "base-initial", "final", "final-full"]
    assert np.allclose(success["mean"], [0.4, 0.5, 0.7, 0.75])
    assert (success["technical"] == 1).all() and (success["episodes"] == TASKS).all()
    assert (success["low"] < success["mean"]).all() and (success["mean"] < success["high"]).all()
    assert (success["turns"] == 5).all()


def test_comparisons_are_those_of_the_gate_statistics(run):
    compared = frames.comparisons(run).set_index("comparison")
    assert len(compared) == 6
    row = compared.loc["final − base"]
    assert math.isclose(row["difference"], 0.3) and (row["gains"], row["losses"], row["ties"]) == (18, 0, 42)
    first, second = ({f"t{i}": float(i < n) for i in range(TASKS)} for n in (24, 42))
    expected = statistics.paired_difference(first, second, seed=1)
    assert (row["low"], row["high"]) == (expected.low, expected.high)


def test_an_empty_run_names_what_is_missing(tmp_path):
    for question in (frames.banks, frames.gates, frames.validation, frames.condition_results, frames.comparisons, frames.inclusion):
        with pytest.raises(InputError):
            question(tmp_path)


def test_conditions_without_a_summary_go_by_name(tmp_path):
    for name in ("b", "a", "base-validation", "round001-masked"):
        (tmp_path / "eval" / name).mkdir(parents=True)
        (tmp_path / "eval" / name / "episodes.jsonl").write_text(json.dumps({"task_id": "t", "status": "purchase"}) + "\n")
    assert frames.conditions(tmp_path) == ["a", "b"]
