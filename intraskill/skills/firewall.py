"""The firewall: keeps answers out of skills.

An analyst sees the hidden goal. Whatever it writes must be usable by an agent that does not, so a text may only be made of general words and of
words that the agent could see in that very episode, and never of the goal's own identifiers.
"""

from collections.abc import Collection, Iterable, Sequence

from intraskill.skills import words
from intraskill.skills.cards import Card, Secrets

TITLE_RUN = 3  # this many words of a title in a row give the product away, even where brand or colour is left out


def vocabulary(texts: Iterable[str]) -> frozenset[str]:
    """The words of some texts, e.g. of everyday instructions, as a general vocabulary."""
    return frozenset(token for text in texts for token in words.tokens(text))


def violations(texts: Sequence[str], *, secrets: Secrets, public: Sequence[str], general: Collection[str]) -> tuple[str, ...]:
    """Why these texts may not be deployed, in words; empty when they may.

    Args:
      texts: what would enter a prompt.
      secrets: ids, titles and hidden values of the episode.
      public: everything that the episode's agent could see.
      general: words that need no source, in `words.tokens` form.
    """
    joined = " | ".join(texts)
    found = []
    for kind, phrases in (("task id", secrets.task_ids), ("product id", secrets.product_ids), ("hidden value", secrets.values)):
        found += [f"contains the {kind} {phrase!r}" for phrase in phrases if words.says(joined, phrase)]
    for title in secrets.titles:
        run = _title_run(joined, title)
        found += [f"contains {run!r} of the product title {title!r}"] if run else []
    visible = vocabulary(public)
    unknown = [t for t in dict.fromkeys(words.tokens(joined)) if t not in visible and t not in general]
    found += [f"uses words that the agent could not see: {', '.join(unknown)}"] if unknown else []
    return tuple(found)


def inspect(card: Card, general: Collection[str]) -> tuple[str, ...]:
    """The violations of a card's deployable part; a card without one has none."""
    return violations(card.deployable.texts, secrets=card.secrets, public=card.public, general=general) if card.deployable else ()


def _title_run(text: str, title: str) -> str:
    """The first run of title words that the text repeats, "" when there is none; a shorter title counts as a whole."""
    spelled, named = words.tokens(text), words.tokens(title)
    size = min(TITLE_RUN, len(named))
    runs = {tuple(spelled[i : i + size]) for i in range(len(spelled) - size + 1)} if size else set()
    return next((" ".join(named[i : i + size]) for i in range(len(named) - size + 1) if tuple(named[i : i + size]) in runs), "")
