"""Compares this project's model with transformers (torch, float32, CPU) on a Hugging Face checkpoint, tiny or large.

    python launch/compare_hf.py DIR [--seed=0]

Prints one line per figure and exits 1 when one is out of tolerance. The rows are random tokens: shorter than a chunk, not a multiple of one, several.
Needs torch (`pip install -e '.[parity]'`) and, for weights and gradients in float32, about 12 bytes of memory per parameter.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import functools  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from intraskill.models.qwen35 import cache, hf, hf_directory, model  # noqa: E402
from intraskill.models.qwen35.config import ModelConfig  # noqa: E402
from intraskill.types import InputError  # noqa: E402

LENGTHS = (5, 77, 128)
WIDTH = max(LENGTHS)
PROMPT, NEW = 11, 64
LOGITS, GRADIENTS = 2e-4, 1e-3


@dataclasses.dataclass(frozen=True)
class Figure:
    """One comparison: the largest difference found (or a count of them), what is allowed, and where it is."""

    name: str
    value: float
    allowed: float
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.value <= self.allowed  # False for NaN


@dataclasses.dataclass(frozen=True)
class Inputs:
    tokens: np.ndarray  # int32 [rows, WIDTH], of which LENGTHS[row] count
    prompts: np.ndarray  # int32 [2, PROMPT]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What both sides compute. `logits` by kind of evaluation, each a list of float32 [length, vocabulary], one per row."""

    logits: dict[str, list[np.ndarray]]
    gradients: dict[str, np.ndarray]  # of the mean log-prob, by published name
    greedy: np.ndarray  # [2, NEW]


# ------------------------------------------------------------------------------------------------------------- reference


def _import_torch() -> tuple[Any, Any]:
    try:
        import torch  # pyright: ignore[reportMissingImports]  (an extra)
        from transformers.models import qwen3_5
    except ImportError as error:
        raise InputError(f"compare_hf needs torch and transformers ({error}): pip install -e '.[parity]'") from None
    return torch, qwen3_5


def _padded(torch: Any, tokens: np.ndarray, side: str) -> dict[str, Any]:
    ids, mask = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, np.int64)
    for row, length in enumerate(LENGTHS):
        where = slice(0, length) if side == "right" else slice(WIDTH - length, WIDTH)
        ids[row, where], mask[row, where] = tokens[row, :length], 1
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def reference(directory: Path, inputs: Inputs) -> Outputs:
    """What transformers computes."""
    torch, qwen3_5 = _import_torch()
    loaded, report = qwen3_5.Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    if report["missing_keys"] or report["mismatched_keys"]:
        raise InputError(f"{directory}: transformers finds no weights for {sorted(report['missing_keys'])[:3]}; copy the checkpoint again")
    loaded = loaded.float().eval()
    right = loaded(**_padded(torch, inputs.tokens, "right"), use_cache=False).logits
    with torch.no_grad():
        left = loaded(**_padded(torch, inputs.tokens, "left"), use_cache=False).logits
    logits = {
        "right": [right[row, :length].detach().numpy() for row, length in enumerate(LENGTHS)],
        "left": [left[row, WIDTH - length :].numpy() for row, length in enumerate(LENGTHS)],
    }
    picked = [torch.log_softmax(right[row, : n - 1], -1)[range(n - 1), inputs.tokens[row, 1:n].tolist()] for row, n in enumerate(LENGTHS)]
    torch.cat(picked).mean().backward()
    gradients = {name: p.grad.numpy() for name, p in loaded.named_parameters()}
    prompts = torch.tensor(inputs.prompts, dtype=torch.long)
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    greedy = loaded.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)[:, PROMPT:].numpy()
    return Outputs(logits, gradients, greedy)


# ------------------------------------------------------------------------------------------------------------------ ours


@functools.partial(jax.jit, static_argnums=1)
def _logits_and_gradients(params: Any, config: ModelConfig, tokens: Any, positions: Any, segments: Any) -> Any:
    index = jnp.broadcast_to(jnp.arange(WIDTH - 1)[None], (len(LENGTHS), WIDTH - 1))
    trained = (segments[:, 1:] > 0).astype(jnp.float32)

    def mean_log_prob(params: Any) -> Any:
        scored = model.log_probs(params, config, tokens, positions, segments, index, tokens[:, 1:])
        return jnp.sum(scored.logprob * trained) / jnp.sum(trained)

    return model.logits(params, config, model.forward(params, config, tokens, positions, segments)), jax.grad(mean_log_prob)(params)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _stepwise(params: Any, config: ModelConfig, tokens: Any, prefill: int) -> Any:
    """Logits [row, WIDTH - prefill, vocabulary] at the columns from `prefill` on, one cached step a token."""
    one = jnp.ones(len(tokens), jnp.int32)
    slots = cache.init_cache(config, len(tokens), WIDTH)
    if prefill:
        _, slots = model.extend(params, config, slots, tokens[:, :prefill], prefill * one)

    def step(slots: Any, token: Any) -> tuple[Any, Any]:
        hidden, slots = model.extend(params, config, slots, token[:, None], one)
        return slots, model.logits(params, config, hidden)

    return jax.lax.scan(step, slots, tokens[:, prefill:].T)[1].swapaxes(0, 1)


