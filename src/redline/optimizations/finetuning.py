"""Fine-tuning on short rows: packing, the update as one CUDA graph, the loader."""

from redline.optimizations.entry import Claim, Optimization, needs_capability, needs_cuda

ENTRIES = (
    Optimization(
        name="finetune-tf32",
        title="TF32 beside mixed precision",
        workloads=("finetune",),
        effect="rounding",
        claims=(Claim(source="seed 003 §10", words="1.2-1.5x on supported GPUs", low=1.2, high=1.5),),
        off={"tf32": False},
        on={"tf32": True},
        why_not=needs_capability((8, 0), "TF32"),
        note="With bf16 no fp32 product is left for it to speed up; alone it is `tf32`.",
    ),
    Optimization(
        name="packing",
        title="rows packed without padding",
        workloads=("finetune",),
        effect="rounding",
        claims=(
            Claim(source="trl#3526", words="packing, Qwen2.5-0.5B on tldr: 3.7x", low=3.7, high=3.7),
            Claim(
                source="transformers#31629",
                words="padding-free, Llama-2-7B: 1,269 to 1,746 tokens/s",
                low=1.38,
                high=1.38,
            ),
            Claim(
                source="unsloth#3672",
                words="padding-free, Llama-3-8B: 96 s to 52 s, 1.85x",
                low=1.85,
                high=1.85,
            ),
        ),
        off={"padded": True},
        on={"padded": False},
        note=(
            "The seeds pad rows of about 45 tokens to 128: two thirds of the work. Pre-training reads windows"
            " of a token stream, which hold no padding."
        ),
    ),
    Optimization(
        name="cuda-graphs",
        title="the whole update as one CUDA graph",
        workloads=("finetune",),
        effect="exact",
        claims=(
            Claim(
                source="seed 003 §5",
                words="torch.compile mode='reduce-overhead' (CUDA graphs), 1.2-1.5x",
                low=1.2,
                high=1.5,
            ),
            Claim(
                source="PyTorch blog, CUDA graphs, October 2021",
                words="1.12x on BERT (4,096 GPUs) to 1.7x on Mask R-CNN (272 GPUs)",
                low=1.12,
                high=1.7,
            ),
        ),
        off={"graph": False},
        on={"graph": True},
        why_not=needs_cuda,
        note=(
            "An update on some 1,500 tokens takes the GPU milliseconds and the host, launching kernel by"
            " kernel, over a hundred."
        ),
    ),
    Optimization(
        name="finetune-workers",
        title="loader workers in fine-tuning",
        workloads=("finetune",),
        effect="exact",
        claims=(
            Claim(
                source="seed 003 §3", words="num_workers=4, pin_memory, prefetch 2: 1.5-2x", low=1.5, high=2.0
            ),
        ),
        standing="built in",
        note=(
            "A thousand rows are a hundred kilobytes: they are tokenised once and lie in memory, so there is"
            " nothing to wait for."
        ),
    ),
    Optimization(
        name="finetune-passes",
        title="an update in one pass",
        workloads=("finetune",),
        effect="exact",
        claims=(
            Claim(source="seed 000 §4", words="batch 16 x 2 to 32 x 1: training 1.5-2x", low=1.5, high=2.0),
            Claim(source="seed 003 §9", words="batch 64, or 8 x 8 in less memory"),
        ),
        standing="built in",
        note=(
            "32 rows of about 45 tokens are 1,440 positions: one pass, and smaller ones only where memory"
            " does not hold it. For pre-training it is a switch: micro-batch."
        ),
    ),
    Optimization(
        name="finetune-optimizer",
        title="fused AdamW in fine-tuning",
        workloads=("finetune",),
        effect="rounding",
        claims=(Claim(source="seed 003, configuration", words="optim='adamw_torch_fused' (faster)"),),
        standing="built in",
        note=(
            "One kernel over the adapters, 2 % of the weights. For pre-training it is a switch:"
            " fused-optimizer."
        ),
    ),
)
