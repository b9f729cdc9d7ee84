"""Against transformers' Qwen3.5 on torch, float32: logits, gradients, greedy decoding, checkpoints. Weights cross over by published name."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny

from intraskill.models.qwen35 import cache, hf, model

torch = pytest.importorskip("torch")
qwen = pytest.importorskip("transformers.models.qwen3_5")

pytestmark = pytest.mark.torch

WIDTH = 40
LENGTHS = [5, 33, 40]  # shorter than a chunk, not a multiple of one, several


def hf_model(config, params):
    fields = {k: v for k, v in config.to_hf().items() if k != "architectures"}
    reference = qwen.Qwen3_5ForCausalLM(qwen.Qwen3_5TextConfig(**fields, attn_implementation="eager")).float().eval()
    tensors = {name: torch.tensor(np.asarray(t)) for name, t in tiny.hf_tensors(config, params).items()}
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    return reference


def padded(tokens, side):
    """Rows cut to LENGTHS and padded on one side, with their attention mask."""
    ids, mask = np.zeros((len(LENGTHS), WIDTH), np.int64), np.zeros((len(LENGTHS), WIDTH), np.int64)
    for row, length in enumerate(LENGTHS):
        where = slice(0, length) if side == "right" else slice(WIDTH - length, WIDTH)
        ids[row, where], mask[row, where] = tokens[row, :length], 1
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@functools.partial(jax.jit, static_argnums=1)
def logits_and_grads(params, config, tokens, positions, segments):
    index = jnp.broadcast_to(jnp.arange(WIDTH - 1)[None], (len(LENGTHS), WIDTH - 1))
    trained = (segments[:, 1:] > 0).astype(jnp.float32)

    def loss(params):
        scored = model.log_probs(params, config, tokens, positions, segments, index, tokens[:, 1:])
        return jnp.sum(scored.logprob * trained) / jnp.sum(trained)

    return model.logits(params, config, model.forward(params, config, tokens, positions, segments)), jax.grad(loss)(params)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_logits_and_gradients(shape):
    config = tiny.config(shape)
    params = tiny.params(config)
    reference = hf_model(config, params)
    tokens = tiny.tokens(config, len(LENGTHS), WIDTH)
    ours, grads = logits_and_grads(params, config, tokens, *tiny.pack([[n] for n in LENGTHS], WIDTH))

    right = reference(**padded(tokens, "right")).logits
    with torch.no_grad():
        left = reference(**padded(tokens, "left")).logits
    for row, length in enumerate(LENGTHS):
        for theirs in (right[row, :length].detach(), left[row, WIDTH - length :]):
            np.testing.assert_allclose(ours[row, :length], theirs.numpy(), atol=2e-4, rtol=0)

    picked = [torch.log_softmax(right[row, : n - 1], -1)[range(n - 1), tokens[row, 1:n]] for row, n in enumerate(LENGTHS)]
    torch.cat(picked).mean().backward()
    expected = {name: p.grad.numpy() for name, p in reference.named_parameters()}
    ours = tiny.hf_tensors(config, grads)
    assert set(ours) == set(expected)
    for name, gradient in ours.items():
        np.testing.assert_allclose(gradient, expected[name], atol=1e-3 * np.abs(expected[name]).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("shape", ["two_values_a_key", "three_to_one"])
def test_greedy_decoding_of_64_tokens(shape):
    config = tiny.config(shape)
    params = tiny.params(config)
    prompts = tiny.tokens(config, 2, 11)
    expected = hf_model(config, params).generate(
        torch.tensor(prompts, dtype=torch.long), max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None
    )

    @jax.jit
    def decode(params, prompts):
        one = jnp.ones(2, jnp.int32)
        hidden, slots = model.extend(params, config, cache.init_cache(config, 2, 80), prompts, 11 * one)

        def step(carried, _):
            hidden, slots = carried
            token = jnp.argmax(model.logits(params, config, hidden), axis=-1).astype(jnp.int32)
            return model.extend(params, config, slots, token[:, None], one), token

        return jax.lax.scan(step, (hidden, slots), None, length=64)[1].T

    np.testing.assert_array_equal(decode(params, prompts), expected[:, 11:].numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_checkpoint_loads_in_transformers(tmp_path, dtype):
    config = tiny.config("three_values_a_key")
    params = tiny.params(config)
    hf.save_hf(tmp_path / "out", config, params, dtype, shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    reference, report = qwen.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype

    loaded_config, loaded = hf.load_hf(tmp_path / "out", chunk_size=16)
    assert loaded_config == config
    tokens = tiny.tokens(config, len(LENGTHS), WIDTH)
    ours, _ = logits_and_grads(loaded, config, tokens, *tiny.pack([[WIDTH]] * len(LENGTHS), WIDTH))
    with torch.no_grad():
        np.testing.assert_allclose(ours, reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy(), atol=2e-4, rtol=0)


def test_config_survives_transformers():
    config = tiny.config("three_to_one")
    fields = {k: v for k, v in config.to_hf().items() if k != "architectures"}
    theirs = qwen.Qwen3_5TextConfig(**fields).to_dict()
    assert type(config).from_hf(theirs, chunk_size=config.chunk_size) == config
