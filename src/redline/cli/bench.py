"""Measure Redline beside its alternatives, in one run on the same work.

redline bench train                    the training loop beside the bare step, plain PyTorch and Hugging Face's
                                       Trainer
redline bench train --recipe nano      one recipe, also on a CPU
redline bench generate                 the generation engine beside `transformers`; needs a GPU, or --quick
redline bench finetune                 LoRA fine-tuning beside Hugging Face's Trainer with PEFT; needs a GPU, or
                                       --quick
"""

import argparse
from collections.abc import Collection
from pathlib import Path

HELP = "measure speeds beside PyTorch, Transformers and PEFT"
STANDARD = (
    ("gpt2-124m", (), ("loop", "plain", "hf")),
    ("gpt-1.3b", ("train.batch_size=64",), ("loop", "hf")),
    ("gpt-1.3b", ("train.batch_size=64", "plan.precision=fp8"), ("loop",)),
)
"""Recipe, overrides and arms. 1.3B takes smaller batches so that six blocks of every arm take minutes, not
hours."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(dest="verb", metavar="WHAT", required=True)
    train = verbs.add_parser("train", help="training speed")
    train.add_argument(
        "--recipe", action="append", metavar="RECIPE",
        help="bench this instead of the standard set; may be repeated",
    )  # fmt: skip
    train.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE",
        help="override a value of every recipe",
    )  # fmt: skip
    train.add_argument(
        "--data", default="tinyshakespeare", metavar="SOURCE",
        help="what to train on (default tinyshakespeare)",
    )  # fmt: skip
    train.add_argument("--blocks", type=int, default=6, help="timed blocks of each arm (default 6)")
    train.add_argument(
        "--steps-per-block", type=int, default=5, metavar="N", help="updates in a block (default 5)"
    )
    generate = verbs.add_parser("generate", help="generation speed")
    finetune = verbs.add_parser("finetune", help="LoRA fine-tuning speed")
    for verb in (generate, finetune):
        verb.add_argument(
            "--quick", action="store_true", help="a tiny model, to see that everything runs; also on a CPU"
        )
    for verb, arms in (
        (train, "loop, plain or hf"),
        (generate, "transformers or redline"),
        (finetune, "hf-seeds, hf-best, graph, compiled or fp32"),
    ):
        verb.add_argument("--arm", action="append", metavar="ARM", help=f"{arms} (default: all)")
        verb.add_argument(
            "--out", type=Path, default=Path("benchmarks"), help="folder of the results (default benchmarks)"
        )


def run(options: argparse.Namespace) -> None:
    path = {"train": _train, "generate": _generate, "finetune": _finetune}[options.verb](options)
    print(path.read_text(encoding="utf-8"))
    print(f"written to {path} and {path.with_suffix('.json')}")


def _train(options: argparse.Namespace) -> Path:
    from redline.bench.train import ARMS, bench_train
    from redline.cli.options import check_least, status
    from redline.config.load import load_recipe
    from redline.machine.facts import read_facts
    from redline.plan.hardware import hardware_here

    check_least("--blocks", options.blocks)
    check_least("--steps-per-block", options.steps_per_block)
    _check_arms(options, ARMS)
    data = [f'data.source="{options.data}"', 'data.tokenizer="bpe"', "data.valid_fraction=0.05"]
    standard = [(name, sets, options.arm or arms) for name, sets, arms in STANDARD]
    chosen = [(name, (), options.arm or ARMS) for name in options.recipe] if options.recipe else standard
    cases = [(load_recipe(name, [*data, *sets, *options.set]), arms) for name, sets, arms in chosen]
    from redline.machine.ceilings import load_or_measure

    facts = read_facts()
    hardware = hardware_here(facts, load_or_measure(facts, progress=status))
    return bench_train(
        cases, hardware, facts, options.out, blocks=options.blocks, steps_per_block=options.steps_per_block,
        progress=status,
    )  # fmt: skip


def _generate(options: argparse.Namespace) -> Path:
    from redline.bench.generate import ARMS, bench_generate
    from redline.cli.options import status

    _check_arms(options, ARMS)
    facts, name = _quick_or_full(options)
    from redline.machine.ceilings import load_or_measure

    ceilings = load_or_measure(facts, progress=status)
    return bench_generate(name, ceilings, facts, options.out, arms=options.arm or ARMS, progress=status)


def _finetune(options: argparse.Namespace) -> Path:
    from redline.bench.finetune import LABELS, bench_finetune
    from redline.cli.options import status

    _check_arms(options, LABELS)
    facts, name = _quick_or_full(options)
    return bench_finetune(name, facts, options.out, arms=options.arm or tuple(LABELS), progress=status)


def _check_arms(options: argparse.Namespace, known: Collection[str]) -> None:
    from redline.errors import ConfigError

    for arm in options.arm or ():
        if arm not in known:
            raise ConfigError(f"--arm must be one of {', '.join(known)}, got {arm!r}")


def _quick_or_full(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from redline.errors import MachineError
    from redline.machine.facts import read_facts

    facts = read_facts()
    if not facts.gpus and not options.quick:
        raise MachineError("the full benchmark needs a GPU, and this machine has none: use --quick")
    return facts, "quick" if options.quick else "full"
