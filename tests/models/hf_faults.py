"""Run by test_hf_faults.py in a process of its own: each fault strikes in a forked child, so that the parent lives to tell.

    PYTHONPATH=.:tests python tests/models/hf_faults.py DIRECTORY       prints one JSON object

Kills are placed at calls, not at times: the child sends itself SIGKILL when a named function is called for the n-th time.
"""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from models import checkpoints, tiny

from intraskill.models.qwen35 import hf, hf_files
from intraskill.types import InputError

TASKS = {
    "import": lambda d: hf.import_hf(d / "published", d / "out"),
    "export": lambda d: hf.export_imported(d / "imported", d / "out"),
    "save": lambda d: hf.save_hf(d / "out", CONFIG, np_params(), source=d / "published"),
}
CONFIG = tiny.config("two_values_a_key")

# task, where the call is looked up, its name, and which call it is that does not return
KILLS: list[tuple[str, Any, str, int]] = [
    ("import", hf_files, "read_into", 1),
    ("import", hf_files, "read_into", 12),
    ("import", hf_files.Writer, "copy", 2),
    ("import", hf, "write_json", 1),
    ("import", os, "rename", -1),
    ("export", hf_files.Writer, "write", 1),
    ("export", hf_files.Writer, "write", 12),
    ("export", hf_files, "write_index", 1),
    ("export", os, "rename", -1),
    ("save", hf_files.Writer, "write", 12),
    ("save", hf_files.Writer, "copy", 2),
    ("save", os, "rename", -1),
]


def np_params() -> Any:
    return checkpoints.params(CONFIG)


def strike(owner: Any, name: str, count: int, directory: Path) -> None:
    """Replaces a function by one that kills the process at its `count`-th call, -1 meaning the one that names the finished directory."""
    original, calls = getattr(owner, name), [0]

    def struck(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == count or (count < 0 and Path(arguments[1]) == directory / "out"):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, name, struck)


def in_child(body: Any) -> tuple[int, str]:
    """Runs `body` in a fork; returns the wait status and what it returned as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            os.write(write, str(body()).encode())
            status = 0
        except InputError as error:
            os.write(write, str(error).encode())
            status = 3
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    return os.waitpid(child, 0)[1], text


def left(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name not in ("published", "imported"))


def kill(directory: Path, task: str, owner: Any, name: str, count: int) -> dict[str, Any]:
    def doomed() -> None:
        strike(owner, name, count, directory)
        TASKS[task](directory)

    status, text = in_child(doomed)
    after = left(directory)
    again, error = in_child(lambda: (TASKS[task](directory), hf.load_hf(directory / "out"))[0])
    result = {"task": task, "at": f"{name} {count}", "signal": os.WTERMSIG(status), "said": text, "left": after, "again": again, "error": error}
    result["left again"] = left(directory)
    clear(directory)
    return result


def full_disk(directory: Path, task: str) -> dict[str, Any]:
    """No file may grow beyond a few kilobytes, which systems report as they report a full disk."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))
        TASKS[task](directory)

    status, text = in_child(limited)
    result = {"task": task, "status": os.waitstatus_to_exitcode(status), "said": text, "left": left(directory)}
    clear(directory)
    return result


def clear(directory: Path) -> None:
    for name in left(directory):
        shutil.rmtree(directory / name)


def main() -> None:
    directory = Path(sys.argv[1])
    checkpoints.multimodal(directory / "published", CONFIG, num_shards=2)
    assert in_child(lambda: hf.import_hf(directory / "published", directory / "imported")) == (0, "None")
    kills = [kill(directory, *point) for point in KILLS]
    disks = [full_disk(directory, task) for task in TASKS]
    print(json.dumps({"kills": kills, "disks": disks}))


if __name__ == "__main__":
    main()
