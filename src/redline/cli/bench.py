"""Compare Redline with its alternatives, in one run on the same work.

redline bench train                    the training loop against the bare step, plain PyTorch and Hugging Face's
                                       Trainer; needs a GPU
redline bench train --recipe nano      one recipe, also on a CPU
redline bench generate                 the generation engine against `transformers`; needs a GPU, or --quick
redline bench finetune                 LoRA fine-tuning against Hugging Face's Trainer with PEFT; needs a GPU, or
                                       --quick
redline bench rl                       GRPO against TRL's GRPOTrainer; needs a GPU, or --quick
redline bench attention                kernel attention against flash attention; needs a GPU, or --quick
redline bench train --arm loop --against benchmarks/train_nvidia-h200_20261115.json     exits with 1 if it became slower
"""

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.bench.results import page_of, recorded, slower
from redline.cli.options import ceilings_of, status
from redline.config.load import load_recipe
from redline.errors import ConfigError, MachineError, StorageError
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_here
from redline.record.files import read_json

STANDARD = (
    ("gpt2-124m", (), ("loop", "plain", "hf")),
    ("gpt-1.3b", ("train.batch_size=64",), ("loop", "hf")),
    ("gpt-1.3b", ("train.batch_size=64", "plan.precision=fp8"), ("loop",)),
)
"""Recipe, overrides and arms. 1.3B takes smaller batches, so that its blocks take minutes and not hours."""
ARMS = {
    "train": ("loop", "plain", "hf"),
    "generate": ("transformers", "redline"),
    "finetune": ("hf-seeds", "hf-best", "graph", "fp32"),
    "rl": ("trl", "trl_continuous", "redline", "redline_compiled", "actor"),
    "attention": ("flash", "cudnn", "favor"),
}
OUT = "--out DIR   folder of the results (default benchmarks)"
AGAINST = "--against FILE   compare our arms with an earlier benchmark's JSON from the same kind of machine"
QUICK = "--quick   use a tiny model, to check that everything runs; works on a CPU too"


def _fixed(verb: str, about: str, against: str = AGAINST) -> str:
    """The arguments of a benchmark whose work is fixed."""
    *arms, last = ARMS[verb]
    named = f"--arm ARM...   {', '.join(arms)} or {last} (default: all)"
    return f"{about}\n{QUICK}\n{named}\n{against}\n{OUT}"


ARGUMENTS = {
    "train": f"""training speed
--recipe RECIPE...         bench this instead of the standard set
--set TABLE.KEY=VALUE...   override a value of every recipe
--data SOURCE              what to train on (default tinyshakespeare)
--blocks N                 timed blocks of each arm (default 6)
--steps-per-block N        updates per block (default 5)
--arm ARM...               loop (always interleaved with the bare step), plain or hf (default: all)
{AGAINST}
{OUT}""",
    "generate": _fixed("generate", "generation speed"),
    "finetune": _fixed("finetune", "LoRA fine-tuning speed"),
    "rl": _fixed("rl", "whole steps of reinforcement learning, and the update of a larger model"),
    "attention": _fixed("attention", "kernel attention and flash attention at several lengths", against=""),
}


def run(options: argparse.Namespace) -> int:
    known = ARMS[options.verb]
    if wrong := [arm for arm in options.arm if arm not in known]:
        raise ConfigError(f"--arm must be one of {', '.join(known)}, got {wrong[0]!r}")
    against = getattr(options, "against", None)
    before = _recorded(options, against) if against else None
    path = _train(options) if options.verb == "train" else _measure(options)
    print(path.read_text(encoding="utf-8"))
    print(f"written to {path} and {path.with_suffix('.json')}")
    now = read_json(path.with_suffix(".json"), dict, error=ConfigError)
    worse = slower(now, before) if before else []
    for why in worse:
        status(f"slower than {against}: {why}")
    return 1 if worse else 0


def _recorded(options: argparse.Namespace, against: Path) -> dict[str, Any]:
    facts, quick = read_facts(), "-quick" if getattr(options, "quick", False) else ""
    page = page_of(options.out, f"{options.verb}{quick}", facts)
    if against.resolve() == page.with_suffix(".json").resolve():
        raise ConfigError(f"{against} is the file this benchmark writes: give another --out")
    return recorded(against, facts)


def _train(options: argparse.Namespace) -> Path:
    data = [f'data.source="{options.data}"', 'data.tokenizer="bpe"', "data.valid_fraction=0.05"]
    standard = [(name, sets, options.arm or arms) for name, sets, arms in STANDARD]
    chosen = [(name, (), options.arm or ARMS["train"]) for name in options.recipe] or standard
    cases = [(load_recipe(name, [*data, *sets, *options.set]), arms) for name, sets, arms in chosen]
    facts = read_facts()
    if not facts.gpus and not options.recipe:
        raise MachineError("the full benchmark needs a GPU, but this machine has none: use --recipe nano")
    _check_writable(options.out)
    from redline.bench.train import bench_train

    hardware = hardware_here(facts, ceilings_of(facts))
    blocks = {"blocks": options.blocks, "steps_per_block": options.steps_per_block}
    return bench_train(cases, hardware, facts, options.out, **blocks, progress=status)


def _check_writable(out: Path) -> None:
    """Refuse a folder that cannot hold the results before anything is measured."""
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise StorageError(f"{out} cannot be written to; choose another path")


def _measure(options: argparse.Namespace) -> Path:
    """Run a benchmark whose work is fixed: the room's module of that name measures it."""
    facts = read_facts()
    if not facts.gpus and not options.quick:
        raise MachineError("the full benchmark needs a GPU, but this machine has none: use --quick")
    _check_writable(options.out)
    name, more = "quick" if options.quick else "full", {}
    if options.verb == "generate":
        more["ceilings"] = ceilings_of(facts)
    module = importlib.import_module(f"redline.bench.{options.verb}")
    bench: Callable[..., Path] = getattr(module, f"bench_{options.verb}")
    return bench(name, facts, options.out, arms=options.arm or ARMS[options.verb], progress=status, **more)
