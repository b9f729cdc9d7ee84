"""The commands: what they print, and one line for whatever is wrong."""

import builtins
import sys

import numpy as np
import pytest
from loop.fixtures import launcher
from models import checkpoints, tiny

from intraskill.types import InputError
from launch import compare_hf

__all__ = ["launcher"]


def assert_refused(process, *words):
    assert process.status == 2, process.stderr
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1, process.stderr
    for word in words:
        assert word in process.stderr


@pytest.fixture
def published(tmp_path):
    checkpoints.multimodal(tmp_path / "published", tiny.config("two_values_a_key"))
    return tmp_path / "published"


def test_there_and_back_in_silence(launcher, tmp_path, published):
    done = launcher.run("launch/import_hf.py", f"--checkpoint={published}", f"--out={tmp_path / 'imported'}")
    assert (done.status, done.stderr) == (0, "") and done.stdout == f"{tmp_path / 'imported'}: imported {published}\n"
    done = launcher.run("launch/export_hf.py", f"--imported={tmp_path / 'imported'}", f"--out={tmp_path / 'out'}")
    assert (done.status, done.stderr) == (0, "") and done.stdout == f"{tmp_path / 'out'}: {tmp_path / 'imported'}\n"
    for file in published.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


def test_bad_input(launcher, tmp_path, published):
    out = f"--out={tmp_path / 'out'}"
    (tmp_path / "file").write_text("")
    assert_refused(launcher.run("launch/import_hf.py", f"--checkpoint={tmp_path / 'nowhere'}", out), "nowhere", "no such directory")
    assert_refused(launcher.run("launch/import_hf.py", f"--checkpoint={published}", f"--out={published}"), str(published), "exists already")
    assert_refused(launcher.run("launch/import_hf.py", f"--checkpoint={published}", f"--out={tmp_path / 'file' / 'x'}"), "file")
    assert_refused(launcher.run("launch/import_hf.py", f"--checkpoint={published}"), "out")
    assert_refused(launcher.run("launch/export_hf.py", f"--imported={published}", out), "is not an imported directory")
    assert_refused(launcher.run("launch/export_hf.py", out), "run", "imported")
    assert_refused(launcher.run("launch/export_hf.py", "--run=a", "--imported=b", out), "run", "imported")
    assert {p.name for p in tmp_path.iterdir()} == {"published", "file"}


# ------------------------------------------------------------------------------------------------------------ compare_hf


def test_compare_without_torch_says_what_to_install(published, monkeypatch, capsys):
    original = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.partition(".")[0] == "torch":
            raise ImportError("No module named 'torch'")
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(sys, "argv", ["compare_hf.py", str(published)])
    with pytest.raises(SystemExit) as stopped:
        compare_hf.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ("error: compare_hf needs torch and transformers (No module named 'torch'): pip install -e '.[parity]'\n")


def test_compare_without_a_directory(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_hf.py"])
    with pytest.raises(SystemExit) as stopped:
        compare_hf.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_figure_is_judged_by_its_tolerance():
    outputs = compare_hf.Outputs(
        {kind: [np.ones((n, 3), np.float32) for n in compare_hf.LENGTHS] for kind in ("forward", "right", "left")}
        | {"prefilled": [np.ones((64, 3), np.float32)], "recurrent": [np.ones((128, 3), np.float32)]},
        {"a": np.array([2.0, -4.0]), "b": np.array([1.0])},
        np.zeros((2, 64), np.int32),
    )
    assert [f.value for f in compare_hf.figures(outputs, outputs)] == [0] * 6
    other = compare_hf.Outputs(
        {**outputs.logits, "left": [x + np.float32(0.25) for x in outputs.logits["left"]]},
        {"a": np.array([2.0, -4.02]), "b": np.array([1.0])},
        np.eye(2, 64, dtype=np.int32),
    )
    found = compare_hf.figures(other, outputs)  # ours differ in gradients and tokens
    assert [f.ok for f in found] == [True, True, False, False, True, True]
    assert found[2].value == pytest.approx(0.005) and found[2].where == "a" and found[3].value == 2
    found = compare_hf.figures(outputs, other)
    assert found[1].value == 0.25 and not found[1].ok
    assert not compare_hf.Figure("", float("nan"), 1).ok
    last = [x if len(x) < 128 else x * np.float32(np.nan) for x in outputs.logits["left"]]
    found = compare_hf.figures(outputs, compare_hf.Outputs({**outputs.logits, "left": last}, outputs.gradients, outputs.greedy))
    assert [f.ok for f in found] == [True, False, True, True, True, True]  # one row that is no number, after others that agree


def test_compare_names_a_broken_directory(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        compare_hf.compare(tmp_path / "nowhere", 0)
