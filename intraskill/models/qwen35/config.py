"""The shape of a dense Qwen3.5 text model, and its translation to and from Hugging Face's `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from intraskill.types import InputError

_DTYPES = ("float32", "bfloat16")
_REMAT = ("none", "block", "layer")
_ATTENTION = ("blocked", "splash")
_TOO_LARGE = 1 << 31  # sizes and indices are int32 on the device

# ModelConfig field -> key of config.json, for the fields that translate one to one.
_HF_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
    "rms_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise InputError(message)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of the model; hashable, so that it can be a static argument of jit.

    Layers repeat in blocks of `full_attention_interval`: linear attention, except for the last one of each block, which is full attention.

    Attributes:
      conv_kernel: taps of the causal convolution in front of the linear attention.
      partial_rotary_factor: share of head_dim that is rotated.
      dtype: dtype of activations. State, gates, solves, norms, softmax and logits are float32 in any case.
      param_dtype: dtype in which parameters are stored.
      chunk_size: tokens that the linear attention handles in one dense piece; a power of two from 8 on.
      remat: what the backward pass finds: "none" everything, "block" the input of each block, "layer" the input of each layer (more bytes than
        "block" in all, fewer at a time). The rest is computed again.
      attention: how rows attend when they are trained on: "blocked" in XLA, on any platform; "splash" by the TPU kernel, which writes no scores to
        memory and needs bfloat16 and rows of a multiple of 128 tokens.
      piece_length: tokens of a row that are worked on at a time, everywhere but in full attention itself; the backward pass computes them again, last
        piece first (`pieces`). Linear layers then keep their input and, per piece, the state that it starts from, under "none" as under "layer". Rows
        must be a multiple of it, and it of chunk_size. 0: the whole row.
      scan_layers: stack the parameters of equal layers and scan over the blocks, so that many layers compile like one block. Without it
        each layer owns its arrays, which saves a copy of every weight per call: worth it for small models and for decoding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    full_attention_interval: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int = 4
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    tie_embeddings: bool = True
    rms_eps: float = 1e-6
    max_positions: int = 262_144
    dtype: str = "float32"
    param_dtype: str = "float32"
    chunk_size: int = 32
    remat: str = "none"
    attention: str = "blocked"
    piece_length: int = 0
    scan_layers: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is not int:
                continue
            least = 0 if field.name == "piece_length" else 1
            whole = isinstance(value, int) and not isinstance(value, bool)
            _check(whole and least <= value < _TOO_LARGE, f"model {field.name} is {value!r}: give a whole number >= {least} and < 2^31")
        for part, whole in (
            ("full_attention_interval", "num_layers"),
            ("num_kv_heads", "num_heads"),
            ("linear_num_key_heads", "linear_num_value_heads"),
        ):
            small, large = getattr(self, part), getattr(self, whole)
            _check(large % small == 0, f"model {whole} is {large}: it must be a multiple of {part}, {small}")
        _check(
            2 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"model partial_rotary_factor is {self.partial_rotary_factor}: times head_dim {self.head_dim} it must give an even number, 2 to head_dim",
        )
        _check(
            self.chunk_size >= 8 and self.chunk_size & (self.chunk_size - 1) == 0, f"model chunk_size is {self.chunk_size}: give a power of two >= 8"
        )
        for name, value in (("rope_theta", self.rope_theta), ("rms_eps", self.rms_eps)):
            _check(0 < value < math.inf, f"model {name} is {value}: give a finite number > 0")
        for name, allowed in (("dtype", _DTYPES), ("param_dtype", _DTYPES), ("remat", _REMAT), ("attention", _ATTENTION)):
            _check(getattr(self, name) in allowed, f"model {name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        _check(
            self.piece_length % self.chunk_size == 0,
            f"model piece_length is {self.piece_length}: it must be a multiple of chunk_size, {self.chunk_size}",
        )
        _check(
            self.attention == "blocked" or self.dtype == "bfloat16",
            f"model attention is {self.attention!r} with dtype {self.dtype}: the kernel multiplies in bfloat16; take bfloat16, or blocked",
        )

    # ---------------------------------------------------------------------------------------------------- derived sizes

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_entries(self) -> int:
        """Layers that own an entry in the parameter tree: one block when layers are scanned, otherwise all."""
        return self.full_attention_interval if self.scan_layers else self.num_layers

    @property
    def value_heads_per_key_head(self) -> int:
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def conv_channels_per_head(self) -> int:
        """Channels of one key head that pass through the convolution: its query, its key, and the values of its value heads."""
        return 2 * self.linear_key_head_dim + self.value_heads_per_key_head * self.linear_value_head_dim

    @property
    def activation_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    def is_full(self, layer: int) -> bool:
        """Whether a layer (or an entry of the parameter tree) is full attention."""
        return (layer + 1) % self.full_attention_interval == 0

    # ---------------------------------------------------------------------------------------------------- Hugging Face

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], **overrides: Any) -> "ModelConfig":
        """Reads a `config.json` of a text-only or a multimodal dense Qwen3.5; `overrides` set numerics such as dtype or remat.

        Raises:
          InputError: a key is missing, or asks for something this implementation does not have.
        """
        text = hf.get("text_config", hf)
        _check(isinstance(text, Mapping), f"config.json: text_config is {type(text).__name__}, expected an object")
        _check(
            str(text.get("model_type", "")) in ("qwen3_5_text", "qwen3_5"),
            f"config.json: model_type is {text.get('model_type')!r}: only dense Qwen3.5 (qwen3_5 or qwen3_5_text) can be loaded",
        )
        missing = sorted(key for key in _HF_KEYS.values() if key not in text)
        _check(not missing, f"config.json lacks {', '.join(missing)}: is it complete, and of a Qwen3.5 model?")
        for key in _HF_KEYS.values():
            kinds = (int, float) if key == "rms_norm_eps" else int
            _check(isinstance(text[key], kinds) and not isinstance(text[key], bool), f"config.json: {key} is {text[key]!r}, expected a number")
        for key, expected in (("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True)):
            _check(text.get(key, expected) == expected, f"config.json: {key} is {text[key]!r}, only {expected!r} is supported" if key in text else "")
        rope = _rope(text)
        theta = rope.get("rope_theta", text.get("rope_theta"))
        _check(theta is not None, "config.json lacks rope_theta, both in rope_parameters and beside it")
        factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        for key, value in (("rope_theta", theta), ("partial_rotary_factor", factor)):
            known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            _check(known, f"config.json: {key} is {value!r}, expected a number")
        fields = {name: text[key] for name, key in _HF_KEYS.items()}
        fields["rope_theta"] = float(theta)
        fields["partial_rotary_factor"] = float(factor)
        tied = hf.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        _check(isinstance(tied, bool), f"config.json: tie_word_embeddings is {tied!r}, expected true or false")
        fields["tie_embeddings"] = tied
        fields["full_attention_interval"] = _interval(text)
        return cls(**{**fields, **overrides})

    def to_hf(self) -> dict[str, Any]:
        """The text-only `config.json`. It names the layers twice, since transformers reads layer_types and SGLang the interval."""
        half = self.rotary_dim // 2
        section = [half - (half + 1) // 3 - half // 3, (half + 1) // 3, half // 3]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **{key: getattr(self, name) for name, key in _HF_KEYS.items()},
            "layer_types": ["full_attention" if self.is_full(i) else "linear_attention" for i in range(self.num_layers)],
            "full_attention_interval": self.full_attention_interval,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_section": section,
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "initializer_range": 0.02,
            "mamba_ssm_dtype": "float32",
            "dtype": self.param_dtype,
            "use_cache": True,
        }


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation, from the key of today, of earlier versions (which transformers prefers when both are there), or both."""
    rope: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        part = text.get(key) or {}
        _check(isinstance(part, Mapping), f"config.json: {key} is {part!r}, expected an object")
        kind = part.get("rope_type", part.get("type", "default"))
        _check(kind in ("default", "mrope"), f"config.json: the type of {key} is {kind!r}, only the default rotation is supported")
        rope |= part
    return rope


