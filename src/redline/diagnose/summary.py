"""What is said beside the findings: where the time of an update went, and why nothing was found, which is
good news only sometimes.

split(observed) == {"forward": 0.031, "backward": 0.062, ..., "idle": 0.002}
"""

from statistics import fmean

from redline.diagnose.causes import FEWEST_UPDATES, enough, felt_wait_s
from redline.diagnose.observed import PHASES, Observed

TIMES_FROM = {
    "run": "write `step_s` with every update",
    "hf": (
        "let the run end, or train with include_num_input_tokens_seen='all', which puts train_runtime on"
        " every line"
    ),
    "torchtitan": "at least two lines of steps are needed, with their time stamps",
    "verl": "keep the lines that hold perf/time_per_step or timing_s/step",
    "lightning": (
        "train with the callback ThroughputMonitor(batch_size_fn, length_fn), which writes train/time"
    ),
}
"""How a log of each format gets its times."""
TIMES_FROM_COLUMNS = (
    "name the column with --map step_s=COLUMN (COLUMN:ms where it is in milliseconds), or --map"
    " elapsed_s=COLUMN"
)


def split(observed: Observed) -> dict[str, float]:
    """Mean seconds of each part of an update, what is left of it as `idle`; empty where its parts were not
    measured. Means add up to the update, as medians do not."""
    step_s = observed.mean("step_s")
    if not step_s or observed.mean("forward_s") is None:
        return {}
    known = {
        name.removesuffix("_s"): observed.share(name) * step_s
        for name in PHASES
        if any(getattr(s, name) for s in observed.steady)
    }
    left_s = max(0.0, step_s - sum(known.values()))
    wait_s = min(fmean(felt_wait_s(s) for s in observed.steady), left_s)
    return known | {"data wait": wait_s, "idle": left_s - wait_s}


def too_little(observed: Observed) -> str | None:
    """Why nothing, or not much, can be said about the speed of a log, and how to get what is missing; None
    where there is enough."""
    if observed.format == "document":
        return None
    if not observed.steps:
        return "No update is recorded, so nothing can be said."
    if not any(s.step_s for s in observed.steps):
        return (
            "The log holds no times, so nothing can be said about speed:"
            f" {TIMES_FROM.get(observed.format, TIMES_FROM_COLUMNS)}."
        )
    if not enough(observed):
        return (
            f"Only {len(observed.steady)} timed update(s) after the warm-up, fewer than {FEWEST_UPDATES}: too"
            " few to judge the speed."
        )
    return None


def nothing_found(observed: Observed) -> str:
    """What to say where no rule found anything."""
    if observed.format == "document":
        return "No claim found that cannot hold."
    if little := too_little(observed):
        return little
    missing = [name for name in ("gpu", "parameters", "seq_len") if getattr(observed.facts, name) is None]
    more = (
        f" Not known: {', '.join(missing)}; more can be said with --fact NAME=VALUE."
        if missing and observed.format != "run"
        else ""
    )
    return f"Nothing found that would bring more than 5 %.{more}"
