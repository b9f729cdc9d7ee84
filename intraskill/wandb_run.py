"""Weights & Biases as a view of metrics.jsonl, for runs that ask for it. The package is an extra: `pip install '.[wandb]'`.

Where the numbers go (project, entity, online or offline) is W&B's own business and is said by its environment variables, such as WANDB_PROJECT
and WANDB_MODE=offline. W&B cannot take a row back: what a resumed run plays again stands there twice under one `KIND/index`; the later row counts.
"""

import importlib
import json
import logging
import os
import pathlib
import secrets
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from intraskill.run_directory import read_json, write_json
from intraskill.types import InputError

PROJECT = "intraskill"  # unless WANDB_PROJECT names another
_log = logging.getLogger(__name__)


def load() -> ModuleType:
    """The package. Raises InputError where it is not installed; nothing is started yet."""
    try:
        wandb = importlib.import_module("wandb")  # by name: type checkers run where the extra is not installed
    except ImportError as e:
        raise InputError(f"W&B was asked for and cannot be imported ({e}): pip install '.[wandb]', or leave the flag out") from e
    if not hasattr(wandb, "init"):  # a directory of that name is a package to Python
        raise InputError(f"W&B was asked for and {list(wandb.__path__)[0]} is a directory, not the package: pip install '.[wandb]'")
    return wandb


class WandbRun:
    """One W&B run for a run directory; a resumed run continues it, by the id in `wandb.json`.

    A view that breaks after the start does not end the run: it is left out from there on, with a warning.
    """

    def __init__(self, directory: str | os.PathLike[str], config: Mapping[str, Any]):
        """Starts or continues the W&B run. Raises InputError when W&B refuses, e.g. for want of a login."""
        directory, wandb = pathlib.Path(directory), load()
        path = directory / "wandb.json"
        if not path.is_file():
            write_json(path, {"id": secrets.token_hex(4)})
        record = read_json(path)
        if not isinstance(record, dict) or not isinstance(record.get("id"), str):
            raise InputError(f"{path} does not name a W&B run; restore it from a copy, or remove it to have the rest shown as another W&B run")
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=directory.name,
                id=record["id"],
                resume="allow",
                dir=directory,
                config=json.loads(json.dumps(config)),
                settings=wandb.Settings(console="off"),  # else it wraps the streams that the bars are drawn on
            )
        except wandb.errors.Error as e:
            raise InputError(f"W&B does not start: {e}; log in with `wandb login`, set WANDB_MODE=offline, or leave the flag out") from e
        self._kinds: set[str] = set()

    def show(self, kind: str, index: int, numbers: Mapping[str, float]) -> None:
        """Logs a record as one row; charts of its kind have `KIND/index` as x axis, like TensorBoard's."""
        if self._run is None:
            return
        try:
            if kind not in self._kinds:
                self._kinds.add(kind)
                self._run.define_metric(f"{kind}/index")
                self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/index")
            self._run.log({f"{kind}/index": index, **{f"{kind}/{name}": value for name, value in numbers.items()}})
        except Exception as e:  # W&B's process may die in many ways, and days of training do not hang on a view
            _log.warning("W&B takes no more records (%s: %s); metrics.jsonl has them all, and a resumed run starts W&B again", type(e).__name__, e)
            self._run = None

    def close(self) -> None:
        """Returns when everything is sent, or written where W&B is offline."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as e:  # as above
            _log.warning("W&B may lack the last records (%s: %s); metrics.jsonl has them all", type(e).__name__, e)
