"""From episodes of any length to rows of one length.

Every microbatch that reaches the compiled update has one of a few shapes, the same for the whole run: a fixed number of rows of T tokens and M
trained positions, and for what is left at the end rows of a fraction of both. Only the NUMBER of microbatches follows the data, so nothing compiles
twice. The normalisation of the loss is decided here, as one weight per token over the whole optimizer batch: the update adds microbatches up and
never divides, which makes gradient accumulation exact whatever the split.

Reinforcement learning and the cross-entropy warm start share this file; the latter leaves advantages at 0 and may weigh tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from intraskill.types import Batch, InputError, Trajectory, require

OVERLONG = ("drop", "mask", "truncate")
AGGREGATIONS = ("episode_mean", "token_mean", "fixed_length")
_MOST_SHAPES = 16


@dataclasses.dataclass(frozen=True)
class Episode:
    """What packing needs of one token sequence.

    Attributes:
      tokens: token ids, at least one.
      loss_mask: True where the token is a target of the loss. Never at position 0, which nothing predicts.
      sampler_logprobs: the engine's log-probs, read where loss_mask is True. None for text that nobody sampled.
      advantage: shared by all tokens; 0 for the warm start.
      token_weights: relative weight of each target in the loss, > 0 where loss_mask is True. None weighs all alike.
    """

    tokens: Sequence[int] | np.ndarray
    loss_mask: Sequence[bool] | np.ndarray
    sampler_logprobs: Sequence[float] | np.ndarray | None = None
    advantage: float = 0.0
    token_weights: Sequence[float] | np.ndarray | None = None

    def __post_init__(self):
        columns = {"loss_mask": self.loss_mask, "sampler_logprobs": self.sampler_logprobs, "token_weights": self.token_weights}
        lengths = {name: len(column) for name, column in columns.items() if column is not None}
        require(len(self.tokens) > 0, "an episode has at least one token")
        require(set(lengths.values()) == {len(self.tokens)}, f"{len(self.tokens)} tokens, but lengths {lengths}")
        require(not self.loss_mask[0], "the token at position 0 cannot be trained: no token before it predicts it")
        require(bool(np.isfinite(self.advantage)), f"advantage must be finite, got {self.advantage}")
        if self.token_weights is not None:
            trained = np.asarray(self.token_weights, np.float64)[np.asarray(self.loss_mask, bool)]
            require(bool(np.all(np.isfinite(trained) & (trained > 0))), "token_weights must be finite and > 0 where loss_mask is True")

    @classmethod
    def of(cls, trajectory: Trajectory, advantage: float) -> "Episode":
        """The episode of a rollout: the sampled tokens are trained, with the engine's log-probs."""
        return cls(trajectory.tokens, trajectory.loss_mask, trajectory.logprobs, float(advantage))


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """What became of the episodes. Nothing leaves the batch without being listed here.

    Attributes:
      num_rows: rows, empty ones included.
      num_slots: tokens that these rows have room for.
      num_tokens: tokens in the rows.
      num_trained: trained tokens in the rows.
      overlong: indices of the episodes that exceed a row, to which the `overlong` rule was applied.
      untrained: indices of the episodes that have no trained token (left); they are not packed and not averaged over.
    """

    num_rows: int
    num_slots: int
    num_tokens: int
    num_trained: int
    overlong: tuple[int, ...]
    untrained: tuple[int, ...]

    @property
    def padding(self) -> float:
        """Share of the slots that hold no token."""
        return 1 - self.num_tokens / self.num_slots

    def metrics(self) -> dict[str, float]:
        return {
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "trained_tokens": self.num_trained,
            "padding": self.padding,
            "overlong": len(self.overlong),
            "untrained": len(self.untrained),
        }


@dataclasses.dataclass(frozen=True)
class _Piece:
    """An episode as it will lie in a row: `num_tokens` of it, of which the positions `trained` are targets."""

    episode: int
    num_tokens: int
    trained: np.ndarray


