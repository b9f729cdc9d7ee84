"""The update arrow of the loop: what a step's groups become, and what is left behind when an update is not finite."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest
from grpo import reference, toy
from ml_collections import ConfigDict
from rollout.fakes import TASK, completion

from configs import coevolve, pocket
from intraskill import fast_loop
from intraskill import parts as parts_module
from intraskill.grpo import batch_file
from intraskill.grpo.learner import Learner, NonFiniteUpdate
from intraskill.grpo.loss import ClippedPolicyGradient
from intraskill.models.qwen35.config import QWEN35_4B
from intraskill.parts import Parts, check_settings, make_objective, packing_options
from intraskill.types import Group, InputError, Mask, MaskKind, Sampling, Status, Trajectory, Turn


def trajectory(rng, num_prompt, num_sampled, reward):
    """A prompt, then sampled tokens of the toy's vocabulary; the sampler's log-probs are made up."""
    prompt, ids = rng.integers(0, toy.VOCABULARY, num_prompt).tolist(), rng.integers(0, toy.VOCABULARY, num_sampled).tolist()
    turn = Turn(num_prompt, dataclasses.replace(completion(*ids), logprobs=tuple(-rng.random(num_sampled))), "", None, "", "ok", "")
    mask = (False,) * num_prompt + (True,) * num_sampled
    return Trajectory((*prompt, *ids), mask, (0.0,) * num_prompt + turn.completion.logprobs, (turn,), Status.PURCHASE, reward, reward == 1.0)


def groups(num_groups, size=3, seed=0, longest=6):
    rng = np.random.default_rng(seed)

    def one(index):
        episodes = [trajectory(rng, int(rng.integers(1, 5)), int(rng.integers(1, longest)), float(rng.integers(0, 2))) for _ in range(size)]
        return Group(10 + index, TASK, Mask(MaskKind.SKILL_FREE), tuple(episodes))

    return [one(i) for i in range(num_groups)]


def config_of(**grpo):
    config = pocket.get_config("smoke")
    config.grpo.update({"row_length": 12, "trained_per_row": 8, "rows_per_microbatch": 2, "row_unit": 6, "learning_rate": 0.01, **grpo})
    return config


def parts_of(tmp_path, config, *, log_probs=toy.log_probs):
    """The parts that an update uses, around the toy; and the lines that it writes."""
    lines = []
    parts = object.__new__(Parts)
    parts.config, parts.run = config, types.SimpleNamespace(path=tmp_path)
    parts.metrics = types.SimpleNamespace(write=lines.append)
    parts.progress = types.SimpleNamespace(start=lambda *_: None, advance=lambda *_: None, finish=lambda *_: None, said=(said := []), say=said.append)
    parts.policy = types.SimpleNamespace(config=QWEN35_4B)  # read only where a peak is configured
    parts.learner = toy.learner(make_objective(config), learning_rate=config.grpo.learning_rate, log_probs=log_probs)
    parts.reference = parts.learner.reference(toy.params(seed=5)) if config.grpo.kl_coefficient else None
    return parts, lines


def told_by(params, trajectory):
    """Log-probs of the sampled tokens, from the toy's definition."""
    table = np.asarray(params["table"], np.float64)
    logp = table - np.log(np.exp(table).sum(1, keepdims=True))
    return [logp[a, b] for a, b, trained in zip(trajectory.tokens[:-1], trajectory.tokens[1:], trajectory.loss_mask[1:], strict=True) if trained]


def expected_loss(batch_groups, params, options):
    told, advantages = [], []
    for group in batch_groups:
        advantages += reference.advantages([t.reward for t in group.trajectories], options.divide_by_std)
        for t in group.trajectories:
            sampler = [p for p, trained in zip(t.logprobs, t.loss_mask, strict=True) if trained]
            policy = told_by(params, t)
            told.append(reference.Told(policy, policy, sampler, told_by(toy.params(seed=5), t)))
    return reference.objective(told, advantages, options).loss


