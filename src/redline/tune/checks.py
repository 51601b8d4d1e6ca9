"""What `redline verify` checks: each promise of a plan against what the profiler saw of one pass and one update.

    [check(case) for check in CHECKS]          # verify.py makes the case

plan/values.py says which of these checks proves which value. A check concerns every workload, or says why not.
"""

import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redline.engine.decoder import Decoder, Start
from redline.engine.request import Sampling
from redline.model.attention.state import Room
from redline.model.lora import lora_layers
from redline.model.transformer import Transformer
from redline.plan.plan import Plan
from redline.plan.values import ALLOCATOR_VARIABLES, HALF
from redline.record.units import counted
from redline.train.graph import Captured
from redline.train.loop import Trainer
from redline.train.packed import Packed
from redline.train.step import Lesson
from redline.tune.evidence import (
    Check,
    Trace,
    absent,
    attention_ran,
    checked,
    kernel_attention,
    profiled,
    unseen,
)

WATCHED = 5
"""Updates that are timed together, and as many more that torch's sync detector watches."""
DATA_SHARE = 0.05
"""Share of the updates' time that may be spent waiting for data."""
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
GAP = {"fp32": (1e-4, 1e-3), "bf16": (0.05, 1.0)}
"""Mean and largest difference of a log-probability from the fp32 forward, in nats. Seen: 2e-5 and 5e-5 in fp32
(SmolLM2-135M on a CPU), 0.02 and 0.4 in bf16 (SmolLM2-360M on an H200)."""
ATTENTION_KERNELS = ("flash", "fmha", "attention", "sdpa")
"""Parts of the names of attention kernels, for the evidence."""
ATTENTION = "aten::scaled_dot_product_attention"
"""What the model calls, whichever kernel then runs; not seen in compiled code."""
EXPLICIT_ATTENTION = "aten::_scaled_dot_product_attention_math"
SYNCHRONISING = "called a synchronizing CUDA operation"
"""How torch's detector reports a sync; it also warns once that it is a prototype."""
LOSS_OPERATIONS = {"torch": "aten::cross_entropy_loss", "fused": "_Fused", "fp8": "_Fp8"}
"""One for each piece of the loss; several pieces are computed again in the backward pass."""
UPDATE_OPERATIONS = {
    "fused": "aten::_fused_adamw_",
    "foreach": "aten::_foreach_addcdiv_",
    "loop": "aten::addcdiv_",
}
NO_GRAPHS = "a CPU has no CUDA graphs"
NO_LOSS = "the profiler saw no cross entropy that it knows"
NO_KERNELS = (
    "the profiler saw no kernel on the GPU: CUPTI is missing, or not available here (another profiler, a"
    " container's permissions)"
)
EMULATED = "a CPU emulates FP8: it multiplies rounded numbers in fp32"
IN_THE_GRAPH = "it is inside the update's CUDA graph, where the profiler sees only kernels"


@dataclass(frozen=True)
class Numbers:
    """Mean loss of a pass, and its gradients."""

    loss: float
    gradients: Mapping[str, Tensor]


@dataclass
class Case:
    plan: Plan
    trainer: Trainer
    rows: Sequence[Lesson]
    """Sequences of the pass, each alone."""
    head_rows: int
    """Positions of the pass that the output head computes."""
    in_pass: Trace
    in_update: Trace
    found: Numbers
    expected: Numbers
    graphs_before: int
    graphs_after: int
    waited_share: float
    rule: Check | None = None
    """The check of a learning rule other than back-propagation."""

    @property
    def model(self) -> Transformer:
        return self.trainer.learner.model

    @property
    def mixing(self) -> str:
        return self.model.config.attention

    @property
    def blocks(self) -> int:
        return self.model.config.num_layers

    @property
    def cuda(self) -> bool:
        return self.trainer.process.device.type == "cuda"

    @property
    def packed(self) -> bool:
        return isinstance(self.trainer.objective, Packed)


# ---- numbers ----


def _loss_and_gradients(case: Case) -> Check:
    """Against the same weights in fp32; for packed rows one example at a time, as padding would compute."""
    holds, figures = agreement(case.plan.coarsest, case.found, case.expected)
    tokens = sum(row.tokens.numel() for row in case.rows)
    what = f"{len(case.rows)} examples one by one" if case.packed else f"{tokens:,} tokens"
    return checked("loss and gradients", holds, f"fp32 reference, {what}: {figures}")


