"""Checkpoint directories for the tests of Hugging Face input and output, written with the safetensors library from published names alone."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.hf_layout import published_shapes
from intraskill.models.qwen35.params import abstract_params

TOWERS = {
    "model.visual.patch_embed.proj.weight": np.arange(60, dtype=np.float16).reshape(3, 4, 5),
    "model.visual.blocks.0.norm1.weight": np.linspace(-1, 1, 7).astype(ml_dtypes.bfloat16),
    "mtp.fc.weight": np.linspace(0, 1, 33).astype(ml_dtypes.bfloat16),
    "mtp.norm.weight": np.arange(5, dtype=np.int64),
}


def params(config: ModelConfig, seed: int = 0):
    """A parameter tree of random numbers; compiles nothing."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract_params(config))


def published(config: ModelConfig, prefix: str, seed: int = 0) -> dict[str, np.ndarray]:
    """The text tower's tensors as published: bfloat16, the decay rates and the norm inside linear layers float32."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in published_shapes(config).items():
        dtype = np.float32 if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) else ml_dtypes.bfloat16
        tensors[name if name == "lm_head.weight" else prefix + name] = rng.normal(size=shape).astype(dtype)
    return tensors


def multimodal(directory: Path, config: ModelConfig, num_shards: int = 3) -> dict[str, np.ndarray]:
    """Writes a checkpoint in the layout of the published one: three towers, sharded, config.json without full_attention_interval."""
    directory.mkdir()
    tensors = {**published(config, "model.language_model."), **TOWERS}
    weight_map = {}
    for number in range(num_shards):
        file = f"model.safetensors-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for i, name in enumerate(sorted(tensors)) if i % num_shards == number}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values()), "note": "kept"}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    outside = ("architectures", "tie_word_embeddings", "full_attention_interval", "dtype")
    text = {key: value for key, value in config.to_hf().items() if key not in outside}
    content = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**text, "dtype": "bfloat16"},
        "vision_config": {"depth": 1, "hidden_size": 8},
        "tie_word_embeddings": config.tie_embeddings,
    }
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "preprocessor_config.json").write_text('{"size": 1}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("about the original")
    return tensors
