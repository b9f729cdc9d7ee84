"""Tiny models for the tests of this folder, and rows of episodes for them."""

import jax
import numpy as np

from intraskill.models.qwen35 import hf, model
from intraskill.models.qwen35.config import ModelConfig

_BASE = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "full_attention_interval": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_theta": 1e4,
    "max_positions": 512,
    "chunk_size": 16,
}

SHAPES = {
    "plain": {},
    "two_values_a_key": {"linear_num_value_heads": 4, "num_kv_heads": 4},
    "three_values_a_key": {"linear_num_value_heads": 6, "tie_embeddings": False},
    "four_values_a_key": {"linear_num_key_heads": 1, "linear_num_value_heads": 4, "num_kv_heads": 1, "partial_rotary_factor": 0.5},
    "two_full_layers": {"num_layers": 4, "scan_layers": True, "remat": "block"},
    "three_to_one": {"num_layers": 4, "full_attention_interval": 4, "chunk_size": 32, "tie_embeddings": False, "conv_kernel": 3},
}


def config(shape: str = "plain", **overrides) -> ModelConfig:
    return ModelConfig(**{**_BASE, **SHAPES[shape], **overrides})


def params(config: ModelConfig, seed: int = 0):
    """Parameters without the special values of initialisation (norms at 0 or 1), and with fast and slow decays."""
    rng = np.random.default_rng(seed)
    drawn = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(seed))
    return jax.tree.map(lambda x: np.asarray(x) + rng.normal(scale=0.1, size=x.shape).astype(x.dtype), drawn)


def tokens(config: ModelConfig, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)


def pack(lengths: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions, segment_ids) of rows with segments of the given lengths, padded to `width`."""
    positions, segments = np.zeros((len(lengths), width), np.int32), np.zeros((len(lengths), width), np.int32)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts, start=1):
            positions[row, start : start + length] = np.arange(length)
            segments[row, start : start + length] = number
            start += length
    return positions, segments


def hf_tensors(config: ModelConfig, tree) -> dict[str, np.ndarray]:
    return dict(hf.to_hf_tensors(config, tree))


forward = jax.jit(model.forward, static_argnums=1)
extend = jax.jit(model.extend, static_argnums=1)
