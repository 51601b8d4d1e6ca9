"""Attention kernels, and the compiler."""

from redline.config.recipe import Recipe
from redline.optimizations.entry import Claim, Optimization, needs_capability, needs_cuda
from redline.plan.plan import Hardware


def _cudnn(recipe: Recipe, hardware: Hardware) -> str | None:
    width = recipe.model.head_size
    if width % 8 or width > 128:
        return f"cuDNN's kernel takes head widths that are multiples of 8 up to 128, got {width}"
    return needs_capability((8, 0), "cuDNN attention")(recipe, hardware)


ENTRIES = (
    Optimization(
        name="sdpa",
        title="fused attention instead of explicit scores",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(
                source="FlashAttention, arXiv 2205.14135",
                words="GPT-2 at 1K tokens: up to 3x end to end over Hugging Face, 1.7x over Megatron-LM",
                low=1.7,
                high=3.0,
            ),
            Claim(source="seed 002 §7", words="efficient attention with proper scaling"),
        ),
        off={"attention": "math"},
        on={"attention": "auto"},
        note="The gain is in time and in memory: explicit scores take T x T numbers a head.",
    ),
    Optimization(
        name="flash",
        title="the flash kernel by name",
        workloads=("train",),
        effect="rounding",
        claims=(Claim(source="seed 002 §5", words="torch.backends.cuda.enable_flash_sdp(True)"),),
        off={"attention": "auto"},
        on={"attention": "flash"},
        why_not=needs_capability((8, 0), "flash attention"),
        note=(
            "torch has it enabled already and picks it by itself for half precision: asking for it changes"
            " nothing, but where torch prefers cuDNN's kernel (cudnn)."
        ),
    ),
    Optimization(
        name="cudnn",
        title="cuDNN's attention kernel",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(
                source="PyTorch 2.5 release blog",
                words="up to 75 % over FlashAttention-2 on H100",
                low=1.0,
                high=1.75,
            ),
        ),
        off={"attention": "auto"},
        on={"attention": "cudnn"},
        why_not=_cudnn,
        note=(
            "The claim is of the attention call alone. Opt-in after 2.5's bugs (pytorch#138522). From torch"
            " 2.10 with cuDNN 9.15.1 on, torch prefers it by itself on Hopper: there it is what `auto` runs."
        ),
    ),
    Optimization(
        name="compile",
        title="torch.compile of the blocks",
        workloads=("train", "finetune"),
        effect="rounding",
        claims=(
            Claim(
                source="seed 003 §5", words="1.2-1.5x after warm-up (mode reduce-overhead)", low=1.2, high=1.5
            ),
            Claim(
                source="torchtitan, 8B on 8 H100, December 2024",
                words="5,762 to 6,667 tokens/s a GPU",
                low=1.16,
                high=1.16,
            ),
            Claim(
                source="ml-engineering, B200, August 2026",
                words="training, default mode: 3.1-3.9x at 1B x 512 tokens, 0.94-0.95x at 8B x 8192",
                low=0.94,
                high=3.9,
            ),
        ),
        off={"compile": "off"},
        on={"compile": "default"},
        note="Costs 10 to 60 s before the first update; a short run does not earn it back.",
    ),
    Optimization(
        name="compile-autotune",
        title="torch.compile, max-autotune",
        workloads=("train",),
        effect="rounding",
        claims=(Claim(source="seed 002 §6", words="max-autotune with fullgraph instead of default"),),
        off={"compile": "default"},
        on={"compile": "max-autotune-no-cudagraphs"},
        why_not=needs_cuda,
        note=(
            "fullgraph is always on here, block by block. On an H200 with torch 2.11 a whole-model"
            " max-autotune died of an illegal memory access."
        ),
    ),
    Optimization(
        name="reduce-overhead",
        title="torch.compile, reduce-overhead, in pre-training",
        workloads=("train",),
        effect="rounding",
        claims=(Claim(source="seed 003 §5", words="mode='reduce-overhead', 1.2-1.5x", low=1.2, high=1.5),),
        standing="built in",
        note=(
            "The mode is CUDA graphs. A pre-training pass of thousands of tokens is not bound by launches;"
            " where an update is (fine-tuning), all of it is one graph: cuda-graphs."
        ),
    ),
)
