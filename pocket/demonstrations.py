"""What the warm start teaches from: whole demonstrated episodes, and drills of the single skills inside the same format.

Both are token sequences in the agent's own chat format, played in the real shop. A demonstration performs each careful procedure with
a high probability when a chunk of its mechanism is in the prompt and with a lower one when it is not, and says in its first thought which ones; that
is how chunks come to matter.
A drill opens pages at random and asks for many verdicts, so that looking things up is learned before it is needed; a glance is a page and
its verdicts without anything before it, where seeing that a word is on the page is learned first. Now and then a demonstration
slips: it makes a click that the shop refuses, which is not trained, and recovers, which is.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping, Sequence

from intraskill.grpo.packing import Episode
from intraskill.rollout.chat import Chat
from intraskill.types import Chunk, Task, ToolCall
from pocket.skills import Mechanism, mechanisms
from shop_env.scripted import PROCEDURES, SECOND, Action, Shopper, Wish, read_instruction
from shop_env.session import Session, Shop
from shop_env.synthetic import COLOURS, SIZES
from shop_env.tasks import Task as ShopTask


@dataclasses.dataclass(frozen=True)
class DemonstrationConfig:
    """How demonstrations are drawn.

    Attributes:
      present: P(procedure performed | its chunk in the prompt).
      absent: P(procedure performed | its chunk not in the prompt), by procedure.
      stale: P(the second row is opened first | the stale chunk in the prompt).
      bare: share of episodes with no chunk; otherwise each chunk is included with probability one half.
      glances: share of glances; about an eighth of the tokens.
      drills: share of drills in the rest.
      slip: P(a refused click is made first) at each turn where one is easily made.
      observation_weight: loss weight of a shop token, against 1 for a token that the policy writes in a demonstration.
      answer_weight: loss weight of an answer in a drill or a glance: a skill, a need or a verdict.
    """

    present: float = 0.97
    absent: tuple[tuple[str, float], ...] = (("query", 0.5), ("persona", 0.75), ("stated", 0.85), ("page", 0.5), ("stock", 0.7), ("price", 0.75))
    stale: float = 0.85
    bare: float = 0.3
    glances: float = 0.45
    drills: float = 0.5
    slip: float = 0.06
    observation_weight: float = 0.3
    answer_weight: float = 3.0


def reworded(rng: random.Random, mechanism: Mechanism) -> Chunk:
    """A chunk that says `mechanism` in no fixed sequence of words, so that the policy cannot wait for a certain title or sentence.

    Its three texts are drawn one by one from the paraphrases and lose one word in five; half of the titles are two of the mechanism's words.
    Held-out texts never come out.
    """

    def thinned(text: str) -> str:
        return " ".join(w for w in text.split() if rng.random() >= 0.2) or text

    held_out = {c.text for c in mechanism.held_out}
    known = sorted({w for c in mechanism.paraphrases for text in (c.title, c.applies_when, c.procedure) for w in text.split()})
    while True:
        title, when, procedure = (rng.choice(mechanism.paraphrases) for _ in range(3))
        chunk = dataclasses.replace(
            title,
            title=title.title if rng.random() < 0.5 else " ".join(rng.sample(known, 2)),
            applies_when=thinned(when.applies_when),
            procedure=thinned(procedure.procedure),
        )
        if chunk.text not in held_out:
            return chunk


def _attributes_of(shop: Shop, task: ShopTask) -> list[str]:
    """The attributes that products of the task's type can have."""
    category = shop.world.catalog[task.goal.product_id].category
    return sorted({a for p in shop.world.catalog.values() if p.category == category for a in p.attributes})


def _labels(results: str) -> list[str]:
    """The labels of a page of results."""
    return [line.split(" ", 1)[0] for line in results.split("\n")[1:]]