def agreement(precision: str, found: Numbers, expected: Numbers) -> tuple[bool, str]:
    """Whether loss and gradients lie within the precision's band of the fp32 ones, with the figures."""
    difference = abs(found.loss / expected.loss - 1)
    # a weight without a gradient counts as one with gradient 0
    dot = sum(
        float((found.gradients[name].double() * g.double()).sum())
        for name, g in expected.gradients.items()
        if name in found.gradients
    )
    norms = [
        math.sqrt(sum(float(g.double().square().sum()) for g in numbers.gradients.values()))
        for numbers in (found, expected)
    ]
    cosine, norm = dot / max(norms[0] * norms[1], 1e-300), abs(norms[0] / norms[1] - 1)
    band, least = BAND[precision]
    norm_band = NORM_BAND if precision in HALF else NORM_BAND / 10
    holds = difference <= band and cosine >= least and norm <= norm_band  # false if one is nan
    figures = (
        f"loss differs by {difference:.1e} (band {band:g}), gradients have cosine {cosine:.6f} (at least"
        f" {least}), their norm differs by {norm:.1e} (band {norm_band:g})"
    )
    return holds, figures


def log_probabilities(gap: Mapping[str, float], answers: int, *, half: bool) -> Check:
    mean, largest = GAP["bf16" if half else "fp32"]
    evidence = (
        f"fp32 forward, {gap['tokens']:,} tokens of {answers} answers: {gap['mean']:.1e} nats on"
        f" average (band {mean:g}), {gap['max']:.1e} at most (band {largest:g})"
    )
    return checked("log-probabilities of the engine", gap["mean"] <= mean and gap["max"] <= largest, evidence)


# ---- products and kernels ----


def _precision(case: Case) -> Check:
    name, precision, shares = "precision of matrix products", case.plan.precision, case.in_pass.products
    if case.plan.coarsest == "fp8" and not case.cuda:
        return absent(name, EMULATED)
    promised = {"tf32": "fp32", "fp8": "bf16"}.get(precision, precision)
    share = shares.get(promised, 0.0) + (shares.get("fp8", 0.0) if case.plan.coarsest == "fp8" else 0.0)
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    seen = ", ".join(f"{dtype} {part:.1%}" for dtype, part in ordered) or "none"
    return checked(name, share > 0.99, f"plan says {precision}; multiplications by input dtype: {seen}")


def _fp8(case: Case) -> Check:
    if case.plan.precision != "fp8":
        return absent("FP8 products", f"the plan says {case.plan.precision}")
    if not case.cuda:
        return absent("FP8 products", EMULATED)
    count, expected = case.in_pass.operations["aten::_scaled_mm"], 4 * case.blocks
    evidence = f"{count} scaled products in one pass, at least {expected} expected (4 per block)"
    return checked("FP8 products", count >= expected, evidence)


def _tf32(case: Case) -> Check:
    wanted = "high" if case.plan.precision == "tf32" else "highest"
    found = torch.get_float32_matmul_precision()
    evidence = f"torch.get_float32_matmul_precision() is {found!r}, {case.plan.precision} needs {wanted!r}"
    return checked("TF32 state", found == wanted, evidence)


def _attention(case: Case) -> Check:
    """Whether the planned kernel computes every call of attention. In compiled code a fused kernel's operation is seen, once
    per call; explicit scores are not."""
    name, wanted, blocks, seen = "attention kernel", case.plan.attention, case.blocks, case.in_pass
    if case.mixing != "softmax":
        return kernel_attention(name, case.mixing, seen, blocks, compiled=case.plan.compile != "off")
    explicit, calls = seen.operations[EXPLICIT_ATTENTION], seen.operations[ATTENTION]
    ran = attention_ran(seen) | ({"math": explicit} if explicit else {})
    count = sum(ran.values())
    kernels = [kernel for kernel in seen.kernels if any(word in kernel.lower() for word in ATTENTION_KERNELS)]
    said = ", ".join(f"{kernel} {times} times" for kernel, times in ran.items()) or "no fused kernel"
    more = f"; on the GPU {', '.join(sorted(kernels)[:2])[:160]}" if kernels else ""
    evidence = f"plan says {wanted}; in one pass of {blocks} blocks ran {said}{more}"
    allowed = ran.keys() - {"math"} if wanted == "auto" else {wanted, "short", "varlen"}
    if not ran.keys() <= allowed:
        return checked(name, False, evidence)
    if case.packed and not ran and case.cuda and (case.plan.precision not in HALF or not calls):
        return unseen(name, f"{evidence}; the kernels for packed rows are for half precision")
    if case.packed:
        return checked(name, wanted == "math" or count >= blocks, evidence)
    if count < calls or (not ran and kernels and case.plan.compile != "off"):
        return unseen(name, f"{evidence}; the other calls ran under a name that is not known here")
    least = calls if case.rule else (2 if calls > blocks else 1) * blocks
    return checked(name, wanted == "math" or count >= least, evidence)


