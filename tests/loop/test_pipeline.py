"""One step after the other, and the next one played while one trains: which weights sampled what, what runs beside what, what is left after a fault.

Engine, shop and chat are fakes; packing, learner and objective are the real ones over a table of logits. Nothing here measures time: what must run
at once waits for each other.
"""

import asyncio
import contextlib
import json
import re
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo import toy
from loop import parts_of_fakes
from loop.parts_of_fakes import BANK, TOKENS, make_parts
from models import tiny
from rollout.fakes import BUY, CLICK, STOP, completion

from configs import coevolve, pocket
from intraskill import fast_loop, slow_loop
from intraskill.fast_loop import Position
from intraskill.grpo.loss import ClippedPolicyGradient
from intraskill.grpo.sampling_filter import TechnicalFailures
from intraskill.parts import check_settings
from intraskill.pipeline import fast_round
from intraskill.profiler import Profiler
from intraskill.rollout import records
from intraskill.run_directory import read_json
from intraskill.step_metrics import update_figures, update_flops
from intraskill.telemetry import Metrics
from intraskill.types import Batch, EngineError, Health, InputError, Published

STEPS, GROUPS, VOCABULARY = 3, 4, 128
WAIT = 120.0  # seconds until a test that waits for something that does not come gives up


class Engine(parts_of_fakes.Engine):
    """Samples as the version that it was last given; refuses to be given one while it plays. Episodes of odd number buy if they see chunk a@1."""

    def __init__(self):
        super().__init__()
        self.loaded: list[int] = []
        self.before = lambda group: None  # called with the group's index; may return an awaitable

    async def load_weights(self, published):
        assert self.running == 0, "weights change between steps only"
        self.loaded.append(published.version)
        self.health = Health(True, published.version, published.digest)

    async def generate(self, prompt_ids, *, session, sampling):
        self.running += 1
        try:
            version = self.health.weight_version
            await asyncio.sleep(0)
            waiting = self.before(session.noise[2])
            if waiting is not None:
                await waiting
            wins = TOKENS["a@1"] in prompt_ids and session.noise[3] % 2
            return completion(BUY if wins else CLICK, STOP, weight_versions=(version,))
        finally:
            self.running -= 1


class Killed(Exception):
    """Stands for whatever ends a process."""


class Run:
    """A run's parts, and what happened: `events` has the starts and ends of rollouts and updates, `saved` the checkpoints."""

    def __init__(self, path: Path, **changes):
        config = pocket.get_config("smoke")
        config.schedule.update({"rounds": 2, "steps_per_round": STEPS})
        config.rollout.update({"group_size": 4, "groups_per_step": 3, "oversample": GROUPS, "max_steps": 2, "max_context": 200, "attempts": 1})
        config.grpo.update({"sampler_correction": "truncate", "row_length": 64, "trained_per_row": 32})
        config.telemetry.peak_flops = 1e12
        config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
        check_settings(config)
        self.path, self.engine, self.events, self.saved = path, Engine(), [], []
        self.parts, _ = make_parts(path, config, self.engine)
        self.parts.metrics, self.parts.profiler = Metrics(path), Profiler(path / "profile")
        self.parts.progress.start = lambda name, total: self.events.append(f"{name} begins")
        self.parts.progress.finish = lambda name: self.events.append(f"{name} ends")
        self.parts.learner = toy.learner(ClippedPolicyGradient(sampler_correction="truncate"), learning_rate=0.1)
        self.parts.checkpoints = types.SimpleNamespace(save=self._save)
        self.parts.reference, self.parts.lead = None, types.SimpleNamespace(whole=lambda params: params)  # one process, no KL term
        object.__setattr__(self.parts.policy, "config", tiny.config())
        self.curriculum = slow_loop.make_curriculum(config, BANK, {})

    def start(self):
        """The table of logits has a row for each token that the fakes use."""
        table = 0.1 * jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY), jnp.float32)
        return self.parts.learner.init({"table": table, "scale": jnp.ones((1,), jnp.float32)})

    def _save(self, step, state, position):
        self.saved.append((step, jax.tree.map(jnp.copy, state), position))

    async def play(self, state, position: Position, round_index: int = 0):
        return await fast_round(self.parts, state, position.enter(round_index), BANK, self.curriculum, round_index)

    def groups(self, step: int):
        directory = self.path / f"rounds/{step // STEPS:03d}/groups"
        return [records.from_json(read_json(directory / f"{i:08d}.json")) for i in range(step * GROUPS, (step + 1) * GROUPS)]

    def lines(self):
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """Publishing costs nothing here; a version's digest is its name."""
    monkeypatch.setattr(fast_loop, "publish", lambda config, directory, version, *_: Published(version, str(directory), f"w{version}"))


