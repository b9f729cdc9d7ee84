"""A run killed with SIGKILL at twelve instants and resumed after each, beside the same run undisturbed: both leave the same record, bit for bit.

One run is killed all the way through, so that what a kill leaves is also met by a process that was itself resumed. docs/training.md has the instants.
"""

import shutil
import signal
from pathlib import Path

import pytest
from loop import kills
from loop.fork_server import ForkServer, Process
from loop.kills import Kill
from loop.runs import flags, record

from intraskill.run_directory import read_json, write_json

SCRIPT, CONFIG = "launch/train.py", "configs/pocket.py:smoke"
SIZES = {"schedule__steps_per_round": 2, "validation__tasks": 12, "checkpoint__keep": 2}
NUM_STEPS, GROUPS, UPDATES = 4, 4, 2  # of the run; of a step

# In the order in which the run meets them. Round 0 has steps 0 and 1; a step has 4 groups and 2 updates.
KILLS = {
    "in a rollout, while the third group is written": Kill("rounds/000/groups/*.json", 3),
    "between the two updates": Kill("intraskill.grpo.learner:Learner.update", 2),
    "while weights are published": Kill("weights/00000001/manifest.json"),
    "after publishing, before the checkpoint": Kill("intraskill.checkpoint:Checkpointer.save"),
    "during an Orbax save": Kill("checkpoints/1"),
    "in the next rollout, while a checkpoint may be under way": Kill("rounds/000/groups/*.json", 2),
    "in the retries": Kill("intraskill.skills.triage:after_retry", 2),
    "in the gate, masked validation half played": Kill("intraskill.evaluation:outcome", 12 + 6),  # the bare episodes come first
    "in the gate, masked validation half recorded": Kill("eval/round000-masked/summary.json"),
    "while the bank is written": Kill("rounds/001/curriculum.json"),  # bank.json is there
    "while the round is closed": Kill("rounds/000/summary.json"),
    "while the policy is exported": Kill("export"),
}

# Two minutes on two idle cores; a machine that others share may take ten times that.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def whole(runs, checkpoint, launcher: ForkServer) -> Path:
    """The run that nobody disturbs."""
    process = launcher.run(SCRIPT, *flags(CONFIG, runs, "whole", checkpoint, **SIZES), batches=runs / "whole.batches")
    assert process.status == 0, process.stderr
    return runs / "whole"


@pytest.fixture(scope="module")
def killed(runs, checkpoint, launcher: ForkServer) -> tuple[Path, dict[str, Process]]:
    """The run that is killed at every instant; the processes by where they were killed, and "resumed" for the last one."""
    arguments = [SCRIPT, *flags(CONFIG, runs, "killed", checkpoint, **SIZES)]
    processes = {}
    for name, kill in KILLS.items():
        resume = ["--resume"] if processes else []
        processes[name] = launcher.run(*arguments, *resume, kill=kill, batches=runs / "killed.batches")
        assert processes[name].status == -signal.SIGKILL, (name, processes[name].stdout, processes[name].stderr)
    processes["resumed"] = launcher.run(*arguments, "--resume", batches=runs / "killed.batches")
    return runs / "killed", processes


def test_a_run_killed_at_twelve_instants_leaves_the_record_of_an_undisturbed_one(whole, killed):
    run, processes = killed
    assert len(KILLS) >= 12 and processes["resumed"].status == 0, processes["resumed"].stderr
    expected, found = record(whole), record(run)
    assert set(found) == set(expected)
    differ = [name for name in expected if found[name] != expected[name]]
    assert not differ
    groups = [name for name in expected if "/groups/" in name]
    assert len(groups) == NUM_STEPS * GROUPS and {"rounds/002/bank.json", "rounds/001/gate.json", "metrics.jsonl"} <= set(expected)
    assert any(name.startswith("export/") for name in expected)


def test_every_update_saw_the_same_batch_however_often_it_was_made(whole, killed):
    expected, found = (kills.batches(run.with_suffix(".batches")) for run in (whole, killed[0]))
    assert sorted(expected) == list(range(NUM_STEPS * UPDATES)) and all(len(digests) == 1 for digests in expected.values())
    assert found == expected
    assert len((killed[0].with_suffix(".batches")).read_text().splitlines()) > NUM_STEPS * UPDATES, "some updates were made more than once"


def test_the_last_checkpoints_are_equal_to_the_optimizers_last_bit(whole, killed):
    records = []
    for run in (whole, killed[0]):
        steps = sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
        assert steps == [NUM_STEPS - 1, NUM_STEPS], "keep = 2"
        records.append([read_json(run / f"checkpoints/{step}/record/metadata") for step in steps])
    assert records[0] == records[1]  # position, and a checksum for each array
    assert any("opt_state" in path for path in records[0][0]["leaves"])


