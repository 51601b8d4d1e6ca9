"""How fast a plan could run: the time of one token as a sum of what must be computed and what must be moved. No torch.

Each term is a floor of one kind of work at the rate this hardware gives it; they add up because a GPU does them one after another.
Left out: launch gaps, communication that is not hidden, and anything a compiler does worse than it could.
"""

from typing import Any

from redline.config.recipe import Recipe
from redline.plan import arithmetic
from redline.plan.plan import Hardware

ATTENTION_SHARE = 0.45
"""Rate of a causal flash-attention pass, forward and backward, against the rate of large matrix products (head width 64, H200)."""
COPY_SHARE = 0.85
"""What a large copy reaches of the datasheet bandwidth (H200: 4.17 of 4.8 TB/s)."""


def attainable_tokens_per_s(recipe: Recipe, hardware: Hardware, world_size: int, values: dict[str, Any]) -> float | None:
    """Tokens/s of all processes together, or None where the hardware's rates are not known."""
    rate, bandwidth = hardware.rate_tflops(values["precision"]), hardware.bandwidth_bytes_per_s
    dense = hardware.rate_tflops("bf16" if values["precision"] == "fp8" else values["precision"])
    if rate is None or dense is None or bandwidth is None:
        return None
    model, T = recipe.model, recipe.data.seq_len
    count = arithmetic.parameters(model)
    again = {"none": 3, "selective": 3, "full": 4}[values["recompute"]] / 3
    products = 6 * (again * count.hidden / rate + (count.matmul - count.hidden) / dense) / 1e12
    pairs = 6 * model.num_layers * model.num_heads * model.head_size * T  # half of the square: causal
    attention = again * pairs / (ATTENTION_SHARE * dense * 1e12)
    moved = again * _moved_bytes(model, values["precision"])
    update = 40 * count.total / world_size / (recipe.tokens_per_step / world_size)  # clip, AdamW: 10 passes of 4 bytes
    traffic = (moved + update) / (COPY_SHARE * bandwidth)
    return world_size / (products + attention + traffic)


def _moved_bytes(model: Any, precision: str) -> float:
    """Bytes per token that element-wise work reads and writes: norms, activation, residuals, rotation, and the logits' five passes."""
    a = arithmetic.BYTES[precision]
    inner = model.ffn_size * (3 if model.activation == "swiglu" else 2)
    rotation = 4 * (model.num_heads + model.kv_heads) * model.head_size if model.positions == "rope" else 0
    block = 14 * model.hidden_size + 3 * inner + rotation
    return float(a * (model.num_layers * block + 5 * model.vocab_size))
