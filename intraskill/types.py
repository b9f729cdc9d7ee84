"""The carriers that travel along the loop's arrows, and the protocols of the two things it talks to.

Nothing here imports the rest of the project or JAX: a carrier is plain data whose invariants are checked where it is built, so that a
broken trajectory or batch fails at its source and not three stages later.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int


class InputError(ValueError):
    """Bad input from outside (config, file, server, flag): the message names the value, the rule and the remedy.

    `launch/` prints it as one line and exits with status 2. It never stands for a bug in this code.
    """


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless `condition`: an invariant of a carrier, checked where it is built."""
    if not condition:
        raise ValueError(message)


# ---------------------------------------------------------------------------------------------------------------- skills


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One skill in natural language.

    Attributes:
      logical_id: stays the same over rewrites.
      version: 1 for the first text, +1 for each rewrite.
      title: a few words.
      applies_when: what the agent can see when the skill applies.
      procedure: what to do. May not be empty.
      check: how to see that it worked, or "".
      common_failure: what goes wrong without it, or "".
      provenance: where the text came from (seed bank, proposal id, ...), for audit only.
      history: one record per gate that measured the chunk, oldest first; never part of a prompt.
    """

    logical_id: str
    version: int
    title: str
    applies_when: str
    procedure: str
    check: str = ""
    common_failure: str = ""
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self):
        require(bool(self.logical_id) and self.version >= 1, f"chunk {self.logical_id!r} v{self.version}: needs an id and version >= 1")
        require(bool(self.title.strip()) and bool(self.procedure.strip()), f"chunk {self.id}: title and procedure may not be empty")

    @property
    def id(self) -> str:
        """`logical_id@version`: what masks, prompts and gates refer to."""
        return f"{self.logical_id}@{self.version}"

    @property
    def text(self) -> str:
        """The one-line form that enters a prompt: only deployable fields, empty ones left out."""
        parts = [f"{self.title}:"]
        if self.applies_when:
            parts.append(f"when {self.applies_when}")
        parts.append(self.procedure)
        if self.check:
            parts.append(f"check {self.check}")
        if self.common_failure:
            parts.append(f"avoid {self.common_failure}")
        return " ".join(parts)


class MaskKind(enum.StrEnum):
    """Why a prompt carries the skills that it carries."""

    SKILL_FREE = "skill_free"  # drawn with probability q, or a bare evaluation: no skill by design
    ASSISTED = "assisted"  # each chunk drawn on its own; may come out empty, which is not the same as skill-free
    FULL = "full"  # the whole bank: retries and full-skill evaluations
    RETRIEVED = "retrieved"  # a treatment: the chunks nearest to the task's words
    MIXED = "mixed"  # a treatment: each episode of the group has a mask of its own, so advantages compare contexts


@dataclasses.dataclass(frozen=True)
class Mask:
    """The chunks that all prompts of one group carry, in prompt order."""

    kind: MaskKind
    chunk_ids: tuple[str, ...] = ()

    def __post_init__(self):
        empty = self.kind in (MaskKind.SKILL_FREE, MaskKind.MIXED)
        require(not empty or not self.chunk_ids, f"a mask that is {self.kind} carries no chunk itself, got {self.chunk_ids}")
        require(len(set(self.chunk_ids)) == len(self.chunk_ids), f"duplicate chunk in mask {self.chunk_ids}")

    @classmethod
    def skill_free(cls) -> "Mask":
        return cls(MaskKind.SKILL_FREE)


# -------------------------------------------------------------------------------------------------------------- episodes


@dataclasses.dataclass(frozen=True)
class Task:
    """The public side of a shop task: exactly what an agent may see. Goals stay in the shop."""

    id: str
    instruction: str
    persona: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One parsed call."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How an engine samples. Log-probs are those of the distribution sampled from: after temperature and banned ids."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()

    def __post_init__(self):
        require(self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        require(self.temperature >= 0, f"temperature must be >= 0 (0 is greedy), got {self.temperature}")
        require(0 < self.top_p <= 1 and self.top_k >= 0, f"top_p in (0, 1] and top_k >= 0 expected, got {self.top_p}, {self.top_k}")


@dataclasses.dataclass(frozen=True)
class Session:
    """An episode as the engine knows it: its prefix stays cached under `id`; `noise` keys its random numbers.

    Two sessions with equal `noise`, weights and prompts sample the same tokens in the embedded engine's deterministic mode.
    """

    id: str
    noise: tuple[int, ...]  # e.g. (run seed, stream, group, episode)


@dataclasses.dataclass(frozen=True)
class Completion:
    """What an engine sampled for one turn. The stop token, when there is one, is the last id."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # "stop" | "length" | "abort"
    weight_versions: tuple[int, ...]  # the distinct versions that sampled these ids, oldest first
    cached_tokens: int  # prompt tokens that were not computed again
    latency: float  # seconds

    def __post_init__(self):
        require(len(self.ids) == len(self.logprobs), f"{len(self.ids)} ids but {len(self.logprobs)} log-probs")
        require(self.finish_reason in ("stop", "length", "abort"), f"unknown finish reason {self.finish_reason!r}")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One model step: the prompt so far, what was sampled, what the shop answered.

    Attributes:
      prompt_length: tokens before the sampled ones (prompt, earlier turns and their results).
      completion: the sampled ids with their log-probs.
      text: the sampled text, a view for people; never re-tokenised.
      call: the parsed call, or None when there was a protocol error.
      protocol_error: the typed error of an unparseable output, or "".
      feedback: "ok", or the shop's typed reason for an invalid action, or "" when the shop was not asked.
      observation: the tool result's text, "" at the end of the episode.
    """

    prompt_length: int
    completion: Completion
    text: str
    call: ToolCall | None
    protocol_error: str
    feedback: str
    observation: str


class Status(enum.StrEnum):
    """How an episode ended. Only TECHNICAL keeps an episode's group out of training."""

    PURCHASE = "purchase"
    ACTION_LIMIT = "action_limit"  # reward 0, trains
    GENERATION_LENGTH = "generation_length"  # reward 0, trains
    TECHNICAL = "technical"  # engine abort or environment fault: not scored


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One episode as the trainer sees it: a flat token sequence and, born with each token, whether the policy sampled it.

    Invariants: tokens, loss_mask and logprobs have one length; a log-prob is 0 where loss_mask is False and finite where it is True;
    the sampled ids of the turns, in order, are exactly the tokens under loss_mask.

    `injected` are the chunks whose texts the prompt was made of, noted where it was made. `weights` has, for each weight version that sampled
    the episode, oldest first, the digest that the engine confirmed; "" where it could no longer say.
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    turns: tuple[Turn, ...]
    status: Status
    reward: float
    success: bool
    reward_detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""  # what went wrong, when status is TECHNICAL
    injected: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    def __post_init__(self):
        lengths = {len(self.tokens), len(self.loss_mask), len(self.logprobs)}
        require(len(lengths) == 1, f"tokens, loss_mask and logprobs differ in length: {sorted(lengths)}")
        sampled = [i for turn in self.turns for i in turn.completion.ids]
        require(sampled == [t for t, m in zip(self.tokens, self.loss_mask, strict=True) if m], "sampled ids differ from the tokens under loss_mask")
        bad = [i for i, (lp, m) in enumerate(zip(self.logprobs, self.loss_mask, strict=True)) if not np.isfinite(lp) or (not m and lp != 0)]
        require(not bad, f"log-probs must be finite, and 0 outside loss_mask; not so at positions {bad[:5]}")
        require(0 <= self.reward <= 1, f"reward {self.reward} lies outside [0, 1]")

    @property
    def scored(self) -> bool:
        return self.status != Status.TECHNICAL


