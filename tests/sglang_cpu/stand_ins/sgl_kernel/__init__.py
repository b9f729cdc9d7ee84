"""Stand-ins, in plain torch, for the CPU kernels that Qwen3.5 needs under SGLang and that no published wheel contains.

Slow and accurate. Calls of any other kernel fail with its name.
"""

import torch
import torch.nn.functional as F

__version__ = "0.4.10"


def fused_sigmoid_mul_cpu(x, gate):
    return x.mul_(torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype))


def _gemma_norm(x, weight, eps, width):
    x = x.reshape(-1, width)
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1.0 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    q, gate = q_gate.reshape(len(q_gate), num_heads, 2 * head_dim).chunk(2, dim=-1)
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim), gate.reshape(-1, head_dim).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, key_heads, value_heads, key_dim, value_dim):
    tokens, mixed = len(qkvz), 2 * key_heads * key_dim + value_heads * value_dim
    z = qkvz[:, mixed:].reshape(tokens, value_heads, value_dim)
    return qkvz[:, :mixed].contiguous(), z.contiguous(), ba[:, :value_heads].contiguous(), ba[:, value_heads:].contiguous()


def fused_gdn_gating_cpu(a_log, a, b, dt_bias):
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), torch.sigmoid(b.float()).unsqueeze(0)


def fused_rmsnorm_gated_cpu(x, weight, z, eps):
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (scaled * F.silu(z.float())).to(x.dtype)


def _unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _delta_rule(q, k, v, decay, beta, state):
    """q, k [T, H, K], v [T, H, V], decay (log) and beta [T, H], state [H, V, K]."""
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + error[:, :, None] * k[t][:, None, :]
        out[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return out, state


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, initial_state_indices=None, **_):
    """Sequences lie one after the other in [1, T, ...]; the state of each is read from and written back to its row."""
    repeats = v.shape[2] // q.shape[2]
    queries = (_unit(q[0].float()) * q.shape[-1] ** -0.5).repeat_interleave(repeats, 1)
    keys, values = _unit(k[0].float()).repeat_interleave(repeats, 1), v[0].float()
    out, ends = torch.zeros_like(values), cu_seqlens.tolist()
    for i, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        if stop > start:
            row = int(initial_state_indices[i])
            span = slice(start, stop)
            out[span], state = _delta_rule(
                queries[span], keys[span], values[span], g[0, span].float(), beta[0, span].float(), initial_state[row].float()
            )
            initial_state[row] = state.to(initial_state.dtype)
    return out.to(v.dtype).unsqueeze(0), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens=None, **_):
    decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    each = torch.arange(q.shape[1] + 1)
    return chunk_gated_delta_rule(q, k, v, decay, beta, initial_state_source, each, initial_state_indices)[0]


for _name, _function in list(globals().items()):
    if _name.endswith("_cpu"):
        setattr(torch.ops.sgl_kernel, _name, _function)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    missing.__name__ = name
    return missing