@pytest.mark.parametrize(
    "grpo",
    [
        {},
        {"normalise_std": False, "aggregation": "fixed_length", "fixed_length": 9, "kl_coefficient": 0.2, "sampler_correction": "truncate"},
        {"aggregation": "token_mean", "ratio": "sequence", "sampler_correction": "mask", "sampler_cap": 1.5},
    ],
    ids=["published", "fixed length, KL, truncated", "token mean, sequence, masked"],
)
def test_a_step_from_the_config_to_the_loss(tmp_path, grpo):
    """The first update of a step sees the policy that old log-probs came from, so its loss is known from the parameters alone."""
    config = config_of(**grpo)
    parts, lines = parts_of(tmp_path, config)
    admitted = groups(4)
    fast_loop.update(parts, parts.learner.init(toy.params()), admitted, 0, 0)
    names = [f.name for f in dataclasses.fields(ClippedPolicyGradient)] + ["aggregation"]
    options = reference.Options(
        **{name: config.grpo[name] for name in names}, divide_by_std=config.grpo.normalise_std, fixed_length=config.grpo.fixed_length or None
    )
    assert lines[0]["loss"] == pytest.approx(expected_loss(admitted[::2], toy.params(), options), rel=1e-4, abs=1e-6)
    assert ("reference_kl" in lines[0]) == (config.grpo.kl_coefficient > 0)
    assert [line["kind"] for line in lines] == ["update"] * 2
    # The old policy of the second update is the step's first one too, and no longer the present one.
    assert lines[0]["ratio_gap"] < 1e-5 and lines[1]["ratio_gap"] > 1e-3


def test_groups_stay_whole_and_every_episode_is_dealt_once():
    config = config_of(updates_per_step=3)
    admitted = groups(7)
    batches = fast_loop.optimizer_batches(config, admitted)
    assert [sorted({group for group, _ in batch.origins}) for batch in batches] == [[10, 13, 16], [11, 14], [12, 15]]
    by_index = {g.index: g for g in admitted}
    for batch in batches:
        assert sorted(batch.origins) == [(index, n) for index in sorted({g for g, _ in batch.origins}) for n in range(3)]
        for part in batch.microbatches:
            for r, m in zip(*np.nonzero(part.mask), strict=True):
                index, number = batch.origins[part.episode[r, m]]
                column = part.positions[r, part.index[r, m]] + 1
                assert by_index[index].trajectories[number].tokens[column] == part.targets[r, m]


@pytest.mark.parametrize("overlong", ["drop", "mask", "truncate"])
def test_overlong_episodes_are_counted_in_the_metrics_and_said(tmp_path, overlong):
    config = config_of(overlong=overlong, updates_per_step=1, row_length=8, trained_per_row=6)
    parts, lines = parts_of(tmp_path, config)
    admitted = groups(6, longest=10)
    expected = sum(len(t.tokens) > 8 or sum(t.loss_mask) > 6 for g in admitted for t in g.trajectories)
    fast_loop.update(parts, parts.learner.init(toy.params()), admitted, 0, 0)
    assert 0 < expected == lines[0]["overlong"] < 18
    (said,) = parts.progress.said
    assert said.startswith(f"step 0: {expected} of 18 episodes exceed a row (grpo.row_length = 8 tokens") and said.endswith(f"{overlong} was applied")


def test_rows_that_no_episode_fits_train_nothing_and_that_is_said(tmp_path):
    parts, lines = parts_of(tmp_path, config_of(row_length=1, row_unit=0))
    fast_loop.update(parts, parts.learner.init(toy.params()), groups(4), 3, 7)
    assert [line["trained_tokens"] for line in lines] == [0, 0]
    assert [said.partition(",")[0] for said in parts.progress.said] == [
        "step 7: 12 of 12 episodes exceed a row (grpo.row_length = 1 tokens",
        "step 7: warning: no token is trained in update 0 of the step",
        "step 7: warning: no token is trained in update 1 of the step",
    ]


def test_what_fits_is_not_spoken_of(tmp_path):
    parts, _ = parts_of(tmp_path, config_of())
    fast_loop.update(parts, parts.learner.init(toy.params()), groups(4), 0, 0)
    assert parts.progress.said == []


