"""Checkpoint directories: round trips, layouts, and what is wrong with a bad one said in one line."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import checkpoints, tiny
from safetensors.numpy import load_file, save_file

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig
from intraskill.types import InputError


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_round_trip_is_bit_exact(tmp_path, shape):
    config = tiny.config(shape)
    params = checkpoints.params(config)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    hf.save_hf(tmp_path / "out", config, params, extra_files=[tokenizer], shard_bytes=30_000)
    overrides = {name: getattr(config, name) for name in ("chunk_size", "scan_layers", "remat")}
    loaded_config, loaded = hf.load_hf(tmp_path / "out", **overrides)
    assert loaded_config == config
    assert_equal_trees(loaded, params)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob("*.partial"))


def test_bfloat16_keeps_the_decay_rates(tmp_path):
    config = tiny.config()
    params = checkpoints.params(config)
    hf.save_hf(tmp_path / "out", config, params, "bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {name: str(t.dtype) for name, t in tensors.items()}
    assert kinds.pop("model.layers.0.linear_attn.A_log") == kinds.pop("model.layers.0.linear_attn.norm.weight") == "float32"
    assert set(kinds.values()) == {"bfloat16"}
    _, loaded = hf.load_hf(tmp_path / "out")
    np.testing.assert_array_equal(loaded["embed"], params["embed"].astype(jnp.bfloat16).astype(np.float32))


def test_published_layout_of_the_linear_projection():
    """All queries, then all keys, then all values; value head h belongs to key head h // 2."""
    config = tiny.config("two_values_a_key")  # 2 key heads of 16, 4 value heads of 24
    tensors = tiny.hf_tensors(config, checkpoints.params(config))
    flat = np.arange(2 * 16 + 2 * 16 + 4 * 24, dtype=np.float32)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    tensors[name] = np.broadcast_to(flat[:, None], tensors[name].shape)
    second = hf.from_hf_tensors(config, tensors)["layers"]["0"]["linear"]["qkv"][0, 1]
    assert second.tolist() == [*range(16, 32), *range(48, 64), *range(64 + 48, 64 + 96)]


def test_multimodal_layout(tmp_path, caplog):
    config = tiny.config("three_values_a_key")
    params = checkpoints.params(config)
    tensors = dict(hf.to_hf_tensors(config, params, prefix="model.language_model."))
    tensors |= {"model.visual.patch_embed.proj.weight": np.zeros((2, 2), np.float32), "mtp.fc.weight": np.zeros(3, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    text = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "tie_word_embeddings")}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with caplog.at_level(logging.INFO):
        loaded_config, loaded = hf.load_hf(tmp_path, chunk_size=16)
    assert loaded_config == config
    assert_equal_trees(loaded, params)
    assert "left out 2 tensors" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.fixture
def checkpoint(tmp_path):
    config = tiny.config()
    hf.save_hf(tmp_path / "good", config, checkpoints.params(config))
    return tmp_path / "good"


def rewrite(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def set_config(directory, **values):
    file = directory / "config.json"
    content = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


BREAKAGES = {
    "no directory": (lambda d: d.rename(d.with_name("moved")), "no such directory"),
    "no config": (lambda d: (d / "config.json").unlink(), "no such file"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "not readable as JSON"),
    "config of a list": (lambda d: (d / "config.json").write_text("[]"), "expected an object"),
    "foreign model": (lambda d: set_config(d, model_type="llama"), "model_type is 'llama'"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "lacks model.safetensors"),
    "lost shard": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "lacks model-00001-of-00002.safetensors",
    ),
    "truncated": (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]), "truncated"),
    "not safetensors": (lambda d: (d / "model.safetensors").write_bytes(b"PK" + b"\0" * 40), "not a safetensors file"),
    "missing tensor": (lambda d: rewrite(d, lambda t: t.pop("model.layers.0.mlp.up_proj.weight")), "missing layers.0.mlp.up_proj.weight"),
    "foreign tensor": (
        lambda d: rewrite(d, lambda t: t.update({"model.layers.0.mlp.bias": np.zeros(2, np.float32)})),
        "unexpected model.layers.0.mlp.bias",
    ),
    "wrong shape": (
        lambda d: rewrite(d, lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)})),
        r"model.norm.weight is \[31\], expected \[32\]",
    ),
    "lacking key": (lambda d: set_config(d, num_hidden_layers=None), "lacks num_hidden_layers"),
    "odd layer types": (lambda d: set_config(d, layer_types=["full_attention", "linear_attention"]), "layer_types does not repeat"),
    "no interval": (lambda d: set_config(d, layer_types=None, full_attention_interval=None), "lacks layer_types and full_attention_interval"),
    "scaled rotation": (lambda d: set_config(d, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "type of rope_parameters is 'yarn'"),
    "text for a number": (lambda d: set_config(d, hidden_size="many"), "hidden_size is 'many'"),
    "experts": (lambda d: set_config(d, model_type="qwen3_5_moe_text"), "only dense"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_bad_checkpoints_are_named(checkpoint, name):
    damage, message = BREAKAGES[name]
    damage(checkpoint)
    with pytest.raises(InputError, match=message) as caught:
        hf.load_hf(checkpoint)
    assert "\n" not in str(caught.value)


def test_nothing_is_overwritten(checkpoint):
    config = tiny.config()
    with pytest.raises(InputError, match="exists already"):
        hf.save_hf(checkpoint, config, {})
    with pytest.raises(InputError, match="extra files not found: .*nowhere.json"):
        hf.save_hf(checkpoint.with_name("new"), config, {}, extra_files=["nowhere.json"])
    with pytest.raises(InputError, match="float16"):
        hf.save_hf(checkpoint.with_name("new"), config, {}, "float16")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 3, "multiple of full_attention_interval"),
        ("num_heads", 3, "multiple of num_kv_heads"),
        ("linear_num_value_heads", 3, "multiple of linear_num_key_heads"),
        ("vocab_size", 0, "whole number >= 1"),
        ("vocab_size", True, "whole number >= 1"),
        ("chunk_size", 24, "power of two"),
        ("partial_rotary_factor", 0.05, "even number"),
        ("dtype", "float16", "choose one of float32, bfloat16"),
        ("remat", "all", "choose one of none, block"),
        ("rope_theta", 0.0, "finite number > 0"),
    ],
)
def test_bad_configs_are_named(field, value, message):
    with pytest.raises(InputError, match=message):
        tiny.config(**{field: value})


def test_config_names_the_layers_twice():
    written = tiny.config("three_to_one").to_hf()
    assert written["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert written["full_attention_interval"] == 4
    for key in ("layer_types", "full_attention_interval"):
        assert ModelConfig.from_hf({k: v for k, v in written.items() if k != key}, chunk_size=32) == tiny.config("three_to_one")
