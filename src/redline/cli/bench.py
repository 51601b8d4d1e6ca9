"""Measure Redline beside its alternatives, in one run on the same work.

redline bench train                        the training loop beside the bare step, plain PyTorch and Hugging
                                           Face's Trainer
redline bench train --recipe nano          one recipe, also on a CPU
redline bench generate                     the generation engine beside `transformers`; needs a GPU, or
                                           --quick
redline bench finetune                     LoRA fine-tuning beside Hugging Face's Trainer with PEFT; needs a
                                           GPU, or --quick
"""

import argparse
from pathlib import Path

HELP = "measure training, generation or fine-tuning beside its alternatives"
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
        "--recipe",
        action="append",
        metavar="RECIPE",
        help="bench this instead of the standard set; may be repeated",
    )
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a value of every recipe",
    )
    train.add_argument("--arm", action="append", metavar="ARM", help="loop, plain or hf (default: all)")
    train.add_argument(
        "--data",
        default="tinyshakespeare",
        metavar="SOURCE",
        help="what to train on (default tinyshakespeare)",
    )
    train.add_argument("--blocks", type=int, default=6, help="timed blocks of each arm (default 6)")
    train.add_argument(
        "--steps-per-block", type=int, default=5, metavar="N", help="updates in a block (default 5)"
    )
    train.add_argument(
        "--out", type=Path, default=Path("benchmarks"), help="folder of the results (default benchmarks)"
    )

    generate = verbs.add_parser("generate", help="generation speed")
    generate.add_argument(
        "--quick", action="store_true", help="a tiny model, to see that everything runs; also on a CPU"
    )
    generate.add_argument(
        "--arm", action="append", metavar="ARM", help="transformers or redline (default: both)"
    )
    generate.add_argument(
        "--out", type=Path, default=Path("benchmarks"), help="folder of the results (default benchmarks)"
    )

    tune = verbs.add_parser("finetune", help="LoRA fine-tuning speed")
    tune.add_argument(
        "--quick", action="store_true", help="a tiny model, to see that everything runs; also on a CPU"
    )
    tune.add_argument(
        "--arm",
        action="append",
        metavar="ARM",
        help="hf-seeds, hf-best, graph, compiled or fp32 (default: all)",
    )
    tune.add_argument(
        "--out", type=Path, default=Path("benchmarks"), help="folder of the results (default benchmarks)"
    )


def run(options: argparse.Namespace) -> None:
    {"train": _train, "generate": _generate, "finetune": _finetune}[options.verb](options)


def _train(options: argparse.Namespace) -> None:
    from redline.bench.train import ARMS, bench_train
    from redline.cli.options import status
    from redline.config.load import load_recipe
    from redline.errors import ConfigError
    from redline.machine.ceilings import load_or_measure
    from redline.machine.facts import read_facts
    from redline.plan.hardware import hardware_here

    for name in ("blocks", "steps_per_block"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for arm in options.arm or ():
        if arm not in ARMS:
            raise ConfigError(f"--arm must be one of {', '.join(ARMS)}, got {arm!r}")
    data = [f'data.source="{options.data}"', 'data.tokenizer="bpe"', "data.valid_fraction=0.05"]
    standard = [(name, sets, options.arm or arms) for name, sets, arms in STANDARD]
    chosen = [(name, (), options.arm or ARMS) for name in options.recipe] if options.recipe else standard
    cases = [(load_recipe(name, [*data, *sets, *options.set]), arms) for name, sets, arms in chosen]
    facts = read_facts()
    hardware = hardware_here(facts, load_or_measure(facts, progress=status))
    path = bench_train(
        cases,
        hardware,
        facts,
        options.out,
        blocks=options.blocks,
        steps_per_block=options.steps_per_block,
        progress=status,
    )
    print(path.read_text(encoding="utf-8"))
    print(f"written to {path} and {path.with_suffix('.json')}")


def _generate(options: argparse.Namespace) -> None:
    from redline.bench.generate import ARMS, bench_generate
    from redline.cli.options import status
    from redline.errors import ConfigError, MachineError
    from redline.machine.ceilings import load_or_measure
    from redline.machine.facts import read_facts

    for arm in options.arm or ():
        if arm not in ARMS:
            raise ConfigError(f"--arm must be one of {', '.join(ARMS)}, got {arm!r}")
    facts = read_facts()
    if not facts.gpus and not options.quick:
        raise MachineError("the full benchmark needs a GPU, and this machine has none: use --quick")
    name = "quick" if options.quick else "full"
    ceilings = load_or_measure(facts, progress=status)
    path = bench_generate(name, ceilings, facts, options.out, arms=options.arm or ARMS, progress=status)
    print(path.read_text(encoding="utf-8"))
    print(f"written to {path} and {path.with_suffix('.json')}")


def _finetune(options: argparse.Namespace) -> None:
    from redline.bench.finetune import LABELS, bench_finetune
    from redline.cli.options import status
    from redline.errors import ConfigError, MachineError
    from redline.machine.facts import read_facts

    for arm in options.arm or ():
        if arm not in LABELS:
            raise ConfigError(f"--arm must be one of {', '.join(LABELS)}, got {arm!r}")
    facts = read_facts()
    if not facts.gpus and not options.quick:
        raise MachineError("the full benchmark needs a GPU, and this machine has none: use --quick")
    path = bench_finetune(
        "quick" if options.quick else "full",
        facts,
        options.out,
        arms=options.arm or tuple(LABELS),
        progress=status,
    )
    print(path.read_text(encoding="utf-8"))
    print(f"written to {path} and {path.with_suffix('.json')}")
