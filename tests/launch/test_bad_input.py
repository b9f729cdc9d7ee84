"""Bad input is answered by one line that names the value, the rule and the remedy, with exit code 2, and nothing is created."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from loop.fork_server import ROOT
from loop.runs import flags
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

CONFIG = "configs/pocket.py:smoke"
ONE_LINE_MOST = 1000


def assert_refused(process, runs: Path, *words: str) -> None:
    assert process.status == 2, (process.status, process.stdout[-500:], process.stderr[-2000:])
    error = process.stderr
    assert error.count("\n") == 1 and len(error) < ONE_LINE_MOST and error.startswith("error: "), error
    assert "Traceback" not in process.stdout + error
    assert not [word for word in words if word not in error], error
    assert not list(runs.iterdir()), "nothing is created"


@pytest.fixture
def runs(tmp_path) -> Path:
    path = tmp_path / "runs"
    path.mkdir()
    return path


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.fixture
def train(launcher, runs, checkpoint):
    """Starts a run that should be refused; the last arguments win."""

    def start(*more: str, config: str = CONFIG, **settings):
        return launcher.run("launch/train.py", *flags(config, runs, "refused", settings.pop("model__checkpoint", checkpoint), **settings), *more)

    return start


# --------------------------------------------------------------------------------------------------------------- checkpoint


def test_missing_checkpoint_directory(train, runs, tmp_path):
    assert_refused(train(model__checkpoint=tmp_path / "nowhere"), runs, str(tmp_path / "nowhere"), "no such directory", "Hugging Face")


def test_a_directory_that_is_no_checkpoint(train, runs, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/notes.txt").write_text("hello")
    assert_refused(train(model__checkpoint=tmp_path / "foreign"), runs, "config.json", "no such file", "Hugging Face")


def test_a_checkpoint_of_another_architecture(train, runs, copy):
    (copy / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    assert_refused(train(model__checkpoint=copy), runs, "model_type is 'llama'", "qwen3_5")


def test_a_checkpoint_whose_weights_are_truncated(train, runs, copy):
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert_refused(train(model__checkpoint=copy), runs, "model.safetensors", "truncated", "copy it again")


def test_a_checkpoint_without_a_tokenizer(train, runs, copy):
    (copy / "tokenizer.json").unlink()
    assert_refused(train(model__checkpoint=copy), runs, str(copy), "tokenizer.json")


def test_a_tokenizer_without_the_special_tokens(train, runs, copy):
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")), chat_template="{{ messages }}")
    bare.save_pretrained(str(copy))
    assert_refused(train(model__checkpoint=copy), runs, str(copy), "<|im_start|>", "special tokens")


# ------------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.grpo.learnin_rate=3e-4", ["no key", "learnin_rate", "learning_rate"]),
        ("--config.nothing=1", ["no key", "nothing"]),
        ("--config.rollout.group_size=four", ["group_size", "four"]),
        ("--config.rollout.group_size=4.5", ["group_size", "4.5"]),
        ("--config.grpo.learning_rate=fast", ["learning_rate", "fast"]),
        ("--config.model.thinking=maybe", ["thinking", "maybe"]),
        ("--resum", ["resum"]),
        ("configs/pocket.py:demo", ["configs/pocket.py:demo", "--config"]),
        ("--config.rollout.group_size=0", ["rollout.group_size", "0", ">= 2"]),
        ("--config.rollout.group_size=1", ["rollout.group_size", "1", ">= 2"]),
        ("--config.rollout.num_slots=0", ["rollout.num_slots"]),
        ("--config.rollout.oversample=2", ["rollout.oversample", "2", "groups_per_step"]),
        ("--config.rollout.max_context=4096", ["1024"]),
        ("--config.rollout.temperature=0.0", ["rollout.temperature"]),
        ("--config.rollout.temperature=-1.0", ["rollout.temperature"]),
        ("--config.rollout.temperature=nan", ["rollout.temperature", "finite"]),
        ("--config.shop.port=70000", ["shop.port", "65535"]),
        ("--config.shop.test=-5", ["shop.test", ">= 1"]),
        ("--config.name=../escape", ["../escape", "one path component"]),
        ("--config.grpo.updates_per_step=4", ["grpo.updates_per_step", "4", "3"]),
        ("--config.grpo.aggregation=median", ["aggregation", "median"]),
        ("--config.grpo.overlong=cut", ["overlong", "cut"]),
        ("--config.grpo.clip_low=-0.1", ["clip", "-0.1"]),
        ("--config.grpo.betas=3", ["grpo.betas", "two numbers"]),
        ("--config.grpo.learning_rate=-1.0", ["learning_rate", "-1"]),
        ("--config.schedule.rounds=0", ["schedule.rounds"]),
        ("--config.seed=-1", ["seed", "-1"]),
        ("--config.curriculum.q=1.5", ["q", "1.5"]),
        ("--config.curriculum.rho_min=0.95", ["rho_min", "0.95"]),
        ("--config.shop.num_products=50", ["50", "64"]),
        ("--config.shop.page_size=0", ["page_size", "0"]),
        ("--config.validation.tasks=13", ["validation.tasks", "13", "12"]),
        ("--config.mesh.data=64", ["64"]),
        ("--config.mesh.data=2", ["rows_per_microbatch", "3", "2"]),
        ("--config.model.dtype=float16", ["float16", "bfloat16"]),
        ("--config.checkpoint.keep=0", ["keep"]),
        ("--config.model.piece_length=352", ["640", "piece_length", "352"]),
        ("--config.grpo.weight_decay=nan", ["weight_decay", "nan"]),
        ("--config.bank.max_active=11", ["bank.max_active", "11", "10"]),
    ],
)
def test_flags(train, runs, flag, words):
    assert_refused(train(flag), runs, *words)


def test_unknown_variant(train, runs):
    assert_refused(train(config="configs/pocket.py:nope"), runs, "nope", "demo", "smoke")


def test_missing_config_file(train, runs):
    assert_refused(train(config="configs/nowhere.py"), runs, "configs/nowhere.py")


def test_a_config_file_that_is_no_python(train, runs, tmp_path):
    (tmp_path / "broken.py").write_text("def get_config(:\n")
    assert_refused(train(config=str(tmp_path / "broken.py")), runs, "broken.py")


# -------------------------------------------------------------------------------------------------------------- other inputs


def test_resuming_what_is_not_there(train, runs):
    assert_refused(train("--resume"), runs, str(runs / "refused"), "no run to resume")


def test_busy_port(train, runs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(train(shop__port=port), runs, str(port), "in use")


@pytest.mark.parametrize("damage", ["hash", "text", "kind", "gone"])
def test_a_bank_file_that_is_not_what_it_was(train, runs, tmp_path, damage):
    path = tmp_path / "bank.json"
    bank = json.loads((ROOT / "pocket/bank.json").read_text())
    if damage == "hash":
        bank["content"]["chunks"][0]["procedure"] = "click at random"
    if damage == "kind":
        bank["schema"] = "curriculum"
    if damage != "gone":
        path.write_text("{" if damage == "text" else json.dumps(bank))
    words = {"hash": "was edited", "text": "is not JSON", "kind": "curriculum", "gone": "cannot be read"}[damage]
    assert_refused(train(bank__path=path), runs, str(path), words)


def test_missing_mechanisms(train, runs, tmp_path):
    assert_refused(train(bank__mechanisms=tmp_path / "m.json"), runs, str(tmp_path / "m.json"))


def test_not_enough_disk(train, runs):
    assert_refused(train("--config.rollout.oversample=1000000000000"), runs, "of disk", "free some space", str(runs))


def test_a_real_process_answers_the_same_way(runs, tmp_path):
    """Once without the fork server: interpreter start, re-execution for the allocator, imports and all."""
    command = [sys.executable, "launch/train.py", *flags(CONFIG, runs, "refused", tmp_path / "nowhere")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere'}: no such directory") and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------- other entry points


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"condition__tasks": 13}, ["condition.tasks = 13", "12"]),
        ({"condition__tasks": 0}, ["condition.tasks = 0"]),
        ({"condition__samples": 0}, ["condition.samples", "0"]),
        ({"condition__split": "dev"}, ["dev"]),
        ({"condition__bank": "nowhere.json"}, ["nowhere.json"]),
        ({"model__checkpoint": "nowhere"}, ["nowhere", "no such directory"]),
    ],
)
def test_eval(launcher, runs, checkpoint, settings, words):
    arguments = flags("configs/eval.py:base", runs, "refused", checkpoint, **{"condition__tasks": 4, **settings})
    assert_refused(launcher.run("launch/eval.py", *arguments), runs, *words)


def test_eval_of_an_unknown_condition(launcher, runs, checkpoint):
    assert_refused(launcher.run("launch/eval.py", *flags("configs/eval.py:best", runs, "refused", checkpoint)), runs, "best", "base_initial")


def test_export_of_what_is_no_run(launcher, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    for run, words in ((tmp_path / "absent", "config.json"), (tmp_path / "empty", "config.json")):
        assert_refused(launcher.run("launch/export_hf.py", f"--run={run}", f"--out={runs / 'out'}"), runs, str(run), words)
    (tmp_path / "empty/config.json").write_text("{}")
    assert_refused(launcher.run("launch/export_hf.py", f"--run={tmp_path / 'empty'}", f"--out={runs / 'out'}"), runs, "no checkpoints yet")
    assert_refused(launcher.run("launch/export_hf.py", f"--run={tmp_path}"), runs, "out")
    assert_refused(launcher.run("launch/export_hf.py", "--run=x", "--out=y", "--dtype=int8"), runs, "int8", "bfloat16")


def test_a_warm_start_over_an_existing_directory(launcher, runs, tmp_path):
    assert_refused(launcher.run("launch/warm_start.py", f"--out={tmp_path}"), runs, str(tmp_path), "exists already")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--tokens=5", ["tokens", "5"]),
        ("--tokens=210815", ["210815", "60", "210816"]),  # an update has 3 rows of 1,152 tokens, and the 61st is the first after the warm-up
        ("--seed=-1", ["seed", "-1"]),
        (f"--seed={2**32}", ["seed", str(2**32)]),  # JAX would draw the parameters of seed 0
    ],
)
def test_a_warm_start_that_cannot_be(launcher, runs, flag, words):
    assert_refused(launcher.run("launch/warm_start.py", f"--out={runs / 'x'}", flag), runs, *words)


def test_a_report_of_what_is_no_run(launcher, runs, tmp_path):
    assert_refused(launcher.run("launch/report.py", f"--run={tmp_path / 'absent'}"), runs, str(tmp_path / "absent"))


# ----------------------------------------------------------------------------------------------------------------- watching


def test_a_profiler_window_outside_the_run(train, runs):
    assert_refused(train("--profile=1:2"), runs, "profile = '1:2'", "FIRST <= LAST < 2")
