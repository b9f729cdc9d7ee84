import dataclasses
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from intraskill import run_directory
from intraskill.run_directory import RunDirectory
from intraskill.types import InputError, MaskKind

CONFIG = {"seed": 1, "grpo": {"learning_rate": 1e-6, "betas": (0.9, 0.98)}}


def test_create_writes_config_and_versions_and_leaves_nothing_else(tmp_path):
    with RunDirectory.create(tmp_path / "a", CONFIG) as run:
        assert json.loads((run.path / "config.json").read_text()) == {"seed": 1, "grpo": {"learning_rate": 1e-6, "betas": [0.9, 0.98]}}
        versions = json.loads((run.path / "versions.json").read_text())
        assert versions["packages"]["numpy"] == np.__version__
        assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
        assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "lock", "versions.json"]
        assert run.changed == {}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_create_refuses_an_existing_run_and_leaves_it_alone(tmp_path):
    RunDirectory.create(tmp_path / "a", CONFIG).close()
    before = (tmp_path / "a" / "config.json").read_bytes()
    with pytest.raises(InputError, match=r"a already exists, and a run is never overwritten; pass --resume"):
        RunDirectory.create(tmp_path / "a", {"seed": 2})
    assert (tmp_path / "a" / "config.json").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="already exists"):
        RunDirectory.create(tmp_path / "file", CONFIG)


def test_create_accepts_an_empty_directory(tmp_path):
    (tmp_path / "a").mkdir()
    RunDirectory.create(tmp_path / "a", CONFIG).close()
    assert (tmp_path / "a" / "config.json").exists()


def test_create_loses_the_race_cleanly(tmp_path, monkeypatch):
    """Another process makes the run after our first look and before our rename."""

    def slow_versions():
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "config.json").write_text("theirs")
        return {}

    monkeypatch.setattr(run_directory, "versions", slow_versions)
    with pytest.raises(InputError, match="already exists"):
        RunDirectory.create(tmp_path / "a", CONFIG)
    assert (tmp_path / "a" / "config.json").read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_resume_needs_a_run_and_its_configuration(tmp_path):
    with pytest.raises(InputError, match=r"no run to resume in .*leave out --resume"):
        RunDirectory.resume(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "versions.json").write_text("{}")
    with pytest.raises(InputError, match=r"b cannot be resumed: its config.json is gone; restore it from a copy"):  # not: leave out --resume
        RunDirectory.resume(tmp_path / "b")
    RunDirectory.create(tmp_path / "a", CONFIG).close()
    with RunDirectory.resume(tmp_path / "a", CONFIG) as run:
        assert run.config["grpo"]["betas"] == [0.9, 0.98]
    with pytest.raises(InputError, match=r"started with grpo.learning_rate=1e-06, not 0.1"):
        RunDirectory.resume(tmp_path / "a", {"seed": 1, "grpo": {"learning_rate": 0.1, "betas": (0.9, 0.98)}})
    with pytest.raises(InputError, match=r"started with extra=null, not 3"):
        RunDirectory.resume(tmp_path / "a", {**CONFIG, "extra": 3})
    RunDirectory.resume(tmp_path / "a").close()  # the refusals let go of the lock


def test_resume_removes_half_written_files_and_keeps_the_rest(tmp_path):
    with RunDirectory.create(tmp_path / "a", CONFIG) as run:
        run.write_json("rounds/000/gate.json", {"x": 1})
        leftover = run.round(0) / ".gate.json.123-456.tmp"
        leftover.write_text("{")
    with RunDirectory.resume(tmp_path / "a") as run:
        assert not leftover.exists()
        assert run_directory.read_json(run.round(0) / "gate.json") == {"x": 1}


def test_resume_records_changed_versions(tmp_path, monkeypatch):
    old = {"packages": {"jax": "0.10.2", "torch": "2.13.0"}, "git": {"revision": "a", "modified": False}, "python": "3.11.7", "platform": "here"}
    new = {**old, "packages": {"jax": "0.10.3"}}
    monkeypatch.setattr(run_directory, "versions", lambda: old)
    RunDirectory.create(tmp_path / "a", CONFIG).close()
    monkeypatch.setattr(run_directory, "versions", lambda: new)
    with RunDirectory.resume(tmp_path / "a") as run:
        assert run.changed == {"jax": ["0.10.2", "0.10.3"], "torch": ["2.13.0", None]}
    record = run_directory.read_json(tmp_path / "a" / "versions.json")
    assert record["packages"] == old["packages"]
    assert [r["changed"] for r in record["resumed"]] == [run.changed]


