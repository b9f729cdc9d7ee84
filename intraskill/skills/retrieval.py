"""Retrieval of chunks for a task, as methods do that show each task its own few skills instead of drawing them.

By words alone: no embedding model, nothing learned, the same answer everywhere. A chunk scores the sum, over the task's distinct words that it
contains, of log(1 + N / n), with n of the bank's N chunks containing the word; so a word that every chunk has hardly counts. What only a meaning
connects, such as a paraphrase, it does not find.
"""

import math

from intraskill.skills import words
from intraskill.skills.bank import Bank
from intraskill.types import Task


def nearest(bank: Bank, task: Task, num: int) -> tuple[str, ...]:
    """The ids of the `num` chunks nearest to the task's instruction and persona, in prompt order; ties go to the chunk that stands first."""
    asked = set(words.tokens(" ".join([task.instruction, *(f"{k} {v}" for k, v in task.persona.items())])))
    said = [set(words.tokens(chunk.text)) for chunk in bank.chunks]
    # fsum and a fixed order, so that equal words make equal scores on every machine.
    scores = [math.fsum(math.log1p(len(said) / sum(w in s for s in said)) for w in sorted(asked & own)) for own in said]
    best = sorted(range(len(said)), key=lambda i: (-scores[i], i))[:num]
    return tuple(bank.ids[i] for i in sorted(best))
