"""What memory buys: recomputation, the size of a pass, the loss in pieces, the allocator."""

from redline.config.recipe import Recipe
from redline.optimizations.entry import Claim, Optimization, needs_cuda
from redline.plan.plan import Hardware

SMALL_PASS = 8
"""Sequences in a pass of the naive plan: seed 002's own. Where the batch is no multiple of it, its largest
divisor below."""


def _small_batch(recipe: Recipe, _hardware: Hardware) -> str | None:
    batch = recipe.train.batch_size
    return None if batch > 1 else f"the batch is {batch} sequence: it cannot be cut"


def _fused_loss(recipe: Recipe, hardware: Hardware) -> str | None:
    return needs_cuda(recipe, hardware)


ENTRIES = (
    Optimization(
        name="no-recompute",
        title="activation checkpointing off",
        workloads=("train", "finetune"),
        effect="exact",
        claims=(Claim(source="seed 003 §2", words="20-30 % faster, memory +30-40 %", low=1.2, high=1.3),),
        off={"recompute": "full"},
        on={"recompute": "none"},
        note=(
            "Full recomputation is 8 FLOPs a weight and token instead of 6: at most 1.33x where only matrix"
            " products take time."
        ),
    ),
    Optimization(
        name="selective-recompute",
        title="selective instead of full recomputation",
        workloads=("train",),
        effect="exact",
        claims=(
            Claim(
                source="Korthikanti et al., arXiv 2205.05198",
                words="with sequence parallelism, 530B on 2,240 A100: 29 % faster than full recomputation",
                low=1.29,
                high=1.29,
            ),
        ),
        off={"recompute": "full"},
        on={"recompute": "selective"},
        note=(
            "Keeps matrix products and attention, redoes the rest. The paper's redoes the attention scores"
            " and keeps the rest."
        ),
    ),
    Optimization(
        name="recompute",
        title="activation checkpointing on",
        workloads=("train",),
        effect="exact",
        claims=(Claim(source="seed 002 §7", words="enabled with use_reentrant=False, as an optimisation"),),
        off={"recompute": "none"},
        on={"recompute": "full"},
        note="Saves memory and costs up to a third of the step. The seed turns it on at 11 % of the memory.",
    ),
    Optimization(
        name="micro-batch",
        title="larger passes, less accumulation",
        workloads=("train",),
        effect="exact",
        claims=(
            Claim(source="seed 000 §4", words="16 x 2 to 32 x 1 passes, training 1.5-2x", low=1.5, high=2.0),
            Claim(
                source="seed 002 §1", words="8 x 16 to 32-64 x 2-4, 4-8x GPU utilisation", low=4.0, high=8.0
            ),
            Claim(
                source="seed 002, automatic batch size", words="32-64 on 80 GB, 16-32 on 40 GB, 8-16 below"
            ),
            Claim(source="seed 003 §9", words="64 without checkpointing, or 8 x 8"),
        ),
        off={"micro_batch": SMALL_PASS},
        on={"micro_batch": None},
        why_not=_small_batch,
        note=(
            "The batch stays the recipe's. On: the planner's size, where speed levels off; larger only takes"
            " memory."
        ),
    ),
    Optimization(
        name="cross-entropy",
        title="fused cross entropy",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(
                source="Liger, arXiv 2410.10989",
                words="20 % more throughput on average than Hugging Face, with its other kernels",
                low=1.2,
                high=1.2,
            ),
        ),
        off={"cross_entropy": "torch"},
        on={"cross_entropy": "fused"},
        why_not=_fused_loss,
        note="One kernel turns the logits into their gradient in place, in half precision.",
    ),
    Optimization(
        name="loss-chunks",
        title="output head and loss in 8 pieces",
        workloads=("train",),
        effect="exact",
        claims=(
            Claim(
                source="Cut Your Losses, arXiv 2411.09009",
                words=(
                    "by a kernel, not pieces: the loss of Gemma 2 (2B) from 24 GB to 1 MB, without"
                    " sacrificing speed"
                ),
                low=1.0,
                high=1.0,
            ),
            Claim(
                source="torchtitan#996",
                words="the loss in pieces: 7 GiB less on Llama3-8B at the same throughput",
                low=1.0,
                high=1.0,
            ),
        ),
        off={"loss_chunks": 1},
        on={"loss_chunks": 8},
        note="Saves memory: the logits of one piece at a time. The head is computed twice.",
    ),
    Optimization(
        name="allocator",
        title="expandable segments",
        workloads=("train",),
        effect="exact",
        claims=(Claim(source="seed 002 §5", words="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),),
        off={"allocator": ""},
        on={"allocator": "expandable_segments:True"},
        why_not=needs_cuda,
        note=(
            "Against fragmentation; a matter of speed only where shapes change near full memory (NeMo#9061)."
            " torch now calls the variable PYTORCH_ALLOC_CONF and keeps the old name as an alias."
        ),
    ),
    Optimization(
        name="sharding",
        title="weights, gradients and optimiser state spread over the GPUs (FSDP)",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(
                source="seed 001, FSDP configuration", words="strategy='fsdp', with gradient checkpointing"
            ),
        ),
        standing="built in",
        note=(
            "FSDP2 under torchrun, block by block; one GPU has nothing to spread. It buys memory and costs"
            " communication."
        ),
    ),
)