def _cross_entropy(case: Case) -> Check:
    name, wanted = "cross entropy", case.plan.cross_entropy
    counts = case.in_pass.operations
    seen = {kind: counts[name] for kind, name in LOSS_OPERATIONS.items() if counts[name]}
    if not seen:
        return unseen(name, NO_LOSS)
    ran = ", ".join(f"{kind} {count} times" for kind, count in seen.items())
    return checked(name, set(seen) == {wanted}, f"plan says {wanted}; in one pass ran {ran}")


def _update(case: Case) -> Check:
    name, wanted, seen = "optimiser kernels", case.plan.update, case.in_update.operations
    if case.plan.graph:
        return absent(name, IN_THE_GRAPH)
    ran = {kind for kind in ("fused", "foreach") if seen[UPDATE_OPERATIONS[kind]]} or {"loop"}
    counts = [f"{name} {seen[name]} times" for name in UPDATE_OPERATIONS.values() if seen[name]]
    evidence = f"plan says {wanted}; one update ran {', '.join(counts) or 'none of them'}"
    return checked(name, ran == {wanted}, evidence)


# ---- what is computed how often ----


def _compiled(case: Case) -> Check:
    blocks = [block._compiled_call_impl is not None for block in case.model.blocks]
    compiled, wanted = sum(blocks), case.plan.compile != "off"
    evidence = (
        f"plan says {case.plan.compile}; {compiled} of {len(blocks)} blocks compiled, "
        f"{counted(case.graphs_after, 'graph')} captured"
    )
    holds = (compiled == len(blocks) and case.graphs_after > 0) if wanted else compiled == 0
    return checked("compilation", holds, evidence)


def _recompilation(case: Case) -> Check:
    if case.plan.compile == "off":
        return absent("no recompilation", "the plan does not compile")
    new = case.graphs_after - case.graphs_before
    evidence = f"{counted(new, 'new graph')} in the updates after the warm-up"
    return checked("no recompilation", new == 0, evidence)


def _recompute(case: Case) -> Check:
    """Full recomputation calls attention again in the backward; selective does, and takes the result that was kept.
    In compiled code only a fused kernel's operation is seen."""
    name, plan, blocks = "recomputation", case.plan.recompute, case.blocks
    if case.rule is not None:
        return absent(name, "feedback alignment runs its blocks twice, which looks the same")
    ran = sum(attention_ran(case.in_pass).values())
    calls = case.in_pass.operations[ATTENTION] or ran  # the kernels of packed rows are called directly
    evidence = f"plan says {plan}; attention of {blocks} blocks in one pass: "
    if case.plan.compile != "off":
        again, evidence = ran > blocks, f"{evidence}its operation ran {ran} times"
        hidden = (plan == "selective" and not again) or (plan == "full" and ran < 2 * blocks and case.cuda)
        if ran < blocks or hidden:
            return unseen(name, f"{evidence}; anything else recomputed is inside compiled kernels")
        return checked(name, ran >= 2 * blocks if plan == "full" else not again, evidence)
    evidence = f"{evidence}called {calls} times, its operation ran {ran} times"
    told = not case.cuda and case.mixing == "softmax"
    if not calls or (plan == "selective" and calls == ran and not told):
        return unseen(name, f"{evidence}; another plan would show the same")
    # Kept results pass torch's dispatch twice the first time and once the second; others once each time.
    kept = ran != calls if ran else plan == "selective"
    holds = calls == (1 if plan == "none" else 2) * blocks
    return checked(name, holds and (plan == "none" or kept == (plan == "selective")), evidence)


def _loss_chunks(case: Case) -> Check:
    """If there are several pieces, each is computed again in the backward pass, so that only one is in memory."""
    name, plan = "pieces of the loss", case.plan.loss_chunks
    seen = sum(case.in_pass.operations[operation] for operation in LOSS_OPERATIONS.values())
    if not seen:
        return unseen(name, NO_LOSS)
    pieces = math.ceil(case.head_rows / math.ceil(case.head_rows / plan))
    expected = 1 if plan == 1 else 2 * pieces
    evidence = f"plan says {plan}; one pass computed the loss of a piece {seen} times, {expected} expected"
    return checked(name, seen == expected, evidence)


