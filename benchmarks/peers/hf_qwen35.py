"""Hugging Face's Qwen3.5 in torch on CPU, with the weights of one of our parameter trees."""

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig

SHAPE = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    full_attention_interval=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    max_positions=16_384,
)
"""7.9 M parameters in the proportions of the 4B: twice as many value heads as key heads, three linear layers to a full one, gated attention."""


def build(config: ModelConfig, params) -> Qwen3_5ForCausalLM:
    """The model in float32 with the kernels that Hugging Face chooses on CPU."""
    fields = {key: value for key, value in config.to_hf().items() if key != "architectures"}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields, attn_implementation="sdpa")).float().eval()
    tensors = {name: torch.tensor(np.asarray(tensor)) for name, tensor in hf.to_hf_tensors(config, params)}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not match: missing {missing}, unexpected {unexpected}")
    return model


def _cut(tokens: np.ndarray, at_once: int | None) -> tuple[torch.Tensor, ...]:
    return torch.tensor(tokens, dtype=torch.long).split(at_once or len(tokens))


def logits(model, tokens: np.ndarray, at_once: int | None = None) -> np.ndarray:
    """Of all rows, computed on `at_once` rows at a time (None: on all)."""
    with torch.no_grad():
        return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in _cut(tokens, at_once)]).numpy()


def loss_and_gradients(model, tokens: np.ndarray, at_once: int | None = None) -> tuple[float, dict[str, np.ndarray]]:
    """Mean cross-entropy of each next token, and its gradients by published name; computed on `at_once` rows at a time (None: on all)."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for ids in _cut(tokens, at_once):
        scores = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), ids[:, 1:].reshape(-1)) * (len(ids) / len(tokens))
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.numpy() for name, p in model.named_parameters()}


def decode(model, prompts: np.ndarray, num_new: int) -> np.ndarray:
    """Greedy continuation with Hugging Face's own cache and loop."""
    ids = torch.tensor(prompts, dtype=torch.long)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[:, prompts.shape[1] :].numpy()
