"""Operations and bytes of Qwen3.5 by formula, written without looking at the program: the check on `work`, and the whole plan where none is compiled.

T tokens in a row of one episode, M of them trained on; all figures are for one row.
"""

from intraskill.models.qwen35 import splash
from intraskill.models.qwen35.config import ModelConfig


def num_layers(config: ModelConfig) -> tuple[int, int]:
    """Linear and full attention layers."""
    full = config.num_layers // config.full_attention_interval
    return config.num_layers - full, full


def matrices(config: ModelConfig) -> dict[str, int]:
    """Entries of the matrices that a token is multiplied with: of the projections of one layer of either kind, its MLP, and the vocabulary."""
    d = config.hidden_size
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads * config.linear_value_head_dim
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "linear": d * (2 * keys + 3 * values + 2 * config.linear_num_value_heads),  # q, k; v, z, out; beta, decay
        "full": d * (3 * heads + 2 * kv_heads),  # q, gate, out; k, v
        "mlp": 3 * d * config.intermediate_size,
        "vocabulary": d * config.vocab_size,
    }


def model_flops(config: ModelConfig, length: int, trained: int, *, backward: bool = True) -> float:
    """What the model asks for: each product once forward and twice backward, causal pairs only, the delta rule token by token."""
    linear, full = num_layers(config)
    sizes = matrices(config)
    products = linear * sizes["linear"] + full * sizes["full"] + config.num_layers * sizes["mlp"]
    pairs = length * (length + 1) / 2
    attention = full * 4 * config.num_heads * config.head_dim * pairs
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    rule = linear * 6 * state * length  # read, write, read out
    forward = 2 * products * length + attention + rule + 2 * sizes["vocabulary"] * trained
    return forward * (3 if backward else 1)


def delta_flops(config: ModelConfig, length: int) -> float:
    """Forward products of one layer's delta rule in chunks of C tokens: decays, pairs, inverse, solution, reads and writes of the state."""
    c, keys, values = config.chunk_size, config.linear_num_key_heads, config.linear_num_value_heads
    k, v = config.linear_key_head_dim, config.linear_value_head_dim
    doublings = (c // 8).bit_length() - 1
    inverse = 2 * c**3 * (4 + 2 * doublings)
    a_value_head = 2 * (c * c * (c + 1) + c * c * (v + k) + 3 * c * k * v + c * c * v) + inverse
    return (keys * 4 * c * c * k + values * a_value_head) * -(-length // c)


def executed_flops(config: ModelConfig, length: int, trained: int, *, backward: bool = True) -> float:
    """What the step does: forward, what remat does again, and backward."""
    linear, full = num_layers(config)
    sizes = matrices(config)
    projections = 2 * length * (linear * sizes["linear"] + full * sizes["full"])
    mlp = 2 * length * config.num_layers * sizes["mlp"]
    delta = linear * delta_flops(config, length)
    vocabulary = 2 * trained * sizes["vocabulary"]
    splashed = config.attention == "splash"
    pairs = splash.tiles_computed(length) * splash.tile(length) ** 2 if splashed else tiled_pairs(length)
    product = full * 2 * config.num_heads * config.head_dim * pairs  # one of the two of attention
    if not backward:
        return projections + mlp + delta + 2 * product + vocabulary
    pieces = 0 < config.piece_length < length
    again = config.remat != "none"
    # In pieces everything but attention is done again where its gradient is computed; layers that remat does again as well count twice.
    entered = 2 * length * full * config.hidden_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # query, key, value
    twice = (projections + mlp + delta if config.remat == "block" else entered if again else 0.0) if pieces else 0.0
    # The MLP comes last: of what is done again its second product is not needed.
    mlp_again = 2 / 3 if pieces or config.remat == "layer" else (1.0 if again else 0.0)
    return (
        (projections + delta) * (3 + (again or pieces))
        + mlp * (3 + mlp_again)
        + twice
        + product * (2 + 2 * again + (7 if splashed else 5))  # backward: scores again; the kernel's two parts each do scores and their gradient
        + vocabulary * 4
    )


def tiled_pairs(length: int) -> float:
    """Square tiles at and below the diagonal (`attention.attend_packed`)."""
    tile = min(1024, max(128, length // 16 // 128 * 128))
    blocks = -(-length // tile)
    return blocks * (blocks + 1) / 2 * tile**2


def stream_bytes(config: ModelConfig, length: int) -> float:
    """Operands and results of the projections' and the MLP's products in a gradient step, forward, done again, and twice backward."""
    linear, full = num_layers(config)
    sizes, d = matrices(config), config.hidden_size
    weights = linear * sizes["linear"] + full * sizes["full"] + config.num_layers * sizes["mlp"]
    # A product of D x N has T x (D + N) entries beside its matrix.
    wide = (weights / d) + 5 * d * config.num_layers
    return 4 * config.activation_dtype.itemsize * (weights + length * wide)


def activation_bytes(config: ModelConfig, length: int, trained: int) -> float:
    """What the backward pass keeps and what its widest layer needs, roughly: good for the order of magnitude."""
    item = config.activation_dtype.itemsize
    d, stream = config.hidden_size, length * config.hidden_size * item
    kept = {"layer": config.num_layers, "block": config.num_layers // config.full_attention_interval, "none": 0}[config.remat] * stream
    piece = min(config.piece_length or length, length)
    if piece < length:  # the states that pieces hand on
        states = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        kept += num_layers(config)[0] * length // piece * 4 * states
    mlp = piece * config.intermediate_size * item * 5 + 3 * d * config.intermediate_size * (item + 4)
    channels = config.linear_num_key_heads * config.conv_channels_per_head
    values = config.linear_num_value_heads * config.linear_value_head_dim
    linear = piece * ((2 * channels + 6 * values) * item + 4 * (6 * channels + 10 * config.linear_num_value_heads * config.chunk_size))
    heads = config.num_heads * config.head_dim
    full = length * 8 * heads * item
    widest = {"layer": max(mlp, linear, full), "block": mlp + full + (config.full_attention_interval - 1) * (mlp + linear)}
    layers = num_layers(config)
    working = widest.get(config.remat, layers[0] * linear + layers[1] * full + config.num_layers * mlp)
    return kept + working + 4 * stream + 3 * 4 * max(1 << 26, trained * d)
