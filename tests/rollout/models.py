"""A hybrid model small enough to compile in seconds: one linear and one full layer."""

import jax

from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.model import init_params


def config(**changes) -> ModelConfig:
    fields = dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, full_attention_interval=2, num_heads=2, num_kv_heads=1, head_dim=16
    )
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, chunk_size=8)
    return ModelConfig(**{**fields, **linear, **changes})


def params(config: ModelConfig, seed: int = 0):
    return init_params(config, jax.random.key(seed))
