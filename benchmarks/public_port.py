"""Forward pass, training step and greedy decoding against a public JAX port of Qwen3.5: SkyRL's, on the same weights, batch, cores and dtype.

    git clone https://github.com/NovaSky-AI/SkyRL && git -C SkyRL checkout a9564572eb8e91076be43c1bd5e4615e3de17265
    pip install --no-deps --target=SkyRL/.packages peft accelerate cloudpathlib
    python benchmarks/public_port.py --checkout=SkyRL [--rows=8] [--length=512] [--rounds=7] [--prompt=64] [--new=128] [--batches=1,8,32]

Their code runs unchanged in this interpreter, and none of it is here, so `make bench` leaves this script out. It needs torch, which bench_model.py
imports. The packages are what their loader imports and ours does not; JAX, flax and transformers are those of our environment.

First it checks that both sides give the same logits, loss, gradients and tokens; then it times them in turn. Ours is what bench_model.py and
bench_decode.py time. Theirs is what their JAX backend compiles: `nnx.merge` inside jit with all parameters as arguments, float32, no LoRA adapters,
an attention mask of ones, a mesh of one device, no recomputation in the backward pass. Both take whole rows and the loss of all tokens but the first.
Two things differ from that backend. Gradients are of all parameters, as ours, where it trains LoRA alone. And the loss is taken both from all logits
at once ("step") and from pieces of 1,024 tokens, the backend's default ("step pieces"); the faster one counts. Decoding likewise: "generate" is their
method, one compiled loop that also draws a sample and computes a log-prob at every step; "steps" is their model with their cache in the loop of
bench_decode.py, which takes the arg max alone; the faster one counts. A step's time is that of `new` tokens minus that of one, divided by new - 1.
Targets: ours is faster in all.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import bench_decode, bench_model, interleave  # noqa: E402
from benchmarks.peers import hf_qwen35, skyrl_qwen35  # noqa: E402
from benchmarks.peers.skyrl_qwen35 import Port  # noqa: E402
from intraskill.models.qwen35 import hf, model  # noqa: E402
from intraskill.models.qwen35.config import ModelConfig  # noqa: E402
from intraskill.types import InputError  # noqa: E402


def check_same(config: ModelConfig, params: Any, tokens: np.ndarray, port: Port, logits: Any, step: Any) -> None:
    """Prints how far both are apart; raises AssertionError beyond 2e-4 for logits, 1e-5 for the loss, 1e-3 of each gradient's largest entry."""
    ours, theirs = np.asarray(logits(params, tokens)), np.asarray(port.logits(tokens))
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)
    (loss, grads), gaps = step(params, tokens), {}
    named = dict(hf.to_hf_tensors(config, jax.device_get(grads), skyrl_qwen35.PREFIX))
    for their_loss, their_grads in (port.step(tokens), port.step_in_pieces(tokens)):
        np.testing.assert_allclose(loss, their_loss, atol=1e-5)
        expected = port.by_name(their_grads)
        if named.keys() != expected.keys():
            raise AssertionError(f"gradients have other names: {sorted(named.keys() ^ expected.keys())}")
        for name, gradient in named.items():
            largest = np.abs(expected[name]).max()
            np.testing.assert_allclose(gradient, expected[name], atol=1e-3 * largest, rtol=0, err_msg=name)
            gaps[name] = max(gaps.get(name, 0.0), float(np.abs(gradient - expected[name]).max() / largest))
        print(f"loss {float(loss):.7f} ours, {float(their_loss):.7f} theirs")
    worst = max(gaps, key=lambda name: gaps[name])
    print(f"largest difference: logits {np.abs(ours - theirs).max():.1e}; gradients {gaps[worst]:.1e} of the largest entry ({worst})")


def time_passes(config: ModelConfig, params: Any, tokens: np.ndarray, port: Port, rounds: int) -> dict[str, float]:
    """Checks, times and prints forward passes and training steps; returns theirs / ours."""
    our_logits, our_step = bench_model.our_sides(config, tokens)
    check_same(config, params, tokens, port, our_logits, our_step)
    sides = {
        "forward ours": lambda: jax.block_until_ready(our_logits(params, tokens)),
        "forward theirs": lambda: port.logits(tokens),
        "step ours": lambda: jax.block_until_ready(our_step(params, tokens)),
        "step theirs": lambda: port.step(tokens),
        "step pieces theirs": lambda: port.step_in_pieces(tokens),
    }
    times = interleave.measure(sides, rounds)
    print(f"{'side':18s} {'wall s':>8s} {'CPU s':>8s} {'tokens/s':>10s}")
    for name, timing in times.items():
        print(f"{name:18s} {timing.wall:8.3f} {timing.cpu:8.3f} {tokens.size / timing.wall:10.0f}")
    steps = min(times["step theirs"].wall, times["step pieces theirs"].wall)
    return {"forward": times["forward theirs"].wall / times["forward ours"].wall, "step": steps / times["step ours"].wall}


def time_decoding(config: ModelConfig, params: Any, port: Port, prompts: np.ndarray, new: int, rounds: int) -> float:
    """Checks, times and prints a decoding step at one batch size; returns theirs / ours."""
    length = prompts.shape[1] + new
    decoders = {
        "ours": functools.partial(bench_decode.our_decoder(config, len(prompts), length), params),
        "generate": port.generate,
        "steps": port.stepper(length),
    }
    expected = decoders["ours"](prompts, new)
    for name in ("generate", "steps"):
        np.testing.assert_array_equal(expected, decoders[name](prompts, new), err_msg=f"tokens of {name}")
    sides = {(name, count): functools.partial(decode, prompts, count) for name, decode in decoders.items() for count in (1, new)}
    times = interleave.measure({f"{name} {count}": side for (name, count), side in sides.items()}, rounds)

    def a_step(name: str, clock: str) -> float:
        return (getattr(times[f"{name} {new}"], clock) - getattr(times[f"{name} 1"], clock)) / (new - 1) * 1e3

    print(f"{len(prompts):5d} " + " ".join(f"{a_step(name, clock):12.2f}" for clock in ("wall", "cpu") for name in decoders))
    return min(a_step("generate", "wall"), a_step("steps", "wall")) / a_step("ours", "wall")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help=f"a clone of {skyrl_qwen35.PORT}")
    for name, value in (("--rows", 8), ("--length", 512), ("--rounds", 7), ("--prompt", 64), ("--new", 128)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--batches", default="1,8,32")
    arguments = parser.parse_args(argv)
    try:
        modules = skyrl_qwen35.import_port(arguments.checkout)
    except InputError as error:
        parser.error(str(error))
    config = hf_qwen35.SHAPE
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    port = Port(modules, config, params)
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.vocab_size, (arguments.rows, arguments.length), dtype=np.int32)
    ratios = time_passes(config, params, tokens, port, arguments.rounds)
    print("batch " + " ".join(f"{f'{name} {clock}':>12s}" for clock in ("ms", "CPU") for name in ("ours", "generate", "steps")))
    for batch in map(int, arguments.batches.split(",")):
        prompts = random.integers(0, config.vocab_size, (batch, arguments.prompt), dtype=np.int32)
        ratios[f"decode {batch}"] = time_decoding(config, params, port, prompts, arguments.new, arguments.rounds)
    return interleave.verdict("public_port", {name: (ratio, 1.0, True) for name, ratio in ratios.items()})


if __name__ == "__main__":
    sys.exit(main())