def test_the_reference_is_the_start_and_stays(tmp_path):
    """With KL alone the policy is drawn back to the reference, and the estimate falls."""
    config = config_of(kl_coefficient=1.0, updates_per_step=1, learning_rate=0.05)
    parts, lines = parts_of(tmp_path, config)
    frozen = jax.tree.map(np.asarray, parts.reference)
    equal = [dataclasses.replace(g, trajectories=tuple(dataclasses.replace(t, reward=0.0, success=False) for t in g.trajectories)) for g in groups(4)]
    state = parts.learner.init(toy.params())
    for step in range(30):
        state = fast_loop.update(parts, state, equal, 0, step)
    assert lines[-1]["reference_kl"] < 0.3 * lines[0]["reference_kl"] and lines[0]["loss"] == pytest.approx(
        expected_loss(equal, toy.params(), reference.Options(kl_coefficient=1.0)), rel=1e-4
    )
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, parts.reference), frozen)


def test_nothing_compiles_after_the_first_step(tmp_path):
    config = config_of()
    parts, _ = parts_of(tmp_path, config, log_probs=lambda params, batch: toy.log_probs(params, batch))  # JAX's caches go by function
    state = fast_loop.update(parts, parts.learner.init(toy.params()), groups(2), 0, 0)
    programs = [parts.learner._score, parts.learner._accumulate, parts.learner._norm, parts.learner._apply, parts.learner._zeros]
    sizes = [program._cache_size() for program in programs]
    assert sizes == [2, 2, 1, 1, 1], "scores and gradient once for each of the two shapes of a row"
    shapes = set()
    for seed, count in enumerate((2, 3, 5, 8, 13)):
        admitted = groups(count, seed=seed)
        shapes |= {part.tokens.shape for batch in fast_loop.optimizer_batches(config, admitted) for part in batch.microbatches}
        state = fast_loop.update(parts, state, admitted, 0, seed + 1)
    assert shapes == {(2, 6), (2, 12)} and [program._cache_size() for program in programs] == sizes


def broken_log_probs(params, batch):
    """Finite until a token 7 follows a token 7."""
    scores = toy.log_probs(params, batch)
    before = jax.numpy.take_along_axis(batch.tokens, batch.index, axis=1)
    return scores._replace(logprob=jax.numpy.where((before == 7) & (batch.targets == 7), jax.numpy.nan, scores.logprob))


def with_sevens(admitted, number, episode):
    t = admitted[number].trajectories[episode]
    completed = dataclasses.replace(t.turns[0].completion, ids=(7, 7), logprobs=(-1.0, -1.0))
    changed = Trajectory(
        (1, 7, 7),
        (False, True, True),
        (0.0, -1.0, -1.0),
        (dataclasses.replace(t.turns[0], prompt_length=1, completion=completed),),
        Status.PURCHASE,
        t.reward,
        t.success,
    )
    trajectories = [changed if n == episode else t for n, t in enumerate(admitted[number].trajectories)]
    return [dataclasses.replace(g, trajectories=tuple(trajectories)) if n == number else g for n, g in enumerate(admitted)]


def without_sevens(admitted):
    def clean(t):
        ids = tuple(min(i, 6) for i in t.turns[0].completion.ids)
        turn = dataclasses.replace(t.turns[0], completion=dataclasses.replace(t.turns[0].completion, ids=ids))
        return dataclasses.replace(t, tokens=tuple(min(i, 6) for i in t.tokens), turns=(turn,))

    return [dataclasses.replace(g, trajectories=tuple(map(clean, g.trajectories))) for g in admitted]


def test_a_non_finite_old_log_prob_stops_the_run_with_names_and_a_file(tmp_path):
    parts, lines = parts_of(tmp_path, config_of(), log_probs=broken_log_probs)
    state = fast_loop.update(parts, parts.learner.init(toy.params()), without_sevens(groups(4)), 0, 0)
    written = len(lines)
    admitted = with_sevens(without_sevens(groups(4, seed=1)), 3, 2)
    before = jax.tree.map(np.asarray, state)
    with pytest.raises(InputError) as caught:
        fast_loop.update(parts, state, admitted, 0, 5)
    path = tmp_path / "failed" / "update-000002.npz"
    message = str(caught.value)
    assert "step 5, update 2: an old log-prob is not finite, from group 13 episode 2;" in message and str(path) in message
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)
    assert len(lines) == written and [p.name for p in path.parent.iterdir()] == [path.name]
    microbatches, origins = batch_file.load(path)
    assert sorted(origins) == [(index, n) for index in (11, 13) for n in range(3)]
    with pytest.raises(NonFiniteUpdate) as again:
        parts.learner.old_log_probs(state, microbatches)
    assert [origins[n] for n in again.value.episodes] == [(13, 2)]


