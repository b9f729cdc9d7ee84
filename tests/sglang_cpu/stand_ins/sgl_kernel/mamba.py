"""Stand-ins for the causal convolution; see the package."""

import sglang.kernels.ops.attention.fla.layernorm_gated as layernorm_gated
import torch
import torch.nn.functional as F

from sgl_kernel import chunk_gated_delta_rule

layernorm_gated._use_cpu = True


def _activated(y, activation):
    return F.silu(y) if activation in ("silu", "swish") else y


def causal_conv1d_fn_cpu(
    x, weight, bias=None, activation=None, conv_states=None, has_initial_state=None, cache_indices=None, query_start_loc=None, seq_lens_cpu=None, **_
):
    """x [channels, T] holds sequences one after the other; the last inputs of each are kept in its row of conv_states."""
    kernel = weight.reshape(weight.shape[0], 1, weight.shape[-1]).float()
    out, ends = torch.zeros_like(x), query_start_loc.tolist()
    for i, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        if stop <= start:
            continue
        row = int(cache_indices[i])
        before = conv_states[row].float() if bool(has_initial_state[i]) else torch.zeros_like(conv_states[row]).float()
        whole = torch.cat([before, x[:, start:stop].float()], -1)
        y = F.conv1d(whole.unsqueeze(0), kernel, None if bias is None else bias.float(), groups=len(kernel))[0]
        out[:, start:stop] = _activated(y, activation).to(x.dtype)
        conv_states[row] = whole[:, 1 - kernel.shape[-1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(x, conv_states, weight, bias=None, activation=None, conv_state_indices=None, **_):
    kernel = weight.reshape(weight.shape[0], weight.shape[-1]).float()
    out = torch.empty_like(x)
    for i in range(len(x)):
        row = int(conv_state_indices[i])
        if row < 0:
            out[i] = 0
            continue
        whole = torch.cat([conv_states[row].float(), x[i].float()[:, None]], -1)
        y = (whole * kernel).sum(-1) + (0 if bias is None else bias.float())
        out[i] = _activated(y, activation).to(x.dtype)
        conv_states[row] = whole[:, 1:].to(conv_states.dtype)
    return out


def chunk_gated_delta_rule_cpu(**arguments):
    return chunk_gated_delta_rule(**arguments)
