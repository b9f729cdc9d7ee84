"""The plan for machines that are not here: what is counted equals hand calculation and formula, and the verdict follows from it."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from configs import coevolve
from intraskill import parts
from intraskill.grpo.loss import DeviceBatch
from intraskill.models.qwen35 import attention, gated_delta
from intraskill.models.qwen35.config import QWEN35_4B, ModelConfig
from intraskill.models.qwen35.model import abstract_params
from intraskill.models.qwen35.sharding import make_mesh
from intraskill.pod_plan import analytic, plan, report, steps, work
from intraskill.pod_plan.steps import Memory, State, Step
from intraskill.pod_plan.topology import GIB, Topology
from intraskill.types import InputError

if len(jax.devices()) < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# ------------------------------------------------------------------------------------------------------------------ counts


def test_a_scan_counts_as_often_as_it_runs():
    def f(x, weights):
        return lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    found = work.of(jax.jit(f).trace(shaped(4, 8, dtype=jnp.bfloat16), shaped(5, 8, 8, dtype=jnp.bfloat16)), 1)
    assert found.flops == 5 * 2 * 4 * 8 * 8 == found.bf16_flops
    assert found.bytes == 5 * 2 * (4 * 8 + 8 * 8 + 4 * 8)


def test_exact_float32_products_take_six_passes():
    f = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    found = work.of(jax.jit(f).trace(shaped(4, 8), shaped(8, 2)), 1)
    assert (found.flops, found.bf16_flops) == (2 * 4 * 8 * 2, 6 * 2 * 4 * 8 * 2)


def test_loops_and_branches():
    def f(x):
        x = lax.while_loop(lambda c: jnp.sum(c) < 0, lambda c: c @ c, x)
        return lax.cond(jnp.sum(x) > 0, lambda c: c @ c @ c, lambda c: c, x)

    assert work.of(jax.jit(f).trace(shaped(4, 4)), 1, while_trips=7).flops == (7 + 2) * 2 * 4**3


def test_what_is_not_divided_by_hand_is_spread_evenly():
    assert work.of(jax.jit(jnp.matmul).trace(shaped(4, 8), shaped(8, 2)), 8).flops == 2 * 4 * 8 * 2 / 8


def test_exchanges_go_round_a_ring():
    mesh = make_mesh(1, 4, 2)

    def f(x):  # x: [2, 3] on each device
        whole = lax.all_gather(x, "fsdp", axis=0, tiled=True)  # [8, 3], three quarters of it from others
        return lax.psum_scatter(lax.psum(whole, "tensor"), "fsdp", scatter_dimension=0, tiled=True) + lax.psum(x, "data")

    g = jax.shard_map(f, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    sent = work.of(jax.jit(g).trace(shaped(8, 3)), 8).exchanged
    assert sent == {"all_gather": 8 * 3 * 4 * 3 / 4, "all_reduce": 2 * 8 * 3 * 4 / 2, "reduce_scatter": 8 * 3 * 4 * 3 / 4}


def test_xla_agrees_where_it_can_count():
    """Without loops and kernels XLA counts right; elementwise work is what it has more."""
    config = ModelConfig(**{**dataclasses.asdict(QWEN35_4B), "num_layers": 4, "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512})
    mlp = {"gate_up": shaped(256, 2, 512), "down": shaped(512, 256)}
    from intraskill.models.qwen35.layers import mlp as layer

    traced = jax.jit(jax.grad(lambda p, x: jnp.sum(layer(p, x)))).trace(mlp, shaped(1, 128, config.hidden_size))
    counted, xla = work.of(traced, 1).flops, traced.lower().compile().cost_analysis()["flops"]
    assert counted == pytest.approx(xla, rel=0.03)


# ----------------------------------------------------------------------------------------------------------------- formulas


def test_the_shape_is_that_of_the_published_model():
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(QWEN35_4B))) == 4_205_751_296


def test_model_flops_by_hand():
    """One token: 2 operations a matrix entry forward, 4 backward, and little else. Norms, convolutions, A_log and dt_bias hold the other entries."""
    others = 32 * 2 * 2560 + 2560 + 24 * (4 * 8192 + 32 + 32 + 128) + 8 * 2 * 256
    entries = 4_205_751_296 - others
    rule, attention = 24 * 6 * 32 * 128 * 128, 8 * 4 * 16 * 256
    assert analytic.model_flops(QWEN35_4B, 1, 1) == 3 * (2 * entries + rule + attention)


@pytest.mark.parametrize("length", [64, 200])
def test_the_delta_rules_formula_counts_its_program(length):
    c = dataclasses.replace(QWEN35_4B, chunk_size=64)
    heads, group = c.linear_num_key_heads, c.value_heads_per_key_head
    q = shaped(1, length, heads, c.linear_key_head_dim)
    v, gate = shaped(1, length, heads, group, c.linear_value_head_dim), shaped(1, length, heads, group)
    rule = functools.partial(gated_delta.chunked, state=None, chunk_size=64)
    traced = jax.jit(rule).trace(q, q, v, gate, gate, shaped(1, length, dtype=jnp.int32))
    assert work.of(traced, 1).flops == analytic.delta_flops(c, length)


@pytest.mark.parametrize("length", [100, 2048, 3000, 24576])
def test_tiled_attentions_formula_counts_its_program(length):
    """Forward two products of a tile, backward five."""
    q, k = shaped(1, length, 4, 32), shaped(1, length, 2, 32)
    segments = shaped(1, length, dtype=jnp.int32)

    def loss(q, k, v, segments):
        return jnp.sum(attention.attend_packed(q, k, v, segments))

    pairs = analytic.tiled_pairs(length)
    assert work.of(jax.jit(loss).trace(q, k, k, segments), 1).flops == 2 * 2 * 4 * 32 * pairs
    assert work.of(jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, segments), 1).flops == 7 * 2 * 4 * 32 * pairs


@pytest.fixture(scope="module")
def update_of_the_4b():
    """The real programs, traced for 8 devices: rows of 8,192 tokens, half of them trained."""
    config = coevolve.get_config()
    config.grpo.update({"row_length": 8192, "trained_per_row": 4096})
    topology = Topology.parse("cpu:8")
    config.update_from_flattened_dict(steps.spread(config, topology))
    shape = dataclasses.replace(QWEN35_4B, **parts.numerics(config, "tpu"))
    return shape, *steps.train_programs(config, shape, topology.devices())


def test_counted_work_agrees_with_the_formula(update_of_the_4b):
    shape, _, programs = update_of_the_4b
    gradient, scores = (work.of(programs[name], 8).flops for name in ("gradient", "log_probs"))
    assert gradient == pytest.approx(analytic.executed_flops(shape, 8192, 4096), rel=0.05)
    assert scores == pytest.approx(analytic.executed_flops(shape, 8192, 4096, backward=False), rel=0.05)
    assert gradient / analytic.model_flops(shape, 8192, 4096) <= 1.5


def test_exchanged_bytes_of_the_4b(update_of_the_4b):
    """Each matrix is gathered twice in bfloat16, the vocabulary as output layer only; its gradient is sent once in float32; 7/8 are others'."""
    shape, _, programs = update_of_the_4b
    sizes, layers = analytic.matrices(shape), analytic.num_layers(shape)
    entries = layers[0] * sizes["linear"] + layers[1] * sizes["full"] + 32 * sizes["mlp"] + sizes["vocabulary"]
    sent = work.of(programs["gradient"], 8).exchanged
    assert sent["all_gather"] == pytest.approx(2 * 2 * entries * 7 / 8, rel=0.001)
    assert sent["reduce_scatter"] == pytest.approx(4 * entries * 7 / 8, rel=0.001)


