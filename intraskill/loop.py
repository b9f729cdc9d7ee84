"""The loop, as it is drawn: groups under one mask, update, sync; every round retry, analysis, candidates, gate, next bank and curriculum.

The model update compares episodes within one context; the skill update compares contexts at one checkpoint. A run killed at any instant
goes on from its newest checkpoint: what is on disk and still holds (groups, retries, evaluations) is read, the rest is done again.
"""

import time
from typing import Any

from intraskill import evaluation, fast_loop, pipeline, slow_loop, summary, weights
from intraskill.evaluation import Result
from intraskill.fast_loop import Position
from intraskill.grpo.learner import TrainState
from intraskill.parts import TEST, Parts
from intraskill.skills.bank import Bank
from intraskill.types import InputError, Mask, Published


async def run(parts: Parts) -> dict[str, Any]:
    """The whole run; returns what `summary.json` holds."""
    start = time.time()
    state, position = restore(parts)
    slow_loop.begin(parts)
    base = await baseline(parts, parts.initial_bank)
    for index in range(parts.config.schedule.rounds):
        bank, curriculum = slow_loop.load_round(parts, index)
        if _done(parts, index, position.step):
            continue
        began = time.time()
        state, position, published = await pipeline.fast_round(parts, state, position.enter(index), bank, curriculum, index)
        parts.checkpoints.wait()  # what is measured from here on belongs to a checkpoint that is on disk
        groups = slow_loop.groups_of_round(parts, index, position)
        cases = await slow_loop.retry(parts, published, groups, bank, index)
        cards = await slow_loop.analyse(parts, cases, bank, index)
        pool = slow_loop.compile_candidates(parts, cards, bank, index)
        bare, masked, result = await slow_loop.gate_round(parts, published, pool, index)
        bank, curriculum = slow_loop.next_round(parts, bank, curriculum, pool, result, index)
        summary.write_round(parts, index, bare, masked, pool, result, bank, cases, time.time() - began)
    bank, _ = slow_loop.load_round(parts, parts.config.schedule.rounds)
    published, _ = await fast_loop.sync(parts, parts.lead.whole(state.params), position.step)
    final = await conditions(parts, published, bank, "final", "final-full")
    parts.export(state)
    return summary.write(parts, base, final, time.time() - start)


def _done(parts: Parts, index: int, step: int) -> bool:
    """Whether a round is over for a state after `step` steps. Raises InputError where its summary is gone and the state is of a later round."""
    end = (index + 1) * parts.config.schedule.steps_per_round
    done = summary.round_done(parts, index)
    if step > end and not done:
        raise InputError(f"{parts.run.round(index) / 'summary.json'} is gone, and so are the weights to do the round's end again: restore it")
    # Not by its file alone: where the newest checkpoint was damaged, the state is older than the round's end.
    return done and step >= end


async def baseline(parts: Parts, bank: Bank) -> dict[str, Result]:
    """The committed policy before any update: bare validation, and the test conditions without and with the initial bank."""
    published, _ = await fast_loop.sync(parts, parts.policy.params, 0)
    return {
        "base-validation": await slow_loop.bare_validation(parts, published, bank, "base-validation"),
        **await conditions(parts, published, bank, "base", "base-initial"),
    }


async def conditions(parts: Parts, published: Published, bank: Bank, bare: str, full: str) -> dict[str, Result]:
    """The test split without skills and with the bank."""
    tasks, samples = parts.tasks["test"][: parts.config.test.tasks], parts.config.test.samples
    planned = {
        bare: evaluation.cases(tasks, samples, Mask.skill_free(), ()),
        full: slow_loop.guided_cases(parts, bank, tasks, samples),
    }
    return {name: await slow_loop.play(parts, name, TEST, cases, published, bank) for name, cases in planned.items()}


def restore(parts: Parts) -> tuple[TrainState, Position]:
    """The newest checkpoint, or the start; what a killed process left of later steps is dropped."""
    if parts.checkpoints.latest() is None:
        if summary.round_done(parts, 0):  # it was saved before anything was measured
            where = parts.run.path / "checkpoints"
            raise InputError(f"{where} holds no checkpoint, though a round is done: restore it from a copy, or start a run of another name")
        state, position = parts.learner.init(parts.policy.params), Position(metrics={"num_lines": 0})
    else:
        restored = parts.checkpoints.restore(parts.abstract_state())
        state, position = restored.state, Position.from_json(restored.position)
        parts.progress.say(f"resumed after step {position.step}")
        for name, (then, now) in parts.run.changed.items():
            parts.progress.say(f"not as when the run began: {name} was {then} and is {now}")
        if past := parts.profiler.past(position.step):
            parts.progress.say(f"--profile: steps {past[0]} to {past[-1]} were done before this start and are not recorded")
    parts.metrics.restore(position.metrics)
    weights.prune(parts.run.path / "weights", ())  # the engine gets what was restored, published anew
    return state, position
