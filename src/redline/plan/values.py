"""The table of plan values: what each may be, what it does to the numbers, what it needs, and how it is proved. The
planner, the tuner, the guard, `ablate` and `verify` read it. Runs without torch.

    VALUES["precision"].effect                                 # "rounding"
    why_not("attention", "cudnn", recipe, hardware)            # None if it is possible, else the reason
    why_not("cross_entropy", "fused", recipe, hardware, {"precision": "fp32"})

The catalogue (redline.optimizations) says who claims what about a value and what the tuner tries. A new plan value is
a line here; a rule in planner.py says why it is picked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from redline.config.recipe import (
    Attention,
    Compile,
    CrossEntropy,
    Precision,
    Recipe,
    Recompute,
    UpdateKernels,
)
from redline.plan.plan import PLANNED, Hardware, Plan

Effect = Literal["exact", "rounding"]
"""`exact`: the same sums in another order. `rounding`: the same mathematics in another precision or kernel."""
Beside = Mapping[str, Any]
"""Values of the same plan that are decided already."""
Need = Callable[[Recipe, Hardware, Beside], str | None]
"""Why a value is not possible, or None."""

HALF = ("bf16", "fp16", "fp8")
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch finds its allocator's setting. What the user wrote there wins over the plan."""
NEEDED_CAPABILITY = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}
"""The least CUDA compute capability with a precision in hardware; all GPUs have the others."""


def needs_cuda(_recipe: Recipe, hardware: Hardware, _beside: Beside) -> str | None:
    return None if hardware.kind == "cuda" else "needs a CUDA device, but this is a CPU"


def _capability(needed: tuple[int, int], what: str) -> Need:
    def why_not(recipe: Recipe, hardware: Hardware, beside: Beside) -> str | None:
        if (reason := needs_cuda(recipe, hardware, beside)) or hardware.compute_capability >= needed:
            return reason
        has = ".".join(map(str, hardware.compute_capability))
        return f"{what} needs compute capability {needed[0]}.{needed[1]}, {hardware.title} has {has}"

    return why_not


def _half(_recipe: Recipe, _hardware: Hardware, beside: Beside) -> str | None:
    precision = beside.get("precision")
    return None if precision is None or precision in HALF else f"needs half precision, this is {precision}"


def _unscaled(_recipe: Recipe, _hardware: Hardware, beside: Beside) -> str | None:
    if beside.get("precision") != "fp16":
        return None
    return "fp16's loss scaler reads every update's gradient norm, which a graph cannot wait for"


def needs_softmax(recipe: Recipe, _hardware: Hardware, _beside: Beside) -> str | None:
    kind = recipe.model.attention
    return None if kind == "softmax" else f"the model's attention is {kind}"


def _whole_sequences(recipe: Recipe, hardware: Hardware, beside: Beside) -> str | None:
    """Why packed rows would not take it; the update and the prompts of RL share one choice."""
    packed = recipe.workload in ("finetune", "rft") and beside.get("precision") in HALF
    taken = packed and hardware.compute_capability >= (8, 0)
    return "packed rows in half precision have kernels of their own" if taken else None


def _head_width(recipe: Recipe, _hardware: Hardware, _beside: Beside) -> str | None:
    width = recipe.model.head_size
    if width % 8 == 0 and width <= 128:
        return None
    return f"cuDNN's kernel takes head widths that are multiples of 8 up to 128, got {width}"


def _sides(recipe: Recipe, _hardware: Hardware, _beside: Beside) -> str | None:
    model = recipe.model
    return _fp8_sides(
        {
            "hidden_size": model.hidden_size,
            "ffn_size": model.ffn_size,
            "key/value width": model.head_size * model.kv_heads,
            "seq_len": recipe.data.seq_len,
        }
    )


def _head_sides(recipe: Recipe, _hardware: Hardware, _beside: Beside) -> str | None:
    sides = {"vocab_size": recipe.model.vocab_size, "hidden_size": recipe.model.hidden_size}
    return _fp8_sides(sides | {"softmax_candidates": recipe.train.softmax_candidates})


def _fp8_sides(sides: dict[str, int]) -> str | None:
    odd = [f"{name} {size}" for name, size in sides.items() if size % 16]
    return f"FP8 products need sides that are multiples of 16, got {', '.join(odd)}" if odd else None


def _brain_float(_recipe: Recipe, _hardware: Hardware, beside: Beside) -> str | None:
    precision = beside.get("precision")
    return None if precision in (None, "bf16", "fp8") else f"needs bf16 logits, this is {precision}"


def _steady_shapes(recipe: Recipe, _hardware: Hardware, _beside: Beside) -> str | None:
    return None if recipe.rl is None else "the rows of every rollout differ in length"


def _steady_update(recipe: Recipe, _hardware: Hardware, _beside: Beside) -> str | None:
    """Why a graph cannot repeat the update, as config/rules.py refuses it in a recipe."""
    if recipe.feedback is not None:
        return "feedback alignment runs a backward inside a backward, which is not captured"
    warms_up = recipe.train.orthogonality and recipe.train.orthogonality_warmup_steps
    return "train.orthogonality_warmup_steps changes the update that a graph repeats" if warms_up else None