def pack(
    episodes: Sequence[Episode],
    *,
    row_length: int,
    max_trained_per_row: int,
    rows_multiple_of: int = 1,
    overlong: str = "drop",
    aggregation: str = "episode_mean",
    fixed_length: int | None = None,
) -> tuple[Batch, PackingReport]:
    """Packs the episodes of ONE optimizer update into rows of one length, first-fit decreasing.

    Args:
      episodes: all episodes of the update; `Batch.episode` refers to their order.
      row_length: T, tokens a row.
      max_trained_per_row: M, trained positions a row.
      rows_multiple_of: empty rows are added until the number of rows is a multiple of this; there is always at least one row.
      overlong: for an episode of more than T tokens or M trained tokens: "drop" leaves it out as if it had not been submitted; "mask" trains none of
        its tokens but still counts it in the average over episodes; "truncate" trains the longest prefix that fits.
      aggregation: "episode_mean" is the mean over each episode's tokens, then over episodes; "token_mean" the mean over all tokens; "fixed_length"
        the sum over tokens / (fixed_length * number of episodes), so that a token weighs the same in a short and a long episode.
      fixed_length: only for that aggregation.

    Returns:
      The batch and the report. The batch's weights sum to 1 for the two means (less the masked episodes' share).
    """
    if rows_multiple_of < 1:
        raise InputError(f"rows_multiple_of {rows_multiple_of} must be >= 1")
    chosen = _choose(episodes, row_length, max_trained_per_row, overlong, aggregation, fixed_length)
    rows = _first_fit_decreasing(chosen.pieces, row_length, max_trained_per_row)
    num_rows = max(1, -(-len(rows) // rows_multiple_of)) * rows_multiple_of
    batch = _fill(episodes, rows, chosen.weights, num_rows, row_length, max_trained_per_row)
    return batch, chosen.report(num_rows, num_rows * row_length)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The shapes that microbatches may have.

    Attributes:
      count: rows of a microbatch.
      length: T, tokens of a full row.
      trained: M, trained positions of a full row.
      unit: rows of what fills no microbatch of full rows have a multiple of this many tokens, and their share of M. 0: full rows only.
    """

    count: int
    length: int
    trained: int
    unit: int = 0

    def __post_init__(self):
        if self.count < 1 or self.unit < 0:
            raise InputError(f"{self.count} rows a microbatch must be >= 1, and a row unit of {self.unit} tokens >= 0")
        if self.unit and self.length > _MOST_SHAPES * self.unit:
            raise InputError(
                f"a row of {self.length} tokens has more than {_MOST_SHAPES} multiples of the row unit {self.unit}, and each compiles: raise the unit"
            )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(tokens, trained positions) of a row, ascending; the last one is the full row."""
        lengths = [*(range(self.unit, self.length, self.unit) if self.unit else ()), self.length]
        return [(length, -(-self.trained * length // self.length)) for length in lengths]

    def empty(self) -> list[Batch]:
        """A microbatch of padding of each shape, in the order of `shapes`."""
        return [_fill([], [], {}, self.count, *shape) for shape in self.shapes]


def pack_microbatches(
    episodes: Sequence[Episode], rows: Rows, *, overlong: str = "drop", aggregation: str = "episode_mean", fixed_length: int | None = None
) -> tuple[list[Batch], PackingReport]:
    """Packs the episodes of ONE optimizer update into microbatches.

    Rows are filled first-fit decreasing. Those that do not fill a microbatch are packed again, into the shortest rows in which one microbatch holds
    them: where many devices want a row each, rows that only make the last microbatch whole would be most of the padding.

    Args:
      episodes: all episodes of the update; `Batch.episode` refers to their order.
      rows: the shapes.
      overlong: see `pack`; full rows decide.
      aggregation: see `pack`.
      fixed_length: see `pack`.

    Returns:
      At least one microbatch, and the report.
    """
    chosen = _choose(episodes, rows.length, rows.trained, overlong, aggregation, fixed_length)
    filled = _first_fit_decreasing(chosen.pieces, rows.length, rows.trained)
    num_whole = len(filled) // rows.count
    parts = [(filled[i * rows.count : (i + 1) * rows.count], rows.shapes[-1]) for i in range(num_whole)]
    rest = [piece for row in filled[num_whole * rows.count :] for piece in row]
    if rest or not parts:
        parts.append(_shortest(rest, rows))
    microbatches = [_fill(episodes, part, chosen.weights, rows.count, *shape) for part, shape in parts]
    return microbatches, chosen.report(rows.count * len(parts), rows.count * sum(length for _, (length, _) in parts))


def _shortest(pieces: Sequence[_Piece], rows: Rows) -> tuple[list[list[_Piece]], tuple[int, int]]:
    """The pieces in at most one microbatch of the shortest rows that can hold them, and those rows' shape."""
    for length, trained in rows.shapes[:-1]:
        if all(p.num_tokens <= length and len(p.trained) <= trained for p in pieces):
            filled = _first_fit_decreasing(pieces, length, trained)
            if len(filled) <= rows.count:
                return filled, (length, trained)
    # Full rows hold them: what did not fit into the rows before is placed as it was among all pieces.
    return _first_fit_decreasing(pieces, rows.length, rows.trained), rows.shapes[-1]


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """What of the episodes is packed, each token's weight in the loss by episode, and what is not packed, or not whole."""

    pieces: list[_Piece]
    weights: dict[int, np.ndarray]
    overlong: tuple[int, ...]
    untrained: tuple[int, ...]

    def report(self, num_rows: int, num_slots: int) -> PackingReport:
        num_tokens, num_trained = sum(p.num_tokens for p in self.pieces), sum(len(p.trained) for p in self.pieces)
        return PackingReport(num_rows, num_slots, num_tokens, num_trained, self.overlong, self.untrained)


def _choose(episodes: Sequence[Episode], row_length: int, max_trained: int, overlong: str, aggregation: str, fixed_length: int | None) -> _Chosen:
    _check_options(row_length, max_trained, overlong, aggregation, fixed_length)
    pieces, too_long, untrained = [], [], []
    for number, episode in enumerate(episodes):
        trained = np.flatnonzero(np.asarray(episode.loss_mask, bool))
        piece = _Piece(number, len(episode.tokens), trained)
        if piece.num_tokens > row_length or len(trained) > max_trained:
            too_long.append(number)
            if overlong != "truncate":
                continue
            piece = _truncated(piece, row_length, max_trained)
        if len(piece.trained) == 0:
            untrained.append(number)
        else:
            pieces.append(piece)
    num_averaged = len(pieces) + (len(too_long) if overlong == "mask" else 0)
    weights = _loss_weights(episodes, pieces, num_averaged, aggregation, fixed_length)
    return _Chosen(pieces, weights, tuple(too_long), tuple(untrained))


def _check_options(row_length: int, max_trained: int, overlong: str, aggregation: str, fixed_length: int | None) -> None:
    if min(row_length, max_trained) < 1:
        raise InputError(f"row_length {row_length} and max_trained_per_row {max_trained} must be >= 1")
    if overlong not in OVERLONG:
        raise InputError(f"overlong is {overlong!r}: use one of {', '.join(OVERLONG)}")
    if aggregation not in AGGREGATIONS:
        raise InputError(f"aggregation is {aggregation!r}: use one of {', '.join(AGGREGATIONS)}")
    if (aggregation == "fixed_length") != (fixed_length is not None and fixed_length >= 1):
        raise InputError(
            f"fixed_length is {fixed_length!r} with aggregation {aggregation!r}: give a length >= 1 with aggregation fixed_length, None otherwise"
        )


def _truncated(piece: _Piece, row_length: int, max_trained: int) -> _Piece:
    """The longest prefix with at most `row_length` tokens and `max_trained` trained ones."""
    num_tokens = min(piece.num_tokens, row_length)
    if len(piece.trained) > max_trained:
        num_tokens = min(num_tokens, int(piece.trained[max_trained]))  # ends just before the first target too many
    return _Piece(piece.episode, num_tokens, piece.trained[piece.trained < num_tokens])


def _first_fit_decreasing(pieces: Sequence[_Piece], row_length: int, max_trained: int) -> list[list[_Piece]]:
    """Longest first (earlier episode first among equals), each into the first row with room for its tokens and its targets."""
    rows: list[list[_Piece]] = []
    room = np.zeros((len(pieces), 2), np.int64)  # tokens and targets still free in each row, in the order of `rows`
    for piece in sorted(pieces, key=lambda p: (-p.num_tokens, p.episode)):
        need = (piece.num_tokens, len(piece.trained))
        fits = np.flatnonzero((room[: len(rows)] >= need).all(axis=1))
        if len(fits) == 0:
            room[len(rows)] = (row_length, max_trained)
            rows.append([])
            fits = [len(rows) - 1]
        rows[fits[0]].append(piece)
        room[fits[0]] -= need
    return rows


def _loss_weights(
    episodes: Sequence[Episode], pieces: Sequence[_Piece], num_averaged: int, aggregation: str, fixed_length: int | None
) -> dict[int, np.ndarray]:
    """For each packed episode the weights of its trained tokens; float64, so that their sum is exact before it is stored as float32."""
    relative = {}
    for piece in pieces:
        weights = episodes[piece.episode].token_weights
        relative[piece.episode] = np.ones(len(piece.trained)) if weights is None else np.asarray(weights, np.float64)[piece.trained]
    if aggregation == "episode_mean":
        return {e: w / (w.sum() * num_averaged) for e, w in relative.items()}
    if aggregation == "token_mean":
        total = sum(w.sum() for w in relative.values())
        return {e: w / total for e, w in relative.items()}
    assert fixed_length is not None  # by _check_options
    return {e: w / (fixed_length * num_averaged) for e, w in relative.items()}


def _fill(
    episodes: Sequence[Episode], rows: Sequence[Sequence[_Piece]], weights: dict[int, np.ndarray], num_rows: int, row_length: int, max_trained: int
) -> Batch:
    by_token = {name: np.zeros((num_rows, row_length), np.int32) for name in ("tokens", "positions", "segment_ids")}
    by_target = {name: np.zeros((num_rows, max_trained), np.int32) for name in ("index", "targets")}
    by_target |= {
        name: np.zeros((num_rows, max_trained), np.float32)
        for name in ("weight", "advantage", "sampler_logprobs", "old_logprobs", "reference_logprobs")
    }
    by_target |= {"mask": np.zeros((num_rows, max_trained), bool), "episode": np.full((num_rows, max_trained), -1, np.int32)}
    for r, row in enumerate(rows):
        column = target = 0
        for segment, piece in enumerate(row, start=1):
            episode = episodes[piece.episode]
            tokens = np.asarray(episode.tokens, np.int32)
            here = np.s_[r, column : column + piece.num_tokens]
            by_token["tokens"][here] = tokens[: piece.num_tokens]
            by_token["positions"][here] = np.arange(piece.num_tokens)
            by_token["segment_ids"][here] = segment
            here = np.s_[r, target : target + len(piece.trained)]
            by_target["index"][here] = column + piece.trained - 1
            by_target["targets"][here] = tokens[piece.trained]
            by_target["mask"][here] = True
            by_target["weight"][here] = weights[piece.episode]
            by_target["advantage"][here] = episode.advantage
            if episode.sampler_logprobs is not None:
                by_target["sampler_logprobs"][here] = np.asarray(episode.sampler_logprobs, np.float32)[piece.trained]
            by_target["old_logprobs"][here] = by_target["reference_logprobs"][here] = np.nan  # the learner's to compute
            by_target["episode"][here] = piece.episode
            column += piece.num_tokens
            target += len(piece.trained)
    return Batch(**by_token, **by_target)
