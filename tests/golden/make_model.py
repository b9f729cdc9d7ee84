"""Makes tests/golden/model/*.npz: what transformers computes for tiny random Qwen3.5 models, for machines without torch.

    python tests/golden/make_model.py [--out=DIR]

Each file holds a config.json, weights under their published names (`tensor:NAME`), inputs, and float32 results: logits with right and left
padding, the gradient of the mean log-prob (`gradient:NAME`), 64 greedy tokens after each prompt; and the versions that made it. Nothing of this
project is imported here, so that the reference owes nothing to what it judges.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np

OUT = Path(__file__).resolve().parent / "model"
LENGTHS = (5, 33, 40)  # shorter than a chunk of 16, not a multiple of one, several
PROMPT, NEW = 11, 64

_BASE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}

SHAPES = {
    "plain": {},
    "two_values_a_key": {"linear_num_value_heads": 4, "num_key_value_heads": 2},
    "three_values_a_key": {"linear_num_value_heads": 6, "tie_word_embeddings": False},
    "four_values_a_key": {"linear_num_key_heads": 1, "linear_num_value_heads": 4},
    "two_full_layers": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "three_to_one": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "tie_word_embeddings": False,
        "linear_conv_kernel_dim": 3,
    },
}


def _padded(torch, tokens, side):
    width = max(LENGTHS)
    ids, mask = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, np.int64)
    for row, length in enumerate(LENGTHS):
        where = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, where], mask[row, where] = tokens[row, :length], 1
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def make(shape: str) -> dict[str, np.ndarray]:
    """The content of one file."""
    import torch
    import transformers
    from transformers.models import qwen3_5

    config = {**_BASE, **SHAPES[shape]}
    fields = {key: value for key, value in config.items() if key != "architectures"}
    model = qwen3_5.Qwen3_5ForCausalLM(qwen3_5.Qwen3_5TextConfig(**fields, attn_implementation="eager")).float().eval()
    rng = np.random.default_rng(sorted(SHAPES).index(shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Every tensor off its initial value: norms around what leaves a signal as it is, decays from slow to fast, matrices with gain one.
            drawn = rng.normal(size=parameter.shape)
            if parameter.ndim == 1:
                drawn = rng.uniform(-3, 1, parameter.shape) if name.endswith(("A_log", "dt_bias")) else 0.1 * drawn
                drawn = drawn + (1 if name.endswith("linear_attn.norm.weight") else 0)
            else:
                drawn = drawn * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.tensor(drawn.astype(np.float32)))
    tokens = rng.integers(0, config["vocab_size"], (len(LENGTHS), max(LENGTHS)), dtype=np.int32)
    prompts = rng.integers(0, config["vocab_size"], (2, PROMPT), dtype=np.int32)

    right = model(**_padded(torch, tokens, "right"), use_cache=False).logits
    with torch.no_grad():
        left = model(**_padded(torch, tokens, "left"), use_cache=False).logits
    picked = [torch.log_softmax(right[row, : n - 1], -1)[range(n - 1), tokens[row, 1:n].tolist()] for row, n in enumerate(LENGTHS)]
    torch.cat(picked).mean().backward()
    ids = torch.tensor(prompts, dtype=torch.long)
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__, "python": platform.python_version()}
    return {
        "config": np.array(json.dumps(config)),
        "versions": np.array(json.dumps(versions)),
        "lengths": np.array(LENGTHS, np.int32),
        "tokens": tokens,
        "prompts": prompts,
        "logits_right": right.detach().numpy(),
        "logits_left": left.numpy(),
        "greedy": greedy[:, PROMPT:].numpy().astype(np.int32),
        **{f"tensor:{name}": p.detach().numpy() for name, p in model.named_parameters()},
        **{f"gradient:{name}": p.grad.numpy() for name, p in model.named_parameters()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        np.savez_compressed(out / f"{shape}.npz", **make(shape))
        print(f"{out / shape}.npz: {(out / f'{shape}.npz').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