@pytest.fixture
def new(tmp_path):
    """Makes a run of the settings that it is given."""
    made = []

    def make(**changes) -> Run:
        made.append(Run(tmp_path, **changes))
        return made[-1]

    yield make
    for run in made:
        run.parts.metrics.close()


async def played(path: Path, **changes) -> Run:
    """Two rounds from the start."""
    run = Run(path, **changes)
    state, position = run.start(), Position(metrics=run.parts.metrics.state())
    for index in range(2):
        state, position, _ = await run.play(state, position, index)
    run.parts.metrics.close()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both modes, two rounds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_loop, "publish", lambda config, directory, version, *_: Published(version, str(directory), f"w{version}"))
        return {o: asyncio.run(played(tmp_path_factory.mktemp(f"overlap{o}"), rollout__overlap=o)) for o in (0, 1)}


# ------------------------------------------------------------------------------------------------------------- which weights


def versions(run: Run, step: int) -> set[int]:
    """Of every sampled token of a step: a turn's tokens carry the versions of its completion."""
    return {v for g in run.groups(step) for t in g.trajectories for turn in t.turns for v in turn.completion.weight_versions}


def test_on_policy_steps_are_played_by_the_weights_that_train_on_them(runs):
    assert [versions(runs[0], step) for step in range(2 * STEPS)] == [{0}, {1}, {2}, {3}, {4}, {5}]


def test_overlapped_steps_are_played_wholly_by_the_weights_of_the_step_before_the_last(runs):
    # The first step of a round has no step beside which it could be played: the pipeline is empty there.
    assert [versions(runs[1], step) for step in range(2 * STEPS)] == [{0}, {0}, {1}, {3}, {3}, {4}]


@pytest.mark.parametrize("overlap", [0, 1])
def test_weights_are_confirmed_and_change_between_steps_only(runs, overlap):
    run = runs[overlap]
    assert run.engine.loaded == [0, 1, 2, 3, 3, 4, 5, 6], "version 3 is given again where the second round starts"
    for step in range(2 * STEPS):
        (version,) = versions(run, step)
        assert {t.weights for g in run.groups(step) for t in g.trajectories} == {(f"w{version}",)}


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_step_s_lines_stand_together_and_a_checkpoint_ends_after_them(runs, overlap):
    lines = runs[overlap].lines()
    assert [(line["kind"], line["step"]) for line in lines] == [(k, s) for s in range(2 * STEPS) for k in ("rollout", "update", "update", "sync")]
    found = [(step, position["step"], position["next_group"], position["metrics"]["num_lines"]) for step, _, position in runs[overlap].saved]
    assert found == [(s, s, GROUPS * s, 4 * s) for s in range(1, 2 * STEPS + 1)]
    lags = [line["weight_lag"] for line in lines if line["kind"] == "rollout"]
    assert lags == ([0] * 6 if overlap == 0 else [0, 1, 1, 0, 1, 1])


def test_both_modes_play_the_same_tasks_under_the_same_masks(runs):
    for step in range(2 * STEPS):
        assert [(g.task, g.mask) for g in runs[0].groups(step)] == [(g.task, g.mask) for g in runs[1].groups(step)]


# -------------------------------------------------------------------------------------------------------- what runs beside what


def test_on_policy_nothing_runs_beside_anything(runs):
    expected = [f"step {s}: {stage} {what}" for s in range(2 * STEPS) for stage in ("rollout", "update") for what in ("begins", "ends")]
    assert runs[0].events == expected


async def test_overlapped_the_next_step_is_played_to_its_end_while_one_trains(new):
    run = new(rollout__overlap=1)
    ended = {step: threading.Event() for step in range(STEPS)}
    run.parts.progress.finish = lambda name: ended[int(name.split()[1][:-1])].set() if name.endswith("rollout") else None
    update, waited = run.parts.learner.update, []

    def patiently(state, microbatches):
        step = int(state.step) // 2  # two updates a step
        if step + 1 < STEPS:
            waited.append(ended[step + 1].wait(WAIT))
        return update(state, microbatches)

    run.parts.learner.update = patiently
    await run.play(run.start(), Position())
    assert waited == [True] * 4


