"""One episode: a policy behind an engine acts in a shop until it buys, runs out of budget, or something breaks.

The token record is append-only. A prompt is the previous prompt, the exact ids that were sampled and the rendered tool result; nothing is
ever rendered again, so a template that treats old turns differently cannot change what the policy saw. A token and its loss-mask bit are
appended by the same call, which is the only place where the record grows.

An episode ends in one of two kinds of ways. Scored: a purchase, the step limit, or the length limit, the last two with reward 0, and all
of them train. Technical: the engine or the shop broke a promise; the reason is in `Trajectory.error` and nothing is scored.
"""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from intraskill.types import (
    Chunk,
    Completion,
    Engine,
    EngineError,
    Opened,
    Sampling,
    Session,
    Shop,
    ShopError,
    Status,
    StepResult,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    require,
)

if TYPE_CHECKING:
    from intraskill.rollout.chat import Chat

log = logging.getLogger(__name__)

# Longest wait, when an episode is over, for the shop and the engine to forget it. A dead server must not hold the run up.
_CLEANUP_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """An episode's budgets; a turn's own budget is `Sampling.max_new_tokens`."""

    max_context: int  # tokens of prompt, results and sampled ids together
    max_steps: int  # model steps, protocol errors included

    def __post_init__(self):
        require(self.max_context >= 2 and self.max_steps >= 1, f"limits must be positive, got {self}")


