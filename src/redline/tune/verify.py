"""Proof that this machine really does what a plan says: each check passed, failed, not applicable or not checked,
with the evidence.

    checks = verify(recipe, plan, progress=print)
    [check for check in checks if check.status == "failed"]

The training loop itself runs a few updates on the recipe's data, at most two passes each. One pass and one turn of
the loop are profiled, and on a GPU torch's sync detector watches more turns. Loss and gradients of the pass are
compared with the same weights in fp32, eager, with explicit attention, one sequence at a time. A recipe of RFT or
reinforcement learning has no examples yet, so the model answers a few of its questions, which also proves generation,
and learns from the answers. The checks are in checks.py. Left out: speed (`redline tune`) and several processes.
"""

import copy
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from redline.config.dfa import DfaConfig
from redline.config.recipe import IGNORED, Recipe
from redline.engine.request import Completion, Request
from redline.errors import Say
from redline.finetune import check_result, job_of, prepare
from redline.measure.child import synchronize
from redline.measure.training import TrainingSubject
from redline.measure.trial import train_trial
from redline.model.lora import add_lora
from redline.model.transformer import Transformer, build_model, weights_of
from redline.plan.bounds import Outside
from redline.plan.plan import Plan
from redline.rft.sample import logprob_gap
from redline.rft.session import Session, open_session
from redline.rl.domains import open_domains
from redline.rl.policy import Policy
from redline.train.execution import COMPUTE_DTYPE, plain_fp32
from redline.train.feedback import rule_of
from redline.train.loop import Trainer
from redline.train.objective import candidates_of
from redline.train.packed import Example, Packed
from redline.train.process import Process
from redline.train.restore import open_weights
from redline.train.step import Lesson
from redline.tune.checks import CHECKS, WATCHED, Case, Numbers, generation_graphs, log_probabilities
from redline.tune.evidence import Check, checked, profiled

MOST_PASSES = 2
"""Passes of a long update that are run: the others are the same."""
WARM_UP = 3
"""Updates before any is watched: they compile, fill the loader, move the adapters' B from 0."""
QUESTIONS = 16
FAR = 0.9
"""Cosine with back-propagation's gradient that random feedback does not reach (docs/okadfa.md)."""


def verify(recipe: Recipe, plan: Plan, *, progress: Say) -> list[Check]:
    """Run a few updates under the plan and check every promise it makes. Raises what training would raise."""
    if recipe.workload == "rft":
        return _verify_rft(recipe, plan, progress)
    if recipe.workload == "rl":
        return _verify_rl(recipe, plan, progress)
    passes = min(MOST_PASSES, plan.accumulation)
    few = recipe.with_rows(passes * plan.micro_batch)
    progress(f"building the model; {WARM_UP + WATCHED} updates of {passes} x {plan.micro_batch}")
    subject = TrainingSubject(train_trial(few, replace(plan, accumulation=passes)).setting)
    try:
        case = _watch(few, plan, subject.trainer, progress)
        ruled = [case.rule] if case.rule else []
        return [*(check(case) for check in CHECKS), *ruled, generation_graphs(case.model)]
    finally:
        subject.close()


def _verify_rft(recipe: Recipe, plan: Plan, progress: Say) -> list[Check]:
    with (
        tempfile.TemporaryDirectory() as folder,
        open_session(recipe, plan, Path(folder) / "run", Outside(environment=os.environ)) as session,
    ):
        check_result(recipe)
        progress(f"{recipe.model.init_from} answers {QUESTIONS} questions")
        completions = _completions(session)
        return _answered(recipe, session.plan, session.model.model, session.process, completions, progress)


