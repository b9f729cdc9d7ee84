"""`Parts` whose engine, shop and chat are fakes, for tests of the loop's arrows without a model; what the real ones are is tested elsewhere."""

import types
from pathlib import Path
from typing import Any

from rollout import fakes
from rollout.fakes import BUY, CLICK, STOP, completion

from intraskill.parts import Parts, Policy
from intraskill.skills.bank import Bank
from intraskill.types import Chunk, EngineError, Task


def chunk(name: str, version: int = 1, text: str = "") -> Chunk:
    return Chunk(name, version, title=name, applies_when="", procedure=text or f"do {name}")


BANK = Bank((chunk("a", text="mind the budget"), chunk("b", text="compare the colour"), chunk("c", text="weigh the size"), chunk("d")))
NEW = (chunk("b", 2), chunk("n"), chunk("o"))
TOKENS = {c.id: 100 + i for i, c in enumerate((*BANK.chunks, *NEW))}
WORDS = ("budget", "colour", "size", "wool")
TASKS = [Task(f"task-{i:02d}", f"find one lamp with {WORDS[i % 4]} and {WORDS[(i // 4) % 4]}", {}) for i in range(24)]


def seen_in(tokens) -> tuple[str, ...]:
    """The chunks that a prompt's tokens show."""
    ids = {token: i for i, token in TOKENS.items()}
    return tuple(ids[t] for t in tokens if t in ids)


class Chat(fakes.Chat):
    """Writes each chunk as a token of its own."""

    identity = {"chat": "fake"}

    def prompt(self, task, chunks, observation):
        return [*fakes.PROMPT, *(TOKENS[c.id] for c in chunks), 70]


class Engine(fakes.Engine):
    """Buys, and so succeeds, where the prompt carries chunk a@1; else clicks until its steps are over. `broken` names (stream, index) that fail."""

    def __init__(self, broken=()):
        super().__init__(turns=())
        self.broken = set(broken)

    async def generate(self, prompt_ids, *, session, sampling):
        self.prompts.append(tuple(prompt_ids))
        if session.noise[1:3] in self.broken:
            raise EngineError("gone")
        return completion(BUY if TOKENS["a@1"] in prompt_ids else CLICK, STOP)


def make_parts(path: Path, config: Any, engine: Engine | None = None) -> tuple[Parts, list[dict]]:
    """The parts, and the list that their metrics go to."""
    policy = object.__new__(Policy)
    for name, value in {"chat": Chat(), "sampling": fakes.SAMPLING}.items():
        object.__setattr__(policy, name, value)
    lines: list[dict] = []
    quiet = types.SimpleNamespace(say=lambda text: lines.append({"said": text}))
    for name in ("start", "advance", "finish"):
        setattr(quiet, name, lambda *_, **__: None)
    parts = object.__new__(Parts)  # only the attributes that the arrows use
    parts.config, parts.policy, parts.engine, parts.shop, parts.shop_identity = config, policy, engine or Engine(), fakes.Shop(), "shop"
    parts.run = types.SimpleNamespace(path=path, round=lambda index: path / "rounds" / f"{index:03d}")
    parts.metrics, parts.progress = types.SimpleNamespace(write=lines.append), quiet
    parts.initial_bank, parts.tasks = BANK, {"train": TASKS, "validation": TASKS, "test": TASKS}
    return parts, lines
