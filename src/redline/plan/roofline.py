"""How fast a plan could run: the time of one token as a sum of what must be computed and what must be moved.
No torch.

Each term is a floor of one kind of work at the rate this hardware gives it; they add up because a GPU does
them one after another. Left out: launch gaps, communication that is not hidden, and anything a compiler does
worse than it could.
"""

from typing import Any

from redline.config.recipe import ModelConfig, Recipe
from redline.plan import arithmetic
from redline.plan.plan import Hardware

ATTENTION_SHARE = 0.28
"""Rate of causal attention, forward and backward, against the best matrix product (H200, cuDNN: 0.26 at head
width 64, 0.32 at 128)."""
COPY_SHARE = 0.6
"""What element-wise kernels reach of the datasheet bandwidth (H200; a plain copy reaches 0.89)."""


def attainable_tokens_per_s(
    recipe: Recipe, hardware: Hardware, world_size: int, values: dict[str, Any]
) -> float | None:
    """Tokens/s of all processes together, or None where the hardware's rates are not known."""
    rate, bandwidth = hardware.rate_tflops(values["precision"]), hardware.bandwidth_bytes_per_s
    dense = hardware.rate_tflops("bf16" if values["precision"] == "fp8" else values["precision"])
    if rate is None or dense is None or bandwidth is None:
        return None
    model, T = recipe.model, recipe.data.seq_len
    count = arithmetic.parameters(model)
    again = {"none": 3, "selective": 3, "full": 4}[values["recompute"]] / 3
    once_more = 2 * arithmetic.recomputed_weights(model) if values["recompute"] == "full" else 0
    products = ((6 * count.hidden + once_more) / rate + 6 * (count.matmul - count.hidden) / dense) / 1e12
    pairs = 6 * model.num_layers * model.num_heads * model.head_size * T  # half of the square: causal
    attention = again * pairs / (ATTENTION_SHARE * dense * 1e12)
    moved = again * _moved_bytes(model, values["precision"])
    update = 40 * count.total / recipe.tokens_per_step  # clip, AdamW: 10 passes of 4 bytes
    traffic = (moved + update) / (COPY_SHARE * bandwidth)
    return world_size / (products + attention + traffic)


def _moved_bytes(model: ModelConfig, precision: str) -> float:
    """Bytes per token that element-wise work reads and writes: norms, activation, residuals, rotation, three
    passes over the logits, and with FP8 the quantisation of what goes into every product, forward and
    backward."""
    a, D = arithmetic.BYTES[precision], model.hidden_size
    width, kv_width = model.num_heads * model.head_size, model.kv_heads * model.head_size
    inner = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    rotation = 4 * (width + kv_width) if model.positions == "rope" else 0
    block = a * (14 * D + 3 * (inner + model.ffn_size) + rotation)
    # amax, cast and transposed cast: 7 bytes for each element of inputs and output gradients
    if precision == "fp8":
        block += 7 * ((2 * D + width + model.ffn_size) + (width + 2 * kv_width + 2 * D + inner))
    return float(model.num_layers * block + a * 3 * model.vocab_size)
