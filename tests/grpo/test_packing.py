import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intraskill.grpo.packing import Episode, Rows, pack, pack_microbatches
from intraskill.types import Completion, InputError, Status, Trajectory, Turn

T, M = 24, 10


@st.composite
def episode_lists(draw):
    """Episodes whose tokens name their place, 1000 * episode + position, so that a packed token says where it came from."""
    weighted = draw(st.booleans())
    episodes = []
    for number in range(draw(st.integers(0, 12))):
        num_tokens = draw(st.integers(1, T + 6))
        mask = [False] + draw(st.lists(st.booleans(), min_size=num_tokens - 1, max_size=num_tokens - 1))
        weights = draw(st.lists(st.floats(0.1, 4), min_size=num_tokens, max_size=num_tokens)) if weighted else None
        tokens = np.arange(num_tokens) + 1000 * number
        episodes.append(Episode(tokens, mask, -np.arange(num_tokens) * np.array(mask) / 8, float(number), weights))
    return episodes


def prefix(episode, overlong):
    """The number of tokens that may be packed, by counting one token at a time; None when the episode may not be."""
    if len(episode.tokens) <= T and sum(episode.loss_mask) <= M:
        return len(episode.tokens)
    if overlong != "truncate":
        return None
    kept = num_trained = 0
    for trained in list(episode.loss_mask)[:T]:
        num_trained += trained
        if num_trained > M:
            break
        kept += 1
    return kept


@settings(deadline=None, max_examples=150)
@given(episode_lists(), st.sampled_from(["drop", "mask", "truncate"]), st.integers(1, 4))
def test_every_token_lands_once_with_its_own_labels(episodes, overlong, multiple):
    batch, report = pack(episodes, row_length=T, max_trained_per_row=M, rows_multiple_of=multiple, overlong=overlong)
    assert batch.tokens.shape == (report.num_rows, T) and batch.index.shape == (report.num_rows, M) and report.num_rows % multiple == 0
    kept = {n: p for n, e in enumerate(episodes) if (p := prefix(e, overlong)) is not None and any(e.loss_mask[:p])}
    expected = sorted((n, i) for n, p in kept.items() for i in range(p))

    real = batch.segment_ids > 0
    assert sorted((t // 1000, t % 1000) for t in batch.tokens[real]) == expected
    assert np.array_equal(batch.positions[real], batch.tokens[real] % 1000)
    assert not batch.tokens[~real].any() and not batch.positions[~real].any()
    for row in batch.segment_ids:
        used = row[row > 0]
        assert (
            np.array_equal(row[: len(used)], used)
            and np.array_equal(np.unique(used), np.arange(1, len(set(used)) + 1))
            and (np.diff(used) >= 0).all()
        )

    targets = []
    for r, m in zip(*np.nonzero(batch.mask), strict=True):
        n, i = divmod(int(batch.targets[r, m]), 1000)
        targets.append((n, i))
        assert (
            batch.tokens[r, batch.index[r, m]] == 1000 * n + i - 1
            and batch.segment_ids[r, batch.index[r, m]] == batch.segment_ids[r, batch.index[r, m] + 1]
        )
        assert batch.episode[r, m] == n and batch.advantage[r, m] == n and batch.sampler_logprobs[r, m] == -i / 8
    assert sorted(targets) == [(n, i) for n, i in expected if episodes[n].loss_mask[i]]
    for name in ("index", "targets", "weight", "advantage", "sampler_logprobs", "old_logprobs", "reference_logprobs"):
        assert not getattr(batch, name)[~batch.mask].any()
    assert (batch.episode[~batch.mask] == -1).all()

    assert report.overlong == tuple(n for n, e in enumerate(episodes) if len(e.tokens) > T or sum(e.loss_mask) > M)
    lost = set(range(len(episodes))) - set(kept)
    assert lost == set(report.untrained) | (set(report.overlong) if overlong != "truncate" else set())
    assert report.num_tokens == real.sum() and report.num_trained == batch.mask.sum()
    assert report.padding == pytest.approx(1 - real.mean())


@settings(deadline=None, max_examples=80)
@given(episode_lists(), st.sampled_from(["drop", "mask", "truncate"]), st.sampled_from(["episode_mean", "token_mean"]))
def test_weights(episodes, overlong, aggregation):
    batch, report = pack(episodes, row_length=T, max_trained_per_row=M, overlong=overlong, aggregation=aggregation)
    packed = sorted(set(batch.episode[batch.mask].tolist()))
    if not packed:
        assert not batch.weight.any()
        return
    num_masked = len(report.overlong) if overlong == "mask" and aggregation == "episode_mean" else 0
    np.testing.assert_allclose(batch.weight.sum(dtype=np.float64), len(packed) / (len(packed) + num_masked), rtol=1e-5)
    for n in packed:
        at = batch.mask & (batch.episode == n)
        own = np.ones(len(episodes[n].tokens)) if episodes[n].token_weights is None else np.array(episodes[n].token_weights)
        relative = own[batch.targets[at] % 1000]
        np.testing.assert_allclose(batch.weight[at] / batch.weight[at].sum(), relative / relative.sum(), rtol=1e-5)
        if aggregation == "episode_mean":
            np.testing.assert_allclose(batch.weight[at].sum(dtype=np.float64), 1 / (len(packed) + num_masked), rtol=1e-5)


def test_a_batch_by_hand():
    a = Episode([5, 6, 7], [False, False, True], [0, 0, -0.5], 2.0)
    b = Episode([8, 9, 3, 4], [False, True, True, False], [0, -1.0, -2.0, 0], -1.0)
    batch, report = pack([a, b], row_length=8, max_trained_per_row=4, rows_multiple_of=2)
    assert batch.tokens.tolist() == [[8, 9, 3, 4, 5, 6, 7, 0], [0] * 8]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0] * 8]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0], [0] * 8]
    assert batch.index.tolist() == [[0, 1, 5, 0], [0] * 4]
    assert batch.targets.tolist() == [[9, 3, 7, 0], [0] * 4]
    assert batch.mask.tolist() == [[True, True, True, False], [False] * 4]
    assert batch.weight.tolist() == [[0.25, 0.25, 0.5, 0], [0] * 4]
    assert batch.advantage.tolist() == [[-1, -1, 2, 0], [0] * 4]
    assert batch.sampler_logprobs.tolist() == [[-1, -2, -0.5, 0], [0] * 4]
    assert batch.episode.tolist() == [[1, 1, 0, -1], [-1] * 4]
    assert report.padding == 1 - 7 / 16 and report.overlong == () and report.untrained == ()
    fixed, _ = pack([a, b], row_length=8, max_trained_per_row=4, aggregation="fixed_length", fixed_length=10)
    np.testing.assert_allclose(fixed.weight, [[0.05, 0.05, 0.05, 0]])


