"""The update of the weights, and the bookkeeping around it: optimiser kernels, loader, logging,
checkpoints."""

from redline.config.recipe import Recipe
from redline.optimizations.entry import Claim, Optimization, needs_cuda
from redline.plan.plan import Hardware


def _cores(_recipe: Recipe, hardware: Hardware) -> str | None:
    return (
        None
        if hardware.cores > 1
        else "this machine has one core: a second thread would take it from the step"
    )


ENTRIES = (
    Optimization(
        name="foreach-optimizer",
        title="AdamW over lists of tensors (foreach)",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(
                source="PyTorch docs, torch.optim",
                words="the for-loop is usually slower than foreach, which is the default",
            ),
        ),
        off={"update": "loop"},
        on={"update": "foreach"},
    ),
    Optimization(
        name="fused-optimizer",
        title="fused AdamW",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(source="seed 003, configuration", words="optim='adamw_torch_fused' (faster)"),
            Claim(source="seed 002 §7", words="reduced optimiser overhead"),
            Claim(source="PyTorch docs, torch.optim", words="in general fused > foreach > for-loop"),
        ),
        off={"update": "loop"},
        on={"update": "fused"},
        note="The update's share shrinks with the tokens in a batch: 40 bytes moved a parameter, once.",
    ),
    Optimization(
        name="loader-threads",
        title="more loader workers",
        workloads=("train",),
        effect="exact",
        claims=(
            Claim(
                source="seed 003 §3",
                words="num_workers=4: 1.5-2x, especially with slower storage",
                low=1.5,
                high=2.0,
            ),
            Claim(source="seed 002 §3", words="8 workers"),
        ),
        off={"loader_threads": 1},
        on={"loader_threads": 4},
        why_not=_cores,
        note=(
            "Only where a step waits for data (`data_wait_s` in the record). Tokens are memory-mapped and"
            " read by threads."
        ),
    ),
    Optimization(
        name="prefetch",
        title="batches prepared ahead",
        workloads=("train",),
        effect="exact",
        claims=(
            Claim(source="seed 003 §3", words="prefetch_factor=2, part of 1.5-2x", low=1.5, high=2.0),
            Claim(source="seed 002 §3", words="prefetch_factor=4"),
        ),
        off={"prefetch": 1},
        on={"prefetch": 4},
        note="prefetch_factor=2 is torch's default already, where there are workers.",
    ),
    Optimization(
        name="pinned-memory",
        title="page-locked batches, copied while the GPU computes",
        workloads=("train",),
        effect="exact",
        claims=(Claim(source="seed 003 §3", words="pin_memory=True, part of 1.5-2x", low=1.5, high=2.0),),
        standing="built in",
        why_not=needs_cuda,
        note=(
            "The loader pins on every GPU: a batch of 64 x 1024 tokens is 1 MiB, and its copy overlaps the"
            " step."
        ),
    ),
    Optimization(
        name="memory-map",
        title="memory-mapped token shards",
        workloads=("train",),
        effect="exact",
        claims=(
            Claim(
                source="seed 002 §3",
                words="memory-mapped option for maximum I/O performance; streaming; pre-allocated collator",
            ),
        ),
        standing="built in",
        note="`redline data build` writes them; `data.stream` tokenises while training instead.",
    ),
    Optimization(
        name="logging-cadence",
        title="logging less often",
        workloads=("train", "finetune"),
        effect="exact",
        claims=(Claim(source="seed 003 §7", words="logging_steps 10 to 50: 2-5 %", low=1.02, high=1.05),),
        standing="built in",
        note=(
            "Every update is logged without making the GPU wait; `redline bench train` measures what that"
            " costs: under 0.5 %."
        ),
    ),
    Optimization(
        name="checkpoint-cadence",
        title="fewer, smaller checkpoints",
        workloads=("train", "finetune"),
        effect="exact",
        claims=(Claim(source="seed 003 §6", words="save per epoch, weights only: faster saves"),),
        standing="built in",
        note=(
            "Checkpoints are written behind the next updates; `events.jsonl` holds what each stalled. Without"
            " optimiser state a run cannot be resumed to the same bits, so it is always saved."
        ),
    ),
)
