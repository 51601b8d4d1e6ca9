"""The seeds' own lists: which entries, in which order, on a recipe of which shape. What `redline ablate
seeds/000` ... `004` runs.

A study has parts, one a workload. The order is the document's, but for what would undo what stands before it:
bf16 comes before FP8, and FP8 after the compiler it needs. What a document leaves out and stands on
(adapters, the key/value cache) comes first; what it does not name at all is on from the start (bf16 in seed
001). What it names and no switch turns here (built in, or a matter of the recipe) is a row that says so. Any
other recipe is a study of the `train` entries in NAIVE_ORDER.
"""

from dataclasses import dataclass

from redline.optimizations.entry import Workload


@dataclass(frozen=True, kw_only=True)
class Part:
    workload: Workload
    names: tuple[str, ...]
    """Entries of the catalogue, in the order in which they are applied; those that are no switches are rows
    without a measurement."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What generation completes: as many prompts, samples of each, and lengths that are drawn evenly from 1
    to `new_tokens`."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int


NAIVE_ORDER = (
    "tf32", "bf16", "fp16", "sdpa", "fused-optimizer", "no-recompute", "compile", "vocabulary-padding",
    "micro-batch", "cross-entropy",
    "cudnn", "compile-autotune", "fp8", "loader-threads", "prefetch", "allocator", "loss-chunks",
    "larger-batch", "muon",
)  # fmt: skip
"""From fp32, eager, explicit attention, small passes, full recomputation and a for-loop optimiser, as the
seeds go about it."""

STUDIES: dict[str, tuple[Part, ...]] = {
    "seeds/000": (
        Part(
            workload="generate",
            names=(
                "lora-merge", "kv-cache", "batched-generation", "bf16-generation", "cache-clearing", "slots",
                "prefix-sharing",
                "cuda-graphs-decode",
            ),
        ),
        Part(workload="finetune", names=("finetune-passes", "bf16", "no-recompute", "packing", "cuda-graphs")),
    ),
    "seeds/001": (
        Part(
            workload="generate",
            names=(
                "kv-cache", "batched-generation", "longer-sequences", "reward-processes", "slots",
                "prefix-sharing", "cuda-graphs-decode",
            ),
        ),
    ),
    "seeds/002": (
        Part(
            workload="train",
            names=(
                "tf32", "bf16", "micro-batch", "larger-batch", "loader-threads", "prefetch", "memory-map",
                "schedule", "sdpa", "flash",
                "allocator", "compile", "compile-autotune", "fp8", "recompute", "fused-optimizer",
            ),
        ),
    ),
    "seeds/003": (
        Part(
            workload="finetune",
            names=(
                "bf16", "no-recompute", "finetune-workers", "accumulation", "compile", "checkpoint-cadence",
                "logging-cadence", "schedule",
                "finetune-passes", "finetune-tf32", "finetune-optimizer", "packing", "cuda-graphs",
            ),
        ),
    ),
    "seeds/004": (Part(workload="train", names=("bf16", "accumulation", "micro-batch", "sdpa", "fused-optimizer", "compile")),),
}  # fmt: skip

SAMPLES: dict[str, Samples] = {
    "seeds/000": Samples(prompts=32, samples=30, prompt_tokens=96, new_tokens=128),
    "seeds/001": Samples(prompts=32, samples=4, prompt_tokens=128, new_tokens=128),
}
"""Seed 000: its 30 samples a question, of the task's lengths. Seed 001: its prompts and answers before they
were lengthened, and its 4 samples."""


def study(name: str) -> tuple[Part, ...]:
    """The parts of a recipe's ablation, by the recipe's name."""
    return STUDIES.get(name, (Part(workload="train", names=NAIVE_ORDER),))
