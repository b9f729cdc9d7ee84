"""Which episodes the embedded engine computes next, and in what pieces. Plain Python: it decides, the engine computes.

The rule that everything here serves: how an episode's tokens are cut into device calls depends on the episode alone. A prefill is cut by
its own length into pieces of fixed sizes, every call of a kind and size has one fixed shape whoever shares it, and an episode that lost its
slot is rebuilt through the very pieces and single steps that built it. So its numbers are the same bits alone, in a crowd, and after an
eviction.

Rows of the cache: `num_slots` for episodes, then `num_prompts` for the first prompts last seen, which the other episodes of a group copy
instead of computing them.
"""

import collections
import dataclasses
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from intraskill.types import EngineError, Sampling, Session, require


class Refused(EngineError):
    """A turn that was never queued, because it cannot be computed."""


class NotContinued(Refused):
    """A prompt that does not continue what its session holds."""


# An episode that nobody released keeps its tokens; this many per slot are kept before the oldest idle one is forgotten.
_EPISODES_PER_SLOT = 4
# Device calls that a prefill may wait while fuller calls go first.
_PATIENCE = 8


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The fixed shapes of the engine's calls.

    Attributes:
      num_slots: episodes whose state is kept.
      num_prompts: first prompts whose state is kept.
      max_length: tokens an episode may have.
      decode_rows: episodes in one decode call.
      decode_block: steps in one decode call; a call ends early when no row is left.
      prefill_buckets: sizes of the pieces that prompts are cut into, ascending.
      prefill_tokens: a prefill call of bucket b has max(1, prefill_tokens // b) rows.
    """

    num_slots: int
    max_length: int
    num_prompts: int = 8
    decode_rows: int = 32
    decode_block: int = 8
    prefill_buckets: tuple[int, ...] = (16, 32, 64, 128, 256)
    prefill_tokens: int = 128

    def __post_init__(self):
        counts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "prefill_buckets"}
        require(min(counts.values()) >= 1, f"engine shapes must be >= 1, got {counts}")
        buckets = self.prefill_buckets
        ascending = list(buckets) == sorted(set(buckets))
        require(bool(buckets) and ascending and buckets[0] >= 2, f"prefill_buckets must ascend from 2 or more, got {buckets}")

    @property
    def num_rows(self) -> int:
        return self.num_slots + self.num_prompts

    @property
    def no_row(self) -> int:
        """Fills a call up: a row beyond the last, of which nothing is written back."""
        return self.num_rows

    def prefill_rows(self, bucket: int) -> int:
        return max(1, self.prefill_tokens // bucket)

    def pieces(self, start: int, stop: int) -> Iterator["Piece"]:
        """A stretch of new tokens, cut: as many of the largest bucket as fit whole, then the smallest that holds the rest."""
        while start < stop:
            largest = self.prefill_buckets[-1]
            bucket = next((b for b in self.prefill_buckets if b >= stop - start), largest)
            end = min(stop, start + bucket)
            yield Piece(start, end, bucket)
            start = end


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of an episode that enter the cache together; `bucket` 0: one by one, through decode calls."""

    start: int
    stop: int
    bucket: int


@dataclasses.dataclass(eq=False)
class Request:
    """One turn that is being computed. `done` is the engine's future for it."""

    sampling: Sampling
    prompt_length: int
    done: Any
    started: float
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    num_sampled: int = 0


@dataclasses.dataclass(eq=False)
class Episode:
    """A session's tokens and where its state stands.

    Attributes:
      tokens: everything known: prompts, results, sampled ids.
      fed: tokens[:fed] are in the cache, when there is a slot.
      spans: how tokens entered the cache, in order and without gaps: (start, stop, whether by single steps). Kept when the slot is lost.
      pieces: what must still enter before the next token can be sampled.
      used: the scheduler's clock when the episode was last computed or asked for.
    """

    id: str
    key: tuple[int, int]
    tokens: list[int]
    fed: int = 0
    slot: int | None = None
    spans: list[tuple[int, int, bool]] = dataclasses.field(default_factory=list)
    pieces: collections.deque[Piece] = dataclasses.field(default_factory=collections.deque)
    request: Request | None = None
    used: int = 0

    @property
    def row(self) -> int:
        """The slot of an episode that has one."""
        assert self.slot is not None, f"session {self.id} is computed without a slot"
        return self.slot

    @property
    def fresh(self) -> bool:
        return self.fed == 0

    @property
    def opening(self) -> tuple[int, ...]:
        """The first prompt: what episodes of a group have in common."""
        return tuple(self.tokens[: self.spans[0][1]])


@dataclasses.dataclass(frozen=True)
class CopyCall:
    """State of row `source` to row `target`, for each pair."""

    pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    bucket: int
    episodes: tuple[Episode, ...]


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    episodes: tuple[Episode, ...]


Call = CopyCall | PrefillCall | DecodeCall


def noise_key(seed: int, session: Session) -> tuple[int, int]:
    """64 bits that depend on the seed and the session's noise, never on its id or slot."""
    return struct.unpack("<II", hashlib.sha256(repr((seed, session.noise)).encode()).digest()[:8])


class Scheduler:
    """Slots, prompts and the queue. Everything runs on the event loop's thread; device calls happen between `next_call` and `fed`/`sampled`."""

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.counts: collections.Counter[str] = collections.Counter()
        self._episodes: dict[str, Episode] = {}
        self._waiting: collections.deque[Episode] = collections.deque()
        self._active: dict[str, Episode] = {}  # a request and a slot, in the order of arrival
        self._free = list(range(shapes.num_slots - 1, -1, -1))
        self._prompts: collections.OrderedDict[tuple[int, ...], int] = collections.OrderedDict()
        self._openings: dict[tuple[int, ...], Episode] = {}  # first prompts that are being computed, and by whom
        self._clock = 0

    # ------------------------------------------------------------------------------------------------------- from outside

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting)

    def add(self, session: Session, key: tuple[int, int], prompt: Sequence[int], request: Request) -> None:
        """Queues a turn. Raises Refused when it does not fit, NotContinued when the session holds something else."""
        limit = self.shapes.max_length
        if len(prompt) + request.sampling.max_new_tokens > limit:
            asked = f"{len(prompt)} prompt tokens and {request.sampling.max_new_tokens} new ones"
            raise Refused(f"{asked} exceed the engine's max_length, {limit}: ask for fewer tokens, or make max_length the agent's context limit")
        episode = self._episodes.get(session.id)
        if episode is None:
            episode = self._episodes[session.id] = Episode(session.id, key, [])
        elif episode.request is not None:
            raise Refused(f"session {session.id} already has a turn in flight: wait for it, or use another session id")
        elif len(prompt) < len(episode.tokens) or list(prompt[: len(episode.tokens)]) != episode.tokens:
            raise NotContinued(f"the prompt of session {session.id} does not continue its {len(episode.tokens)} tokens: prompts only grow")
        end = episode.spans[-1][1] if episode.spans else 0
        self.counts["new_tokens"] += len(prompt) - end
        episode.tokens = list(prompt)
        episode.request = request
        self._touch(episode)
        if episode.slot is None:
            self._waiting.append(episode)
        else:  # never behind an episode that waits for a slot: this one's slot cannot be taken while it has a turn in flight
            self._activate(episode, rebuild=False)
        self._forget_surplus()

    def drop(self, session_id: str, turn: Request | None = None) -> Request | None:
        """Forgets a session, wherever it stands, and returns the turn that was in flight. What a running call computes for it is ignored.

        With `turn` only while that turn is in flight: another one may have taken the session's name since.
        """
        episode = self._episodes.get(session_id)
        if episode is None or (turn is not None and episode.request is not turn):
            return None
        del self._episodes[session_id]
        if episode in self._waiting:
            self._waiting.remove(episode)
        self._active.pop(session_id, None)
        self._leave_slot(episode)
        request, episode.request = episode.request, None
        return request

    def drop_all(self) -> list[Request]:
        """Forgets every session and returns the turns that were in flight."""
        requests = [self.drop(i) for i in list(self._episodes)]
        return [r for r in requests if r is not None]

    def flush(self) -> None:
        """Declares everything in the cache stale. Turns in flight go on from their tokens, which enter the cache again in one stretch."""
        self._prompts.clear()
        self._openings.clear()
        for episode in self._episodes.values():
            episode.spans.clear()
            if episode.request is None:
                self._leave_slot(episode)
        for episode in self._active.values():
            episode.fed = 0
            self._plan(episode, rebuild=True)

    # ---------------------------------------------------------------------------------------------------------- decisions

    def next_call(self) -> Call | None:
        """What to compute now: full calls first, then whatever lets most rows decode together; None when nothing is left."""
        self._clock += 1
        self._assign_slots()
        copies = self._copy_openings()
        if copies:
            return copies
        buckets: dict[int, list[Episode]] = collections.defaultdict(list)
        decoding = []
        for episode in self._active.values():
            if not episode.pieces or not episode.pieces[0].bucket:
                decoding.append(episode)
            elif not self._waits_for_opening(episode):
                buckets[episode.pieces[0].bucket].append(episode)
        for episodes in (*buckets.values(), decoding):
            episodes.sort(key=lambda e: e.used)
        prefills = [PrefillCall(b, tuple(e[: self.shapes.prefill_rows(b)])) for b, e in buckets.items()]
        prefills.sort(key=lambda c: c.episodes[0].used)
        full = [c for c in prefills if len(c.episodes) == self.shapes.prefill_rows(c.bucket)]
        overdue = [c for c in prefills if self._clock - c.episodes[0].used > _PATIENCE]
        if len(decoding) < self.shapes.decode_rows:
            overdue += prefills
        if full or overdue:
            return [*full, *overdue][0]
        return DecodeCall(tuple(decoding[: self.shapes.decode_rows])) if decoding else None

    def _assign_slots(self) -> None:
        while self._waiting:
            slot = self._free.pop() if self._free else self._evict()
            if slot is None:
                return
            episode = self._waiting.popleft()
            episode.slot, episode.fed = slot, 0
            self._activate(episode, rebuild=True)

    def _activate(self, episode: Episode, rebuild: bool) -> None:
        self._active[episode.id] = episode
        self._plan(episode, rebuild)

    def _evict(self) -> int | None:
        """Takes the slot of the episode that has been idle for longest, if any is idle."""
        idle = [e for e in self._episodes.values() if e.slot is not None and e.request is None]
        if not idle:
            return None
        victim = min(idle, key=lambda e: e.used)
        slot, victim.slot, victim.fed = victim.slot, None, 0
        self.counts["evictions"] += 1
        return slot

    def _plan(self, episode: Episode, rebuild: bool) -> None:
        """Sets the pieces that lead from the cache's state, or with `rebuild` from nothing, to the end of the tokens."""
        assert episode.request is not None
        end = episode.spans[-1][1] if episode.spans else 0
        episode.spans.append((end, len(episode.tokens), False))
        episode.request.cached_tokens = min(episode.fed, episode.request.prompt_length)
        episode.pieces.clear()
        for start, stop, single in episode.spans if rebuild else episode.spans[-1:]:
            episode.pieces.extend([Piece(start, stop, 0)] if single else self.shapes.pieces(start, stop))

    def _waits_for_opening(self, episode: Episode) -> bool:
        """Whether another episode is computing this one's first prompt; if none is, this one does from now on."""
        return episode.fresh and self._openings.setdefault(episode.opening, episode) is not episode

    def _copy_openings(self) -> CopyCall | None:
        """Gives episodes that have not begun the state of their first prompt, where it is kept."""
        pairs = []
        for episode in self._active.values():
            row = self._prompts.get(episode.opening) if episode.fresh else None
            if row is None:
                continue
            assert episode.request is not None
            self._prompts.move_to_end(episode.opening)
            episode.fed = len(episode.opening)
            episode.request.cached_tokens = min(episode.fed, episode.request.prompt_length)
            while episode.pieces and episode.pieces[0].stop <= episode.fed:
                episode.pieces.popleft()
            self.counts["copied_tokens"] += episode.fed
            pairs.append((row, episode.row))
        return CopyCall(tuple(pairs)) if pairs else None

    # ------------------------------------------------------------------------------------------------------------ results

    def prefilled(self, call: PrefillCall) -> CopyCall | None:
        """Notes that a prefill call was computed; returns a copy to make before the next call, if a first prompt is to be kept."""
        pairs = []
        self.counts["padded_tokens"] += call.bucket * self.shapes.prefill_rows(call.bucket)
        for episode in call.episodes:
            if episode.request is None:  # dropped while the call ran
                continue
            piece = episode.pieces.popleft()
            self.counts["prefilled_tokens"] += piece.stop - piece.start
            episode.fed = piece.stop
            self._touch(episode)
            if piece.stop == len(episode.opening) and self._openings.get(episode.opening) is episode:
                del self._openings[episode.opening]
                pairs.append((episode.row, self._keep_prompt(episode.opening)))
        return CopyCall(tuple(pairs)) if pairs else None

    def _keep_prompt(self, opening: tuple[int, ...]) -> int:
        used = set(self._prompts.values())
        first = self.shapes.num_slots
        if len(used) == self.shapes.num_prompts:
            _, row = self._prompts.popitem(last=False)
        else:
            row = next(r for r in range(first, first + self.shapes.num_prompts) if r not in used)
        self._prompts[opening] = row
        return row

    def forced(self, episode: Episode, num_steps: int) -> None:
        """Notes that known tokens entered the cache one by one, as they did before the episode lost its slot."""
        self.counts["prefilled_tokens"] += num_steps
        episode.fed += num_steps
        if episode.fed == episode.pieces[0].stop:
            episode.pieces.popleft()
        self._touch(episode)

    def sampled(self, episode: Episode, ids: Sequence[int], logprobs: Sequence[float], version: int) -> str:
        """Notes sampled tokens; returns the finish reason when the turn is complete, else ""."""
        request = episode.request
        assert request is not None
        episode.tokens.extend(ids)
        request.logprobs.extend(logprobs)
        request.num_sampled += len(ids)
        if version not in request.versions:
            request.versions.append(version)
        self.counts["sampled_tokens"] += len(ids)
        self._touch(episode)
        stopped = ids[-1] in request.sampling.stop_ids
        if not stopped and request.num_sampled < request.sampling.max_new_tokens:
            episode.fed = len(episode.tokens)
            return ""
        # The last token was never fed: it opens the next turn's prefill.
        start, episode.fed = episode.spans[-1][1], len(episode.tokens) - 1
        if episode.fed > start:
            episode.spans.append((start, episode.fed, True))
        episode.request = None
        del self._active[episode.id]
        return "stop" if stopped else "length"

    # ------------------------------------------------------------------------------------------------------------- slots

    def _touch(self, episode: Episode) -> None:
        episode.used = self._clock

    def _leave_slot(self, episode: Episode) -> None:
        for opening in [o for o, e in self._openings.items() if e is episode]:
            del self._openings[opening]
        if episode.slot is not None:
            self._free.append(episode.slot)
        episode.slot, episode.fed = None, 0
        episode.pieces.clear()

    def _forget_surplus(self) -> None:
        surplus = len(self._episodes) - _EPISODES_PER_SLOT * self.shapes.num_slots
        if surplus > 0:
            idle = sorted((e for e in self._episodes.values() if e.request is None), key=lambda e: e.used)
            for episode in idle[:surplus]:
                self.drop(episode.id)
