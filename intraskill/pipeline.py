"""A round's steps, one after the other or overlapped.

With `rollout.overlap` 0 every step is on-policy: its groups are played by the weights that it then trains. With 1 the groups of the next step are
played while a step trains, so they come from the weights before it, one version older than those that train on them. The update is blocking work
and runs in a thread beside the event loop; the engine is given new weights only once both are over, so one version plays a step to its end.

The pipeline drains at a round's end and fills at its start: the next round's masks are drawn from a bank and a curriculum that the gate decides at
the frozen checkpoint. What was played ahead belongs to no checkpoint: a resumed run plays it again, as the first step after a fill.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from intraskill import fast_loop
from intraskill.fast_loop import Played, Position
from intraskill.grpo.learner import TrainState
from intraskill.parts import Parts
from intraskill.rollout.collect import gather
from intraskill.skills.bank import Bank
from intraskill.skills.curriculum import Curriculum
from intraskill.types import Published

T = TypeVar("T")


async def fast_round(
    parts: Parts, state: TrainState, position: Position, bank: Bank, curriculum: Curriculum, round_index: int
) -> tuple[TrainState, Position, Published]:
    """The round's steps that are not done yet, and the weights that the engine serves after them."""
    steps_per_round = parts.config.schedule.steps_per_round
    steps = range(position.step, (round_index + 1) * steps_per_round)

    def play(step: int, first_group: int) -> Coroutine[Any, Any, Played]:
        return fast_loop.rollout(parts, bank, curriculum, round_index, step, first_group)

    published, _ = await fast_loop.sync(parts, parts.lead.whole(state.params), position.step)
    ahead: Played | None = None
    began = time.monotonic()
    for step in steps:
        with parts.profiler.step(step):
            played = ahead or await play(step, position.next_group)
            parts.metrics.write(played.record)
            training = _in_thread(fast_loop.update, parts, state, played.admission.admitted, round_index, step)
            if parts.config.rollout.overlap and step + 1 in steps:
                both: list[Coroutine[Any, Any, Any]] = [training, play(step + 1, position.next_group + len(played.groups))]
                state, ahead = await gather(both)
            else:
                async with parts.engines_aside():
                    state, ahead = await training, None
            published, record = await fast_loop.sync(parts, parts.lead.whole(state.params), step + 1)
            ended = time.monotonic()
            parts.metrics.write({"kind": "sync", "round": round_index, "step": step, **record, "step_seconds": ended - began})
            began = ended
            position = position.after(len(played.groups), parts.metrics.state())
            if position.step % parts.config.checkpoint.every_steps == 0 or position.step % steps_per_round == 0:
                parts.checkpoints.save(position.step, state, position.to_json())
    return state, position, published


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """The result of blocking work. A caller that is cancelled waits for its end: nothing may be closed under its hands."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        if not working.cancelled():
            working.exception()  # looked at, so that asyncio does not report it: the cancellation goes first
        raise
