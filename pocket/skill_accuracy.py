"""How well a policy performs each single skill: greedy, teacher-forced accuracy by kind of token on fresh careful demonstrations."""

import random
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from intraskill.grpo.packing import Episode, pack
from intraskill.models.qwen35 import model
from intraskill.models.qwen35.config import ModelConfig
from intraskill.rollout.chat import Chat
from intraskill.types import Task, ToolCall
from pocket.skills import mechanisms
from shop_env.scripted import PROCEDURES, Action, Shopper, Wish
from shop_env.session import Session, Shop


def kinds(action: Action, wish: Wish) -> list[str]:
    """The kind of each word token of an action, thought first; "" for words that are not a skill of their own."""
    words = action.thought.split()
    labels = [""] * len(words)
    if words[:1] == ["do"]:
        labels[1:] = ["plan"] * (len(words) - 1)
    elif words[:1] == ["price"]:
        labels[1], labels[3], labels[4] = "price recall", "budget recall", f"budget {words[4]}"
    elif words:
        for i, word in enumerate(words):
            if word in ("yes", "no"):
                labels[i] = f"{'option' if i >= 2 and words[i - 2] in ('colour', 'size') else 'attribute'} {word}"
            elif word in ("in", "likes"):
                labels[i] = "source"
            elif word not in ("colour", "size", "a"):
                labels[i] = "value recall" if words[i - 1] in ("colour", "size") else "attribute recall"
    if action.tool == "search":
        return [*labels, "", *("" if word == "a" else "query copy" for word in action.argument.split())]
    if "=" in action.argument:
        axis = action.argument.split("=")[0]
        return [*labels, "", "", "stated option" if axis == wish.stated_axis else "persona option"]
    return [*labels, "", {"previous": "leave", "buy now": "buy"}.get(action.argument, "row")]


def measure(
    params: Any, config: ModelConfig, chat: Chat, shop: Shop, *, episodes: int, seed: int, row_length: int = 1152
) -> dict[str, tuple[float, int]]:
    """Accuracy and count by kind, over `episodes` careful demonstrations whose prompts carry every useful skill."""
    rng = random.Random(seed)
    useful = [m for m in mechanisms().values() if m.shopper in PROCEDURES]
    tasks = sorted(shop.world.tasks)
    correct: dict[str, list[bool]] = defaultdict(list)

    @jax.jit
    def greedy(params, tokens, positions, segment_ids, index):
        hidden = model.forward(params, config, tokens, positions, segment_ids)
        return jnp.argmax(model.logits(params, config, jnp.take_along_axis(hidden, index[..., None], axis=1)), -1)

    for _ in range(episodes):
        task = shop.world.tasks[rng.choice(tasks)]
        shopper = Shopper(task.instruction, task.persona, PROCEDURES, rng)
        session = Session(shop, task)
        tokens = chat.prompt(Task(task.id, task.instruction, task.persona), [rng.choice(m.paraphrases) for m in useful], session.observation)
        labels = [""] * len(tokens)
        observation = session.observation
        while True:
            action = shopper.act(observation)
            ids = chat.assistant(action.thought, ToolCall(action.tool, action.arguments))
            tokens += ids
            named = kinds(action, shopper.wish)
            labels += (named + [""] * len(ids))[: len(ids)]
            step = session.step(action.tool, action.arguments)
            if step.done:
                break
            observation = step.observation
            result = chat.tool_result(observation)
            tokens += result
            labels += [""] * len(result)
        batch, _ = pack([Episode(tokens, [bool(k) for k in labels])], row_length=row_length, max_trained_per_row=row_length)
        guess = np.asarray(greedy(params, batch.tokens, batch.positions, batch.segment_ids, batch.index))
        for kind, right in zip([k for k in labels if k], (guess == batch.targets)[batch.mask], strict=True):
            correct[kind].append(bool(right))
    return {kind: (float(np.mean(values)), len(values)) for kind, values in sorted(correct.items())}
