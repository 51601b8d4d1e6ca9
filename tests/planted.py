"""Plants one fault at a time into a real run, lets `diagnose` read the run folder, and compares what it
predicts with what is measured.

    python tests/planted.py                                  # CPU, a small nano
    python tests/planted.py --recipe gpt2-124m               # the same on a GPU, with the faults that only a
                                                             GPU has

A fault goes in through the code that a user would slow down: the data set, an observer, a pin of the plan;
padding, generation without a cache and losses read too soon, which our own training has not, in loops of a
user's own (planted_loops.py). A clean and a faulty run take turns, some updates at a time, and the gain
measured is the ratio of their wall clocks.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from planted_loops import learn_from_samples, read_every_loss, train_on_rows

from redline.config.load import load_recipe, to_toml
from redline.data.shards import TokenDataset
from redline.diagnose.readers.own import read_run
from redline.diagnose.rules import diagnose
from redline.machine.facts import read_facts
from redline.machine.store import cached
from redline.observe import WatchedRun
from redline.plan.hardware import hardware_here
from redline.plan.plan import Hardware, save
from redline.plan.planner import make_plan
from redline.pretrain import job_of, open_corpus
from redline.record.run import RunFolder
from redline.train.loop import Trainer
from redline.train.open_run import OpenRun
from redline.train.process import Process

SMALL = (
    "model.num_layers=2",
    "data.seq_len=32",
    "train.batch_size=16",
    "train.eval_every=0",
    "train.checkpoint_every=0",
    "train.warmup_steps=0",
)
"""The nano recipe so small that an update takes some tens of milliseconds on one core."""


class SlowDataset(TokenDataset):
    """Token shards on a disk that takes its time."""

    delay_s = 0.0

    def read_windows(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
        time.sleep(self.delay_s)
        return super().read_windows(indices, seq_len)


class SlowObserver:
    """An exporter that blocks: every line, or every N lines."""

    def __init__(self, delay_s: float, every: int) -> None:
        self.delay_s, self.every = delay_s, every

    def metrics(self, line: dict[str, Any]) -> None:
        if line["step"] % self.every == 0:
            time.sleep(self.delay_s)

    def event(self, kind: str, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Fault:
    cause: str
    """What the top finding must be called."""
    pins: tuple[str, ...] = ()
    loader: float = 0.0
    """Delay of each read, in clean updates."""
    observer: tuple[float, int] = (0.0, 1)
    """Delay in clean updates, and every how many lines."""
    loop: Callable[..., Iterator[WatchedRun]] | None = None
    """A loop of a user's own in the place of the recipe's training; its clean arm is the same loop without
    the fault."""
    block: int = 10
    """Updates in a turn."""
    gpu_only: bool = False


FAULTS = {
    "slow loader": Fault("slow-loader", loader=4.0),
    "tiny passes": Fault("small-passes", pins=("plan.micro_batch=1",)),
    "needless recomputation": Fault("needless-recomputation", pins=("plan.recompute=full",)),
    "logging in the loop": Fault("host-gap", observer=(1.0, 1)),
    "a stall every 10 updates": Fault("stall", observer=(15.0, 10)),
    "padding": Fault("padding", loop=train_on_rows),
    "generation without a cache": Fault("uncached-generation", loop=learn_from_samples, block=2),
    "fp32": Fault("slow-precision", pins=("plan.precision=fp32",), gpu_only=True),
    "not compiled": Fault("not-compiled", pins=("plan.compile=off",), gpu_only=True),
    "sync in the loop": Fault("sync", loop=read_every_loss, gpu_only=True),
}


class Arm(Protocol):
    """A run that is turned by hand."""

    def restart(self) -> None:
        """The next update begins now."""

    def turn(self) -> None:
        """One update."""

    def drain(self) -> None:
        """Wait for the last update and record it."""


class Training:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.restart, self.turn = trainer.instruments.restart, trainer.turn

    def drain(self) -> None:
        self._trainer.drain()


class Loop:
    def __init__(self, updates: Iterator[WatchedRun]) -> None:
        self._updates = updates
        self._run: WatchedRun | None = None

    def restart(self) -> None:
        if self._run is not None:
            self._run.restart()

    def turn(self) -> None:
        self._run = next(self._updates)

    def drain(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Bench:
    """Where the runs happen: a recipe with its overrides, and the machine."""

    recipe: str
    overrides: tuple[str, ...]
    hardware: Hardware
    folder: Path

    @contextmanager
    def arm(self, name: str, fault: Fault, clean_s: float, *, faulty: bool) -> Iterator[Arm]:
        """A real run with or without the fault in it; it is not run to its end."""
        if fault.loop is None:
            with self.trainer(name, fault if faulty else Fault(""), clean_s) as trainer:
                yield Training(trainer)
            return
        with closing(
            fault.loop(self.folder / name, torch.device(self.hardware.kind), faulty=faulty)
        ) as updates:
            yield Loop(updates)

    @contextmanager
    def trainer(self, name: str, fault: Fault, clean_s: float) -> Iterator[Trainer]:
        recipe = load_recipe(self.recipe, [*self.overrides, "train.steps=100000", *fault.pins])
        plan = make_plan(recipe, self.hardware)
        process = Process(0, 1, torch.device(self.hardware.kind))
        with RunFolder(self.folder / name) as folder:
            folder.recipe_path.write_text(to_toml(recipe))
            save(plan, folder.plan_path)
            corpus = open_corpus(recipe, folder.path, process, None)
            source = corpus.train
            assert isinstance(source, TokenDataset)
            source.__class__, source.delay_s = SlowDataset, fault.loader * clean_s  # type: ignore[attr-defined]
            slow = SlowObserver(fault.observer[0] * clean_s, fault.observer[1])
            job = job_of(recipe, plan, corpus, process, OpenRun(folder.path, folder, [slow]))
            trainer = Trainer(job, process)
            try:
                yield trainer
            finally:
                trainer.close()


def turn(arm: Arm, turns: int) -> float:
    """Seconds of some updates by the wall clock, to the end of the last."""
    arm.restart()
    started_s = time.perf_counter()
    for _ in range(turns):
        arm.turn()
    arm.drain()
    return time.perf_counter() - started_s


def plant(bench: Bench, name: str, *, blocks: int) -> dict[str, Any]:
    """Blocks of updates, clean and faulty in turn so that both meet the same load; the wall clock, not the
    record, is the measure."""
    fault = FAULTS[name]
    with bench.arm(f"{name} clean", fault, 0.0, faulty=False) as clean:
        turn(clean, 5)
        clean_s = turn(clean, 5) / 5
        with bench.arm(name, fault, clean_s, faulty=True) as faulty:
            turn(faulty, 5)  # warm, and so that what comes every ten updates falls into the middle of a block
            ratios = [turn(faulty, fault.block) / turn(clean, fault.block) for _ in range(blocks)]
    findings = diagnose(read_run(bench.folder / name))
    top = findings[0] if findings else None
    predicted = top.gain.middle if top and top.gain else 1.0
    return {
        "fault": name,
        "planted": fault.cause,
        "found": top.cause if top else None,
        "right": top is not None and top.cause == fault.cause,
        "predicted": predicted,
        "range": (top.gain.low, top.gain.high) if top and top.gain else None,
        "measured": median(ratios),
        "error": predicted / median(ratios) - 1,
        "false alarms": [finding.cause for finding in diagnose(read_run(bench.folder / f"{name} clean"))],
    }


@contextmanager
def small_bench() -> Iterator[Bench]:
    """The nano recipe on this CPU, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Bench("nano", SMALL, hardware_here(read_facts(), None), Path(folder))
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--blocks", type=int, default=6, help="blocks of updates for each arm")
    parser.add_argument("--only", choices=FAULTS, nargs="+", default=[])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    facts = read_facts()
    with tempfile.TemporaryDirectory() as folder, small_bench() as small:
        quiet = ("train.eval_every=0", "train.checkpoint_every=0", *options.set)
        bench = small
        if options.recipe:
            bench = Bench(
                options.recipe, quiet, hardware_here(facts, cached(facts, progress=print)), Path(folder)
            )
        names = [
            n
            for n, f in FAULTS.items()
            if n in options.only or (not options.only and (bench.hardware.kind == "cuda" or not f.gpu_only))
        ]
        results = []
        for name in names:
            results.append(plant(bench, name, blocks=options.blocks))
            r = results[-1]
            print(
                f"{name:28} found {r['found']!s:24} predicted {r['predicted']:.2f}x measured"
                f" {r['measured']:.2f}x ({r['error']:+.0%})",
                flush=True,
            )
    right, near = (
        sum(r["right"] for r in results),
        sum(r["right"] and abs(r["error"]) <= 0.25 for r in results),
    )
    inside = sum(r["range"] is not None and r["range"][0] <= r["measured"] <= r["range"][1] for r in results)
    alarms = [cause for r in results for cause in r["false alarms"]]
    print(
        f"cause named in {right} of {len(results)}, gain within 25% in {near}, inside its range in {inside};"
        f" false alarms in the clean runs: {alarms or 'none'}"
    )
    if options.out:
        options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
