"""Proof that what RFT promises holds on this machine, for a recipe's own model and questions: its generation
and its fine-tuning update.

    checks = verify_rft(recipe, plan, progress=print)

The model answers a few of the recipe's questions, and is fine-tuned on what it answered for a few updates,
which nobody keeps. One packed pass is profiled, and compared with the same weights in fp32 on one example at
a time. Left out: speed (`redline bench`), scoring, and a server that writes the samples.
"""

import copy
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from redline.config.recipe import IGNORED, Recipe
from redline.engine.request import Completion, Request
from redline.finetune import check_result, job_of, prepare
from redline.model.lora import LoraLinear, lora_layers, merged
from redline.model.transformer import Transformer
from redline.plan.bounds import Outside
from redline.plan.plan import Plan
from redline.rft.sample import logprob_gap
from redline.rft.session import Session, open_session
from redline.train.graph import Captured
from redline.train.loop import Trainer
from redline.train.packed import Packed
from redline.train.packing import Example, exact, unpack
from redline.tune.evidence import Check, Seen, absent, checked, profiled, unseen
from redline.tune.verify import (
    ATTENTION,
    FUSED_ATTENTION,
    NO_GRAPHS,
    NO_KERNELS,
    agreement,
    generation_graphs,
    plain_fp32,
    reference_pass,
)

QUESTIONS = 16
UPDATES = 4
"""Of which the last is watched; the first ones move B, which begins at 0, away from it."""
GAP = {"fp32": (1e-4, 1e-3), "bf16": (0.05, 1.0)}
"""Mean and largest difference of a token's log-probability from the fp32 forward, in nats. Seen: 2e-5 and
5e-5 in fp32 (SmolLM2-135M on a CPU), 0.02 and 0.4 in bf16 (SmolLM2-360M on an H200, against its own bf16
forward)."""
PACKED = {"short": "_ShortAttention", "varlen": "torch_attn::_varlen_attn"}
"""What a GPU in half precision has for packed rows: one operation a block."""


@dataclass
class _Case:
    session: Session
    trainer: Trainer
    row: Sequence[Example]
    """The examples of the pass."""
    in_update: Seen
    in_pass: Seen
    loss: float
    gradients: dict[str, Tensor]

    @property
    def model(self) -> Transformer:
        return self.trainer.learner.model

    @property
    def precision(self) -> str:
        """What the plan says."""
        return self.session.plan.precision

    @property
    def cuda(self) -> bool:
        return self.trainer.process.device.type == "cuda"