def _interval(text: Mapping[str, Any]) -> int:
    """The interval at which full attention recurs, from either of the two keys; when both are there they must agree."""
    interval, types = text.get("full_attention_interval"), text.get("layer_types")
    _check(types is not None or interval is not None, "config.json lacks layer_types and full_attention_interval: one of them is needed")
    _check(types is None or isinstance(types, list), f"config.json: layer_types is {types!r}, expected a list")
    kinds: list[str] = list(types or ())
    if interval is None:
        _check("full_attention" in kinds, "config.json: layer_types holds no full_attention layer, which is not a Qwen3.5 model")
        interval = kinds.index("full_attention") + 1
    _check(isinstance(interval, int) and interval >= 1, f"config.json: full_attention_interval is {interval!r}, expected a number >= 1")
    if types is not None:
        number = text["num_hidden_layers"]
        _check(len(kinds) == number, f"config.json: layer_types names {len(kinds)} layers and num_hidden_layers is {number}")
        expected = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(number)]
        _check(kinds == expected, f"config.json: layer_types does not repeat full_attention every {interval} layers")
    return interval


QWEN35_4B = ModelConfig(
    vocab_size=248_320,
    hidden_size=2560,
    intermediate_size=9216,
    num_layers=32,
    full_attention_interval=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
"""The published text model of 4,205,751,296 parameters."""
