"""A model with SGLang's parameters of Qwen3.5 and a `load_weights` that places published tensors as SGLang's does, one rank of several.

Torch only. Written from what SGLang's layers do (cut evenly over ranks, fused one after the other), not from our loader's table.
"""

import json
import pathlib
import types

import torch

MAPPING = (
    ("qkv_proj", "q_proj", 0),
    ("qkv_proj", "k_proj", 1),
    ("qkv_proj", "v_proj", 2),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
    ("in_proj_qkvz.", "in_proj_qkv.", (0, 1, 2)),
    ("in_proj_qkvz.", "in_proj_z.", 3),
    ("in_proj_ba.", "in_proj_b.", 0),
    ("in_proj_ba.", "in_proj_a.", 1),
)


def text_config(directory: pathlib.Path) -> types.SimpleNamespace:
    """config.json as SGLang's config object shows it."""
    content = json.loads((directory / "config.json").read_text())
    kinds = ["attention" if k == "full_attention" else "linear_attention" for k in content["layer_types"]]
    return types.SimpleNamespace(**{**content, "layers_block_type": kinds})


def _parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)


class Module(torch.nn.Module):
    """Holds what it is given; dots in names become nested modules."""

    def put(self, name: str, parameter: torch.nn.Parameter) -> None:
        head, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(head, parameter)
            return
        if head not in self._modules:
            self.add_module(head, Module())
        self._modules[head].put(rest, parameter)


class Model(Module):
    """One rank's share, everything 7.0 until it is loaded."""

    def __init__(self, config, rank: int = 0, size: int = 1):
        super().__init__()
        self.config, self.rank, self.size = config, rank, size
        d, f = config.hidden_size // 1, config.intermediate_size // size
        self.kv_heads = max(1, config.num_key_value_heads // size)
        self.kv_rank = rank * min(size, config.num_key_value_heads) // size
        queries = config.num_attention_heads * config.head_dim // size
        keys = config.linear_num_key_heads * config.linear_key_head_dim // size
        values, heads = config.linear_num_value_heads * config.linear_value_head_dim // size, config.linear_num_value_heads // size
        self.parts = {
            "qkv_proj": [2 * queries, self.kv_heads * config.head_dim, self.kv_heads * config.head_dim],
            "gate_up_proj": [f, f],
            "in_proj_qkvz.": [keys, keys, values, values],
            "in_proj_ba.": [heads, heads],
            "conv1d": [keys, keys, values],
        }
        padded = -(-config.vocab_size // (64 * size)) * 64
        self.put("model.embed_tokens.weight", _parameter(padded if size > 1 else config.vocab_size, d))
        self.put("model.norm.weight", _parameter(d))
        if not config.tie_word_embeddings:
            self.put("lm_head.weight", _parameter(padded if size > 1 else config.vocab_size, d))
        for layer, kind in enumerate(config.layers_block_type):
            own = {
                "input_layernorm.weight": (d,),
                "post_attention_layernorm.weight": (d,),
                "mlp.gate_up_proj.weight": (2 * f, d),
                "mlp.down_proj.weight": (d, f),
            }
            if kind == "attention":
                own |= {"qkv_proj.weight": (sum(self.parts["qkv_proj"]), d), "o_proj.weight": (d, queries)}
                own |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
            else:
                mixed = 2 * keys + values
                own |= {"linear_attn.conv1d.weight": (mixed, 1, config.linear_conv_kernel_dim), "linear_attn.out_proj.weight": (d, values)}
                own |= {"linear_attn.in_proj_qkvz.weight": (mixed + values, d), "linear_attn.in_proj_ba.weight": (2 * heads, d)}
                own |= {"linear_attn.norm.weight": (config.linear_value_head_dim,), "linear_attn.dt_bias": (heads,), "linear_attn.A_log": (heads,)}
            for name, shape in own.items():
                dtype = torch.float32 if name.endswith("A_log") else torch.bfloat16
                self.put(f"model.layers.{layer}.{name}", _parameter(*shape, dtype=dtype))

    def load_weights(self, weights) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            name = name.replace(".self_attn", "")
            for fused, published, part in MAPPING:
                if published in name:
                    self._load_fused(parameters[name.replace(published, fused)], fused, part, tensor)
                    break
            else:
                self._load_plain(parameters[name], name, tensor)

    def _load_fused(self, parameter, fused: str, part, tensor) -> None:
        if isinstance(part, tuple):
            whole = [self.parts[fused][i] * self.size for i in part]
            for i, chunk in zip(part, tensor.split(whole), strict=True):
                self._load_fused(parameter, fused, i, chunk)
            return
        width, offset = self.parts[fused][part], sum(self.parts[fused][:part])
        rank = self.kv_rank if fused == "qkv_proj" and part else self.rank
        parameter.data.narrow(0, offset, width).copy_(tensor.narrow(0, rank * width, width))

    def _load_plain(self, parameter, name: str, tensor) -> None:
        if name.endswith("conv1d.weight"):
            at, offset = 0, 0
            for width in self.parts["conv1d"]:
                parameter.data.narrow(0, at, width).copy_(tensor.narrow(0, offset + self.rank * width, width))
                at, offset = at + width, offset + width * self.size
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            start = min(self.rank * len(parameter), len(tensor))
            rows = min(len(parameter), len(tensor) - start)
            parameter.data.zero_()
            parameter.data[:rows].copy_(tensor[start : start + rows])
        elif name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            width = parameter.shape[1]
            parameter.data.copy_(tensor.narrow(1, self.rank * width, width))
        elif name.endswith(("A_log", "dt_bias")):
            parameter.data.copy_(tensor.narrow(0, self.rank * len(parameter), len(parameter)))
        else:
            parameter.data.copy_(tensor)


def ask(model: Model) -> dict:
    """What the server's route would answer."""
    answer = model.get_weights_by_name("intraskill.digest", 1 << 30, tp_size=model.size)
    return json.loads(bytes(int(number) for number in answer))
