"""Error of the gated delta rule on bfloat16 inputs, against the recurrence in float64 on the same inputs.

    python benchmarks/bench_delta_rule.py [--length=512] [--skyrl=DIR]

Relative error in the 2-norm of the bfloat16 output. Beside ours: Hugging Face's chunked rule in torch, and with --skyrl a checkout of SkyRL
(github.com/NovaSky-AI/SkyRL), whose two functions are taken from the file `skyrl/tx/models/qwen3_5.py` of that directory. Target: <= 2e-3.
"""

import argparse
import ast
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule  # noqa: E402

from benchmarks import interleave  # noqa: E402
from intraskill.models.qwen35 import gated_delta  # noqa: E402

BATCH, HEADS, WIDTH = 2, 4, 64


def inputs(length: int) -> dict[str, np.ndarray]:
    """Random queries, keys, values, write strengths and decays, as bfloat16 holds them; the decays in float32."""
    rng = np.random.default_rng(0)
    shape = (BATCH, length, HEADS)
    raw = {name: rng.normal(size=(*shape, WIDTH)) for name in ("q", "k", "v")} | {"beta": 1 / (1 + np.exp(-rng.normal(size=shape)))}
    rounded = {name: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for name, x in raw.items()}
    return rounded | {"g": np.asarray(-np.exp(rng.normal(size=shape) - 2), np.float32).astype(np.float64)}


def recurrence(q, k, v, beta, g) -> np.ndarray:
    """The rule token by token in float64."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    state, out = np.zeros((BATCH, HEADS, WIDTH, WIDTH)), np.zeros(v.shape)
    for t in range(q.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        delta = beta[:, t][..., None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], delta)
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) / math.sqrt(WIDTH)
    return out


def ours(q, k, v, beta, g) -> np.ndarray:
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    strengths = [jnp.asarray(x, jnp.float32)[..., None] for x in (beta, g)]
    segments = jnp.ones(q.shape[:2], jnp.int32)

    @jax.jit
    def run(q, k, v, beta, g):
        q, k = gated_delta.l2_norm(q) * WIDTH**-0.5, gated_delta.l2_norm(k)
        return gated_delta.chunked(q, k, v[:, :, :, None], beta, g, segments, None, 32)[0][:, :, :, 0].astype(jnp.bfloat16)

    return np.asarray(run(*low, *strengths), np.float64)


def hugging_face(q, k, v, beta, g) -> np.ndarray:
    low = [torch.tensor(x).bfloat16() for x in (q, k, v)]
    out, _ = torch_chunk_gated_delta_rule(*low, g=torch.tensor(g).float(), beta=torch.tensor(beta).bfloat16(), use_qk_l2norm_in_kernel=True)
    return out.double().numpy()


def skyrl(directory: Path, q, k, v, beta, g) -> np.ndarray:
    """SkyRL's chunked rule in the model's dtype. Only its functions are run: the module imports a training service."""
    source = (directory / "skyrl/tx/models/qwen3_5.py").read_text()
    wanted = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name in ("l2norm", "chunk_gated_delta_rule")]
    future = ast.parse("from __future__ import annotations").body
    namespace = {"jax": jax, "jnp": jnp, "math": math}
    exec(compile(ast.Module([*future, *wanted], type_ignores=[]), "skyrl", "exec"), namespace)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, g, beta)]
    return np.asarray(namespace["chunk_gated_delta_rule"](*low)[0], np.float64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--skyrl", type=Path)
    arguments = parser.parse_args()
    given = inputs(arguments.length)
    expected = recurrence(**given)

    def error(out: np.ndarray) -> float:
        return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))

    sides = {"ours": ours(**given), "HF": hugging_face(**given)}
    if arguments.skyrl:
        sides["SkyRL"] = skyrl(arguments.skyrl, **given)
    sides["rounding alone"] = np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float64)
    for name, out in sides.items():
        print(f"{name:16s} {error(out):.2e}")
    return interleave.verdict("delta_rule", {"relative error": (error(sides["ours"]), 2e-3, False)})


if __name__ == "__main__":
    sys.exit(main())