def test_a_loss_that_overflows_stops_the_run_and_the_file_repeats_it(tmp_path):
    """A reference that gives a token e^100 times the policy's probability: the KL estimate has no float32."""
    parts, lines = parts_of(tmp_path, config_of(kl_coefficient=1.0, updates_per_step=1))
    params = toy.params() | {"table": jax.numpy.zeros((8, 8), jax.numpy.float32).at[:, 0].set(100.0)}
    state, admitted = parts.learner.init(params), groups(2)
    with pytest.raises(InputError, match="step 0, update 0: the loss is not finite, from group 10 episode"):
        fast_loop.update(parts, state, admitted, 0, 0)
    microbatches, _ = batch_file.load(tmp_path / "failed" / "update-000000.npz")
    assert all(np.isfinite(batch.old_logprobs).all() for batch in microbatches) and not lines
    with pytest.raises(NonFiniteUpdate, match="the loss"):
        parts.learner.update(state, microbatches)


def test_a_file_that_is_no_batch_is_refused(tmp_path):
    for name, content in (("text", b"hello"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="is no batch file"):
            batch_file.load(tmp_path / name)
    np.savez(tmp_path / "other.npz", a=np.zeros(1))
    for name in ("other.npz", "absent"):
        with pytest.raises(InputError, match="is no batch file"):
            batch_file.load(tmp_path / name)


@pytest.mark.parametrize(
    ("grpo", "message"),
    [({"ratio": "word"}, "ratio is 'word'"), ({"kl_coefficient": -1.0}, "kl_coefficient is -1"), ({"row_unit": -1}, "grpo.row_unit = -1")],
)
def test_bad_settings_are_refused_before_anything_is_built(grpo, message):
    with pytest.raises(InputError, match=message):
        check_settings(config_of(**grpo))


def leaves(config, prefix=""):
    for name, value in config.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else [(prefix + name, value)]


FLOATS = [key for key, value in leaves(pocket.get_config()) if isinstance(value, float)]
NO_LIMIT = {"grpo.max_grad_norm", "grpo.clip_high", "grpo.sampler_cap"}  # inf: gradients, ratios, corrections of any size


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("key", FLOATS)
def test_no_real_setting_may_be_less_than_nothing_or_not_finite(key, value):
    config = pocket.get_config()
    config.update_from_flattened_dict({key: value})
    if value == math.inf and key in NO_LIMIT:
        check_settings(config)
        return
    with pytest.raises(InputError, match=rf"{key.rpartition('.')[2]}\b.*{value}"):
        check_settings(config)


@pytest.mark.parametrize("value", [-1, 11])
def test_a_bank_s_size_that_the_gate_would_refuse_a_round_later(value):
    config = pocket.get_config()
    config.bank.max_active = value
    with pytest.raises(InputError, match=f"bank.max_active = {value}"):
        check_settings(config)


def test_the_learner_is_built_under_the_run_s_own_sampling(monkeypatch):
    """What it then does with temperature and banned ids is in test_policy."""
    given = []
    monkeypatch.setattr(parts_module, "qwen35_learner", lambda *_, **sampled: given.append(sampled) or object.__new__(Learner))
    config = coevolve.get_config()
    config.mesh.fsdp = 1
    parts_module.make_learner(config, QWEN35_4B, Sampling(1, temperature=0.6, banned_ids=(3, 5)))
    assert given == [{"temperature": 0.6, "banned_ids": (3, 5)}] and config.rollout.temperature == 0.6


@pytest.mark.parametrize("get", [pocket.get_config, coevolve.get_config])
def test_the_defaults_are_the_published_run_s(get):
    config = get()
    assert make_objective(config) == ClippedPolicyGradient(0.2, 0.28, "token", "none", 2.0, 0.0)
    options = packing_options(config)
    assert (options["aggregation"], options["fixed_length"], config.grpo.normalise_std) == ("episode_mean", None, True)
