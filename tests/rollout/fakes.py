"""An engine, a shop and a chat small enough to reason about by hand.

Token 0 stops a turn. A turn's first id decides what it means: CLICK and BUY are calls, anything else is a protocol error.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from intraskill.rollout.chat import ProtocolError
from intraskill.types import Chunk, Completion, EngineError, Health, Opened, Published, Sampling, Session, ShopError, StepResult, Task, ToolCall

STOP, CLICK, BUY, NOISE = 0, 1, 2, 3
PROMPT = (50, 51, 52)
TASK = Task("task-1", "a red lamp", {"likes": "red"})
SAMPLING = Sampling(max_new_tokens=4, stop_ids=(STOP,))


class Chat:
    def prompt(self, task: Task, chunks: Sequence[Chunk], observation: str) -> list[int]:
        return [*PROMPT, *(60 + i for i, _ in enumerate(chunks)), len(observation) + 70]

    def tool_result(self, text: str) -> list[int]:
        return [80, 80 + len(text) % 10]

    def parse(self, ids: Sequence[int]) -> ToolCall | ProtocolError:
        calls = {CLICK: ToolCall("click", {"value": "x"}), BUY: ToolCall("click", {"value": "buy now"})}
        return calls.get(ids[0]) or ProtocolError("no_tool_call", "make exactly one call")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def completion(*ids: int, reason: str = "stop", **changes: Any) -> Completion:
    fields: dict[str, Any] = {"ids": ids, "logprobs": tuple(-0.5 - i for i in range(len(ids))), "finish_reason": reason}
    return Completion(**{**fields, "weight_versions": (3,), "cached_tokens": 0, "latency": 0.01, **changes})


@dataclasses.dataclass
class Engine:
    """Answers from `turns`: completions in order, or a function of (session, turn index) that may raise."""

    turns: Callable[[Session, int], Completion] | Sequence[Completion]
    delay: Callable[[Session], float] = lambda session: 0.0
    prompts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    limits: list[int] = dataclasses.field(default_factory=list)
    released: list[str] = dataclasses.field(default_factory=list)
    running: int = 0
    most_running: int = 0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    health: Health = Health(True, 3, "w3")  # version 3, as `completion` has it

    async def generate(self, prompt_ids: Sequence[int], *, session: Session, sampling: Sampling) -> Completion:
        self.prompts.append(tuple(prompt_ids))
        self.limits.append(sampling.max_new_tokens)
        turn = self.counts[session.id] = self.counts.get(session.id, -1) + 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay(session))
        finally:
            self.running -= 1
        return self.turns(session, turn) if callable(self.turns) else self.turns[turn]

    async def release(self, session: Session) -> None:
        self.released.append(session.id)

    async def load_weights(self, published: Published) -> None:
        raise EngineError("fakes have no weights")

    async def healthy(self) -> Health:
        return self.health


@dataclasses.dataclass
class Shop:
    """Clicks are answered "page"; a purchase pays `reward`. `fault` may raise on a step."""

    reward: Callable[[str], float] = lambda task_id: 1.0
    fault: Callable[[int], None] = lambda step: None
    open_delay: float = 0.0
    open: Any = None
    opened: list[str] = dataclasses.field(default_factory=list)
    closed: list[str] = dataclasses.field(default_factory=list)
    calls: list[ToolCall] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.open = self._open

    async def _open(self, task_id: str, *, privileged: bool = False) -> Opened:
        await asyncio.sleep(self.open_delay)
        self.opened.append(f"e{len(self.opened)}")
        return Opened(self.opened[-1], dataclasses.replace(TASK, id=task_id), "home")

    async def step(self, episode_id: str, call: ToolCall) -> StepResult:
        self.calls.append(call)
        self.fault(len(self.calls))
        if call.arguments["value"] != "buy now":
            return StepResult("page", "ok", False)
        reward = self.reward(TASK.id)
        return StepResult("bought", "ok", True, "purchase", reward, reward == 1.0, {"r_type": 1.0})

    async def close(self, episode_id: str) -> None:
        self.closed.append(episode_id)

    async def tools(self):
        raise ShopError("not here")

    async def tasks(self, split: str):
        raise ShopError("not here")

    async def goal(self, task_id: str):
        raise ShopError("not here")

    async def product(self, product_id: str):
        raise ShopError("not here")
