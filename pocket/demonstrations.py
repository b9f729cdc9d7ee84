"""What the warm start teaches from: whole demonstrated episodes, and drills of the single skills inside the same format.

Both are token sequences in the agent's own chat format, played in the real shop. A demonstration performs each careful procedure with
a high probability when a chunk of its mechanism is in the prompt and with a lower one when it is not; that is how chunks come to matter.
A drill opens pages at random and asks for many verdicts, so that looking things up is learned before it is needed.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping

from intraskill.grpo.packing import Episode
from intraskill.rollout.chat import Chat
from intraskill.types import Chunk, Task, ToolCall
from pocket.skills import mechanisms
from shop_env.scripted import Action, Shopper, read_instruction
from shop_env.session import Session, Shop
from shop_env.synthetic import COLOURS, SIZES


@dataclasses.dataclass(frozen=True)
class DemonstrationConfig:
    """How demonstrations are drawn.

    Attributes:
      present: P(procedure performed | its chunk in the prompt).
      absent: P(procedure performed | its chunk not in the prompt), by procedure.
      stale: P(the second row is opened first | the stale chunk in the prompt).
      bare: share of episodes with no chunk; otherwise each chunk is included with probability one half.
      drills: share of drill episodes.
      observation_weight: loss weight of a shop token, against 1 for a token that the policy writes in a demonstration.
      answer_weight: loss weight of a drill's answer.
    """

    present: float = 0.97
    absent: tuple[tuple[str, float], ...] = (("query", 0.5), ("persona", 0.75), ("stated", 0.85), ("page", 0.5), ("stock", 0.7), ("price", 0.75))
    stale: float = 0.85
    bare: float = 0.3
    drills: float = 0.5
    observation_weight: float = 0.3
    answer_weight: float = 3.0


class _Writer:
    """Grows one token sequence; a token and its loss weight are born together."""

    def __init__(self, chat: Chat, prompt: list[int]):
        self._chat = chat
        self.tokens = list(prompt)
        self.weights: list[float] = [0.0] * len(prompt)

    def add(self, ids: tuple[int, ...], weights: tuple[float, ...] | float) -> None:
        self.tokens.extend(ids)
        self.weights.extend(weights if isinstance(weights, tuple) else (weights,) * len(ids))

    def episode(self) -> Episode:
        mask = tuple(w > 0 for w in self.weights)
        return Episode(tokens=tuple(self.tokens), loss_mask=mask, token_weights=tuple(self.weights))


class Demonstrator:
    """Draws demonstrations and drills from `shops`, an endless seeded stream.

    Args:
      shops: worlds of their own, never the one the policy is trained or tested on afterwards.
      chat: the pocket tokenizer's chat.
      config: see `DemonstrationConfig`.
    """

    def __init__(self, shops: list[Shop], chat: Chat, config: DemonstrationConfig):
        self._shops = shops
        self._chat = chat
        self._config = config
        self._absent: Mapping[str, float] = dict(config.absent)
        self._tasks = [sorted(shop.world.tasks) for shop in shops]
        self._assistant = functools.lru_cache(maxsize=65536)(lambda a: tuple(chat.assistant(a.thought, ToolCall(a.tool, a.arguments))))
        self._result = functools.lru_cache(maxsize=65536)(lambda text: tuple(chat.tool_result(text)))

    def stream(self, seed: int) -> Iterator[Episode]:
        """Demonstrations and drills in the configured mix, for ever."""
        rng = random.Random(seed)
        while True:
            yield self.drill(rng) if rng.random() < self._config.drills else self.demonstration(rng)[0]

    def _draw(self, rng: random.Random):
        which = rng.randrange(len(self._shops))
        shop = self._shops[which]
        return shop, shop.world.tasks[rng.choice(self._tasks[which])]

    def _chunks(self, rng: random.Random) -> list[Chunk]:
        if rng.random() < self._config.bare:
            return []
        chunks = [rng.choice(m.paraphrases) for m in mechanisms().values() if rng.random() < 0.5]
        rng.shuffle(chunks)
        return chunks

    def shopper(self, rng: random.Random, task, chunks: list[Chunk]) -> Shopper:
        """The demonstrator's way to act under a prompt with `chunks`."""
        present = {mechanisms()[c.logical_id].shopper for c in chunks}
        does = [p for p, low in self._absent.items() if rng.random() < (self._config.present if p in present else low)]
        skip = "skip_first" in present and rng.random() < self._config.stale
        return Shopper(task.instruction, task.persona, does, rng, skip_first=skip)

    def demonstration(self, rng: random.Random) -> tuple[Episode, bool]:
        """One played episode and whether it succeeded."""
        shop, task = self._draw(rng)
        chunks = self._chunks(rng)
        shopper = self.shopper(rng, task, chunks)
        session = Session(shop, task)
        observation = session.observation
        writer = _Writer(self._chat, self._chat.prompt(Task(task.id, task.instruction, task.persona), chunks, observation))
        while True:
            action = shopper.act(observation)
            writer.add(self._assistant(action), 1.0)
            step = session.step(action.tool, action.arguments)
            if step.done:
                return writer.episode(), step.success
            observation = step.observation
            writer.add(self._result(observation), self._config.observation_weight)

    def drill(self, rng: random.Random) -> Episode:
        """The needs recited, two random pages with many verdicts, then a price verdict; the loss is on the answers only.

        Reciting comes first in every sense: nothing else can be learned before the policy can find a word in its prompt.
        """
        shop, task = self._draw(rng)
        wish = read_instruction(task.instruction)
        session = Session(shop, task)
        product = shop.world.catalog[task.goal.product_id]
        # A budget near the price of what will be chosen, so that "ok" and "exceeds" are about equally common.
        price = next(p for v in product.options.values() for p in v.values() if p is not None)
        budget = int(price) + rng.randint(-10, 14)
        instruction = task.instruction.replace(f"${wish.budget}", f"${budget}")
        writer = _Writer(self._chat, self._chat.prompt(Task(task.id, instruction, task.persona), self._chunks(rng), session.observation))
        pool = sorted({a for p in shop.world.catalog.values() if p.category == product.category for a in p.attributes})

        def take(action: Action, weights: float) -> str:
            writer.add(self._assistant(action), weights)
            step = session.step(action.tool, action.arguments)
            writer.add(self._result(step.observation), 0.0)
            return step.observation

        needs = [*wish.attributes, wish.kind, wish.stated_axis, wish.stated_value]
        open_axis = "size" if wish.stated_axis == "colour" else "colour"
        needs += [open_axis, task.persona[f"likes {open_axis}"], "budget", f"${budget}"]
        query = f"{rng.choice(pool)} {wish.kind}"
        ids = self._assistant(Action(" ".join(["need", *needs]), "search", query))
        writer.add(ids, self._answer_weights(ids, [i for i, word in enumerate(needs, 1) if word not in ("colour", "size", "budget")]))
        step = session.step("search", {"query": query})
        writer.add(self._result(step.observation), 0.0)
        results = step.observation
        for page in range(2):
            labels = [line.split(" ", 1)[0] for line in results.split("\n")[1:]]
            text = take(Action("", "click", rng.choice(labels)), 0.0)
            thought, answers = self._verdicts(rng, text, pool)
            options = {line.split(" ", 1)[0]: [w for w in line.split(" ")[1:] if not w.startswith("$")] for line in text.split("\n")[2:]}
            target = "previous" if page == 0 else f"colour={rng.choice(options['colour'])}"
            ids = self._assistant(Action(thought, "click", target))
            writer.add(ids, self._answer_weights(ids, answers))
            step = session.step("click", {"target": target})
            writer.add(self._result(step.observation), 0.0)
            results = step.observation
        chosen = take(Action("", "click", f"size={rng.choice(options['size'])}"), 0.0)
        shown = chosen.split(" price ")[1].split(" ")[0]
        verdict = "exceeds" if int(shown[1:]) > budget else "ok"
        ids = self._assistant(Action(f"price {shown} budget ${budget} {verdict}", "click", "buy now"))
        writer.add(ids, self._answer_weights(ids, [1, 3, 4]))
        return writer.episode()

    def _verdicts(self, rng: random.Random, text: str, pool: list[str]) -> tuple[str, list[int]]:
        """A thought with verdicts on random attributes and options, about half of them "no", and the word indices of the verdicts."""
        lines = [line.split(" ") for line in text.split("\n")[1:]]
        has = set(lines[0][1:])
        offers = {line[0]: set(line[1:]) for line in lines[1:]}
        words: list[str] = []
        answers = []
        for _ in range(6):
            source = sorted(has) if rng.random() < 0.5 else [a for a in pool if a not in has]
            words.append(rng.choice(source))
            answers.append(len(words))
            words.append("yes" if words[-1] in has else "no")
        for axis, values in (("colour", COLOURS), ("size", SIZES)):
            absent = [v for v in values if v not in offers[axis]]
            source = absent if absent and rng.random() < 0.5 else [v for v in values if v in offers[axis]]
            words += [axis, rng.choice(source)]
            answers.append(len(words))
            words.append("yes" if words[-1] in offers[axis] else "no")
        return " ".join(words), answers

    def _answer_weights(self, ids: tuple[int, ...], answers: list[int]) -> tuple[float, ...]:
        """Weight on the answer words only. Every word of a drill's thought is one token, so word index = token index."""
        wanted = set(answers)
        return tuple(self._config.answer_weight if i in wanted else 0.0 for i in range(len(ids)))
