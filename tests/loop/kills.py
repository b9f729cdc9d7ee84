"""Ends its own process with SIGKILL at a chosen instant, and notes what it trains on: the fork server installs it before an entry point runs.

An instant is the nth call of a function or the nth rename onto a path. Nothing of the product knows about it, and a rename is where a file comes into
being, so instants survive most changes of the code.
"""

import dataclasses
import fnmatch
import functools
import hashlib
import importlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Kill:
    """Just before the `nth` call of `what` ("module:Class.function"), or before the `nth` rename onto a path that ends like the pattern `what`."""

    what: str
    nth: int = 1

    def arm(self) -> None:
        count = itertools.count(1)

        def strike() -> None:
            if next(count) == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)

        if ":" in self.what:
            _wrap(self.what, lambda *_: strike())
        else:
            pattern = f"*/{self.what}"
            sys.addaudithook(lambda event, args: strike() if event == "os.rename" and fnmatch.fnmatch(os.fsdecode(args[1]), pattern) else None)


def note_batches(path: str) -> None:
    """Appends `[updates done, sha256 of the batch]` to the file at `path` before each optimizer update."""

    def note(learner: Any, state: Any, microbatches: Any, *_: Any) -> None:
        digest = hashlib.sha256()
        for batch in microbatches:
            for field in dataclasses.fields(batch):
                digest.update(np.asarray(getattr(batch, field.name)).tobytes())
        with open(path, "a") as f:
            f.write(json.dumps([int(state.step), digest.hexdigest()]) + "\n")

    _wrap("intraskill.grpo.learner:Learner.update", note)


def note_connections(path: str) -> None:
    """Appends `[host, port]` to the file at `path` for each connection that Python code of this process makes."""

    def note(event: str, arguments: tuple) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            with open(path, "a") as f:
                f.write(json.dumps(arguments[1][:2]) + "\n")

    sys.addaudithook(note)


def batches(path: Path) -> dict[int, set[str]]:
    """What `note_batches` noted, by the number of updates done before."""
    found: dict[int, set[str]] = {}
    for step, digest in map(json.loads, path.read_text().splitlines()):
        found.setdefault(step, set()).add(digest)
    return found


def _wrap(target: str, before: Callable[..., None]) -> None:
    module, _, names = target.partition(":")
    owner: Any = importlib.import_module(module)
    *path, last = names.split(".")
    for name in path:
        owner = getattr(owner, name)
    original = getattr(owner, last)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        return original(*args, **kwargs)

    setattr(owner, last, wrapped)
