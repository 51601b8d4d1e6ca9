"""How often each cause of `diagnose` is right where it is found, counted: the figures in causes.toml, from which the
confidence of a finding comes.

    python tests/diagnose_precision.py             # the counts, and where they differ from those in causes.toml
    python tests/diagnose_precision.py --write     # put them there

Real are the shared logs (real_logs.py) and the pages that Redline grew out of (../shared/seeds). Planted are the faults of
the closed loop on a GPU (planted.py wrote its results into benchmarks/), the logs of our own making, and faults put into a
made run in every format that we know (unit/diagnose_formats.py). A finding that nobody judged counts neither way.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from real_logs import answers

sys.path.insert(0, str(Path(__file__).parent / "unit"))
from diagnose_formats import FORMATS, Run

from redline.diagnose.finding import causes
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src" / "redline" / "diagnose" / "causes.toml"
SEEDS = ROOT.parent / "shared" / "seeds"
PAGES = {
    "000": {"real-batch", "other-work", "contradiction"},
    "001": {"uncached-generation", "per-gpu-throughput", "no-such-memory", "other-work"},
    "002": {
        "impossible-pair",
        "inference-api",
        "over-peak",
        "needless-recomputation",
        "accumulation-as-speed",
    },
    "003": {"gains-multiply", "unknown-argument", "accumulation-as-speed"},
    "004": {"parameter-counts", "accumulation-as-speed"},
}
"""What a reader of each page found that cannot hold."""
TAILS = {
    "out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 892.00 MiB. GPU 0 has a total"
    " capacity of 79.19 GiB of which 683.50 MiB is free.",
    "crash": "Traceback (most recent call last):\n  File \"train.py\", line 10, in <module>\nKeyError: 'input_ids'",
    "time-limit": "slurmstepd: error: *** JOB 1 ON g1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***",
    "host-memory": "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.",
    "collective-timeout": "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
}
ALSO = {"low-mfu", "tiny-batch", "small-passes", "padding", "nanogpt-mfu", "slow-updates"}
"""What the made run has besides its fault: it is a small model in a hurry. Not judged here."""
Count = dict[str, list[int]]


def faults(draw: random.Random) -> Iterator[tuple[str, Run]]:
    """A made run with one fault each, and one without."""
    updates = 240
    times = [0.5 * draw.uniform(0.99, 1.01) for _ in range(updates)]
    losses = [2.0 + 6.0 / (1 + step / 20) + draw.uniform(-0.02, 0.02) for step in range(updates)]
    clean = Run(updates=updates, times=tuple(times), losses=tuple(losses))
    since, every, slow = draw.randrange(60, 180), draw.choice((6, 10, 12)), draw.uniform(1.6, 3.0)
    late = set(draw.sample(range(20, updates), 20))
    yield "", clean
    yield "not-a-number", replace(clean, losses=(*losses[:since], *[float("nan")] * (updates - since)))
    yield ("loss-spike", replace(clean, losses=(*losses[:since], *(3 * loss for loss in losses[since:]))))
    yield (
        "stall",
        replace(clean, times=tuple(t * (5 if n % every == 0 else 1) for n, t in enumerate(times, 1))),
    )
    yield (
        "regime-change",
        replace(clean, times=tuple(t * (slow if n < since else 1) for n, t in enumerate(times))),
    )
    yield (
        "slow-updates",
        replace(clean, times=tuple(t * (6 if n in late else 1) for n, t in enumerate(times))),
    )


def made() -> Count:
    """Faults in every format whose lines are exact and hold them."""
    found: Count = {}
    with TemporaryDirectory() as folder:
        for name, form in FORMATS.items():
            draw = random.Random(name)
            path = Path(folder) / form.name
            for cause, run in faults(draw):
                timed = cause in ("stall", "regime-change", "slow-updates")
                if (timed and (not form.exact_lines or not form.times)) or (
                    cause and not timed and not form.losses
                ):
                    continue
                path.write_text(form.text(run), encoding="utf-8")
                judge(found, path, {cause})
            for cause, tail in TAILS.items() if form.name.endswith(".log") else ():
                path.write_text(form.text(Run()) + tail + "\n", encoding="utf-8")
                judge(found, path, {cause})
    return found


def judge(found: Count, path: Path, right: set[str]) -> None:
    for finding in diagnose(read(path)):
        if finding.cause in right or finding.cause not in ALSO:
            add(found, finding.cause, finding.cause in right)


def add(found: Count, cause: str, right: bool) -> None:
    counts = found.setdefault(cause, [0, 0])
    counts[0] += right
    counts[1] += 1


def planted() -> Count:
    found = made()
    for one in answers(own=True):
        for finding in (*one.right, *one.wrong):
            add(found, finding.cause, finding in one.right)
    (results,) = (ROOT / "benchmarks").glob("closed-loop_*.json")
    for row in json.loads(results.read_text())["planted"]:
        add(found, row["found"], row["right"])
        for cause in row["false_alarms"]:
            add(found, cause, False)
    return found


def real() -> Count:
    """Empty where the shared files are not there."""
    found: Count = {}
    for one in answers(own=False):
        for finding in (*one.right, *one.wrong):
            add(found, finding.cause, finding in one.right)
    for number, right in PAGES.items():
        for page in SEEDS.glob(f"{number}*"):
            for finding in diagnose(read(page)):
                add(found, finding.cause, finding.cause in right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    write, counted = parser.parse_args().write, {"real": real(), "planted": planted()}
    text = TABLE.read_text()
    for cause in causes():
        for kind, counts in counted.items():
            new = counts.get(cause, [0, 0])
            if new != causes()[cause][kind]:
                print(f"{cause}: {kind} {causes()[cause][kind]} -> {new}")
            pattern = rf"(\n\[{re.escape(cause)}\]\n(?:(?!\[).*\n)*?{kind} = )\[\d+, \d+\]"
            text = re.sub(pattern, rf"\g<1>{new}", text)
    if write:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
