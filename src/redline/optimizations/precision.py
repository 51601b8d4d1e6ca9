"""Precision: TF32, bf16, fp16 with a loss scaler, FP8. What is kept (weights, optimiser state, losses) stays
fp32 in all of them."""

from redline.config.recipe import Recipe
from redline.optimizations.entry import Claim, Optimization, needs_capability, needs_cuda
from redline.plan.plan import Hardware


def _fp16(recipe: Recipe, hardware: Hardware) -> str | None:
    if reason := needs_cuda(recipe, hardware):
        return reason
    if hardware.compute_capability >= (8, 0):
        return (
            "this GPU multiplies bf16 at the same rate, and bf16 needs no loss scaler (a host sync an update)"
        )
    return None


def _fp8(recipe: Recipe, hardware: Hardware) -> str | None:
    model = recipe.model
    sides = {
        "hidden_size": model.hidden_size,
        "ffn_size": model.ffn_size,
        "key/value width": model.head_size * model.kv_heads,
    }
    odd = [f"{name} {size}" for name, size in sides.items() if size % 16]
    if recipe.data.seq_len % 16:
        odd.append(f"seq_len {recipe.data.seq_len}")
    if odd:
        return f"FP8 products need sides that are multiples of 16, got {', '.join(odd)}"
    return needs_capability((8, 9), "FP8")(recipe, hardware)


ENTRIES = (
    Optimization(
        name="tf32",
        title="TF32 matrix products",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(source="seed 003 §10", words="1.2-1.5x on supported GPUs", low=1.2, high=1.5),
            Claim(source="seed 002 §5", words="enable TensorFloat-32"),
        ),
        off={"precision": "fp32"},
        on={"precision": "tf32"},
        why_not=needs_capability((8, 0), "TF32"),
        note="Worth nothing on top of bf16, where no fp32 product is left (gpt2-medium: 27.57 samples/s without it, 27.55 with, "
        "pytorch#70951).",
    ),
    Optimization(
        name="bf16",
        title="bf16 products and activations",
        workloads=("train", "finetune"),
        effect="rounding",
        claims=(
            Claim(source="seed 003 §1", words="mixed precision 2-3x", low=2.0, high=3.0),
            Claim(source="seed 004 §1", words="mixed precision 2-3x, zero accuracy loss", low=2.0, high=3.0),
        ),
        off={"precision": "fp32"},
        on={"precision": "bf16"},
        why_not=needs_capability((8, 0), "bf16 at full rate"),
        note="Weights and optimiser state stay fp32; what a layer multiplies is cast on the way.",
    ),
    Optimization(
        name="fp16",
        title="fp16 with a loss scaler",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(source="seed 003 §1", words="fp16=True, 2-3x", low=2.0, high=3.0),
            Claim(source="seed 004 §1", words="FP16 fallback with gradient scaling, 2-3x", low=2.0, high=3.0),
        ),
        off={"precision": "fp32"},
        on={"precision": "fp16"},
        why_not=_fp16,
        note="For GPUs without bf16. Without the scaler small gradients become 0 (torch.amp docs). Seed 003's project saw NaN in fp16.",
    ),
    Optimization(
        name="fp8",
        title="FP8 matrix products (torchao convert_to_float8_training)",
        workloads=("train",),
        effect="rounding",
        claims=(
            Claim(source="seed 002 §2", words="expected 2x on H100", low=2.0, high=2.0),
            Claim(
                source="torchao docs, training",
                words="Llama3-8B on 8 H100: +10 % row-wise, +25 % tensor-wise; below 1x on small products",
                low=1.1, high=1.25,
            ),
        ),
        off={"precision": "bf16"},
        on={"precision": "fp8"},
        why_not=_fp8,
        note="Only inside the blocks; the head stays bf16. Casting costs memory traffic, so narrow models lose.",
    ),
)  # fmt: skip
