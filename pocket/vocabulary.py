"""The words of the pocket world: everything the shop, the skills and the demonstrator spell, in a fixed order."""

import re

from pocket.skills import mechanisms
from shop_env import scripted, synthetic
from shop_env.session import Reason

_FIXED = (
    "persona skills age likes brand colour size - find a in under results of | next previous product has chosen missing price done "
    "invalid yes no need do budget exceeds ok when : when: "
)
# What the shop says to a refused action, and the chat to a turn without a call: rare, and not worth a letter a token.
_REFUSALS = (
    "search row value axis= close the think block with then make one call exactly write nothing after a holds every parameter is tools are "
    "click takes each once needs must be"
)
_TAGS = ("colour=", "size=", "A", "B", "C", "D", "E")


def words() -> tuple[str, ...]:
    """All whole-word tokens but markup; duplicates removed, order fixed."""
    chunks = [chunk for m in mechanisms().values() for chunk in m.paraphrases]
    # Any word of a skill may stand in its title, also at the end: see `demonstrations.reworded`.
    spoken = [w for c in chunks for text in (c.title, c.applies_when, c.procedure) for w in text.split()]
    skill_words = [form for w in spoken for form in (w, f"{w}:")]
    money = [f"${n}{end}" for n in range(1, 60) for end in ("", "-")]
    numbers = [str(n) for n in range(80)] + ["150"] + [f"{a}-{a + 4}" for a in range(1, 150, 5)]
    world = (*synthetic.TYPES, *synthetic.ATTRIBUTES, *synthetic.BRANDS, *synthetic.COLOURS, *synthetic.SIZES)
    refusals = (*Reason, *_REFUSALS.split())
    plan = (*scripted.PROCEDURES, scripted.SECOND)
    return tuple(
        w for w in dict.fromkeys((*_FIXED.split(), *plan, *refusals, *_TAGS, *world, *money, *numbers, *skill_words)) if not re.search(r"[<>\n]", w)
    )
