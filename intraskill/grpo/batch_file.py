"""An optimizer batch as a file: what is left to look at when an update stopped a run.

One `.npz`, readable by NumPy alone: `origins`, and for microbatch i every field of `types.Batch` as `i/field`.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from intraskill.types import Batch, InputError

Origins = Sequence[tuple[int, int]]
"""For each episode of a batch, by its number there (`Batch.episode`): the group's index, and the episode's place in the group."""


def save(path: Path, microbatches: Sequence[Batch], origins: Origins) -> None:
    """Writes the file; it appears complete or not at all."""
    arrays = {"origins": np.asarray(origins, np.int64).reshape(-1, 2)}
    for i, batch in enumerate(microbatches):
        arrays |= {f"{i}/{field.name}": getattr(batch, field.name) for field in dataclasses.fields(Batch)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-0.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]  (names are arrays', none is `allow_pickle`)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[list[Batch], list[tuple[int, int]]]:
    """The microbatches, ready for `Learner.update`, and where their episodes came from. Raises InputError for a file that `save` did not write."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        names = [field.name for field in dataclasses.fields(Batch)]
        count = sum(name.endswith("/tokens") for name in arrays)
        microbatches = [Batch(**{name: arrays[f"{i}/{name}"] for name in names}) for i in range(count)]
        return microbatches, [(int(group), int(episode)) for group, episode in arrays["origins"]]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise InputError(f"{path} is no batch file ({error}); give the one that the run's error named") from None