@functools.partial(jax.jit, static_argnums=1)
def _greedy(params: Any, config: ModelConfig, prompts: Any) -> Any:
    one = jnp.ones(len(prompts), jnp.int32)
    carried = model.extend(params, config, cache.init_cache(config, len(prompts), PROMPT + NEW), prompts, PROMPT * one)

    def step(carried: Any, _: None) -> tuple[Any, Any]:
        hidden, slots = carried
        token = jnp.argmax(model.logits(params, config, hidden), axis=-1).astype(jnp.int32)
        return model.extend(params, config, slots, token[:, None], one), token

    return jax.lax.scan(step, carried, None, length=NEW)[1].T


def ours(config: ModelConfig, params: Any, inputs: Inputs) -> Outputs:
    """What this project computes; besides the forward pass, the same logits from cached steps after a prefill and from cached steps alone."""
    positions, segments = np.zeros(inputs.tokens.shape, np.int32), np.zeros(inputs.tokens.shape, np.int32)
    for row, length in enumerate(LENGTHS):
        positions[row, :length], segments[row, :length] = np.arange(length), 1
    whole, gradients = _logits_and_gradients(params, config, inputs.tokens, positions, segments)
    stepped = {name: np.asarray(_stepwise(params, config, inputs.tokens, start)) for name, start in (("prefilled", WIDTH // 2), ("recurrent", 0))}
    rows = {"forward": [np.asarray(whole[row, :length]) for row, length in enumerate(LENGTHS)], **{k: [v[-1]] for k, v in stepped.items()}}
    greedy = np.asarray(_greedy(params, config, inputs.prompts))
    return Outputs(rows, dict(hf.to_hf_tensors(config, gradients)), greedy)


# --------------------------------------------------------------------------------------------------------------- compare


def _largest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return float(np.max([np.max(np.abs(x - y)) for x, y in zip(a, b, strict=True)]))  # NaN if any is, which Python's max may pass over


def figures(here: Outputs, there: Outputs) -> list[Figure]:
    """Every figure; the last row of LENGTHS is the one that cached steps are compared on, since it fills the width."""
    # A difference below the float32 resolution of the largest gradient is rounding, however small the tensor's own gradient is.
    resolution = float(np.finfo(np.float32).eps) * max(float(np.max(np.abs(g))) for g in there.gradients.values())
    relative = {
        name: float(np.max(np.abs(here.gradients[name] - expected)) / max(np.max(np.abs(expected)), resolution / GRADIENTS))
        for name, expected in there.gradients.items()
    }
    worst = max(relative, key=lambda name: np.nan_to_num(relative[name], nan=np.inf))
    forward = here.logits["forward"]
    return [
        Figure("logits, right padding: max |difference|", _largest(forward, there.logits["right"]), LOGITS),
        Figure("logits, left padding: max |difference|", _largest(forward, there.logits["left"]), LOGITS),
        Figure("gradients of the mean log-prob: relative, worst tensor", relative[worst], GRADIENTS, worst),
        Figure(f"greedy decoding: differing tokens of 2 x {NEW}", int(np.sum(here.greedy != there.greedy)), 0),
        Figure("prefill then decode against one forward: max |difference|", _largest([forward[-1][WIDTH // 2 :]], here.logits["prefilled"]), LOGITS),
        Figure("recurrent against chunked: max |difference|", _largest([forward[-1]], here.logits["recurrent"]), LOGITS),
    ]


def compare(directory: Path, seed: int) -> list[Figure]:
    """Runs the reference, lets go of it, then runs ours."""
    if (directory / hf_directory.RECORD).exists():
        raise InputError(f"{directory}: is an imported directory, which transformers cannot load; export it first, or give the original")
    config = hf.load_config(directory)
    rng = np.random.default_rng(seed)
    draw = functools.partial(rng.integers, 0, config.vocab_size, dtype=np.int32)
    inputs = Inputs(draw((len(LENGTHS), WIDTH)), draw((2, PROMPT)))
    there = reference(directory, inputs)
    config, params = hf.load_hf(directory)
    return figures(ours(config, params, inputs), there)


def report(found: list[Figure]) -> int:
    """Prints the figures and returns the exit status."""
    for figure in found:
        verdict = "ok" if figure.ok else "OUT OF TOLERANCE"
        print(f"{figure.name:58s} {figure.value:9.2g}  allowed {figure.allowed:<7g} {verdict} {figure.where}".rstrip())
    return 0 if all(figure.ok for figure in found) else 1


def _refuse(message: str) -> NoReturn:
    sys.exit(print(f"error: {message}; usage: compare_hf.py DIR [--seed=0]", file=sys.stderr) or 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="Hugging Face directory")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    parser.error = _refuse
    arguments = parser.parse_args()
    with entry.one_line_errors():
        _import_torch()
        return report(compare(arguments.directory, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