def test_state_of_the_4b(update_of_the_4b):
    """16 bytes a parameter over 8 devices; norms and convolutions lie on all of them."""
    _, state, _ = update_of_the_4b
    assert state.parameters == pytest.approx(4 * 4_205_751_296 / 8, rel=0.002)
    assert (state.optimizer, state.gradient) == (pytest.approx(2 * state.parameters, rel=1e-6), state.parameters)


def test_the_batch_of_a_plan_is_the_batch_of_a_run():
    config = coevolve.get_config()
    config.grpo.update({"row_length": 256, "trained_per_row": 128, "row_unit": 128})
    packed = parts.packing_options(config)["rows"].empty()[-1]  # full rows, the most that a microbatch has
    for name, shape, array in zip(DeviceBatch._fields, steps.batch_shapes(config), DeviceBatch.of(packed), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype), name


# ----------------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("name", ["v5p", "v5p:2x2", "v7:2x2", "v5e:4x0", "cpu:-1", "h100:2x4", ""])
def test_machines_that_do_not_exist_are_refused(name):
    with pytest.raises(InputError, match="topology is"):
        Topology.parse(name)


def test_machines():
    found = [Topology.parse(name) for name in ("v5p:2x2x2", "v6e:4x4", "v5e:4x8", "h100:8")]
    assert [(t.kind, t.num_devices) for t in found] == [("tpu", 8), ("tpu", 16), ("tpu", 32), ("gpu", 8)]


def made(memory, **shape):
    """A plan for a v5e, of 16 GiB, whose gradient step needs what is given."""
    config = dataclasses.replace(QWEN35_4B, **{"dtype": "bfloat16", "remat": "layer", "attention": "splash", "piece_length": 4096, **shape})
    step = Step("gradient", memory, work.Work(2.0e12, 3.0e12, 1e9, {"all_gather": 2e9}))
    state = State(2 * GIB, 4 * GIB, 2 * GIB)
    return plan.Plan(Topology.parse("v5e:4x4"), config, "a test", {"mesh.fsdp": 16}, 4096, 2048, state, (step,), True, False, 1.5e12, 2e12)