def _verify_rl(recipe: Recipe, plan: Plan, progress: Say) -> list[Check]:
    check_result(recipe)
    rl, process = recipe.rl, Process(0, 1, torch.device(plan.hardware.kind))
    assert rl is not None
    base = open_weights(Path(recipe.model.init_from or ""))
    model = base.build(process.device, COMPUTE_DTYPE[plan.precision])
    policy = Policy(model, base, process, rl, slots=min(plan.slots, QUESTIONS))
    with open_domains(recipe, base) as domains, closing(policy):
        names = itertools.cycle(domains.by_name)
        asked = [domains.ask(1, (next(names), number)) for number in range(QUESTIONS)]
        requests = [
            Request(prompt=one.prompt, sampling=domains.sampling(one.stops), seed=number)
            for number, one in enumerate(asked)
        ]
        progress(f"{recipe.model.init_from} answers {QUESTIONS} questions")
        with policy.speaking():
            completions = list(policy.engine.run(requests))
    return _answered(recipe, plan, model, process, completions, progress)


def _answered(
    recipe: Recipe,
    plan: Plan,
    model: Transformer,
    process: Process,
    completions: Sequence[Completion],
    progress: Say,
) -> list[Check]:
    """What the answers prove about generation, and training on them about the update (RL only weighs its losses)."""
    with plain_fp32():
        reference = copy.deepcopy(model).float()
        reference.compute_dtype, reference.cross_entropy = torch.float32, "torch"  # operation by operation
        gap = logprob_gap(reference, completions)
    half = model.compute_dtype != torch.float32
    generation = [log_probabilities(gap, len(completions), half=half), generation_graphs(model)]
    trainer = _learner_of(recipe, plan, model, process, completions)
    try:
        case = _watch(recipe, plan, trainer, progress)
        return [*(check(case) for check in CHECKS), *generation]
    finally:
        trainer.close()


def _completions(session: Session) -> list[Completion]:
    rows = min(QUESTIONS, session.asked.rows or QUESTIONS)
    speaker, questions = session.model, session.questions(session.asked.split, rows)
    asked = session.ask(questions, speaker)
    settings, seed = session.settings(asked[0].stops), session.recipe.train.seed
    requests = [Request(prompt=one.prompt, sampling=settings, seed=seed + i) for i, one in enumerate(asked)]
    with session.engine(speaker, asked, sequences=len(requests)) as engine:
        return list(engine.run(requests))


def _learner_of(
    recipe: Recipe, plan: Plan, model: Transformer, process: Process, completions: Sequence[Completion]
) -> Trainer:
    """A training run on the answers that keeps nothing; an epoch is one update of the recipe's size."""
    prepare(model, recipe, process)
    prompts = [(c.request.prompt, c.tokens) for c in completions]
    answered = [Example(prompt, tokens) for prompt, tokens in prompts if isinstance(prompt, tuple)]
    examples = list(itertools.islice(itertools.cycle(answered), plan.micro_batch * plan.accumulation))
    train = replace(recipe.train, batch_size=len(examples), epochs=10 * (WARM_UP + WATCHED), steps=0)
    return Trainer(job_of(model, examples, replace(recipe, train=train), plan, process), process)


def _watch(recipe: Recipe, plan: Plan, trainer: Trainer, progress: Say) -> Case:
    progress(f"{WARM_UP + WATCHED} updates")
    for _ in range(WARM_UP):
        trainer.turn()
    trainer.drain()
    synchronize()
    graphs_before = counters["stats"]["unique_graphs"]
    waited_s, began_s = trainer.source.waited_s, time.perf_counter()
    for _ in range(WATCHED):
        trainer.turn()
    trainer.drain()
    synchronize()
    waited_share = (trainer.source.waited_s - waited_s) / (time.perf_counter() - began_s)
    graphs = graphs_before, counters["stats"]["unique_graphs"]
    progress("profiling a pass and an update")
    batch, rows, head_rows = _first_pass(trainer)
    targets = sum(int((row.targets != IGNORED).sum()) for row in rows)
    learner = replace(trainer.learner, mark=lambda phase: None)
    up = learner.scale.value if learner.scale else 1.0  # as in training, or small gradients become 0
    one = next(iter(trainer.objective.passes(learner, batch)))
    with profiled() as in_pass:
        loss = one.run(up / targets, lambda phase: None)["loss"]
    model = learner.model
    gradients = {name: p.grad / up for name, p in model.named_parameters() if p.grad is not None}
    seen = Numbers(float(loss) / targets, gradients)
    model.zero_grad(set_to_none=True)
    expected = _reference(recipe, model, rows, targets)
    rule = None
    if recipe.feedback is not None:
        plain = replace(recipe, train=replace(recipe.train, rule="backprop"))
        rule = learning_rule(recipe.feedback, seen, expected, _reference(plain, model, rows, targets))
    with profiled() as in_update:
        trainer.turn()
        trainer.drain()
    found = in_pass, in_update, seen, expected, *graphs, waited_share, rule
    return Case(plan, trainer, rows, head_rows, *found)


