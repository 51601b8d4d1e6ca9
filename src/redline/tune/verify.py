"""Proof that what a plan says is really on, on this machine: each check passed, failed, not applicable or not
checked, with what was seen.

    checks = verify(recipe, plan, progress=print)
    [check for check in checks if check.status == "failed"]

The training loop itself runs a few updates on the recipe's data, at most two passes each; one pass and one
turn of the loop are profiled, and on a GPU torch's detector of waits watches more turns. Loss and gradients
of the first pass are compared with the same weights in fp32, eager, with explicit attention. Left out: speed
(`redline tune`), several processes, and fine-tuning, which verify_rft.py has.
"""

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.config.load import to_toml
from redline.config.recipe import IGNORED, Recipe
from redline.engine.decoder import Decoder, Start
from redline.engine.request import Sampling
from redline.measure.child import synchronize
from redline.measure.training import TrainingSubject
from redline.model.attention.state import Room
from redline.model.transformer import Transformer, build_model
from redline.plan.plan import Plan, to_json
from redline.train.step import LossScale
from redline.tune.evidence import Check, Seen, absent, checked, profiled, unseen

MOST_PASSES = 2
"""Of a long update: the others are the same."""
WARM_UP, WATCHED = 3, 5
"""Updates before anything is watched, which compile and fill the loader; and updates that are."""
DATA_SHARE = 0.05
"""Of the time of the updates, what they may wait for data."""
BAND = {
    "fp32": (1e-5, 0.9999),
    "tf32": (1e-3, 0.999),
    "bf16": (1e-2, 0.98),
    "fp16": (1e-2, 0.98),
    "fp8": (2e-2, 0.95),
}
"""Relative difference of the loss, and cosine of all gradients together, against fp32, by precision."""
NORM_BAND = 0.05
"""Relative difference of the gradient's norm; a tenth of it in fp32 and TF32."""
FUSED_ATTENTION = {
    "flash": (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "cudnn": ("aten::_scaled_dot_product_cudnn_attention",),
    "efficient": ("aten::_scaled_dot_product_efficient_attention",),
}
ATTENTION_KERNELS = ("flash", "fmha", "attention", "sdpa")
"""What the names of attention kernels hold, for the evidence."""
SYNCHRONISING = "called a synchronizing CUDA operation"
"""What torch's detector says of a wait; that it is a prototype, it says in other words, once."""
ATTENTION = "aten::scaled_dot_product_attention"
"""What the model calls, whatever kernel then runs; not seen in compiled code."""
EXPLICIT_ATTENTION = "aten::_scaled_dot_product_attention_math"
LOSS_OPERATIONS = {"torch": "aten::cross_entropy_loss", "fused": "_Fused"}
"""One a piece of the loss, of which several are computed again in the backward pass."""
UPDATE_OPERATIONS = {
    "fused": "aten::_fused_adamw_",
    "foreach": "aten::_foreach_addcdiv_",
    "loop": "aten::addcdiv_",
}
NO_GRAPHS = "a CPU has no CUDA graphs"
NO_KERNELS = (
    "the profiler saw no kernel on the GPU: it has no CUPTI, or may not use it here (another profiler, a"
    " container's rights)"
)
EMULATED = "a CPU emulates FP8: it multiplies rounded numbers in fp32"


@dataclass
class _Case:
    """What the checks look at."""

    recipe: Recipe
    plan: Plan
    training: TrainingSubject
    inputs_BT: Tensor
    targets_BT: Tensor
    in_pass: Seen
    in_update: Seen
    graphs_before: int
    graphs_after: int
    waited_share: float

    @property
    def model(self) -> Transformer:
        return self.training.trainer.learner.model

    @property
    def cuda(self) -> bool:
        return self.inputs_BT.is_cuda


def verify(recipe: Recipe, plan: Plan, *, progress: Callable[[str], None]) -> list[Check]:
    """Run a few updates under the plan and check every promise it makes. Raises what training would raise."""
    passes = min(MOST_PASSES, plan.accumulation)
    few = replace(recipe, train=replace(recipe.train, batch_size=passes * plan.micro_batch))
    progress(f"building the model and {WARM_UP + WATCHED} updates of {passes} x {plan.micro_batch} sequences")
    training = TrainingSubject({"recipe": to_toml(few), "plan": to_json(replace(plan, accumulation=passes))})
    try:
        batch = training.trainer.source.next()
        device = training.trainer.process.device
        inputs_BT, targets_BT = (
            t[: plan.micro_batch].to(device) for t in (batch.inputs_BT, batch.targets_BT)
        )
        numerics = _numerics(few, plan, training, inputs_BT, targets_BT)
        case = _watch(few, plan, training, inputs_BT, targets_BT, progress)
        return [numerics, *(check(case) for check in CHECKS)]
    finally:
        training.close()


def _watch(
    recipe: Recipe,
    plan: Plan,
    training: TrainingSubject,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    progress: Callable[[str], None],
) -> _Case:
    for _ in range(WARM_UP):
        training.step()
    training.drain()
    synchronize()
    before, waited_s, began_s = counters["stats"]["unique_graphs"], training.waited_s, time.perf_counter()
    for _ in range(WATCHED):
        training.step()
    training.drain()
    synchronize()
    waited_share = (training.waited_s - waited_s) / (time.perf_counter() - began_s)
    after = counters["stats"]["unique_graphs"]
    progress("profiling a pass and an update")
    model = training.trainer.learner.model
    with profiled() as in_pass:
        model(inputs_BT, targets_BT).backward()
    model.zero_grad(set_to_none=True)
    with profiled() as in_update:
        training.step()
        training.drain()
    return _Case(
        recipe, plan, training, inputs_BT, targets_BT, in_pass, in_update, before, after, waited_share
    )


# ---- numbers ----


def _numerics(
    recipe: Recipe, plan: Plan, training: TrainingSubject, inputs_BT: Tensor, targets_BT: Tensor
) -> Check:
    """Loss and gradients of one pass against the reference, from the same weights."""
    model = training.trainer.learner.model
    loss = model(inputs_BT, targets_BT)
    scale = 1.0 / int((targets_BT != IGNORED).sum())
    up = LossScale().value if plan.precision == "fp16" else 1.0  # as in training, or small gradients become 0
    (loss * scale * up).backward()
    gradients = {name: p.grad / up for name, p in model.named_parameters() if p.grad is not None}
    reference_loss, reference = _reference(recipe, model, inputs_BT, targets_BT, scale)
    found = agreement(plan.precision, float(loss.detach()) * scale, gradients, reference_loss, reference)
    model.zero_grad(set_to_none=True)
    return checked(
        "loss and gradients", found[0], f"fp32 reference, {inputs_BT.numel():,} tokens: {found[1]}"
    )


def agreement(
    precision: str,
    loss: float,
    gradients: Mapping[str, Tensor],
    reference_loss: float,
    reference: Mapping[str, Tensor],
) -> tuple[bool, str]:
    """Whether loss and gradients lie within the precision's band of the fp32 ones; and the figures."""
    difference = abs(loss / reference_loss - 1)
    # A weight without a gradient counts as one whose gradient is 0.
    dot = sum(
        float((gradients[name].double() * g.double()).sum())
        for name, g in reference.items()
        if name in gradients
    )
    norms = [
        math.sqrt(sum(float(g.double().square().sum()) for g in table.values()))
        for table in (gradients, reference)
    ]
    cosine, norm = dot / max(norms[0] * norms[1], 1e-300), abs(norms[0] / norms[1] - 1)
    band, least = BAND[precision]
    norm_band = NORM_BAND if precision in ("bf16", "fp16", "fp8") else NORM_BAND / 10
    holds = difference <= band and cosine >= least and norm <= norm_band  # false where one is nan
    return (
        holds,
        (
            f"loss differs by {difference:.1e} (band {band:g}), gradients have cosine {cosine:.6f} (at least"
            f" {least}), their norm differs by {norm:.1e} (band {norm_band:g})"
        ),
    )


def _reference(
    recipe: Recipe, model: Transformer, inputs_BT: Tensor, targets_BT: Tensor, scale: float
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients in fp32, sequence by sequence so that explicit attention fits."""
    reference = build_model(recipe.model, device=inputs_BT.device, seed=recipe.train.seed)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in reference.named_parameters():
            p.copy_(own[name])
    return reference_pass(reference, zip(inputs_BT, targets_BT, strict=True), scale)


@contextmanager
def plain_fp32() -> Iterator[None]:
    """No TF32 and explicit attention, whatever the plan that is being verified has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def reference_pass(
    reference: Transformer, sequences: Iterable[tuple[Tensor, Tensor]], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a model in fp32, one sequence (tokens, targets) at a time."""
    total = 0.0
    with plain_fp32():
        for x_T, y_T in sequences:
            loss = reference(x_T[None], y_T[None]) * scale
            loss.backward()
            total += float(loss.detach())
    return total, {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


# ---- what is on ----


def _attention(case: _Case) -> Check:
    """Every block, whenever its attention is called, by the planned kernel. A fused kernel's operation is
    seen in compiled code too, once a call (an H200 showed cuDNN's 12 times in 12 compiled blocks); that of
    explicit scores only where nothing is compiled."""
    name, wanted, blocks, seen = (
        "attention kernel",
        case.plan.attention,
        case.recipe.model.num_layers,
        case.in_pass,
    )
    explicit, calls = seen.operations[EXPLICIT_ATTENTION], seen.operations[ATTENTION]
    ran = _fused_attention(case) | ({"math": explicit} if explicit else {})
    count = sum(ran.values())
    kernels = [kernel for kernel in seen.kernels if any(word in kernel.lower() for word in ATTENTION_KERNELS)]
    said = ", ".join(f"{kernel} {times} times" for kernel, times in ran.items()) or "no fused kernel"
    more = f"; on the GPU {', '.join(sorted(kernels)[:2])[:160]}" if kernels else ""
    evidence = f"plan says {wanted}; in one pass of {blocks} blocks ran {said}{more}"
    if not ran.keys() <= (FUSED_ATTENTION.keys() if wanted == "auto" else {wanted}):
        return checked(name, False, evidence)
    if count < calls or (not ran and kernels and case.plan.compile != "off"):
        return unseen(name, f"{evidence}; what else ran has a name that is not known here")
    return checked(name, wanted == "math" or count >= (2 if calls > blocks else 1) * blocks, evidence)


def _fused_attention(case: _Case) -> dict[str, int]:
    """How often each kernel's operation ran in the pass."""
    seen = case.in_pass.operations
    return {
        name: count
        for name, operations in FUSED_ATTENTION.items()
        if (count := sum(seen[o] for o in operations))
    }


def _recompute(case: _Case) -> Check:
    """Full recomputation calls a block's attention again in the backward pass; selective recomputation does
    too, and takes its result from what was kept. A compiler leaves only the operation of a fused kernel to be
    seen."""
    name, plan, blocks = "recomputation", case.plan.recompute, case.recipe.model.num_layers
    calls, ran = case.in_pass.operations[ATTENTION], sum(_fused_attention(case).values())
    evidence = f"plan says {plan}; attention of {blocks} blocks in one pass: "
    if case.plan.compile != "off":
        again, evidence = ran > blocks, f"{evidence}its operation ran {ran} times"
        if (
            ran < blocks
            or (plan == "selective" and not again)
            or (plan == "full" and ran < 2 * blocks and case.cuda)
        ):
            return unseen(name, f"{evidence}; what else is computed again stands inside compiled kernels")
        return checked(name, ran >= 2 * blocks if plan == "full" else not again, evidence)
    evidence = f"{evidence}called {calls} times, its operation ran {ran} times"
    if not calls or (plan == "selective" and calls == ran and case.cuda):
        return unseen(name, f"{evidence}; not told apart from another plan's")
    # What is kept passes through torch's dispatch twice the first time and once the second; what is not, once
    # each time.
    kept = ran != calls if ran else plan == "selective"
    return checked(
        name,
        calls == (1 if plan == "none" else 2) * blocks and (plan == "none" or kept == (plan == "selective")),
        evidence,
    )


def _loss_chunks(case: _Case) -> Check:
    """Several pieces are each computed again in the backward pass, so that one at a time is in memory."""
    name, tokens, plan = "pieces of the loss", case.inputs_BT.numel(), case.plan.loss_chunks
    seen = sum(case.in_pass.operations[operation] for operation in LOSS_OPERATIONS.values())
    if not seen:
        return unseen(name, "the profiler saw neither torch's cross entropy nor the fused one")
    pieces = math.ceil(tokens / math.ceil(tokens / plan))
    expected = 1 if plan == 1 else 2 * pieces
    return checked(
        name,
        seen == expected,
        f"plan says {plan}; one pass computed the loss of a piece {seen} times, {expected} expected",
    )


def _cross_entropy(case: _Case) -> Check:
    name = "cross entropy"
    seen = {
        kind: count
        for kind, operation in LOSS_OPERATIONS.items()
        if (count := case.in_pass.operations[operation])
    }
    if not seen:
        return unseen(name, "the profiler saw neither torch's cross entropy nor the fused one")
    ran = ", ".join(f"{kind} {count} times" for kind, count in seen.items())
    return checked(
        name,
        set(seen) == {case.plan.cross_entropy},
        f"plan says {case.plan.cross_entropy}; in one pass ran {ran}",
    )


def _passes(case: _Case) -> Check:
    """Every pass looks its tokens up once. Of a long update two passes were run."""
    plan, tokens = case.plan, tuple(case.inputs_BT.shape)
    run, seen = min(MOST_PASSES, plan.accumulation), Counter(case.in_update.embedded)
    passes = (
        ", ".join(f"{count} of {' x '.join(map(str, shape))} tokens" for shape, count in seen.items())
        or "none"
    )
    shortened = f", of which {run} were asked for here" if run < plan.accumulation else ""
    evidence = (
        f"plan says {plan.accumulation} of {plan.micro_batch} sequences{shortened}; one update had {passes}"
    )
    return checked("passes of an update", dict(seen) == {tokens: run}, evidence)


def _precision(case: _Case) -> Check:
    if case.plan.precision == "fp8" and not case.cuda:
        return absent("precision of matrix products", EMULATED)
    promised = {"tf32": "fp32", "fp8": "bf16"}.get(case.plan.precision, case.plan.precision)
    shares = case.in_pass.products
    share = shares.get(promised, 0.0) + (shares.get("fp8", 0.0) if case.plan.precision == "fp8" else 0.0)
    seen = (
        ", ".join(f"{dtype} {part:.1%}" for dtype, part in sorted(shares.items(), key=lambda item: -item[1]))
        or "none"
    )
    return checked(
        "precision of matrix products",
        share > 0.99,
        f"plan says {case.plan.precision}; multiplications by input dtype: {seen}",
    )


def _fp8(case: _Case) -> Check:
    if case.plan.precision != "fp8":
        return absent("FP8 products", f"the plan says {case.plan.precision}")
    if not case.cuda:
        return absent("FP8 products", EMULATED)
    count, expected = case.in_pass.operations["aten::_scaled_mm"], 4 * case.recipe.model.num_layers
    return checked(
        "FP8 products",
        count >= expected,
        f"{count} scaled products in one pass, at least {expected} expected (4 a block)",
    )


def _tf32(case: _Case) -> Check:
    wanted, found = (
        "high" if case.plan.precision == "tf32" else "highest",
        torch.get_float32_matmul_precision(),
    )
    return checked(
        "TF32 state",
        found == wanted,
        f"torch.get_float32_matmul_precision() is {found!r}, {case.plan.precision} needs {wanted!r}",
    )


def _compiled(case: _Case) -> Check:
    blocks = [block._compiled_call_impl is not None for block in case.model.blocks]
    compiled, wanted = sum(blocks), case.plan.compile != "off"
    evidence = (
        f"plan says {case.plan.compile}; {compiled} of {len(blocks)} blocks compiled, {case.graphs_after}"
        " graph(s) captured"
    )
    holds = (compiled == len(blocks) and case.graphs_after > 0) if wanted else compiled == 0
    return checked("compilation", holds, evidence)


def _recompilation(case: _Case) -> Check:
    if case.plan.compile == "off":
        return absent("no recompilation", "the plan does not compile")
    new = case.graphs_after - case.graphs_before
    return checked(
        "no recompilation",
        new == 0,
        f"{new} new graph(s) in {WATCHED} updates after {WARM_UP} that warmed up",
    )


def _update(case: _Case) -> Check:
    wanted, seen = case.plan.update, case.in_update.operations
    ran = {name for name in ("fused", "foreach") if seen[UPDATE_OPERATIONS[name]]} or {"loop"}
    counts = ", ".join(
        f"{operation} {seen[operation]} times" for operation in UPDATE_OPERATIONS.values() if seen[operation]
    )
    return checked(
        "optimiser kernels", ran == {wanted}, f"plan says {wanted}; one update ran {counts or 'none of them'}"
    )


def _sync(case: _Case) -> Check:
    """In whole turns of the loop: batch to device, passes, update, record. On a GPU torch itself says where
    the host waits; on a CPU, where nothing can wait, a number read would. fp16 reads one an update, and a CPU
    one more: how many targets the batch has, which on a GPU is counted on the host before the batch goes
    there."""
    name, fp16 = "no hidden sync", int(case.plan.precision == "fp16")
    if not case.cuda:
        count, allowed = case.in_update.reads, 1 + fp16
        evidence = (
            f"{count} number(s) read by the host in one update, {allowed} expected (on a GPU each more would"
            " wait for it)"
        )
        return checked(name, count <= allowed, evidence)
    if case.plan.update != "fused":
        return absent(
            name,
            f"plan.update {case.plan.update} reads its step count on the host; only the fused update never"
            " waits",
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(WATCHED):
                case.training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in caught if SYNCHRONISING in str(w.message)]
    where = f" {', '.join(dict.fromkeys(found))}"[:120]
    return checked(
        name,
        len(found) <= fp16 * WATCHED,
        f"{len(found)} in {WATCHED} updates ({fp16 * WATCHED} allowed){where}".rstrip(),
    )


def _graphs(case: _Case) -> Check:
    """Pre-training has none; generation from this model does."""
    return generation_graphs(case.model)


def generation_graphs(model: Transformer) -> Check:
    name = "CUDA graphs of generation"
    if not model.embed.weight.is_cuda:
        return absent(name, NO_GRAPHS)
    room = Room(slots=8, prompts=8, max_prompt_tokens=16, max_new_tokens=16)
    decoder = Decoder(model, room, whole_batch=False)
    decoder.read([[1, 2, 3, 4]], [0])
    integers, floats = decoder.describe(
        prompt=0, prompt_len=4, limit=16, sampling=Sampling(max_new_tokens=16), stop_ids=()
    )
    decoder.start([Start([0], integers, floats, filtered=False, seed=0, first_sample=0)])
    decoder.launch(np.arange(1), steps=2, filtered=False).wait()  # captures
    with profiled() as seen:
        decoder.launch(np.arange(1), steps=4, filtered=False).wait()
    launched = seen.operations["cudaGraphLaunch"]
    if not launched and not seen.kernels:  # a decode step without a kernel there is not
        return unseen(name, NO_KERNELS)
    return checked(name, launched == 4, f"{launched} graph launches in 4 decode steps")


def _loader(case: _Case) -> Check:
    share = case.waited_share
    return checked(
        "loader ahead of the step",
        share <= DATA_SHARE,
        f"{share:.1%} of {WATCHED} updates waited for data ({DATA_SHARE:.0%} allowed)",
    )


def _allocator(case: _Case) -> Check:
    if not case.cuda or not case.plan.allocator:
        return absent(
            "allocator", "only CUDA has an allocator to set" if not case.cuda else "the plan sets nothing"
        )
    setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "nothing"
    return checked(
        "allocator",
        case.plan.allocator in setting,
        f"plan says {case.plan.allocator}; the environment has {setting}",
    )


CHECKS = (
    _precision, _tf32, _fp8, _attention, _compiled, _recompilation, _recompute, _loss_chunks, _cross_entropy,
    _passes, _update, _sync,
    _graphs, _loader, _allocator,
)  # fmt: skip