def test_targets_open_a_row_too():
    """Two episodes of 4 tokens fit 8 columns, but not 3 targets."""
    episode = Episode([1, 2, 3, 4], [False, False, True, True])
    batch, _ = pack([episode, episode], row_length=8, max_trained_per_row=3)
    assert batch.tokens.shape == (2, 8)


def test_no_episodes_still_give_a_batch_of_the_fixed_shape():
    batch, report = pack([], row_length=8, max_trained_per_row=3, rows_multiple_of=4)
    assert batch.tokens.shape == (4, 8) and not batch.mask.any() and report.padding == 1


def seen(microbatches):
    """{(episode, position): everything that the update reads about the token}, over all microbatches."""
    found = {}
    for batch in microbatches:
        for r, m in zip(*np.nonzero(batch.mask), strict=True):
            before = batch.tokens[r][batch.segment_ids[r] == batch.segment_ids[r, batch.index[r, m]]].tolist()
            key = (int(batch.episode[r, m]), int(batch.positions[r, batch.index[r, m]]))
            assert key not in found
            found[key] = (int(batch.targets[r, m]), before, batch.weight[r, m], batch.advantage[r, m], batch.sampler_logprobs[r, m])
    return found


@settings(deadline=None, max_examples=80)
@given(episode_lists(), st.integers(1, 4), st.sampled_from([0, 12, 9]), st.sampled_from(["drop", "mask", "truncate"]))
def test_microbatches_say_what_one_batch_says(episodes, count, unit, overlong):
    """Whatever the rows, each trained token sees the same episode and has the same weight; shapes are those announced, short rows come last."""
    rows = Rows(count, T, M, unit)
    microbatches, report = pack_microbatches(episodes, rows, overlong=overlong)
    whole, expected = pack(episodes, row_length=T, max_trained_per_row=M, overlong=overlong)
    assert seen(microbatches) == seen([whole])
    shapes = [batch.tokens.shape + batch.index.shape for batch in microbatches]
    announced = [batch.tokens.shape + batch.index.shape for batch in rows.empty()]
    assert set(shapes[:-1]) <= {announced[-1]} and shapes[-1] in announced
    assert announced[-1] == (count, T, count, M) and len(announced) == {0: 1, 12: 2, 9: 3}[unit]
    assert report.num_slots == sum(batch.tokens.size for batch in microbatches) and report.num_rows == count * len(microbatches)
    assert (report.num_tokens, report.num_trained, report.overlong, report.untrained) == (
        expected.num_tokens,
        expected.num_trained,
        expected.overlong,
        expected.untrained,
    )