@dataclasses.dataclass(frozen=True)
class Group:
    """One task, one mask, several episodes: the unit that advantages compare within.

    Only where a treatment mixes guidance within groups is `mask` of kind MIXED, and `own_masks` has one mask for each episode.
    """

    index: int  # position in the run's stream of groups; the mask is a pure function of (curriculum, index)
    task: Task
    mask: Mask
    trajectories: tuple[Trajectory, ...]
    own_masks: tuple[Mask, ...] = ()

    def __post_init__(self):
        wanted = len(self.trajectories) if self.mask.kind == MaskKind.MIXED else 0
        require(len(self.own_masks) == wanted, f"group {self.index} is {self.mask.kind}: {wanted} masks of episodes expected, got {self.own_masks}")

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The mask of each episode."""
        return self.own_masks or (self.mask,) * len(self.trajectories)

    @property
    def scored(self) -> bool:
        return all(t.scored for t in self.trajectories)

    @property
    def all_wrong(self) -> bool:
        """Every episode normally scored, none successful."""
        return self.scored and not any(t.success for t in self.trajectories)

    @property
    def rewards(self) -> Float[np.ndarray, " G"]:
        return np.array([t.reward for t in self.trajectories], np.float64)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows for the trainer: R rows of T tokens, and for each row up to M trained positions.

    Attributes:
      tokens: token ids; 0 where segment_ids is 0.
      positions: index inside the episode, from 0.
      segment_ids: 1, 2, ... for the episodes in a row, contiguous, 0 for padding (only at the row's end).
      index: column of the token whose hidden state predicts the target (the target's own column - 1).
      targets: the sampled token ids.
      mask: True where (index, targets) is a trained token; elsewhere index, targets and all log-probs are 0.
      weight: each token's share of the loss, so that the loss is the plain sum of weight * token loss over all rows, and gradient
        accumulation over rows is exact. Zero where mask is False.
      advantage: the episode's advantage, repeated over its tokens.
      sampler_logprobs: log-probs that the engine reported.
      old_logprobs: log-probs of the trainer's policy before the first update of this step; NaN at trained tokens until computed.
      reference_logprobs: log-probs of the frozen reference policy, where the objective has one; NaN at trained tokens until computed.
      episode: index of the episode in the batch, -1 where mask is False.
    """

    tokens: Int[np.ndarray, "R T"]
    positions: Int[np.ndarray, "R T"]
    segment_ids: Int[np.ndarray, "R T"]
    index: Int[np.ndarray, "R M"]
    targets: Int[np.ndarray, "R M"]
    mask: Bool[np.ndarray, "R M"]
    weight: Float[np.ndarray, "R M"]
    advantage: Float[np.ndarray, "R M"]
    sampler_logprobs: Float[np.ndarray, "R M"]
    old_logprobs: Float[np.ndarray, "R M"]
    reference_logprobs: Float[np.ndarray, "R M"]
    episode: Int[np.ndarray, "R M"]

    def __post_init__(self):
        for names in (
            ("tokens", "positions", "segment_ids"),
            ("index", "targets", "mask", "weight", "advantage", "sampler_logprobs", "old_logprobs", "reference_logprobs", "episode"),
        ):
            shapes = {n: getattr(self, n).shape for n in names}
            require(len(set(shapes.values())) == 1, f"batch fields differ in shape: {shapes}")
        require(self.tokens.shape[0] == self.index.shape[0], f"{self.tokens.shape[0]} rows of tokens, {self.index.shape[0]} of trained positions")
        require(not self.weight[~self.mask].any(), "weight must be 0 where mask is False")