def _first_pass(trainer: Trainer) -> tuple[Any, list[Lesson], int]:
    """A batch; its first pass sequence by sequence; and the positions the head computes in it."""
    batch, objective, device = trainer.source.next(), trainer.objective, trainer.process.device
    if not isinstance(objective, Packed):
        there, size = batch.moved(lambda part: part.to(device)), objective.pass_size
        pairs, some = zip(there.inputs_BT, there.targets_BT, strict=True), candidates_of(there.candidates)
        rows = [Lesson(x_T[None], y_T[None], None, some) for x_T, y_T in itertools.islice(pairs, size)]
        return batch, rows, there.targets_BT[:size].numel()
    rows = [_alone(example, device) for example in batch.examples[: objective.pass_size]]
    return batch, rows, objective.rows(batch)[0][1].answers


def _alone(example: Example, device: torch.device) -> Lesson:
    targets = [*[IGNORED] * (len(example.prompt) - 1), *example.answer]
    tokens = [*example.prompt, *example.answer[:-1]]
    return Lesson(torch.tensor([tokens], device=device), torch.tensor([targets], device=device))


def _reference(recipe: Recipe, model: Transformer, rows: Sequence[Lesson], targets: int) -> Numbers:
    """Mean loss and gradients in fp32, one sequence at a time so that explicit attention fits."""
    reference = build_model(model.config, device=rows[0].tokens.device, seed=0)
    if recipe.lora is not None:
        add_lora(reference, recipe.lora, 0)
    own, total = weights_of(model), 0.0
    with torch.no_grad():
        for name, p in weights_of(reference).items():
            p.copy_(own[name])
    rule = rule_of(recipe, reference)
    with plain_fp32():
        for row in rows:
            one = rule.learn(reference, row)
            total += float(one.run(1 / targets, lambda phase: None)["loss"]) / targets
    return Numbers(total, {name: p.grad for name, p in reference.named_parameters() if p.grad is not None})


def learning_rule(dfa: DfaConfig, found: Numbers, expected: Numbers, backpropagated: Numbers) -> Check:
    """Whether the blocks below the top ones have feedback alignment's gradients, not back-propagation's."""
    numbers = {int(name.split(".")[1]) for name in expected.gradients if name.startswith("blocks.")}
    below = sorted(numbers)[: max(0, len(numbers) - dfa.top_blocks)]
    prefixes = tuple(f"blocks.{number}." for number in below)
    names = [name for name in expected.gradients if name.startswith(prefixes)]
    rule, plain = _cosine(names, found, expected), _cosine(names, found, backpropagated)
    most = 1.0 if dfa.error == "residual" else FAR
    evidence = (
        f"gradients of {len(below)} of {len(numbers)} blocks have cosine {rule:.4f} with feedback alignment in fp32"
        f" and {plain:.4f} with back-propagation (at most {most})"
    )
    return checked("learning rule", not below or (rule > plain and plain <= most), evidence)


def _cosine(names: list[str], one: Numbers, other: Numbers) -> float:
    if not names:
        return 0.0
    a, b = (torch.cat([n.gradients[name].double().flatten() for name in names]) for n in (one, other))
    return float(torch.cosine_similarity(a, b, dim=0))
