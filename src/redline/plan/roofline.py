"""How fast a plan could run: the time of one pass as a sum of what must be computed and what must be moved, or
what the host needs to launch it. No torch.

Each term is a floor of one kind of work at the rate this hardware gives it; they add up because a GPU does
them one after another. The host launches while the GPU computes, so the slower of the two decides: full
passes are bound by the GPU, passes of one or two sequences by the host. Left out: communication (capacity.py), and
anything a compiler does worse than it could.
"""

from collections.abc import Sequence
from typing import Any

from redline.config.recipe import ModelConfig, Recipe
from redline.plan import arithmetic
from redline.plan.plan import Hardware, Plan
from redline.plan.predict import longest_row
from redline.record.units import format_duration

ATTENTION_SHARE = {"cuda": (0.28, 0.32), "cpu": (1.0, 1.0)}
"""Rate of causal attention against the best product, for heads below 128 and others (H200; CPUs: a guess)."""
FAVOR_SHARE = {"cuda": 0.115, "cpu": 1.0}
"""The same for kernel attention, slowed by exponentials and sums (H200, 512 to 8,192 tokens)."""
COPY_SHARE = {"cuda": 0.6, "cpu": 1.0}
"""Share of the bandwidth that element-wise kernels reach: on an H200 of the datasheet's, on a CPU of a measured copy's."""
LAUNCHES_A_LAYER = 125
"""Launches of tiny kernels that cost the host as much as a layer in a pass, forward and backward: 124M on an H200,
compiled, took 16 ms per pass where a launch took 10.3 us (benchmarks/closed-loop)."""
LAUNCH_S = 10e-6
"""Seconds per launch where none was measured: the host of the H200 above."""
UPDATE_LAUNCHES = 1_450
"""The same for what comes once per update: clipping, the optimiser, the loop. With Muon's batched kernels, 8 layers and 16
sequences took that host 25.2 to 33.8 ms, 15 to 23 more than a pass (LOG.md); we take the least, so that what is captured
does pay."""
CAPTURE_S = 2.0
"""Most seconds that capturing an update costs at the start of a run (an H200: 1 to 2 s)."""
MOST_CAPTURED_PASSES = 8
"""Passes in one graph, unless it is pinned: each adds a thousand kernels to what is captured and kept."""
FILL_S, RATED_TOKENS = 0.31e-3, 65_536
"""GPU seconds of a layer that a small pass loses, as kernels start and drain. The rates above contain it at
RATED_TOKENS. Fitted on an H200 to 124M at micro-batch 8, 32 and 128 against 64 (LOG.md)."""
CPU_PASS_S = (1.2e-3, 1.3e-3)
"""Seconds that torch takes on a CPU to dispatch a pass, and each layer in it (measured on a Xeon)."""


def attainable_tokens_per_s(
    recipe: Recipe, hardware: Hardware, world_size: int, values: dict[str, Any]
) -> float | None:
    """Tokens/s of all processes in passes of `micro_batch` sequences, or None if the hardware's rates are unknown."""
    full = roofline_tokens_per_s(recipe, hardware, world_size, values)
    if full is None:
        return None
    tokens = values["micro_batch"] * longest_row(recipe)
    work_s, layers = tokens * world_size / full, recipe.model.num_layers
    if hardware.kind == "cpu":
        return world_size * tokens / (work_s + CPU_PASS_S[0] + CPU_PASS_S[1] * layers)
    fill_s = FILL_S * layers * max(0.0, 1 - tokens / RATED_TOKENS)
    return world_size * tokens / max(work_s + fill_s, 0.0 if values["graph"] else launch_s(recipe, hardware))


def launch_s(recipe: Recipe, hardware: Hardware) -> float:
    """The time the host of a GPU needs to launch one pass: no pass is faster, however few its tokens."""
    return LAUNCHES_A_LAYER * recipe.model.num_layers * (hardware.launch_latency_s or LAUNCH_S)


def captured_pays(recipe: Recipe, hardware: Hardware, values: dict[str, Any]) -> tuple[bool, str]:
    """Whether the host would hold up pre-training on one GPU, so that a CUDA graph of its update pays, and why."""
    passes = recipe.rows_per_update // values["micro_batch"]
    if passes > MOST_CAPTURED_PASSES:
        return False, f"an update of {passes} passes is too large for one graph"
    speed = attainable_tokens_per_s(recipe, hardware, 1, {**values, "graph": True})
    if speed is None:
        return False, "the time of an update on this GPU is not known: its rates are missing"
    once_s = UPDATE_LAUNCHES * (hardware.launch_latency_s or LAUNCH_S)
    gpu_s, host_s = recipe.tokens_per_step / speed, passes * launch_s(recipe, hardware) + once_s
    gpu, host = format_duration(gpu_s), format_duration(host_s)
    times = f"the GPU should need {gpu} for an update, and the host {host} to launch it"
    if gpu_s >= host_s:
        return False, f"{times}, so the GPU does not wait"
    hours, updates = recipe.train.max_hours, recipe.train.steps
    if hours is not None:
        updates = min(updates, int(hours * 3600 / host_s))
    if (host_s - gpu_s) * updates < CAPTURE_S:
        return False, f"{times}; in {updates} updates that is less than capturing takes"
    return True, f"{times} kernel by kernel; as one graph it is a single launch"