def _passes(case: Case) -> Check:
    """Every pass looks up its tokens once. Only a few passes of a long update were run."""
    name, plan = "passes of an update", case.plan
    seen = Counter(case.in_update.embedded)
    if plan.graph:
        return absent(name, IN_THE_GRAPH)
    run = case.trainer.plan.accumulation
    listed = (f"{count} of {' x '.join(map(str, shape))} tokens" for shape, count in seen.items())
    shortened = f", of which {run} were asked for here" if run < plan.accumulation else ""
    rows = "examples" if case.packed else "sequences"
    evidence = (
        f"plan says {plan.accumulation} of {plan.micro_batch} {rows}{shortened}; one update had"
        f" {', '.join(listed) or 'none'}"
    )
    whole = (plan.micro_batch, case.rows[0].tokens.numel())
    holds = seen.total() == run if case.packed else dict(seen) == {whole: run}
    return checked(name, holds, evidence)


def _update_graph(case: Case) -> Check:
    name, executor = "CUDA graph of the update", case.trainer.executor
    captured = len(executor.graphs) if isinstance(executor, Captured) else 0
    if not case.cuda or (not case.plan.graph and not captured):
        return absent(name, "the plan captures none" if case.cuda else NO_GRAPHS)
    launched = case.in_update.operations["cudaGraphLaunch"]
    if captured and not launched and not case.in_update.kernels:
        return unseen(name, NO_KERNELS)
    holds = captured > 0 and launched == 1 and case.plan.graph
    return checked(name, holds, f"{captured} captured, {launched} launched in one update")


# ---- waits and memory ----


def _sync(case: Case) -> Check:
    """Waits in whole turns of the loop. On a GPU torch reports where the host waits; on a CPU the numbers read are counted.
    fp16 reads one per update."""
    name, fp16 = "no hidden sync", int(case.plan.precision == "fp16")
    if not case.cuda:
        count, allowed = case.in_update.reads, fp16 + (not case.packed)
        evidence = (
            f"{counted(count, 'number')} read by the host in one update, {allowed} expected (each further one would wait for a"
            " GPU)"
        )
        return checked(name, count <= allowed, evidence)
    if case.plan.update != "fused":
        why = f"plan.update {case.plan.update} reads its step count on the host; only the fused update never waits"
        return absent(name, why)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(WATCHED):
                case.trainer.turn()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in caught if SYNCHRONISING in str(w.message)]
    where = f" {', '.join(dict.fromkeys(found))}"[:120]
    evidence = f"{len(found)} in {WATCHED} updates ({fp16 * WATCHED} allowed){where}".rstrip()
    return checked(name, len(found) <= fp16 * WATCHED, evidence)


def _loader(case: Case) -> Check:
    share = case.waited_share
    evidence = f"{share:.1%} of the updates' time waited for data ({DATA_SHARE:.0%} allowed)"
    return checked("loader ahead of the step", share <= DATA_SHARE, evidence)


def _allocator(case: Case) -> Check:
    name, wanted = "allocator", case.plan.allocator
    if not case.cuda or not wanted:
        return absent(name, "only CUDA has an allocator to set" if not case.cuda else "the plan sets nothing")
    setting = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "nothing")
    return checked(name, wanted in setting, f"plan says {wanted}; the environment has {setting}")


def generation_graphs(model: Transformer) -> Check:
    """Every decode step of the engine is one launch."""
    name = "CUDA graphs of generation"
    if not model.embed.weight.is_cuda:
        return absent(name, NO_GRAPHS)
    if lora_layers(model):
        return absent(name, "the engine needs merged adapters")
    room = Room(slots=8, prompts=8, max_prompt_tokens=16, max_new_tokens=16)
    decoder = Decoder(model, room, whole_batch=False)
    decoder.read([[1, 2, 3, 4]], [0])
    two = np.arange(2)  # a single row has its own kernels, which do not run blocks (engine/one_row)
    decoder.start([Start([0, 1], 0, 4, 16, Sampling(max_new_tokens=16), (), seed=0, first_sample=0)])
    try:
        decoder.launch(two, steps=2, filtered=False).wait()  # captures
    except RuntimeError as error:  # what waits for the host cannot be captured
        return checked(name, False, f"a decode step cannot be captured: {str(error).splitlines()[0]}")
    with profiled() as seen:
        decoder.launch(two, steps=4, filtered=False).wait()
    launched = seen.operations["cudaGraphLaunch"]
    if not launched and not seen.kernels:  # every decode step has kernels
        return unseen(name, NO_KERNELS)
    return checked(name, launched == 4, f"{launched} graph launches in 4 decode steps")


CHECKS = (
    _loss_and_gradients, _precision, _tf32, _fp8, _attention, _compiled, _recompilation, _recompute, _loss_chunks,
    _cross_entropy, _passes, _update, _update_graph, _sync, _loader, _allocator,
)  # fmt: skip
