"""The pocket shop's mechanisms: how each skill may be worded, and which careful procedure its presence makes more likely.

The effects are planted: the demonstrator performs a procedure more often when a chunk of its mechanism is in the prompt, and the warm
start teaches the policy to do the same. `skills.json` holds the wordings; `paraphrases` are seen in the warm start, `held_out` never.
"""

import dataclasses
import functools
import json
from pathlib import Path

from intraskill.types import Chunk

PATH = Path(__file__).with_name("skills.json")


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One mechanism: the shopper's procedure that it drives (None: a placebo), and its wordings."""

    name: str
    shopper: str | None
    paraphrases: tuple[Chunk, ...]
    held_out: tuple[Chunk, ...]


def _chunk(name: str, wording: dict[str, str]) -> Chunk:
    source = {"source": "pocket/skills.json"}
    return Chunk(name, 1, wording["title"], wording["applies_when"], wording["procedure"], provenance=source)


@functools.cache
def mechanisms() -> dict[str, Mechanism]:
    """All mechanisms by name, in file order."""
    data = json.loads(PATH.read_text())["mechanisms"]
    return {
        name: Mechanism(
            name,
            entry["shopper"],
            tuple(_chunk(name, w) for w in entry["paraphrases"]),
            tuple(_chunk(name, w) for w in entry["held_out"]),
        )
        for name, entry in data.items()
    }