@dataclass(frozen=True, kw_only=True)
class PlanValue:
    effect: Effect
    choices: tuple[Any, ...] = ()
    """Empty: any whole number from 1."""
    proof: tuple[str, ...]
    """The checks of `redline verify` that show it is in effect; empty: only its speed shows it."""
    shapes_memory: bool = False
    """Whether the memory of a pass depends on it."""
    lasting: bool = False
    """Whether a process keeps something of it (compiled code), so that another value needs a new one."""
    needs: Mapping[Any, tuple[Need, ...]] = field(default_factory=dict)
    """What some of the choices need."""


_SWITCH = (False, True)
_PRODUCTS = ("precision of matrix products", "TF32 state", "FP8 products")
_TF32 = _capability(NEEDED_CAPABILITY["tf32"], "TF32")

VALUES: dict[str, PlanValue] = {
    # ---- an update ----
    "precision": PlanValue(
        effect="rounding", choices=get_args(Precision), proof=_PRODUCTS, shapes_memory=True, lasting=True,
        needs={
            "tf32": (_TF32,),
            "bf16": (_capability(NEEDED_CAPABILITY["bf16"], "bf16 at full rate"),),
            "fp16": (needs_cuda,),
            "fp8": (_sides, _capability(NEEDED_CAPABILITY["fp8"], "FP8")),
        },
    ),
    "micro_batch": PlanValue(effect="exact", proof=("passes of an update",)),
    "accumulation": PlanValue(effect="exact", proof=("passes of an update",)),
    "compile": PlanValue(
        effect="rounding", choices=get_args(Compile), proof=("compilation", "no recompilation"),
        shapes_memory=True, lasting=True,
    ),
    "recompute": PlanValue(
        effect="exact", choices=get_args(Recompute), proof=("recomputation",), shapes_memory=True
    ),
    "attention": PlanValue(
        effect="rounding", choices=get_args(Attention), proof=("attention kernel",), shapes_memory=True,
        lasting=True,
        needs={
            "efficient": (needs_softmax, _whole_sequences),
            "math": (needs_softmax, _whole_sequences),
            "flash": (needs_softmax, _whole_sequences, _half, _capability((8, 0), "flash attention")),
            "cudnn": (
                needs_softmax, _whole_sequences, _half, _head_width, _capability((8, 0), "cuDNN attention")
            ),
        },
    ),
    "cross_entropy": PlanValue(
        effect="rounding", choices=get_args(CrossEntropy), proof=("cross entropy",), shapes_memory=True,
        needs={
            "fused": (_half, needs_cuda),
            "fp8": (_brain_float, _head_sides, _capability(NEEDED_CAPABILITY["fp8"], "an FP8 head")),
        },
    ),
    "update": PlanValue(effect="rounding", choices=get_args(UpdateKernels), proof=("optimiser kernels",)),
    "loss_chunks": PlanValue(effect="exact", proof=("pieces of the loss",), shapes_memory=True),
    "loader_threads": PlanValue(effect="exact", proof=("loader ahead of the step",)),
    "prefetch": PlanValue(effect="exact", proof=("loader ahead of the step",)),
    "allocator": PlanValue(
        effect="exact", choices=("", "expandable_segments:True"), proof=("allocator",), lasting=True,
        needs={"expandable_segments:True": (needs_cuda,)},
    ),
    "shards": PlanValue(effect="exact", proof=(), shapes_memory=True),
    # ---- an update of fine-tuning ----
    "tf32": PlanValue(effect="rounding", choices=_SWITCH, proof=(), lasting=True, needs={True: (_TF32,)}),
    "padded": PlanValue(effect="rounding", choices=_SWITCH, proof=("loss and gradients",)),
    "graph": PlanValue(
        effect="exact", choices=_SWITCH, proof=("CUDA graph of the update",),
        needs={True: (_steady_shapes, _steady_update, needs_cuda, _unscaled)},
    ),
    # ---- generation ----
    "slots": PlanValue(effect="rounding", proof=()),
    "cached": PlanValue(effect="rounding", choices=_SWITCH, proof=("log-probabilities of the engine",)),
    "merged": PlanValue(effect="rounding", choices=_SWITCH, proof=()),
    "refilled": PlanValue(effect="rounding", choices=_SWITCH, proof=()),
    "shared": PlanValue(effect="rounding", choices=_SWITCH, proof=()),
    "graphs": PlanValue(
        effect="exact", choices=_SWITCH, proof=("CUDA graphs of generation",), needs={True: (needs_cuda,)}
    ),
    "clear_cache": PlanValue(effect="exact", choices=_SWITCH, proof=()),
}  # fmt: skip


def why_not(
    name: str, value: Any, recipe: Recipe, hardware: Hardware, beside: Beside | None = None
) -> str | None:
    """Why a value is not possible for this recipe on this hardware with the plan's other values; None: it is."""
    reasons = (need(recipe, hardware, beside or {}) for need in VALUES[name].needs.get(value, ()))
    return next((reason for reason in reasons if reason), None)


def effect_of(before: Plan, after: Plan) -> Effect:
    """The most that the values in which two plans differ may do to the numbers."""
    changed = [name for name in PLANNED if getattr(before, name) != getattr(after, name)]
    return "exact" if all(VALUES[name].effect == "exact" for name in changed) else "rounding"