def test_what_does_not_change_the_run_may_change_when_it_goes_on(tmp_path):
    old = {
        "seed": 1,
        "runs_directory": "small",
        "mesh": {"fsdp": 1},
        "engine": {"addresses": ("http://a",), "dtype": "bfloat16"},
        "checkpoint": {"keep": 2},
    }
    new = {
        "seed": 1,
        "runs_directory": "large",
        "mesh": {"fsdp": 8},
        "engine": {"addresses": ("http://b",), "dtype": "bfloat16"},
        "checkpoint": {"keep": 2, "keep_every": 0},
    }
    RunDirectory.create(tmp_path / "a", old).close()
    with RunDirectory.resume(tmp_path / "a", new) as run:
        assert run.changed == {
            "mesh.fsdp": [1, 8],
            "engine.addresses": [["http://a"], ["http://b"]],
            "checkpoint.keep_every": [None, 0],
            "runs_directory": ["small", "large"],
        }
        assert run.config["mesh"] == {"fsdp": 1}, "the record says how the run began"
    assert run_directory.read_json(tmp_path / "a" / "versions.json")["resumed"][0]["changed"]["mesh.fsdp"] == [1, 8]
    with pytest.raises(InputError, match=r'started with engine.dtype="bfloat16", not "float32"'):
        RunDirectory.resume(tmp_path / "a", {**new, "engine": {"addresses": (), "dtype": "float32"}})


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"7", b"{", b"\xff\xfe", b"NaN", b"[" * 100_000, b"1" * 5000, b'{"packages": 3}'])
def test_garbage_in_what_resuming_reads(tmp_path, content):
    RunDirectory.create(tmp_path / "a", CONFIG).close()
    for name in ("config.json", "versions.json"):
        path = tmp_path / "a" / name
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(InputError) as error:
            RunDirectory.resume(tmp_path / "a", CONFIG)
        assert str(tmp_path / "a") in str(error.value) and (name in str(error.value) or "packages=3" in str(error.value))
        path.write_bytes(before)
    RunDirectory.resume(tmp_path / "a", CONFIG).close()


def test_one_process_at_a_time(tmp_path):
    run = RunDirectory.create(tmp_path / "a", CONFIG)
    program = (
        "import sys; from intraskill.run_directory import RunDirectory, InputError\n"
        "try: RunDirectory.resume(sys.argv[1])\nexcept InputError as e: print(e)"
    )
    environment = {**os.environ, "PYTHONPATH": str(run_directory.SOURCE)}
    command = [sys.executable, "-c", program, str(run.path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert f"in use by process {os.getpid()} on" in answer
    run.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout == ""


def test_a_killed_process_leaves_the_lock_free(tmp_path):
    program = (
        "import os, signal, sys; from intraskill.run_directory import RunDirectory\n"
        "run = RunDirectory.create(sys.argv[1], {})\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": str(run_directory.SOURCE)}
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], env=environment)
    assert result.returncode == -9
    RunDirectory.resume(tmp_path / "a", {}).close()


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    run_directory.write_json(path, {"a": 1})

    def full(fd):
        raise OSError("No space left on device")

    monkeypatch.setattr(run_directory.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run_directory.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@dataclasses.dataclass
class Record:
    kind: MaskKind
    ids: tuple[str, ...]


def test_plain():
    value = {
        1: np.float32(0.5),
        "b": np.array([[1, 2]]),
        "c": Record(MaskKind.FULL, ("x",)),
        "d": float("nan"),
        "e": {"b", "a"},
        "f": pathlib.Path("p"),
        "g": np.bool_(True),
    }
    expected = {"1": 0.5, "b": [[1, 2]], "c": {"kind": "full", "ids": ["x"]}, "d": None, "e": ["a", "b"], "f": "p", "g": True}
    assert run_directory.plain(value) == expected
    assert run_directory.plain(np.array([1.0, np.inf])) == [1.0, None]
    with pytest.raises(TypeError, match="of type object has no JSON form"):
        run_directory.plain({"a": object()})


def test_read_json_names_the_file(tmp_path):
    with pytest.raises(InputError, match=r"gone.json cannot be read"):
        run_directory.read_json(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text('{"a": ')
    with pytest.raises(InputError, match=r"bad.json is not JSON"):
        run_directory.read_json(tmp_path / "bad.json")


def test_require_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10**10, 10**10 - 10**9, 10**9))
    run_directory.require_disk(tmp_path / "not" / "yet", 10**9)
    with pytest.raises(InputError, match=r"yet needs 1.5 GB of disk and 1.0 GB are free at"):
        run_directory.require_disk(tmp_path / "not" / "yet", 1_500_000_000)


def test_a_full_disk_is_said_with_place_and_remedy(tmp_path):
    with pytest.raises(InputError, match=r"a/run could not be written: No space left on device, .*B are free at .*free some space there.*--resume"):
        with run_directory.full_disk_named(tmp_path / "a/run"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(PermissionError), run_directory.full_disk_named(tmp_path):
        raise OSError(errno.EACCES, "Permission denied", "there")


def test_size_on_disk_counts_every_file(tmp_path):
    assert run_directory.size_on_disk(tmp_path / "absent") == 0
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/one").write_bytes(b"1" * 100)
    (tmp_path / "a/b/two").write_bytes(b"2" * 23)
    (tmp_path / "a/nowhere").symlink_to("absent")
    assert run_directory.size_on_disk(tmp_path) == 100 + 23 + len("absent")