def launch_bound(recipe: Recipe, plan: Plan) -> bool:
    """Whether the host, and not the GPU, sets the speed that is predicted for the plan."""
    speed, tokens = plan.prediction.attainable_tokens_per_s, plan.micro_batch * recipe.data.seq_len
    if plan.hardware.kind == "cpu" or speed is None or plan.graph:
        return False
    return tokens * plan.world_size / speed <= 1.001 * launch_s(recipe, plan.hardware)


def roofline_tokens_per_s(
    recipe: Recipe, hardware: Hardware, world_size: int, values: dict[str, Any]
) -> float | None:
    """The same for passes so large that neither launches nor the edges of kernels count."""
    rate, bandwidth = hardware.rate_tflops(values["precision"]), hardware.bandwidth_bytes_per_s
    dense = hardware.rate_tflops("bf16" if values["precision"] == "fp8" else values["precision"])
    if rate is None or dense is None or bandwidth is None:
        return None
    model, T = recipe.model, longest_row(recipe)
    count = arithmetic.parameters(model)
    again = {"none": 3, "selective": 3, "full": 4}[values["recompute"]] / 3
    once_more: float = 2 * arithmetic.recomputed_weights(model) if values["recompute"] == "full" else 0
    if (dfa := recipe.feedback) is not None:
        below = arithmetic.feedback_blocks(model, dfa) / model.num_layers
        again = below * 4 / 3 + (1 - below) * again
        once_more = (1 - below) * once_more + 2 * below * count.hidden
        once_more += 2 * arithmetic.feedback_weights(model, dfa)
    # Weights frozen under adapters get no gradients.
    learning, each = count.total, 6
    if recipe.lora is not None:
        learning, each = arithmetic.adapter_parameters(model, recipe.lora), 4
        once_more += 6 * learning
    fp8_head = values["cross_entropy"] == "fp8"
    head = (hardware.rate_tflops("fp8") if fp8_head else None) or dense
    rows = recipe.train.softmax_candidates or model.vocab_size
    products = (each * count.hidden + once_more) / rate + each * rows * model.hidden_size / head
    if model.attention == "favor":
        pairs, share = arithmetic.attention_flops(model, T), FAVOR_SHARE[hardware.kind]
    else:  # half of the square: causal
        pairs = arithmetic.attention_flops(model, T) // 2
        share = ATTENTION_SHARE[hardware.kind][model.head_size >= 128]
    attention = again * pairs / (share * dense * 1e12)
    moved = again * _moved_bytes(model, values["precision"], rows)
    moved += fp8_head * rows  # half of the write is saved, and the gradient transposed
    update = 40 * learning / (recipe.rows_per_update * T)  # clip, AdamW: 10 passes of 4 bytes
    traffic = (moved + update) / (COPY_SHARE[hardware.kind] * bandwidth)
    return world_size / (products / 1e12 + attention + traffic)


def _moved_bytes(model: ModelConfig, precision: str, rows: int) -> float:
    """Bytes per token that element-wise work moves: norms, activation, residuals, rotation, three passes over the
    logits (of so many rows of the head), and FP8's quantisation."""
    a, D = arithmetic.BYTES[precision], model.hidden_size
    width, kv_width = model.num_heads * model.head_size, model.kv_heads * model.head_size
    inner = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    rotation = 4 * (width + kv_width) if model.positions == "rope" else 0
    block = a * (14 * D + 3 * (inner + model.ffn_size) + rotation)
    # amax, cast and transposed cast: 7 bytes for each element of inputs and output gradients
    if precision == "fp8":
        block += 7 * ((2 * D + width + model.ffn_size) + (width + 2 * kv_width + 2 * D + inner))
    return float(model.num_layers * block + a * 3 * rows)


def generation_floor_s(
    model: ModelConfig,
    *,
    prompts: int,
    prompt_tokens: int,
    new_tokens: Sequence[int],
    slots: int,
    bytes_per_value: int,
    bytes_per_s: float,
    flops_per_s: float,
    shared: bool,
) -> float:
    """Least time for sequences of `prompt_tokens` and their own `new_tokens`, at most `slots` at a time. `shared`: a
    prompt's keys and values are read once per step for all of its samples."""
    count, read_by = arithmetic.parameters(model), len(new_tokens) / prompts if shared else 1
    # the first new token comes from the prompt's pass, the others from steps that read all tokens before theirs
    decoded = [length - 1 for length in new_tokens]
    steps = max(max(decoded), -(-sum(decoded) // slots))
    prompt_reads = sum(decoded) * prompt_tokens
    own_reads = sum(length * (length + 1) // 2 for length in decoded)
    kv_bytes = 2 * model.num_layers * model.kv_heads * model.head_size * bytes_per_value
    read_bytes = steps * count.matmul * bytes_per_value + kv_bytes * (own_reads + prompt_reads / read_by)
    prefill = prompts * (count.hidden * prompt_tokens + model.vocab_size * model.hidden_size)
    attended = prompt_reads + own_reads + prompts * prompt_tokens * (prompt_tokens + 1) // 2
    attention = 4 * model.num_layers * model.num_heads * model.head_size * attended
    flops = 2 * (prefill + count.matmul * sum(decoded)) + attention
    return read_bytes / bytes_per_s + flops / flops_per_s