def test_a_plan_that_fits():
    fits = made(Memory(4 * GIB, 2 * GIB, 4 * GIB))
    assert not fits.misfits
    assert report.verdict(fits) == "v5e:4x4: fits, 62.5% of a device's memory at most."
    assert "executed / model FLOPs 1.333" in report.text(fits) and "at most 50.0%" in report.text(fits)
    assert "| 15.2 | 1.22 | all_gather 2 | 10 |" in report.text(fits)  # 3e12 / 197e12, 1e9 / 819e9 and 2e9 / 200e9 seconds


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"remat": "none"}, "model.remat=layer"),
        ({"attention": "blocked"}, "model.attention=splash"),
        ({"piece_length": 0}, "model.piece_length"),
        ({}, "grpo.row_length"),
    ],
)
def test_what_does_not_fit_names_the_knob_that_helps(shape, words):
    too_large = made(Memory(4 * GIB, 9 * GIB, 4 * GIB), **shape)
    assert [step.name for step in too_large.misfits] == ["gradient"]
    assert "needs 17 GiB of 16 GiB" in report.verdict(too_large) and words in report.verdict(too_large)


def test_a_state_that_fills_the_device_asks_for_more_devices():
    too_large = dataclasses.replace(made(Memory(4 * GIB, 9 * GIB, 4 * GIB)), state=State(4 * GIB, 8 * GIB, 4 * GIB))
    assert "take a larger slice" in report.verdict(too_large)


def test_a_step_that_the_compiler_refuses_does_not_fit():
    refused = made(None)
    assert refused.misfits and "refused by the compiler" in report.verdict(refused)


@pytest.mark.parametrize(("decodes_here", "fits"), [(True, False), (False, True)])
def test_a_decode_call_counts_only_where_the_run_decodes(decodes_here, fits):
    """With engines on other machines it is shown, and whether training fits does not hang on it."""
    training = made(Memory(4 * GIB, 2 * GIB, 4 * GIB))
    decode = Step("decode", Memory(12 * GIB, 8 * GIB), work.Work(1.0, 1.0, 1.0, {}))
    both = dataclasses.replace(training, compiled=(*training.compiled, decode), decodes_here=decodes_here)
    said = report.verdict(both)
    assert (not both.misfits, said.startswith("v5e:4x4: fits, 62.5% of")) == (fits, fits)
    assert "decode call needs 20 GiB of 16 GiB: lower rollout.num_slots" in said and "| decode call |" in report.text(both)


def test_a_written_plan_replaces_its_own_section_only(tmp_path):
    path = tmp_path / "plan.md"
    path.write_text("# Plans\n\nWords.\n\n## v5e:4x4\n\nold\n\n## v6e:4x4\n\nkept\n")
    report.write(path, made(Memory(4 * GIB, 2 * GIB, 4 * GIB)))
    found = path.read_text()
    assert found.startswith("# Plans\n\nWords.\n\n## v5e:4x4\n\n16 devices") and found.endswith("## v6e:4x4\n\nkept\n") and "old" not in found


# ----------------------------------------------------------------------------------------------------------------- launcher


@pytest.fixture
def tiny(tmp_path):
    """A directory with no more than a plan needs of a checkpoint."""
    config = ModelConfig(64, 32, 48, 2, 2, 4, 2, 16, 2, 2, 16, 24, max_positions=512)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_hf()))
    return tmp_path / "model"


def start(launcher, checkpoint, *more):
    flags = [
        "--config=configs/pocket.py",
        f"--config.model.checkpoint={checkpoint}",
        "--config.grpo.row_length=64",
        "--config.grpo.trained_per_row=32",
    ]
    return launcher.run("launch/plan.py", *flags, "--config.rollout.max_context=64", *more)


def test_plan_for_eight_devices_of_this_machine(launcher, tiny, tmp_path):
    done = start(launcher, tiny, "--topology=cpu:8", f"--write={tmp_path / 'plan.md'}")
    assert done.status == 0, done.stderr[-2000:]
    assert "mesh.fsdp=8" in done.stdout and "cpu:8: fits" in done.stdout.splitlines()[-1]
    assert all(f"| {name} |" in done.stdout for name in ("gradient of a microbatch", "log-probs of a microbatch", "optimizer step", "decode call"))
    assert done.stdout.strip() in (tmp_path / "plan.md").read_text()


def test_plan_that_does_not_fit_exits_with_1(launcher, tiny):
    """By formula for one GPU: 2^24 tokens of a row leave no doubt."""
    done = start(launcher, tiny, "--topology=h100:1", "--config.grpo.row_length=16777216")
    assert done.status == 1 and "does NOT fit" in done.stdout and "model.remat=layer" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topology=v9:2x2"], "topology is 'v9:2x2'"),
        (["--topology=cpu:8", "--steps=warp"], "steps warp are unknown"),
        (["--topology=cpu:8", "--config.mesh.tensor=3"], "does not divide the 8 devices"),
        (["--topology=cpu:7"], "does not divide"),
    ],
)
def test_bad_input_is_one_line(launcher, tiny, flags, words):
    done = start(launcher, tiny, *flags)
    assert done.status == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr[-1000:]


@pytest.mark.parametrize("name", ["mesh.data", "mesh.tensor", "grpo.row_length", "grpo.trained_per_row"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(name, size):
    config = coevolve.get_config()
    config.update_from_flattened_dict({name: size})
    with pytest.raises(InputError, match=f"{name} is {size}: give a whole number >= 1"):
        plan.make(config, Topology.parse("h100:8"))
