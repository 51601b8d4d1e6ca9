"""Reinforcement learning from verifiable rewards: the model answers, scorers grade it, and its weights learn.

redline rl run rl/demo                               GRPO on the shipped model, half a minute on a CPU
redline rl run rl/guru-8gpu --nproc 8 --dry-run      the plan for eight processes, and nothing else
redline rl run rl/demo --on ray --workers 8          workers on a Ray cluster answer while this process learns
redline rl doctor rl/demo                            before training: solve rates, formats, lengths, times, advice
redline rl compare runs/baseline runs/pcgrad         accuracy of every domain with intervals, conflicts, cost

If the run is stopped or killed, run the same command again and it resumes; Ctrl-C stops it with a checkpoint. The result
is RUN/adapter (RUN/model if all weights learn).
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from redline.cli.options import answer, on_ray, recipe_of, status
from redline.cli.plan import chosen, print_plan
from redline.cli.train import check_options, nodes_of, train
from redline.errors import ConfigError
from redline.plan.plan import to_json
from redline.plan.predict import pcgrad_place
from redline.record.read import read_runs
from redline.record.units import DASH, format_bytes, format_duration, format_share, visible
from redline.report.grid import show
from redline.report.page import write_page
from redline.report.reinforcement import Compared
from redline.report.view import RunView

if TYPE_CHECKING:
    from redline.rl.doctor import Report

ARGUMENTS = {
    "run": """train a recipe of workload rl, or resume its run
@RECIPE
@RUN
@ON_RAY
--dry-run   show the plan and run nothing
@JSON""",
    "doctor": """draw a few answers of every domain and say what to change before training
@RECIPE
--questions N   questions of every domain (default 8)
@DEVICE
@PLAN
@JSON""",
    "compare": """two runs side by side, with a verdict
BASELINE     the run to compare with
OTHER        the run to judge, say one with PCGrad
--out FILE   also write both runs as one page
@JSON""",
}


def run(options: argparse.Namespace) -> int | None:
    verbs: dict[str, Callable[..., int | None]] = {"run": _run, "doctor": _doctor, "compare": _compare}
    return verbs[options.verb](options)


def _run(options: argparse.Namespace) -> int:
    check_options(options)
    workers = on_ray(options)
    if workers is not None and (processes := options.nproc * nodes_of(options)[1]) > 1:
        raise ConfigError(f"--on ray needs one training process; --nproc and --nnodes ask for {processes}")
    recipe = recipe_of(options, runs=("rl",))
    if not options.dry_run:
        return train(options, recipe, on=workers)
    nodes = nodes_of(options)[1]
    plan = chosen(options, recipe, options.nproc * nodes, nodes, say=lambda text: None)
    place, why = pcgrad_place(recipe, plan)
    kept = {"pcgrad_kept_on": {"value": place, "reason": why, "source": "rule"}}
    watched = recipe.rl is not None and recipe.rl.pcgrad != "off"

    def print_all() -> None:
        print_plan(plan, recipe)
        if watched:
            print(f"PCGrad keeps the domains' gradients on the {place}: {why}")

    answer(options, to_json(plan) | (kept if watched else {}), print_all)
    return 0


def _doctor(options: argparse.Namespace) -> None:
    recipe = recipe_of(options, runs=("rl",))
    plan = chosen(options, recipe, 1, say=status)
    from redline.rl.doctor import examine
    from redline.train.execution import set_allocator
    from redline.train.process import join

    set_allocator(plan)
    with join(plan.hardware.kind) as process:
        report = examine(recipe, plan, process, questions=options.questions)
    answer(options, asdict(report), lambda: print_doctor(report))


def _compare(options: argparse.Namespace) -> None:
    base, other = read_runs([Path(options.baseline), Path(options.other)])
    found = Compared(base, other)
    if options.out:
        write_page([RunView(base, 0), RunView(other, 1)], options.out)
        status(f"page: {options.out}")
    answer(options, found, lambda: print_compared(found, (base.label, other.label)))


LONGEST_TEXT = 300


def print_doctor(report: "Report") -> None:
    show(
        ("domain", "answers", "correct", "reward", "groups alike", "no answer found", "cut off", "tokens", "scoring"),
        [
            (
                d.name, f"{d.answers:,}", format_share(d.solved), f"{d.reward:.3f}", format_share(d.even),
                format_share(d.unread), format_share(d.cut), f"{d.tokens:.0f}", format_duration(d.scoring_s),
            )
            for d in report.domains
        ],
        right=range(1, 9),
    )  # fmt: skip
    for domain in report.domains:
        for text in domain.unread_texts:
            print(f"\n{domain.name}, no answer found in: {visible(' '.join(text.split()))[:LONGEST_TEXT]}")
    if (gap := report.gap) is not None:
        rows = [(repr(token), f"{engine:.4f}", f"{trainer:.4f}") for token, engine, trainer in gap.beside]
        print(
            f"\nLog-probabilities of {gap.tokens:,} tokens, engine against trainer: {gap.mean:.2g} nats apart on average,"
            f" {gap.most:.2g} at most"
        )
        show(("token", "engine", "trainer"), rows, right=(1, 2))
    rows = [
        ("memory", format_bytes(report.memory_bytes), "predicted: " + _parts(report)),
        (
            "generation", format_duration(report.generate_s),
            f"a step, at the {report.generate_tokens_per_s:,.0f} tokens/s seen here",
        ),
        ("scoring", format_duration(report.scoring_s), "a step; overlaps with generation"),
        ("update", format_duration(report.update_s), "a step, predicted" if report.update_s else "not predicted on a CPU"),
        ("sandbox", report.sandbox.partition(";")[0], report.sandbox.partition("; ")[2]),
    ]  # fmt: skip
    print()
    show(("", "", ""), rows)
    print()
    for line in report.advice or ["Found nothing to change."]:
        print(visible(line))


def _parts(report: "Report") -> str:
    sizes = sorted(report.memory_parts_bytes.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes if size)


def print_compared(found: Compared, labels: tuple[str, str]) -> None:
    rows = [
        (d.domain, str(d.base), str(d.other), f"{100 * d.low:+.1f} to {100 * d.high:+.1f}", d.word)
        for d in found.differences
    ]
    show(("accuracy", *labels, "difference, points", ""), rows, right=(3,))
    for label, pairs in found.pairs.items():
        shown = [
            (f"{p.a} and {p.b}", f"{p.cosine:+.2f}", format_share(p.rate), format_share(p.tensors))
            for p in pairs
        ]
        columns = (f"conflicts in {label}", "mean cosine", "updates", "tensors")
        print()
        show(columns, shown or [(DASH,) * 4], right=(1, 2, 3))
    print()
    show(("cost", *labels), found.costs)
    print(f"\n{visible(found.verdict)}")
    for caveat in found.caveats:
        print(visible(caveat))
