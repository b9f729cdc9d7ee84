"""SkyRL's JAX port of Qwen3.5, imported from a checkout, with the weights of one of our parameter trees. None of its code is here."""

import functools
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import typing_extensions
from flax import nnx
from transformers import Qwen3_5TextConfig

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig
from intraskill.types import InputError

PORT = "https://github.com/NovaSky-AI/SkyRL"
REVISION = "a9564572eb8e91076be43c1bd5e4615e3de17265"
PACKAGES = "peft accelerate cloudpathlib"
PREFIX = "model.language_model."  # of the names in the checkpoints that their loader reads


def import_port(checkout: Path) -> tuple[Any, Any, Any, Any]:
    """Their modules (models.configs, models.qwen3_5, utils.models, tinker.types), imported from a checkout.

    Raises:
      InputError: the directory is not a checkout of theirs, or what they import is missing.
    """
    if not (checkout / "skyrl" / "tx" / "models" / "qwen3_5.py").is_file():
        raise InputError(f"--checkout={checkout} has no skyrl/tx/models/qwen3_5.py: give a clone of {PORT} (revision {REVISION} was tested)")
    sys.path[:0] = [str(checkout), str(checkout / ".packages")]
    ours = typing.TypedDict
    typing.TypedDict = typing_extensions.TypedDict  # before Python 3.12 pydantic takes no other, and theirs names typing's
    try:
        from skyrl.tinker import types  # pyright: ignore[reportMissingImports]
        from skyrl.tx.models import configs, qwen3_5  # pyright: ignore[reportMissingImports]
        from skyrl.tx.utils import models  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            f"--checkout={checkout}: {error}; run `pip install --no-deps --target={checkout}/.packages {PACKAGES}`, "
            f"and check out revision {REVISION}, which was tested"
        ) from None
    finally:
        typing.TypedDict = ours
    return configs, qwen3_5, models, types


class Port:
    """Their model with the weights of one of our parameter trees, and its compiled functions of tokens [B, T].

    Attributes:
      logits: -> [B, T, vocab].
      step: -> (mean cross-entropy of each next token, gradients of all parameters), from all logits at once.
      step_in_pieces: the same from the logits of 1,024 tokens at a time.
    """

    def __init__(self, modules: tuple[Any, Any, Any, Any], config: ModelConfig, params: Any):
        configs, qwen3_5, self._models, self._types = modules
        self.mesh = jax.make_mesh((1, 1, 1), ("fsdp", "ep", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
        hf_config = Qwen3_5TextConfig(**{key: value for key, value in config.to_hf().items() if key != "architectures"})

        def build(loss_chunk_size: int) -> Any:
            made = configs.Qwen3_5Config(hf_config, max_lora_adapters=0, max_lora_rank=0, shard_attention_heads=True, loss_chunk_size=loss_chunk_size)
            return qwen3_5.Qwen3_5ForCausalLM(made, dtype=jnp.float32, rngs=nnx.Rngs(0))

        with jax.set_mesh(self.mesh), nnx.use_eager_sharding(True), tempfile.TemporaryDirectory() as folder:
            self.model = build(0)
            safetensors.numpy.save_file(dict(hf.to_hf_tensors(config, params, PREFIX)), Path(folder) / "model.safetensors")
            self._models.load_safetensors(folder, self.model.config, self.model)
            in_pieces = nnx.eval_shape(lambda: build(1024))
        self.graph, self.params = nnx.split(self.model)
        self.logits = self._compiled(lambda model, tokens: model.compute_logits(self._hidden(model, tokens)))
        self.step, self.step_in_pieces = (self._compiled_step(nnx.split(made)[0]) for made in (self.model, in_pieces))

    @staticmethod
    def _hidden(model: Any, tokens: Any) -> Any:
        return model(tokens, attention_mask=jnp.ones(tokens.shape, jnp.int32), is_training=True).last_hidden_state

    def _in_mesh(self, function):
        def call(*arguments):
            with jax.set_mesh(self.mesh):
                return jax.block_until_ready(function(*arguments))

        return call

    def _compiled(self, function):
        return functools.partial(self._in_mesh(jax.jit(lambda params, tokens: function(nnx.merge(self.graph, params), tokens))), self.params)

    def _compiled_step(self, graph: Any):
        def loss(params, tokens):
            port = nnx.merge(graph, params)
            return -jnp.mean(port.compute_logprobs(self._hidden(port, tokens)[:, :-1], tokens[:, 1:]))

        return functools.partial(self._in_mesh(jax.jit(jax.value_and_grad(loss))), self.params)

    def by_name(self, tree: Any) -> dict[str, np.ndarray]:
        """A tree like the parameters, as their own writer names and lays it out."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            self._models.save_safetensors(self.model.config, nnx.merge(self.graph, tree), path)
            return safetensors.numpy.load_file(path)

    def generate(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        """Greedy continuation by their own method."""
        sampling = [self._types.SamplingParams(temperature=0.0, max_tokens=num_new, seed=0)] * len(prompts)
        with jax.set_mesh(self.mesh):
            made = self.model.generate(jnp.asarray(prompts), jnp.ones(prompts.shape, jnp.int32), sampling_params=sampling)
        return np.asarray(made.generated_ids)

    def stepper(self, max_length: int):
        """A function of (prompts, num_new): their model and cache, one compiled call a step, as bench_decode.py does with ours."""

        def choose(port, out):
            return jnp.argmax(port.compute_logits(out.last_hidden_state[:, -1:])[:, 0], axis=-1).astype(jnp.int32)

        @jax.jit
        def prefill(params, prompts):
            port, mask = nnx.merge(self.graph, params), jnp.ones(prompts.shape, jnp.int32)
            out = port(prompts, attention_mask=mask)
            return choose(port, out), out.kv_cache.pad_to_length(max_length)

        @functools.partial(jax.jit, donate_argnums=1)
        def step(params, slots, token):
            port, positions = nnx.merge(self.graph, params), slots.cache_position[:, None]
            mask = (jnp.arange(max_length)[None] <= positions).astype(jnp.int32)
            out = port(token[:, None], attention_mask=mask, positions=positions, kv_cache=slots)
            return choose(port, out), out.kv_cache

        def decode(prompts: np.ndarray, num_new: int) -> np.ndarray:
            with jax.set_mesh(self.mesh):
                token, slots = prefill(self.params, prompts)
                tokens = [token]
                for _ in range(num_new - 1):
                    token, slots = step(self.params, slots, token)
                    tokens.append(token)
                return np.stack([np.asarray(t) for t in tokens], axis=1)

        return decode
