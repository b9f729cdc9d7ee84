"""The check for a machine with a GPU, on the CPU with a tiny shape: that it runs, and that it says so when something is wrong."""

import shutil
import subprocess

import pytest

from benchmarks import gpu_check

TINY = ["--shape=tiny", "--row=128", "--slots=2", "--steps=4", "--repeats=1"]


def test_decode_and_update_run(capsys):
    assert gpu_check.main([*TINY, "--parity=no"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["decode", "update", "gpu_check"] and lines[-1] == "gpu_check ok"
    assert "(2 sequences" in lines[1] and "a row of 128" in lines[2] and all("tokens/s" in line for line in lines[1:3])


def test_what_differs_is_a_failure(capsys, monkeypatch):
    def differs() -> str:
        raise AssertionError("logits\n differ")

    for name in ("decode", "update"):
        monkeypatch.setattr(gpu_check, name, lambda *_: "fine")
    monkeypatch.setattr(gpu_check, "parity", differs)
    assert gpu_check.main(TINY) == 1
    out = capsys.readouterr().out
    assert "DIFFERS: logits differ" in out and out.endswith("gpu_check failed\n")


def test_without_a_gpu_the_script_says_so(tmp_path):
    bash = shutil.which("bash")
    assert bash is not None
    found = subprocess.run(
        [bash, str(gpu_check.Path(gpu_check.__file__).with_suffix(".sh"))], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 2 and found.stderr.startswith("nvidia-smi not found") and len(found.stderr.splitlines()) == 1


@pytest.mark.torch
@pytest.mark.loose_numerics  # torch's tensors meet NumPy's
def test_parity_runs():
    pytest.importorskip("torch")
    assert "agree" in gpu_check.parity()