def verify_rft(recipe: Recipe, plan: Plan, *, progress: Callable[[str], None]) -> list[Check]:
    """Generate and fine-tune a little under the recipe, and check what both promise. Raises what they would
    raise."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_session(recipe, plan, Path(folder) / "run", Outside(environment=os.environ)) as session,
    ):
        check_result(recipe)
        model = session.model.model
        progress(f"{QUESTIONS} questions answered by {recipe.model.init_from}")
        completions = _completions(session)
        generation = [_log_probabilities(model, completions), generation_graphs(model)]
        progress(f"{UPDATES} updates on the answers")
        case = _watch(session, completions)
        return [*(check(case) for check in CHECKS), *generation]


def _completions(session: Session) -> list[Completion]:
    rows = min(QUESTIONS, session.asked.rows or QUESTIONS)
    speaker, questions = session.model, session.questions(session.asked.split, rows)
    prompts = session.prompts(questions, speaker)
    settings, seed = session.settings(prompts.stops), session.recipe.train.seed
    requests = [Request(prompt=ids, sampling=settings, seed=seed + i) for i, ids in enumerate(prompts.ids)]
    with session.engine(speaker, longest=prompts.longest, sequences=len(requests), stage="sample") as engine:
        return list(engine.run(requests))


def _watch(session: Session, completions: Sequence[Completion]) -> _Case:
    model, size = session.model.model, session.recipe.train.batch_size
    prepare(model, session.recipe, session.process)
    answered = [
        Example(prompt=c.request.prompt, answer=c.tokens)
        for c in completions
        if isinstance(c.request.prompt, tuple)
    ]
    # an epoch is one update of the recipe's size
    examples = list(itertools.islice(itertools.cycle(answered), size))
    train = replace(session.recipe.train, epochs=UPDATES, steps=0)
    job = job_of(model, examples, replace(session.recipe, train=train), session.plan, session.process)
    assert isinstance(job.objective, Packed)
    trainer = Trainer(job, session.process)
    try:
        for _ in range(UPDATES - 1):
            trainer.turn()
        trainer.drain()
        batch = trainer.source.next()
        row = batch.examples[: job.objective.pass_size]
        words, shape = job.objective.rows(batch)[0]
        with profiled() as in_update:
            trainer.executor.take(batch, targets=float(batch.targets), lr_factor=1.0)
        tokens_1T, targets_1A, packing = unpack(torch.from_numpy(words).to(session.process.device), shape)
        with profiled() as in_pass:
            loss = model(tokens_1T, targets_1A, packing=packing)
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return _Case(session, trainer, row, in_update, in_pass, float(loss.detach()), gradients)
    finally:
        trainer.close()


def _in_fp32(model: Transformer) -> Transformer:
    """A copy that computes in fp32, operation by operation."""
    reference = copy.deepcopy(model).float()
    reference.zero_grad(set_to_none=True)
    reference.compute_dtype, reference.cross_entropy = torch.float32, "torch"
    return reference


def _log_probabilities(model: Transformer, completions: Sequence[Completion]) -> Check:
    mean, largest = GAP["fp32" if model.compute_dtype == torch.float32 else "bf16"]
    with plain_fp32():
        gap = logprob_gap(_in_fp32(model), completions)
    evidence = (
        f"fp32 forward, {gap['tokens']:,} tokens of {len(completions)} answers: {gap['mean']:.1e} nats on"
        f" average (band {mean:g}), {gap['max']:.1e} at most (band {largest:g})"
    )
    return checked("log-probabilities of the engine", gap["mean"] <= mean and gap["max"] <= largest, evidence)


# ---- the fine-tuning update ----


def _packed(case: _Case) -> Check:
    """The packed row against its examples one by one, which is what padding them would compute."""
    reference, device = _in_fp32(case.model), case.trainer.process.device
    scale = 1.0 / exact(case.row).answers

    def alone(example: Example) -> tuple[Tensor, Tensor]:
        targets = [*[IGNORED] * (len(example.prompt) - 1), *example.answer]
        return torch.tensor([*example.prompt, *example.answer[:-1]], device=device), torch.tensor(
            targets, device=device
        )

    loss, gradients = reference_pass(reference, map(alone, case.row), scale)
    ours = {name: gradient * scale for name, gradient in case.gradients.items()}
    holds, figures = agreement(case.precision, case.loss * scale, ours, loss, gradients)
    return checked("packed rows", holds, f"fp32 reference, {len(case.row)} examples one by one: {figures}")


def _precision(case: _Case) -> Check:
    shares = case.in_pass.products
    seen = (
        ", ".join(f"{dtype} {part:.1%}" for dtype, part in sorted(shares.items(), key=lambda item: -item[1]))
        or "none"
    )
    evidence = f"plan says {case.precision}; multiplications by input dtype: {seen}"
    return checked("precision of matrix products", shares.get(case.precision, 0.0) > 0.99, evidence)


def _attention(case: _Case) -> Check:
    name, seen, blocks = (
        "attention kernel of packed rows",
        case.in_pass.operations,
        case.model.config.num_layers,
    )
    fused = {kind: sum(seen[o] for o in operations) for kind, operations in FUSED_ATTENTION.items()}
    ran = {
        kind: count
        for kind, count in (fused | {kind: seen[o] for kind, o in PACKED.items()}).items()
        if count
    }
    evidence = (
        f"{blocks} blocks; in one pass ran"
        f" {', '.join(f'{kind} {count} times' for kind, count in ran.items()) or 'no fused kernel'}"
    )
    if not ran and case.cuda and (case.precision == "fp32" or not seen[ATTENTION]):
        return unseen(name, f"{evidence}; the kernels for packed rows are for half precision")
    return checked(name, sum(ran.values()) >= blocks, evidence)


def _merging(case: _Case) -> Check:
    """Merged weights against W + B A alpha/r in fp64, part by part; and the bits that un-merging gives
    back."""
    name = "adapters merged and un-merged"
    if not (layers := lora_layers(case.model)):
        return absent(name, "the recipe trains all weights: it has no [lora] table")
    before = {layer: layer.weight.detach().clone() for layer in layers.values()}
    moved, off = 0.0, 0.0
    with merged(case.model):
        for layer, weight in before.items():
            wanted = _merged_in_fp64(layer, weight)
            allowed = torch.finfo(weight.dtype).eps * wanted.abs() + 1e-6 * wanted.abs().max()
            off = max(off, float(((layer.weight.double() - wanted).abs() / allowed).max()))
            moved = max(moved, float((wanted - weight.double()).abs().max()))
    same = all(torch.equal(layer.weight, weight) for layer, weight in before.items())
    evidence = (
        f"{len(before)} layers, weights moved by up to {moved:.1e}: {off:.2f} of one rounding off W + B A"
        f" alpha/r; un-merged to {'the same' if same else 'other'} bits"
    )
    return checked(name, moved > 0 and off <= 1 and same, evidence)


def _merged_in_fp64(layer: LoraLinear, weight: Tensor) -> Tensor:
    wanted = weight.double()
    for part, columns in layer.blocks():
        b, a = (
            layer.lora_b.detach()[part.start : part.end, columns].double(),
            layer.lora_a.detach()[columns].double(),
        )
        wanted[part.start : part.end] += b @ a * layer.config.scale
    return wanted


def _update_graph(case: _Case) -> Check:
    name = "CUDA graph of the update"
    if not case.cuda:
        return absent(name, NO_GRAPHS)
    executor = case.trainer.executor
    launched = case.in_update.operations["cudaGraphLaunch"]
    captured = len(executor.graphs) if isinstance(executor, Captured) else 0
    if captured and not launched and not case.in_update.kernels:
        return unseen(name, NO_KERNELS)
    return checked(
        name, captured > 0 and launched == 1, f"{captured} captured, {launched} launched in one update"
    )


CHECKS = (_packed, _precision, _attention, _merging, _update_graph)