# -------------------------------------------------------------------------------------------------------------------- faults


def everything_is_closed(run: Run) -> bool:
    return sorted(run.parts.shop.closed) == sorted(run.parts.shop.opened)


async def test_a_failing_update_ends_the_rollout_beside_it_and_is_raised_as_itself(new):
    run, never, playing = new(rollout__overlap=1), asyncio.Event(), threading.Event()

    def before(group):
        if group >= GROUPS:
            playing.set()
            return never.wait()

    def fail(state, microbatches):
        assert playing.wait(WAIT)
        raise Killed("the update")

    run.engine.before, run.parts.learner.update = before, fail
    with pytest.raises(Killed, match="the update"):
        await asyncio.wait_for(run.play(run.start(), Position()), WAIT)
    assert everything_is_closed(run) and run.saved == [] and run.lines()[-1]["kind"] == "rollout"


async def test_a_failing_rollout_waits_for_the_update_beside_it(new):
    run, failing, ended = new(rollout__overlap=1, rollout__max_technical_in_a_row=2), threading.Event(), []

    def before(group):
        if group >= GROUPS:
            failing.set()
            raise EngineError("gone")

    update = run.parts.learner.update

    def slow(state, microbatches):
        assert failing.wait(WAIT)
        ended.append(update(state, microbatches))
        return ended[-1]

    run.engine.before, run.parts.learner.update = before, slow
    with pytest.raises(TechnicalFailures, match="groups 4 to 5 all failed"):
        await asyncio.wait_for(run.play(run.start(), Position()), WAIT)
    assert len(ended) == 2 and everything_is_closed(run) and run.saved == []


@pytest.mark.parametrize("overlap", [0, 1])
async def test_a_cancelled_run_ends_after_the_update_that_is_under_way(new, overlap):
    run, begun, release, ended = new(rollout__overlap=overlap), threading.Event(), threading.Event(), []
    update = run.parts.learner.update

    def slow(state, microbatches):
        begun.set()
        assert release.wait(WAIT)
        ended.append(True)
        return update(state, microbatches)

    run.parts.learner.update = slow
    task = asyncio.ensure_future(run.play(run.start(), Position()))
    assert await asyncio.to_thread(begun.wait, WAIT)
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done() and not ended
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT)
    assert len(ended) == 2 and everything_is_closed(run)


async def test_an_overlapped_run_that_was_interrupted_keeps_its_tasks_and_masks(new, runs):
    run, calls = new(rollout__overlap=1), []
    update = run.parts.learner.update

    def interrupted(state, microbatches):
        calls.append(1)
        if len(calls) == 3:  # the first update of step 1, while step 2 is played
            raise Killed
        return update(state, microbatches)

    run.parts.learner.update = interrupted
    with contextlib.suppress(Killed):
        await run.play(run.start(), Position(metrics=run.parts.metrics.state()))
    ((_, state, position),) = run.saved
    assert position["step"] == 1 and len(run.lines()) > 4
    run.parts.learner.update = update
    run.parts.metrics.restore(position["metrics"])
    await run.play(state, Position.from_json(position))
    assert [(line["kind"], line["step"]) for line in run.lines()] == [(k, s) for s in range(STEPS) for k in ("rollout", "update", "update", "sync")]
    for step in range(STEPS):
        assert [(g.task, g.mask) for g in run.groups(step)] == [(g.task, g.mask) for g in runs[1].groups(step)]
    # The pipeline fills anew where the run goes on: that step is on-policy.
    assert [versions(run, step) for step in range(STEPS)] == [{0}, {1}, {1}]


# ------------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.overlap": 1}, "rollout.overlap = 1 with grpo.sampler_correction = 'none'.*truncate or mask"),
        ({"rollout.overlap": 2, "grpo.sampler_correction": "mask"}, "rollout.overlap = 2: must be 0"),
        ({"telemetry.peak_flops": -1.0}, "telemetry.peak_flops = -1.0"),
        ({"telemetry.peak_flops": float("inf")}, "telemetry.peak_flops = inf"),
    ],
)
@pytest.mark.parametrize("source", [pocket, coevolve])
def test_settings_that_would_mislead_are_refused(source, changes, words):
    config = source.get_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(InputError, match=words):
        check_settings(config)


def test_on_policy_is_the_default():
    assert pocket.get_config().rollout.overlap == coevolve.get_config().rollout.overlap == 0


# ------------------------------------------------------------------------------------------------------------------- figures


