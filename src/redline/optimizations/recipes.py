"""What is sold as speed and is another training: batch, sequence length, vocabulary, optimiser, schedule.
Measured in tokens/s and reported as a recipe change; never kept."""

from dataclasses import replace

from redline.config.recipe import Recipe
from redline.optimizations.entry import Claim, Optimization
from redline.plan.plan import Hardware

VOCABULARY_MULTIPLE = 64
TIMES_BATCH = 4


def _padded_vocabulary(recipe: Recipe) -> Recipe:
    size = -(-recipe.model.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return replace(recipe, model=replace(recipe.model, vocab_size=size))


def _vocabulary(recipe: Recipe, _hardware: Hardware) -> str | None:
    size = recipe.model.vocab_size
    return (
        f"{size:,} is a multiple of {VOCABULARY_MULTIPLE} already"
        if size % VOCABULARY_MULTIPLE == 0
        else None
    )


def _larger_batch(recipe: Recipe) -> Recipe:
    return replace(recipe, train=replace(recipe.train, batch_size=TIMES_BATCH * recipe.train.batch_size))


def _muon(recipe: Recipe) -> Recipe:
    return replace(recipe, train=replace(recipe.train, optimizer="muon"))


def _is_muon(recipe: Recipe, _hardware: Hardware) -> str | None:
    return "the recipe trains with Muon already" if recipe.train.optimizer == "muon" else None


ENTRIES = (
    Optimization(
        name="vocabulary-padding",
        title=f"vocabulary padded to a multiple of {VOCABULARY_MULTIPLE}",
        workloads=("train",),
        effect="changes-training",
        claims=(
            Claim(
                source="Karpathy on nanoGPT, 3 February 2023",
                words="50257 to 50304: ~25 %",
                low=1.25,
                high=1.25,
            ),
        ),
        change=_padded_vocabulary,
        why_not=_vocabulary,
        note=(
            "Rows that no token uses, so that products have aligned sides. They take part in the softmax and"
            " are trained down: a recipe change, though a mild one."
        ),
    ),
    Optimization(
        name="larger-batch",
        title=f"a batch {TIMES_BATCH} times as large",
        workloads=("train",),
        effect="changes-training",
        claims=(
            Claim(
                source="seed 002 §1",
                words="131K to 500K+ tokens a step, 4-8x GPU utilisation",
                low=4.0,
                high=8.0,
            ),
            Claim(
                source="seed 001 §1 and table", words="batch 4 to 128; throughput 24x", low=24.0, high=24.0
            ),
        ),
        change=_larger_batch,
        note=(
            "Fewer updates for the same tokens. The speed comes from larger passes, which `micro-batch` gives"
            " without it."
        ),
    ),
    Optimization(
        name="accumulation",
        title="gradient accumulation to a larger batch",
        workloads=("train", "finetune"),
        effect="changes-training",
        claims=(
            Claim(source="seed 003 §4", words="16 x 4 = 64 instead of 32; slightly slower per epoch"),
            Claim(source="seed 004 §2", words="larger effective batches, among its key optimisations"),
        ),
        standing="recipe",
        note=(
            "train.batch_size. Accumulation itself never makes a step faster: it is the plan's way to a batch"
            " that does not fit."
        ),
    ),
    Optimization(
        name="muon",
        title="Muon instead of AdamW",
        workloads=("train",),
        effect="changes-training",
        claims=(
            Claim(
                source="Moonlight, arXiv 2502.16982",
                words="~2x computational efficiency at compute-optimal training (not faster steps)",
            ),
            Claim(
                source="KellerJordan/Muon",
                words="the speed record to GPT-2 (small) performance by 1.35x (not faster steps)",
            ),
            Claim(
                source="modded-nanogpt, January 2025",
                words="~1.5x better sample-efficiency, under 2 % wall-clock overhead",
            ),
        ),
        change=_muon,
        why_not=_is_muon,
        note=(
            "The gain is in tokens to a loss. A step costs more: Newton-Schulz is 5 rounds of 3 products for"
            " every hidden matrix."
        ),
    ),
    Optimization(
        name="schedule",
        title="cosine schedule and warm-up, fewer epochs",
        workloads=("train", "finetune"),
        effect="changes-training",
        claims=(
            Claim(source="seed 003 §8", words="may converge in 2 epochs instead of 3", low=1.5, high=1.5),
            Claim(source="seed 002 §4", words="lr 4e-4 to 6e-4, warm-up 2000 to 1000: faster convergence"),
        ),
        standing="recipe",
        note="train.schedule, train.warmup_steps, train.lr.",
    ),
    Optimization(
        name="longer-sequences",
        title="longer prompts and answers, more samples",
        workloads=("generate",),
        effect="changes-training",
        claims=(Claim(source="seed 001 §2, §3", words="256 to 768 tokens, n 1 to 4: A100 efficiency"),),
        standing="recipe",
        note="More tokens a second because each step has more of them; the task is another one.",
    ),
)
