"""Looking before training: draw a few answers of every domain and say what reinforcement learning would make of them.

    report = examine(recipe, plan, process, questions=8)
    report.domains[0].solved, report.gap, report.advice

It draws through the loop's own path (prompts, engine, scorers), so what fails in training fails here, in a minute. The
time of a step is what was seen here for the tokens of a whole step, and for the update what the plan predicts.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from redline.config.recipe import Recipe
from redline.config.rl import RlConfig
from redline.errors import ConfigError, MachineError
from redline.model.transformer import Transformer
from redline.plan.plan import Plan
from redline.rl.algorithm import row_of
from redline.rl.domains import Domains, open_domains
from redline.rl.objective import logprobs
from redline.rl.rollout import Rollout
from redline.rl.run import job_of
from redline.rl.samples import Group
from redline.tasks.sandbox import in_force as in_force_sandbox
from redline.tasks.sandbox import weakness
from redline.train.execution import in_force
from redline.train.process import Process
from redline.train.restore import open_weights

COMPARED = 16
"""Answers whose log-probabilities the trainer computes too."""
BESIDE = 8
"""Tokens of one answer that are shown with both."""
RARELY = 0.05
"""Correct answers below which an unknown form is the first thing to fix; above it the rewards teach the form."""
WIDE_GAP = 0.05
"""Nats per token between engine and trainer that are more than bf16 rounds (H200, 360M: 0.004)."""


@dataclass(frozen=True)
class DomainReport:
    """Shares of the answers; `even` is a share of the groups."""

    name: str
    answers: int
    solved: float
    reward: float
    even: float
    """All answers of the group earned the same: GRPO learns nothing from them."""
    unread: float
    """No answer was found in the text."""
    cut: float
    """The answer ran out of tokens."""
    tokens: float
    """Mean tokens of an answer."""
    failed: int
    """Answers whose scorer failed."""
    scoring_s: float
    """For one answer, with all scoring processes."""
    unread_texts: list[str]
    """Two in which no answer was found."""


@dataclass(frozen=True)
class Gap:
    """Log-probabilities of the same tokens by the engine and by the trainer, nats."""

    mean: float
    most: float
    tokens: int
    beside: list[tuple[str, float, float]]
    """Some tokens of one answer, with the engine's and the trainer's."""


@dataclass(frozen=True)
class Report:
    domains: list[DomainReport]
    gap: Gap | None
    memory_parts_bytes: dict[str, int]
    memory_bytes: int
    generate_tokens_per_s: float
    generate_s: float
    """Generation of a whole step of the recipe, at the speed seen here."""
    scoring_s: float
    """Scoring of a whole step; overlaps with generation."""
    update_s: float | None
    """The update of a whole step, as the plan predicts it; None if it does not."""
    sandbox: str
    """The layer that holds generated programs, and what it leaves open."""
    advice: list[str]


def examine(recipe: Recipe, plan: Plan, process: Process, *, questions: int) -> Report:
    """Draw answers to so many questions of every domain."""
    rl = recipe.rl
    assert rl is not None
    if process.world_size > 1:
        raise ConfigError(f"`redline rl doctor` needs one process, but there are {process.world_size}")
    asked = replace(recipe.train, batch_size=questions * len(rl.domains))
    little = replace(recipe, train=asked, rl=replace(rl, refills=0, weights=(), updates_per_rollout=1))
    base = open_weights(Path(recipe.model.init_from or ""))
    with in_force(plan), open_domains(little, base) as domains:
        job = job_of(little, plan, base, domains, process)
        with closing(job.source(None, 0)) as source:
            drawn: Rollout = source.next()
            gap = _gap(job.model, drawn.groups, domains)
            found = [_domain(name, drawn.groups, domains) for name in rl.names]
    rate = drawn.facts["new_tokens"] / drawn.facts["generate_s"]
    answers, prediction = recipe.rows_per_step, plan.prediction
    new_tokens = answers * fmean(domain.tokens for domain in found)
    read = new_tokens + answers * fmean(len(group.prompt) for group in drawn.groups)
    attainable = prediction.attainable_tokens_per_s
    report = Report(
        domains=found,
        gap=gap,
        memory_parts_bytes=prediction.memory_parts_bytes,
        memory_bytes=prediction.memory_bytes,
        generate_tokens_per_s=rate,
        generate_s=new_tokens / rate,
        scoring_s=answers * fmean(domain.scoring_s for domain in found),
        update_s=read / attainable if attainable else None,
        sandbox=_sandbox(),
        advice=[],
    )
    return replace(report, advice=list(advice(report, rl)))


def _sandbox() -> str:
    try:
        layer = in_force_sandbox()
    except MachineError as error:  # only a recipe with generated programs needs one
        return str(error)
    return f"{layer.name}; leaves open: {'; '.join(layer.leaves_open)}" if layer.leaves_open else layer.name


def _domain(name: str, groups: Sequence[Group], domains: Domains) -> DomainReport:
    own, domain = [group for group in groups if group.domain == name], domains.by_name[name]
    answers = [sample for group in own for sample in group.answers]
    unread = [sample.text for sample in answers if not sample.parsed]
    questions = [domains.ask(group.step, group.key).question for group in own for _ in group.answers]
    said = [domain.task.answer_of(sample.text) for sample in answers]
    began_s = time.perf_counter()
    domain.pool.score(list(zip(questions, said, strict=True)))  # again, with nothing beside it
    return DomainReport(
        name=name,
        answers=len(answers),
        solved=fmean(sample.correct for sample in answers),
        reward=fmean(sample.reward for sample in answers),
        even=fmean(len({sample.reward for sample in group.answers}) == 1 for group in own),
        unread=len(unread) / len(answers),
        cut=fmean(sample.cut for sample in answers),
        tokens=fmean(len(sample.tokens) for sample in answers),
        failed=sum(sample.reason is not None for sample in answers),
        scoring_s=(time.perf_counter() - began_s) / len(answers),
        unread_texts=unread[:2],
    )


@torch.no_grad()
def _gap(model: Transformer, groups: Sequence[Group], domains: Domains) -> Gap | None:
    chosen = [(group, sample) for group in groups for sample in group.answers if sample.tokens][:COMPARED]
    if not chosen:
        return None
    trained = logprobs(model, [row_of(group, sample, 0.0, 0.0) for group, sample in chosen]).float().cpu()
    away = (trained - torch.tensor([value for _, sample in chosen for value in sample.logprobs])).abs()
    _, first = chosen[0]
    texts = domains.tokenizer.decode_batch([[token] for token in first.tokens[:BESIDE]])
    beside = list(zip(texts, first.logprobs, trained.tolist(), strict=False))
    return Gap(float(away.mean()), float(away.max()), len(away), beside)


def advice(report: Report, rl: RlConfig) -> Iterator[str]:
    """What to change before training, the gravest first."""
    for domain in report.domains:
        yield from (f"{domain.name}: {text}" for text in _advice(domain, rl))
    if report.gap is not None and report.gap.mean > WIDE_GAP:
        correction = "keep rl.importance_cap" if rl.importance_cap else "set rl.importance_cap"
        yield (
            f"Engine and trainer differ by {report.gap.mean:.3f} nats per token: {correction}, or try plan.precision=fp32."
        )
    if report.scoring_s > report.generate_s:
        yield (
            f"Scoring a step takes {report.scoring_s:.1f} s and generating it {report.generate_s:.1f} s: the GPU will"
            " wait for rewards. Use more CPU cores or a quicker scorer."
        )
    if "code" in rl.names and (weak := weakness()) is not None:
        yield f"code: {weak}."


def _advice(domain: DomainReport, rl: RlConfig) -> Iterator[str]:
    if domain.failed:
        yield (
            f"the scorer failed on {domain.failed} of {domain.answers} answers, which earn 0: run it alone on one of"
            " them (docs/tasks.md)."
        )
    if domain.unread > 0.5 and domain.solved < RARELY:
        yield (
            f"no answer was found in {domain.unread:.0%} of the texts: show the format with prompt.shots, or teach it"
            " first with `redline rft run` or `redline finetune`."
        )
    elif not domain.solved:
        yield (
            f"none of {domain.answers} answers was correct, so there is nothing to learn from: choose easier questions,"
            " a larger rl.group_size, or begin with `redline rft run`."
        )
    elif domain.solved == 1:
        yield "every answer was correct: choose harder questions or leave it out."
    elif domain.even > 0.5:
        yield (
            f"in {domain.even:.0%} of the groups all answers earned the same, and they are skipped: a larger"
            f" rl.group_size (now {rl.group_size}) finds differences."
        )
    if domain.cut > 0.1:
        yield f"{domain.cut:.0%} of the answers ran out of tokens: raise rl.max_new_tokens (now {rl.max_new_tokens})."
