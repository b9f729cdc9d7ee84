"""What an analyst hands on: a card with a privileged part, for audit, and a deployable part, the only one that may go further."""

import dataclasses
import enum
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from intraskill.run_directory import read_json
from intraskill.skills import records, words
from intraskill.skills.bank import Bank
from intraskill.types import Chunk, InputError, Task, Trajectory, require


class CardStatus(enum.StrEnum):
    """What the analyst proposes."""

    PROPOSE_ADD = "PROPOSE_ADD"
    PROPOSE_REWRITE = "PROPOSE_REWRITE"
    NO_PROPOSAL = "NO_PROPOSAL"


@dataclasses.dataclass(frozen=True)
class Deployable:
    """A skill's texts as they would enter a prompt; `title` and `procedure` may not be empty."""

    title: str
    applies_when: str
    procedure: str
    check: str = ""
    common_failure: str = ""

    def __post_init__(self):
        require(bool(self.title.strip()) and bool(self.procedure.strip()), f"deployable {self.title!r}: title and procedure may not be empty")

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.title, self.applies_when, self.procedure, self.check, self.common_failure)

    @property
    def digest(self) -> str:
        """Identity of the wording, blind to case, width and spacing: what deduplication compares."""
        return records.digest([words.normal(t) for t in self.texts])

    def chunk(self, logical_id: str, version: int, provenance: Mapping[str, Any]) -> Chunk:
        """A chunk with these texts."""
        return Chunk(logical_id, version, *self.texts, provenance=provenance)


def deployable_of(chunk: Chunk) -> Deployable:
    """The texts of a chunk."""
    return Deployable(chunk.title, chunk.applies_when, chunk.procedure, chunk.check, chunk.common_failure)


@dataclasses.dataclass(frozen=True)
class Secrets:
    """What no deployable text may contain: it would hand out answers instead of teaching."""

    task_ids: tuple[str, ...] = ()
    product_ids: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    values: tuple[str, ...] = ()  # targets of the goal that neither instruction nor persona state


@dataclasses.dataclass(frozen=True)
class Card:
    """One analysed episode.

    Attributes:
      id: unique in the run, e.g. "r000-g00000017".
      status: the proposal.
      reason: why there is none; "" otherwise.
      mechanism: the rule that was violated, the key under which cards are merged; "" when none was found.
      deployable: the proposed texts, None without a proposal.
      target: the active chunk that a rewrite replaces, else "".
      public: what the agent could see: instruction, persona and the answers of the shop in the episode and in the trial.
      secrets: what the firewall rejects.
      privileged: goal, divergence, repair and trial; never leaves the run directory.
    """

    id: str
    status: CardStatus
    reason: str = ""
    mechanism: str = ""
    deployable: Deployable | None = None
    target: str = ""
    public: tuple[str, ...] = ()
    secrets: Secrets = Secrets()
    privileged: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        proposes = self.status != CardStatus.NO_PROPOSAL
        require(proposes == (self.deployable is not None), f"card {self.id}: {self.status} with deployable {self.deployable}")
        require(proposes == (not self.reason), f"card {self.id}: a card gives a reason exactly when it proposes nothing, got {self.reason!r}")
        require(
            bool(self.target) == (self.status == CardStatus.PROPOSE_REWRITE), f"card {self.id}: only a rewrite names a target, got {self.target!r}"
        )
        require(not proposes or bool(self.mechanism), f"card {self.id}: a proposal names its mechanism")
        succeeded = bool(self.privileged.get("trial", {}).get("success"))
        require(self.status != CardStatus.PROPOSE_ADD or succeeded, f"card {self.id}: PROPOSE_ADD needs a trial that succeeded")

    def to_json(self) -> dict[str, Any]:
        """The whole card, the privileged part included, for the run directory."""
        return {**dataclasses.asdict(self), "status": str(self.status)}


class Analyst(Protocol):
    """Analyses one failed full-bank retry; the rule-based one needs no model, others may ask one."""

    async def analyse(self, card_id: str, task: Task, retry: Trajectory, bank: Bank, *, tried: Collection[str] = ()) -> Card:
        """Returns a card; `tried` are digests of wordings that a gate already turned down."""
        ...


Mechanisms = Mapping[str, Sequence[Deployable]]


def load_mechanisms(path: str | os.PathLike) -> dict[str, tuple[Deployable, ...]]:
    """Reads `{mechanism: [wording, ...]}`: the first wording is proposed first, later ones when it is active or was turned down."""
    raw = read_json(path)
    if not isinstance(raw, dict) or not all(isinstance(v, list) and v for v in raw.values()):
        raise InputError(f"{path}: expected an object of mechanism -> list of at least one wording")
    found = {}
    for name, wordings in raw.items():
        try:
            found[name] = tuple(_wording(path, w) for w in wordings)
        except ValueError as error:
            raise InputError(f"{path}: {name}: {error}") from error
    return found


def _wording(path: str | os.PathLike, value: Any) -> Deployable:
    texts = records.fields(path, value, Deployable)
    wrong = [f"{name} is {text!r}" for name, text in texts.items() if not isinstance(text, str)]
    require(not wrong, f"a skill's texts are strings, but {', '.join(wrong)}")
    return Deployable(**texts)