@dataclasses.dataclass
class _Record:
    """The episode so far. `force` and `sample` are the only ways in, so a token always comes with its mask bit."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    loss_mask: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    injected: tuple[str, ...] = ()

    def force(self, ids: Sequence[int]) -> None:
        self._extend(ids, [0.0] * len(ids), False)

    def sample(
        self, completion: Completion, text: str, *, call: ToolCall | None = None, protocol_error: str = "", feedback: str = "", observation: str = ""
    ) -> None:
        self.turns.append(Turn(len(self.tokens), completion, text, call, protocol_error, feedback, observation))
        self._extend(completion.ids, completion.logprobs, True)

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        self.tokens.extend(ids)
        self.logprobs.extend(logprobs)
        self.loss_mask.extend([sampled] * len(ids))

    def end(self, status: Status, result: StepResult | None = None, error: str = "") -> Trajectory:
        return Trajectory(
            tokens=tuple(self.tokens),
            loss_mask=tuple(self.loss_mask),
            logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
            status=status,
            reward=result.reward if result else 0.0,
            success=result.success if result else False,
            reward_detail=result.reward_detail if result else {},
            error=error,
            injected=self.injected,
        )


class _Broken(Exception):
    """A promise that the engine or the shop did not keep: the episode is technical."""


async def run_episode(
    engine: Engine,
    shop: Shop,
    chat: "Chat",
    task: Task,
    chunks: Sequence[Chunk],
    session: Session,
    sampling: Sampling,
    limits: Limits,
) -> Trajectory:
    """Plays one episode of `task` with `chunks` in the prompt.

    However it ends, cancellation included, the shop's episode is closed and the engine's session released before this returns or raises.

    Args:
      engine: what samples.
      shop: what answers.
      chat: messages to tokens and back.
      task: the public side of the task.
      chunks: the group's skills, in prompt order.
      session: names the episode to the engine and keys its noise.
      sampling: temperature, per-turn length, stop and banned ids; `stop_ids` may not be empty.
      limits: the episode's budgets.

    Returns:
      A scored trajectory, or a technical one that holds the turns before the fault.
    """
    require(bool(sampling.stop_ids), "sampling.stop_ids is empty: a turn could only end by length; pass chat.stop_ids")
    record = _Record()
    # A task of its own: were `open` itself cancelled, the shop might hold an episode whose id nobody has seen.
    opening = asyncio.ensure_future(shop.open(task.id))
    try:
        opened = await asyncio.shield(opening)
        return await _play(engine, shop, chat, task, chunks, session, sampling, limits, opened, record)
    except (EngineError, ShopError, _Broken) as e:
        return record.end(Status.TECHNICAL, error=f"{type(e).__name__.lstrip('_')}: {e}")
    finally:
        await _to_the_end(_clean_up(engine, shop, session, opening))


async def _play(
    engine: Engine,
    shop: Shop,
    chat: "Chat",
    task: Task,
    chunks: Sequence[Chunk],
    session: Session,
    sampling: Sampling,
    limits: Limits,
    opened: Opened,
    record: _Record,
) -> Trajectory:
    """The turns of an episode that the shop has opened."""
    if opened.task.id != task.id:
        raise _Broken(f"the shop opened task {opened.task.id!r} where {task.id!r} was asked")
    record.force(chat.prompt(task, chunks, opened.observation))
    record.injected = tuple(c.id for c in chunks)
    if len(record.tokens) >= limits.max_context:
        length = len(record.tokens)
        raise _Broken(f"the first prompt has {length} tokens, the context limit is {limits.max_context}: raise the limit or shorten the bank")
    for step in range(limits.max_steps):
        budget = min(sampling.max_new_tokens, limits.max_context - len(record.tokens))
        completion = await _generate(engine, record.tokens, session, dataclasses.replace(sampling, max_new_tokens=budget))
        # The tokens enter only once the shop has answered: a technical trajectory never ends in half a turn.
        if completion.finish_reason == "length":
            record.sample(completion, chat.decode(completion.ids))
            return record.end(Status.GENERATION_LENGTH)
        parsed = chat.parse(completion.ids)
        if isinstance(parsed, ToolCall):
            result = await _act(shop, opened.episode_id, parsed)
            observation = "" if result.done else result.observation
            record.sample(completion, chat.decode(completion.ids), call=parsed, feedback=result.feedback, observation=observation)
            if result.done:
                return record.end(Status(result.status), result)
        else:
            observation = parsed.message
            record.sample(completion, chat.decode(completion.ids), protocol_error=parsed.kind, observation=observation)
        if step + 1 == limits.max_steps:
            break
        appended = chat.tool_result(observation)
        if len(record.tokens) + len(appended) >= limits.max_context:
            return record.end(Status.GENERATION_LENGTH)
        record.force(appended)
    return record.end(Status.ACTION_LIMIT)


async def _generate(engine: Engine, prompt: Sequence[int], session: Session, sampling: Sampling) -> Completion:
    """One completion that keeps every promise of the contract."""
    try:
        completion = await engine.generate(tuple(prompt), session=session, sampling=sampling)
    except ValueError as e:  # a Completion that its own invariants refuse: lengths that disagree, an unknown finish reason
        raise _Broken(f"the engine's answer is malformed: {e}") from e
    ids, logprobs, reason = completion.ids, completion.logprobs, completion.finish_reason
    limit, stops = sampling.max_new_tokens, set(sampling.stop_ids)
    broken = ""
    if reason == "abort":
        broken = f"the engine aborted after {len(ids)} tokens"
    elif len(ids) != len(logprobs):
        broken = f"{len(ids)} ids but {len(logprobs)} log-probs"
    elif len(ids) > limit:
        broken = f"{len(ids)} tokens where at most {limit} were asked"
    elif not all(math.isfinite(p) for p in logprobs):
        broken = f"log-prob {next(p for p in logprobs if not math.isfinite(p))} is not finite"
    elif any(i in stops for i in ids[:-1]):
        broken = "tokens follow a stop token"
    elif reason == "stop" and (not ids or ids[-1] not in stops):
        broken = "finish reason is stop but the last id is no stop token"
    elif reason == "length" and (len(ids) < limit or ids[-1] in stops):
        broken = f"finish reason is length after {len(ids)} of {limit} tokens"
    if broken:
        raise _Broken(f"the engine broke its contract: {broken}")
    return completion


async def _act(shop: Shop, episode_id: str, call: ToolCall) -> StepResult:
    """The shop's answer, checked: an outcome that cannot be scored is a fault, not a zero."""
    result = await shop.step(episode_id, call)
    if result.done and (result.status not in (Status.PURCHASE, Status.ACTION_LIMIT) or not 0 <= result.reward <= 1):
        raise _Broken(f"the shop ended the episode with status {result.status!r} and reward {result.reward}")
    return result


async def _clean_up(engine: Engine, shop: Shop, session: Session, opening: "asyncio.Future[Opened]") -> None:
    """Forgets the episode on both sides. A server's failure here is logged only: the episode's outcome is already known."""

    async def close() -> None:
        try:
            opened = await opening
        except Exception:  # nothing is held; whoever awaited `opening` first has the error
            return
        await shop.close(opened.episode_id)

    ends = [asyncio.wait_for(close(), _CLEANUP_SECONDS), asyncio.wait_for(engine.release(session), _CLEANUP_SECONDS)]
    for error in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(error, (ShopError, EngineError, TimeoutError)):
            log.warning("session %s was not cleaned up: %s: %s", session.id, type(error).__name__, error)
        elif error is not None:
            raise error


async def _to_the_end(cleaning: Awaitable[None]) -> None:
    """Awaits `cleaning` even if this task is cancelled meanwhile (once more), and only then lets the cancellation through."""
    task = asyncio.ensure_future(cleaning)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