def written_names(lines) -> set[str]:
    """KIND/NAME of everything in the records; what is keyed by chunks has CHUNK in their place."""
    found = set()
    for line in lines:
        for name, value in line.items():
            names = {f"{name}/CHUNK"} if isinstance(value, dict) and set(value) == set(BANK.ids) else {name}
            found |= {f"{line['kind']}/{n}" for n in names}
    return found


def table() -> dict[str, str]:
    """The names of docs/training.md, section Metrics, and when each is there."""
    text = (Path(__file__).resolve().parents[2] / "docs/training.md").read_text()
    section = text.split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (rollout|update|sync|all) \| `([^`]+)` \| (.*?) \| ", section, re.MULTILINE)
    assert len({row[:2] for row in rows}) == len(rows) > 30, "a name stands there twice, or the table has another form"
    kinds = {"all": ("rollout", "update", "sync")}
    return {f"{kind}/{name}": when for of, name, when in rows for kind in kinds.get(of, (of,))}


@pytest.mark.parametrize("overlap", [0, 1])
def test_every_written_name_is_documented_and_the_reverse(runs, overlap):
    names, documented = written_names(runs[overlap].lines()), table()
    assert names - set(documented) == set()
    assert {name for name, when in documented.items() if when == "always"} - names == set()
    assert "update/mfu" in names and documented["update/mfu"] == "with `telemetry.peak_flops`"


async def test_without_a_peak_there_is_no_share_of_it(new, runs):
    run = new(telemetry__peak_flops=0.0)
    await run.play(run.start(), Position())
    assert written_names(runs[0].lines()) - written_names(run.lines()) == {"update/mfu"}


def test_the_figures_of_an_update_by_hand():
    shape = tiny.config()
    config = pocket.get_config()
    config.mesh.update({"data": 2, "fsdp": 3, "tensor": 1})
    rows = dict(tokens=(2, 8), positions=(2, 8), segment_ids=(2, 8), index=(2, 4), targets=(2, 4))
    arrays = {name: np.zeros(size, np.int32) for name, size in rows.items()}
    for name in ("weight", "advantage", "sampler_logprobs", "old_logprobs"):
        arrays[name] = np.zeros((2, 4), np.float32)
    arrays |= {"mask": np.zeros((2, 4), bool), "episode": np.full((2, 4), -1, np.int32)}
    arrays["segment_ids"][0, :6], arrays["segment_ids"][1, :4] = 1, 1  # ten tokens
    arrays["mask"][0, :3] = True  # three of them trained
    arrays["old_logprobs"][0, :3], arrays["sampler_logprobs"][0, :3] = np.log([0.5, 0.2, 0.1]), np.log([0.25, 0.2, 0.2])
    arrays["old_logprobs"][1] = 7.0  # padding, which counts nowhere
    if "reference_logprobs" in Batch.__dataclass_fields__:
        arrays["reference_logprobs"] = np.zeros((2, 4), np.float32)
    batch = Batch(**arrays)
    found = update_figures(config, shape, [batch, batch], seconds=4.0)
    assert found == {"tokens_per_second": 5.0, "sampler_ratio": pytest.approx((2 + 1 + 0.5) / 3, rel=1e-6)}
    config.telemetry.peak_flops = 1e6
    assert update_figures(config, shape, [batch, batch], seconds=4.0)["mfu"] == pytest.approx(update_flops(shape, 20, 6) / 4 / 6e6)


def test_the_work_of_an_update_by_hand():
    """The tiny model, matrix by matrix: one linear-attention layer, one of full attention; the vocabulary's matrix meets trained positions only."""
    shape = tiny.config()
    d, m = shape.hidden_size, shape.intermediate_size
    heads, width_k, width_v = shape.linear_num_key_heads, shape.linear_key_head_dim, shape.linear_value_head_dim
    channels = 2 * width_k + width_v
    linear = d * heads * (channels + width_v + 2) + shape.conv_kernel * heads * channels + heads * width_v * d
    full = d * shape.num_heads * 2 * shape.head_dim + d * shape.num_kv_heads * 2 * shape.head_dim + shape.num_heads * shape.head_dim * d
    products = linear + full + 2 * 3 * d * m
    vectors = 2 * heads + width_v + 2 * shape.head_dim + 2 * 2 * d  # decays, norms: no product, but a term each
    assert update_flops(shape, 1, 0) == 6 * (products + vectors)
    assert update_flops(shape, 10, 3) == 60 * (products + vectors) + 18 * shape.vocab_size * d