def test_what_was_finished_before_a_kill_is_not_played_again(killed):
    _, processes = killed
    said = {name: process.stdout for name, process in processes.items()}
    reused = "groups were finished before the interruption and were not played again"
    assert reused not in said["in a rollout, while the third group is written"]
    # The process after the one that was killed while it wrote the third group found two; the next found all four.
    assert f"step 0: 2 of 4 {reused}" in said["between the two updates"]
    assert f"step 0: 4 of 4 {reused}" in said["while weights are published"]
    for name in ("while the bank is written", "resumed"):  # processes that found every step done
        assert "rollout" not in said[name], name


def copy_of(run: Path, name: str, **settings) -> Path:
    """A copy of a run under another name, with other settings in its config, given as `section__key`."""
    path = run.with_name(name)
    shutil.copytree(run, path)
    config = read_json(path / "config.json")
    for key, value in {**settings, "name": name}.items():
        *sections, last = key.split("__")
        section = config
        for part in sections:
            section = section[part]
        section[last] = value
    write_json(path / "config.json", config)
    return path


def resume(launcher: ForkServer, run: Path, checkpoint: Path, **settings) -> Process:
    return launcher.run(SCRIPT, *flags(CONFIG, run.parent, run.name, checkpoint, **SIZES | settings), "--resume")


def test_a_corrupt_newest_checkpoint_costs_a_step_and_changes_nothing(whole, checkpoint, launcher):
    run = copy_of(whole, "corrupt")
    largest = max((run / f"checkpoints/{NUM_STEPS}/state").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x55
    largest.write_bytes(content)
    expected = record(whole)
    for name in ("summary.json", "export"):  # the rest of the round's end stays: the step is done again all the same
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    process = resume(launcher, run, checkpoint)
    assert process.status == 0, process.stderr
    assert f"checkpoint {NUM_STEPS} in {run / 'checkpoints'} is corrupt and is passed over" in process.stderr
    assert f"resumed after step {NUM_STEPS - 1}" in process.stdout
    assert f"step {NUM_STEPS - 1}: 4 of 4 groups were finished before the interruption" in process.stdout
    found = record(run)
    assert [name for name in expected if found.get(name) != expected[name]] == [] and set(found) == set(expected)


def test_a_lost_summary_of_a_round_before_the_newest_checkpoint_is_named(whole, checkpoint, launcher):
    run = copy_of(whole, "lost")
    (run / "rounds/000/summary.json").unlink()
    process = resume(launcher, run, checkpoint)
    assert process.status == 2 and process.stderr.count("\n") == 1, process.stderr
    assert process.stderr.startswith(f"error: {run / 'rounds/000/summary.json'} is gone")


def test_what_a_run_holds_is_no_disk_that_it_still_needs(whole, checkpoint, launcher):
    run = copy_of(whole, "large")
    one = 3 * (checkpoint / "model.safetensors").stat().st_size  # parameters and two moments
    many = {"checkpoint__keep": (shutil.disk_usage(run).free + 10**12) // one}  # a terabyte more than there is, by the plan
    process = resume(launcher, run, checkpoint, **many)
    assert process.status == 2 and "of disk and" in process.stderr, process.stderr
    with (run / "sparse").open("wb") as f:
        f.truncate(10**13)  # as if the run had written that much by now
    process = resume(launcher, run, checkpoint, **many)
    assert process.status == 0, process.stderr


def test_the_checkpoint_of_another_model_is_refused(whole, checkpoint, launcher, tmp_path):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    config = read_json(other / "config.json")
    text = config.get("text_config", config)
    text["rms_norm_eps"] = 2 * text["rms_norm_eps"]
    write_json(other / "config.json", config)
    run = copy_of(whole, "other", model__checkpoint=str(other))
    process = resume(launcher, run, other)
    assert process.status == 2 and process.stderr.count("\n") == 1, process.stderr
    assert "belongs to another model: " in process.stderr and "eps" in process.stderr and "there and" in process.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("versions.json", "[1, 2]"),
        ("metrics.jsonl", '{"kind": "rollout"\n'),
        ("rounds/000/bank.json", '{"schema": "bank", "content": {"chunks": 3}}'),
        ("rounds/001/curriculum.json", "NaN"),
        ("rounds/001/summary.json", "null"),
        ("eval/base/manifest.json", "[]"),
        ("eval/base/summary.json", '{"success": "high"}'),
    ],
)
def test_garbage_in_a_file_of_the_run_is_one_line(whole, checkpoint, launcher, name, content):
    run = whole.with_name("damaged")
    if not run.exists():
        copy_of(whole, "damaged")
    path = run / name
    before = path.read_bytes()
    path.write_text(content)
    process = resume(launcher, run, checkpoint)
    path.write_bytes(before)
    assert process.status == 2 and process.stderr.count("\n") == 1, process.stderr
    assert process.stderr.startswith("error: ") and str(path) in process.stderr


def test_instants_are_named_in_the_docs():
    page = (Path(__file__).resolve().parents[2] / "docs/training.md").read_text()
    section = page.partition("\n## Resume\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[2].strip() for line in section.splitlines() if line.startswith("| ") and line.split("|")[1].strip().isdigit()]
    assert rows == list(KILLS)
