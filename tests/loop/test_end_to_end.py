"""The whole loop as a user runs it: a process per start, two rounds, real shop, engine, learner, gate, report; and the same run battered.

One run goes through undisturbed. Another with the same settings is interrupted by Ctrl-C in its first rollout, killed inside the gate, killed in
the second step's rollout, and resumed each time. Both must leave the same record.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop.fork_server import ROOT, ForkServer, Process
from loop.runs import flags, record

from intraskill import evaluation, weights
from intraskill.models.qwen35 import hf
from intraskill.rollout import records
from intraskill.rollout.chat import load_tokenizer
from intraskill.run_directory import read_json
from intraskill.skills.bank import Bank
from intraskill.types import MaskKind

SCRIPT, CONFIG = "launch/train.py", "configs/pocket.py:smoke"

# A minute on two idle cores; a machine that others share may take ten times that.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def finished(runs, checkpoint) -> tuple[Path, subprocess.CompletedProcess]:
    """A run from start to end, as `python launch/train.py` and nothing else."""
    command = [sys.executable, SCRIPT, *flags(CONFIG, runs, "whole", checkpoint)]
    return runs / "whole", subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="session")
def battered(runs, checkpoint, launcher: ForkServer) -> tuple[Path, dict[str, Process]]:
    """The same run, stopped three times; the processes by what became of them."""
    run = runs / "battered"
    arguments = [SCRIPT, *flags(CONFIG, runs, "battered", checkpoint)]
    processes = {}

    def until(name: str, signal_number: int, reached: Path, *more: str) -> None:
        process = processes[name] = launcher.start(*arguments, *more)
        pattern = reached.name
        process.wait_until(lambda: reached.parent.is_dir() and any(reached.parent.glob(pattern)))
        assert process.status is None, (process.stdout, process.stderr)
        os.kill(process.pid, signal_number)
        process.wait()

    until("Ctrl-C", signal.SIGINT, run / "rounds/000/groups/*.json")
    until("killed in the gate", signal.SIGKILL, run / "eval/round000-bare/summary.json", "--resume")
    until("killed in a rollout", signal.SIGKILL, run / "rounds/001/groups/*.json", "--resume")
    processes["resumed"] = launcher.run(*arguments, "--resume")
    return run, processes


# ---------------------------------------------------------------------------------------------------------- the whole run


def test_a_run_ends_well_and_says_where_its_report_is(finished):
    run, process = finished
    assert process.returncode == 0, process.stderr
    out = " ".join(process.stdout.split())
    assert "plan" in out and "2 rounds, 2 steps, 4 updates" in out
    assert out.endswith(f"report: {run / 'report' / 'index.html'}")
    assert process.stderr == ""


def test_the_run_directory_is_complete(finished, checkpoint):
    run, _ = finished
    for index in range(2):
        directory = run / f"rounds/{index:03d}"
        names = {"bank", "curriculum", "candidates", "cards", "assignments", "gate", "summary"}
        assert {p.stem for p in directory.glob("*.json")} == names
        assert len(list((directory / "groups").glob("*.json"))) == 4
    assert {p.stem for p in (run / "rounds/002").iterdir()} == {"bank", "curriculum"}
    conditions = {"base", "base-initial", "base-validation", "final", "final-full"} | {
        f"round00{i}-{kind}" for i in (0, 1) for kind in ("bare", "masked")
    }
    assert {p.name for p in (run / "eval").iterdir()} == conditions
    for condition in (run / "eval").iterdir():
        assert {p.name for p in condition.iterdir()} == {"manifest.json", "episodes.jsonl", "summary.json"}
    top = {p.name for p in run.iterdir()}
    assert top >= {
        "config.json",
        "versions.json",
        "metrics.jsonl",
        "summary.json",
        "ledger.jsonl",
        "rounds",
        "eval",
        "checkpoints",
        "weights",
        "report",
        "export",
    }
    assert read_json(run / "config.json")["model"]["checkpoint"] == str(checkpoint)
    assert not [p for p in run.rglob("*") if ".tmp" in p.name or p.name.endswith(".partial")]


def test_groups_share_one_mask_and_hold_what_was_sampled(finished):
    run, _ = finished
    groups = [records.from_json(read_json(p)) for p in sorted(run.glob("rounds/*/groups/*.json"))]
    assert [g.index for g in groups] == list(range(8))
    assert len({g.task.id for g in groups}) == 8, "tasks repeat only after an epoch"
    assert {g.mask.kind for g in groups} <= {MaskKind.SKILL_FREE, MaskKind.ASSISTED}
    chat_text = load_tokenizer(read_json(run / "config.json")["model"]["checkpoint"]).decode
    banks = {i: Bank.load(run / f"rounds/00{i}/bank.json") for i in (0, 1)}
    synced = {line["version"]: line["digest"] for line in record(run)["metrics.jsonl"] if line["kind"] == "sync"}
    digests = {**synced, 0: read_json(run / "eval/base/manifest.json")["identity"]["weights"]}
    for group in groups:
        assert len(group.trajectories) == 4 and group.scored
        texts = {c.id: c.text for c in banks[group.index // 4].chunks}
        for trajectory in group.trajectories:
            prompt = chat_text(trajectory.tokens[: trajectory.turns[0].prompt_length])
            assert [i for i in texts if f"- {texts[i]}" in prompt] == list(group.mask.chunk_ids)
            assert set(trajectory.turns[0].completion.weight_versions) == {group.index // 4}
            assert (trajectory.injected, trajectory.weights) == (group.mask.chunk_ids, (digests[group.index // 4],))
    rewards = [t.reward for g in groups for t in g.trajectories]
    assert len(set(rewards)) > 1, "some purchase earns something, so that there is something to learn"


def test_metrics_have_a_line_for_each_rollout_update_and_sync(finished):
    run, _ = finished
    lines = record(run)["metrics.jsonl"]
    assert [(line["kind"], line["round"], line["step"]) for line in lines] == [
        (kind, step, step) for step in (0, 1) for kind in ("rollout", "update", "update", "sync")
    ]
    assert [line["version"] for line in lines if line["kind"] == "sync"] == [1, 2]
    assert len({line["digest"] for line in lines if line["kind"] == "sync"}) == 2, "the policy has changed"


def test_the_summary_repeats_the_record(finished):
    run, _ = finished
    summary = read_json(run / "summary.json")
    assert (summary["name"], summary["seed"], len(summary["rounds"])) == ("whole", 0, 2)
    assert set(summary["test"]) == {"base", "base-initial", "final", "final-full"}
    for condition, figures in summary["test"].items():
        result = evaluation.read(run / "eval" / condition)
        assert figures == result.summary and figures["num_episodes"] == 4
        assert figures["reward"] == pytest.approx(np.mean([o.reward for o in result.outcomes]))
    for index, figures in enumerate(summary["rounds"]):
        assert figures["bare_success"] == evaluation.read(run / f"eval/round00{index}-bare").summary["success"]
        assert figures["bank_size"] == len(Bank.load(run / f"rounds/00{index}/bank.json").chunks)
        assert sum(figures["triage"].values()) == 4 and figures["num_pairs"] == 12
        assert figures["selected"] == list(Bank.load(run / f"rounds/00{index + 1}/bank.json").ids)
    assert [c["name"] for c in summary["comparisons"]] == [
        "validation, bare: final - base",
        "test: final - base",
        "test: base + initial bank - base",
        "test: final + final bank - final",
    ]
    base, final = (evaluation.read(run / "eval" / name) for name in ("base-validation", "round001-bare"))
    assert summary["comparisons"][0]["difference"] == pytest.approx(final.summary["success"] - base.summary["success"])
    assert summary["versions"] == read_json(run / "versions.json")


def test_the_weights_that_were_tested_are_exported_and_load(finished, checkpoint):
    run, _ = finished
    config, params = hf.load_hf(run / "export")
    start_config, start = hf.load_hf(checkpoint)
    assert config == start_config
    tested = read_json(run / "eval/final/manifest.json")["identity"]["weights"]
    assert weights.digest_of(config, params) == tested != weights.digest_of(config, start)
    assert read_json(run / "eval/base/manifest.json")["identity"]["weights"] == weights.digest_of(config, start)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (run / "export" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_the_report_is_one_page_about_this_run(finished):
    run, _ = finished
    page = (run / "report/index.html").read_text()
    assert "whole" in page and "<svg" in page and "<script" not in page


# ------------------------------------------------------------------------------------------------------- the battered run


def test_ctrl_c_exits_130_and_says_how_to_go_on(battered):
    _, processes = battered
    process = processes["Ctrl-C"]
    assert process.status == 130, process.stderr
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("interrupted; go on with: python launch/train.py --config=") and last.endswith("--resume")
    assert "Traceback" not in process.stderr


def test_killed_processes_were_killed_where_the_test_says(battered):
    _, processes = battered
    assert processes["killed in the gate"].status == processes["killed in a rollout"].status == -signal.SIGKILL
    assert "resumed after step" not in processes["killed in the gate"].stdout  # Ctrl-C came before the first checkpoint
    assert "resumed after step 1" in processes["killed in a rollout"].stdout
    assert "resumed after step 1" in processes["resumed"].stdout


def test_a_resumed_run_leaves_the_record_of_an_undisturbed_one(battered, finished):
    run, processes = battered
    assert processes["resumed"].status == 0, processes["resumed"].stderr
    expected, found = record(finished[0]), record(run)
    assert set(found) == set(expected)
    differ = [name for name in expected if found[name] != expected[name]]
    assert not differ
    assert any(name.startswith("export/") for name in expected) and "metrics.jsonl" in expected


def test_an_existing_run_is_refused_without_resume_and_left_alone(finished, checkpoint, launcher, runs):
    run, _ = finished
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    process = launcher.run(SCRIPT, *flags(CONFIG, runs, "whole", checkpoint))
    assert process.status == 2
    assert process.stderr.count("\n") == 1 and str(run) in process.stderr and "--resume" in process.stderr
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_resuming_a_finished_run_changes_no_result(finished, battered, checkpoint, launcher, runs):
    run, _ = battered
    process = launcher.run(SCRIPT, *flags(CONFIG, runs, "battered", checkpoint), "--resume")
    assert process.status == 0, process.stderr
    assert record(run) == record(finished[0])


# ----------------------------------------------------------------------------------------------- the other entry points


def test_eval_plays_a_condition_exactly_as_the_run_did(finished, checkpoint, launcher, runs):
    run, _ = finished
    arguments = flags("configs/eval.py:final_full", runs, "again", run / "export", condition__tasks=4, condition__bank=run / "rounds/002/bank.json")
    process = launcher.run("launch/eval.py", *arguments)
    assert process.status == 0, process.stderr
    episodes = (runs / "again/episodes.jsonl").read_text()
    assert episodes == (run / "eval/final-full/episodes.jsonl").read_text()
    assert read_json(runs / "again/manifest.json")["identity"] == read_json(run / "eval/final-full/manifest.json")["identity"]

    other = launcher.run("launch/eval.py", *flags("configs/eval.py:final", runs, "again", run / "export", condition__tasks=4))
    assert other.status == 2 and other.stderr.count("\n") == 1 and "holds another evaluation" in other.stderr
    assert (runs / "again/episodes.jsonl").read_text() == episodes


def test_export_writes_the_newest_checkpoint(finished, launcher, tmp_path):
    run, _ = finished
    saving = run / "checkpoints/3.orbax-checkpoint-tmp"  # as while the run saves its next step
    saving.mkdir()
    process = launcher.run("launch/export_hf.py", f"--run={run}", f"--out={tmp_path / 'out'}")
    assert process.status == 0 and "step 2" in process.stdout, process.stderr
    assert saving.is_dir()
    saving.rmdir()
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {p.name: p.read_bytes() for p in (run / "export").iterdir()}
    half = launcher.run("launch/export_hf.py", f"--run={run}", f"--out={tmp_path / 'half'}", "--dtype=bfloat16")
    assert half.status == 0, half.stderr
    for a, b in zip(*(jax.tree.leaves(hf.load_hf(tmp_path / name)[1]) for name in ("out", "half")), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-8)


@pytest.mark.torch
@pytest.mark.loose_numerics  # the forward pass is compared with torch's, the promotion rules have their own tests
def test_transformers_loads_the_export_with_equal_logits(finished):
    import torch
    from transformers import AutoModelForCausalLM

    from intraskill.models.qwen35 import model

    run, _ = finished
    config, params = hf.load_hf(run / "export")
    group = records.from_json(read_json(run / "rounds/001/groups/00000004.json"))
    tokens = np.array([group.trajectories[0].tokens], np.int32)
    positions, segments = np.arange(tokens.shape[1], dtype=np.int32)[None], np.ones_like(tokens)
    ours = model.logits(params, config, model.forward(params, config, *map(jnp.asarray, (tokens, positions, segments))))
    reference = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    with torch.no_grad():
        theirs = reference(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=2e-4)