class _Writer:
    """Grows one token sequence; a token and its loss weight are born together."""

    def __init__(self, prompt: list[int]):
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
      drill_shops: the same for drills: worlds where more is out of stock, so that "no" has occasions.
      chat: the pocket tokenizer's chat.
      config: see `DemonstrationConfig`.
    """

    def __init__(self, shops: list[Shop], drill_shops: list[Shop], chat: Chat, config: DemonstrationConfig):
        self._shops, self._drill_shops = shops, drill_shops
        self._chat = chat
        self._config = config
        self._absent: Mapping[str, float] = dict(config.absent)
        self._assistant = functools.lru_cache(maxsize=65536)(lambda a: tuple(chat.assistant(a.thought, ToolCall(a.tool, a.arguments))))
        self._result = functools.lru_cache(maxsize=65536)(lambda text: tuple(chat.tool_result(text)))

    def stream(self, seed: int) -> Iterator[Episode]:
        """Demonstrations, drills and glances in the configured mix, for ever."""
        rng = random.Random(seed)
        while True:
            if rng.random() < self._config.glances:
                yield self.glance(rng)
            else:
                yield self.drill(rng) if rng.random() < self._config.drills else self.demonstration(rng)[0]

    def _draw(self, rng: random.Random, shops: list[Shop]) -> tuple[Shop, ShopTask]:
        shop = rng.choice(shops)
        return shop, shop.world.tasks[rng.choice(list(shop.world.tasks))]

    def _chunks(self, rng: random.Random) -> list[Chunk]:
        if rng.random() < self._config.bare:
            return []
        chunks = [reworded(rng, m) for m in mechanisms().values() if rng.random() < 0.5]
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
        shop, task = self._draw(rng, self._shops)
        chunks = self._chunks(rng)
        shopper = self.shopper(rng, task, chunks)
        session = Session(shop, task)
        observation = session.observation
        writer = _Writer(self._chat.prompt(Task(task.id, task.instruction, task.persona), chunks, observation))
        while True:
            action = shopper.act(observation)
            slip = self._slip(rng, observation, action)
            if slip is not None:
                writer.add(self._assistant(slip), 0.0)
                step = session.step(slip.tool, slip.arguments)
                if step.done:
                    return writer.episode(), step.success
                observation = step.observation
                writer.add(self._result(observation), self._config.observation_weight)
                action = shopper.act(observation)
            writer.add(self._assistant(action), 1.0)
            step = session.step(action.tool, action.arguments)
            if step.done:
                return writer.episode(), step.success
            observation = step.observation
            writer.add(self._result(observation), self._config.observation_weight)

    def _slip(self, rng: random.Random, observation: str, action: Action) -> Action | None:
        """A click in place of `action` that the shop will refuse, or None: most often, and where none is easily made."""
        if rng.random() >= self._config.slip:
            return None
        lines = observation.split("\n")
        if lines[0].startswith("product ") and "=" in action.argument:
            axis = action.argument.split("=")[0]
            offered = next(line for line in lines if line.startswith(f"{axis} ")).split(" ")
            absent = [v for v in (COLOURS if axis == "colour" else SIZES) if v not in offered]
            return dataclasses.replace(action, argument=f"{axis}={rng.choice(absent)}") if absent else None
        if lines[0].startswith("results ") and 1 < len(lines) < 6 and action.argument in "ABCDE":
            return Action("", "click", "ABCDE"[len(lines) - 1])
        if " missing " in lines[0]:
            return Action("", "click", "buy now")
        return None

    def glance(self, rng: random.Random) -> Episode:
        """A product page and verdicts on random words, a piece of an episode.

        That a word occurs twice is what the policy learns last. Among fifty tokens it is found much earlier than among three hundred.
        """
        shop, task = self._draw(rng, self._drill_shops)
        session = Session(shop, task)
        listed = session.step("search", {"query": read_instruction(task.instruction).kind}).observation
        page = session.step("click", {"target": rng.choice(_labels(listed))}).observation
        thought, answers = self._verdicts(rng, page, _attributes_of(shop, task))
        writer = _Writer([])
        writer.add(self._result(page), 0.0)
        ids = self._assistant(Action(thought, "click", "previous"))
        writer.add(ids, self._answer_weights(ids, answers))
        return writer.episode()

    def drill(self, rng: random.Random) -> Episode:
        """Skills and needs recited, a random page with many verdicts, then a price verdict; the loss is on the answers only.

        Reciting comes first in every sense: nothing else can be learned before the policy can find a word in its prompt. Skills are recited in
        the words of a plan, which a demonstration follows with some probability and a drill without fail.
        """
        shop, task = self._draw(rng, self._drill_shops)
        session, chunks = Session(shop, task), self._chunks(rng)
        # A budget near the price of what will be chosen, so that "ok" and "exceeds" are about equally common.
        goal = shop.world.catalog[task.goal.product_id]
        budget = int(next(p for v in goal.options.values() for p in v.values() if p is not None)) + rng.randint(-10, 14)
        instruction = task.instruction.replace(f"${read_instruction(task.instruction).budget}", f"${budget}")
        wish, pool = read_instruction(instruction), _attributes_of(shop, task)
        writer = _Writer(self._chat.prompt(Task(task.id, instruction, task.persona), chunks, session.observation))

        def turn(action: Action, answers: Sequence[int] = ()) -> str:
            ids = self._assistant(action)
            writer.add(ids, self._answer_weights(ids, answers))
            step = session.step(action.tool, action.arguments)
            if not step.done:
                writer.add(self._result(step.observation), 0.0)
            return step.observation

        thought, answers = self._recital(chunks, wish, task.persona)
        results = turn(Action(thought, "search", f"a {rng.choice(pool)} {wish.kind}"), answers)
        page = turn(Action("", "click", rng.choice(_labels(results))))
        options = {line.split(" ", 1)[0]: [w for w in line.split(" ")[1:] if not w.startswith("$")] for line in page.split("\n")[2:]}
        thought, answers = self._verdicts(rng, page, pool)
        turn(Action(thought, "click", f"colour={rng.choice(options['colour'])}"), answers)
        chosen = turn(Action("", "click", f"size={rng.choice(options['size'])}"))
        shown = chosen.split(" price ")[1].split(" ")[0]
        verdict = "exceeds" if int(shown[1:]) > budget else "ok"
        turn(Action(f"price {shown} budget ${budget} {verdict}", "click", "buy now"), [1, 3, 4])
        return writer.episode()

    def _recital(self, chunks: Sequence[Chunk], wish: Wish, persona: Mapping[str, str]) -> tuple[str, list[int]]:
        """A thought that says what the prompt asks for, in the words in which plans and verdicts will need it, and the indices of its answers."""
        present = {mechanisms()[c.logical_id].shopper for c in chunks}
        skills = [*(p for p in PROCEDURES if p in present), *((SECOND,) if "skip_first" in present else ())]
        open_axis = "size" if wish.stated_axis == "colour" else "colour"
        options = ["in", wish.stated_axis, wish.stated_value, "likes", open_axis, persona[f"likes {open_axis}"]]
        words = ["skills", *skills, "need", "a", *wish.attributes, wish.kind, *options, "budget", f"${wish.budget}"]
        given = ("skills", "a", "colour", "size", "budget", "in", "likes")  # "need" is an answer: it says that no other skill is there
        return " ".join(words), [i for i, word in enumerate(words) if word not in given]

    def _verdicts(self, rng: random.Random, text: str, pool: list[str]) -> tuple[str, list[int]]:
        """A thought with verdicts on random attributes and options, about half of them "no", and the word indices of the verdicts.

        Not on the needs: those stand in the prompt as well, so that seeing them there would pass for seeing them on the page.
        """
        lines = [line.split(" ") for line in text.split("\n")[1:]]
        has = set(lines[0][1:])
        offers = {line[0]: set(line[1:]) for line in lines[1:]}
        words: list[str] = []
        answers = []

        def verdict(listed: set[str], known: Sequence[str]) -> None:
            absent = [w for w in known if w not in listed]
            word = rng.choice(absent if absent and rng.random() < 0.5 else [w for w in known if w in listed])
            answers.append(len(words) + 1)
            words.extend([word, "yes" if word in listed else "no"])

        for _ in range(8):
            verdict(has, pool)
        for axis, values in (("colour", COLOURS), ("size", SIZES)) * 2:
            words.append(axis)
            verdict(offers[axis], values)
        return " ".join(words), answers

    def _answer_weights(self, ids: tuple[int, ...], answers: Sequence[int]) -> tuple[float, ...]:
        """Weight on the answer words only. Every word of a drill's thought is one token, so word index = token index."""
        wanted = set(answers)
        return tuple(self._config.answer_weight if i in wanted else 0.0 for i in range(len(ids)))