# ------------------------------------------------------------------------------------------------------------- protocols


@dataclasses.dataclass(frozen=True)
class Published:
    """A set of weights on disk that engines can load. `digest` identifies the content, `version` the moment in the run."""

    version: int
    path: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Health:
    """An engine's word about itself."""

    ok: bool
    weight_version: int
    digest: str
    detail: str = ""


class ProcessError(RuntimeError):
    """Another process of the run is missing, has died or has failed, so that this one cannot go on."""


class EngineError(RuntimeError):
    """An engine could not do what was asked; the episode is technical, never a scored failure."""


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and log-probs out. Text is a view, never the record."""

    async def generate(self, prompt_ids: Sequence[int], *, session: Session, sampling: Sampling) -> Completion:
        """Continues `prompt_ids`, which extends what this session's earlier prompts and completions spelled. Raises EngineError."""
        ...

    async def release(self, session: Session) -> None:
        """Forgets the session's cached prefix. Unknown sessions are fine."""
        ...

    async def load_weights(self, published: Published) -> None:
        """Returns only when every replica serves exactly `published`; raises EngineError otherwise."""
        ...

    async def healthy(self) -> Health: ...


class ShopError(RuntimeError):
    """The shop could not be reached or refused for a reason that is not the agent's doing: the episode is technical."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """An episode that just began."""

    episode_id: str
    task: Task
    observation: str


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The shop's answer to one call. reward and reward_detail are set when done."""

    observation: str
    feedback: str  # "ok" or a typed reason
    done: bool
    status: str = ""  # "purchase" | "action_limit" when done
    reward: float = 0.0
    success: bool = False
    reward_detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Shop(Protocol):
    """What the agent and the analyst need of an environment; `shop_env.client.ShopClient` is one."""

    async def tools(self) -> list[Mapping[str, Any]]:
        """JSON schemas of the tools, fixed for all episodes."""
        ...

    async def tasks(self, split: str) -> list[Task]: ...

    async def open(self, task_id: str, *, privileged: bool = False) -> Opened: ...

    async def step(self, episode_id: str, call: ToolCall) -> StepResult: ...

    async def close(self, episode_id: str) -> None: ...

    async def goal(self, task_id: str) -> Mapping[str, Any]:
        """The hidden goal, for the analyst only (needs the privileged key)."""
        ...

    async def product(self, product_id: str) -> Mapping[str, Any]:
        """A product's full record, for the analyst only (needs the privileged key)."""
        ...