def test_short_rows_by_hand():
    """Rows of 8, two at a time. 8 + 7 fill one microbatch; 3 + 3 fit one row of 8, but also two of 4."""
    episodes = [Episode(np.ones(n, np.int32), [False] + [True] * (n - 1)) for n in (8, 3, 7, 3)]
    microbatches, report = pack_microbatches(episodes, Rows(2, 8, 8, 4))
    assert [batch.tokens.shape for batch in microbatches] == [(2, 8), (2, 4)] and [batch.index.shape for batch in microbatches] == [(2, 8), (2, 4)]
    assert report.num_slots == 24 and report.num_rows == 4 and report.padding == pytest.approx(3 / 24)
    assert pack_microbatches(episodes, Rows(2, 8, 8))[1].padding == pytest.approx(11 / 32)
    # Four trained positions are too many for a short row of four tokens and two trained ones.
    (short,), _ = pack_microbatches([Episode([1] * 4, [False, True, True, False])], Rows(2, 8, 4, 4))
    (full,), _ = pack_microbatches([Episode([1] * 4, [False, True, True, True])], Rows(2, 8, 4, 4))
    assert short.tokens.shape == (2, 4) and full.tokens.shape == (2, 8)


def test_shapes_of_rows():
    assert Rows(2, 20, 10, 8).shapes == [(8, 4), (16, 8), (20, 10)]
    assert Rows(2, 20, 9, 8).shapes == [(8, 4), (16, 8), (20, 9)], "a share of the trained positions is rounded up"
    assert Rows(2, 20, 10).shapes == Rows(2, 20, 10, 20).shapes == Rows(2, 20, 10, 4096).shapes == [(20, 10)]


def test_no_episodes_still_give_a_microbatch():
    (batch,), report = pack_microbatches([], Rows(4, 8, 4, 4))
    assert batch.tokens.shape == (4, 4) and not batch.mask.any() and report.padding == 1


@pytest.mark.parametrize(("arguments", "message"), [((0, 8, 4), "0 rows"), ((2, 8, 4, -1), "unit of -1"), ((2, 8192, 4, 1), "raise the unit")])
def test_bad_rows_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Rows(*arguments)


def test_an_episode_of_a_trajectory():
    completion = Completion((3, 4), (-0.5, -0.25), "stop", (0,), 0, 0.0)
    turn = Turn(2, completion, "", None, "", "ok", "")
    trajectory = Trajectory((1, 2, 3, 4), (False, False, True, True), (0.0, 0.0, -0.5, -0.25), (turn,), Status.PURCHASE, 1.0, True)
    batch, _ = pack([Episode.of(trajectory, 1.5)], row_length=4, max_trained_per_row=2)
    assert batch.targets.tolist() == [[3, 4]] and batch.sampler_logprobs.tolist() == [[-0.5, -0.25]] and batch.advantage.tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [True, True]), "position 0"),
        (([], []), "at least one token"),
        (([1, 2], [False]), "lengths"),
        (([1, 2], [False, True], None, np.inf), "advantage must be finite"),
        (([1, 2], [False, True], None, 0.0, [1.0, 0.0]), "token_weights"),
    ],
)
def test_bad_episodes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Episode(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlong": "ignore"}, "overlong is 'ignore'"),
        ({"aggregation": "sum"}, "aggregation is 'sum'"),
        ({"aggregation": "fixed_length"}, "fixed_length is None"),
        ({"fixed_length": 4}, "fixed_length is 4"),
        ({"row_length": 0}, "row_length 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        pack([], **{"row_length": 8, "max_trained_per_row": 3} | options)
