"""Why a step takes as long as it does: rules on the times that a log holds. Each predicts what its fix saves,
in seconds of the step.

A share is counted against the mean update (what is paid), medians where one slow update would mislead. Rules
that compare with the plan the planner would have made are in plans.py, those on what comes every N updates in
pauses.py, those on generation in generation.py.
"""

from statistics import fmean, median
from typing import Any

from redline.diagnose.finding import Evidence, Finding, Gain
from redline.diagnose.observed import PHASES, Observed, Step
from redline.record.read import WARM_UP
from redline.record.units import format_duration

WORTH_SAYING = 0.05
"""Shares of the step below this are left alone: they are not more than what two runs of the same thing differ
by."""
FEWEST_UPDATES = 6
"""A share of the update is told from this many updates after the warm-up on: one or two may be anything."""
LAUNCH_BOUND = 0.85
"""Share of the step that the host spends issuing it from which on the GPU is waiting for the host."""
COMPILING = (1.05, 1.3)
"""What torch.compile brings. Measured on an H200 at 124M parameters, behind fused loss, optimiser and norms:
1.05 and 1.07 (LOG.md). The upper end allows for models with less fused, and is not measured."""


def saved(step_s: float, share_low: float, share_high: float, why: str) -> Gain:
    """The gain of taking between two shares of the step away."""
    return Gain(
        1 / (1 - min(share_low, 0.99)),
        1 / (1 - min(share_high, 0.99)),
        f"{why}; the update takes {format_duration(step_s)}",
    )


def enough(observed: Observed) -> bool:
    """Whether the log holds enough steady updates to speak of their mean."""
    return len(observed.steady) * (observed.stride if observed.lines_are_means else 1) >= FEWEST_UPDATES


def idle_s(step: Step) -> float | None:
    """What is left of an update when its phases are taken away; None where they were not measured."""
    phases = [value for name in PHASES if (value := getattr(step, name)) is not None]
    return max(0.0, step.step_s - sum(phases)) if step.step_s is not None and len(phases) >= 3 else None


def felt_wait_s(step: Step) -> float:
    """Wait for the loader that the step felt: on a GPU, the part that outlasted the update before it."""
    waited, idle = step.data_wait_s or 0.0, idle_s(step)
    return waited if idle is None else min(waited, idle)


def data_wait(observed: Observed) -> list[Finding]:
    """The loader is slower than the step."""
    steady, mean_s = observed.steady, observed.mean("step_s")
    if not mean_s or not enough(observed) or observed.mean("data_wait_s") is None:
        return []
    lost_s = fmean(felt_wait_s(s) for s in steady)
    share = lost_s / mean_s
    if share < WORTH_SAYING:
        return []
    plan = observed.plan
    threads = f" (now {plan.loader_threads})" if plan else ""
    streaming = observed.recipe is not None and observed.recipe.data.stream
    fix = (
        "build token shards once and train on them: `redline data build` and data.stream=false"
        if streaming
        else f"--set plan.loader_threads=4{threads}; where the disk is slow, copy the shards to a local one"
    )
    if plan is None:
        fix = "more loader workers (4 to 8), or prepare the data once and read it memory-mapped"
    return [
        Finding(
            cause="slow-loader",
            kind="cause",
            title=f"The step waits for data {share:.0%} of its time",
            evidence=(
                Evidence("wait", lost_s * 1e3, "ms an update, mean"),
                Evidence("update", mean_s * 1e3, "ms, mean"),
                Evidence("wait", share, "of the update"),
            ),
            fix=fix,
            gain=saved(mean_s, 0.9 * share, share, f"without the wait {1 - share:.0%} of the time is left"),
            confidence=0.95,
        )
    ]


def _gap_s(observed: Observed) -> float:
    """Time of an update that neither its phases nor the loader account for. The median, because what comes
    every N updates is a stall and has its own rule."""
    gaps = [idle - felt_wait_s(s) for s in observed.steady if (idle := idle_s(s)) is not None]
    return median(gaps) if gaps else 0.0


def _hidden_s(observed: Observed, gap_s: float) -> float:
    """How much of the gap would hide behind the GPU's work if the host were not seen to wait for the GPU: as
    much as that work takes, and of it not generation, in which the host looks at every token."""
    if not _waits(observed):
        return 0.0
    busy = [
        (s.step_s or 0.0) - idle - (s.generate_s or 0.0)
        for s in observed.steady
        if (idle := idle_s(s)) is not None
    ]
    return min(gap_s, median(busy)) if busy else 0.0


def host_gap(observed: Observed) -> list[Finding]:
    """Time between updates in which nothing is computed, and which a wait for the GPU does not explain:
    logging, an observer."""
    whole_s, mean_s = _gap_s(observed), observed.mean("step_s")
    gap_s = whole_s - _hidden_s(observed, whole_s)
    if not mean_s or not enough(observed) or gap_s / mean_s < WORTH_SAYING:
        return []
    share = gap_s / mean_s
    less = (
        f", and {(whole_s - gap_s) * 1e3:.3g} ms that would hide behind the GPU's work"
        if gap_s < whole_s
        else ""
    )
    return [
        Finding(
            cause="host-gap",
            kind="cause",
            title=f"Between updates {share:.0%} of the time passes with nothing computed",
            evidence=(
                Evidence("gap", gap_s * 1e3, f"ms an update, median, data wait taken off{less}"),
                Evidence("update", mean_s * 1e3, "ms, mean"),
            ),
            fix=(
                "take out of the loop what waits: an observer or exporter that blocks (log from a thread, or"
                " less often), .item(), print, torch.cuda.synchronize()"
            ),
            gain=saved(mean_s, 0.85 * share, share, "without the gap"),
            confidence=0.85,
        )
    ]


def _waits_for_launches(observed: Observed) -> bool:
    """Whether the GPU waits for the host: issuing an update takes as long as the update. A host that runs
    ahead is held up once CUDA's queue is full and then seems as slow as the GPU, so the first updates, in
    which it was not full, must say the same."""
    if not (observed.facts.gpus or observed.facts.gpu):
        return False
    shares = [
        s.issue_s / max(1e-9, s.step_s - (s.data_wait_s or 0.0))
        for s in observed.steps[1:]
        if s.issue_s and s.step_s
    ]
    return bool(shares) and min(*shares[:WARM_UP], median(shares)) > LAUNCH_BOUND


def _scales_with_positions(observed: Observed, mean_s: float) -> tuple[float, float, str]:
    """The part of the step that computes padded rows, the least share of that part that shrinks with its
    positions, and how it is known.

    Forward and backward shrink with the positions, up to what a pass costs whatever it computes (launches,
    weights read, gradients written): 15 % of them at most in passes that fill the device, and all where the
    GPU waits for launches. Generation and the optimiser's update do not. Where phases are not recorded, the
    least allows for an optimiser and a host that take a third of the step.
    """
    forward, backward, update_s = (
        observed.share("forward_s"),
        observed.share("backward_s"),
        observed.part("update_actor"),
    )
    if forward and backward:
        part, least, known = min(1.0, forward + backward), 0.85, "forward and backward"
    elif observed.format == "verl" and update_s:
        part, least, known = min(1.0, update_s / mean_s), 0.6, "the actor's update"
    elif any(observed.share(name) for name in PHASES):
        part = max(0.0, 1 - observed.share("generate_s") - observed.share("optimizer_s"))
        least, known = (
            0.6,
            "all but generation and the optimiser, as forward and backward are not both marked",
        )
    else:
        part, least, known = 1.0, 0.6, "all of it, as no phases are recorded"
    return (
        (part, 0.0, f"{known}; but the GPU waits for the host, whatever it computes")
        if _waits_for_launches(observed)
        else (part, least, known)
    )


def padding(observed: Observed) -> list[Finding]:
    """Positions computed that hold no token."""
    share, mean_s = observed.mean("padding_share"), observed.mean("step_s")
    removed = observed.setting("use_remove_padding")
    if not share or not mean_s or not enough(observed) or (removed and removed.value.lower() == "true"):
        return []
    part, least, known = _scales_with_positions(observed, mean_s)
    if share * part < WORTH_SAYING:
        return []
    return [
        Finding(
            cause="padding",
            kind="cause",
            title=f"{share:.0%} of the positions computed are padding",
            evidence=(
                Evidence("padding", share, "of all positions"),
                Evidence("padded rows computed in", part, f"of the step: {known}"),
            ),
            fix="pack rows to the length of a pass"
            + (
                " (actor_rollout_ref.model.use_remove_padding=True)"
                if observed.format == "verl"
                else (
                    " (redline packs by itself; TRL: packing=True, padding_free=True; Trainer:"
                    " train_sampling_strategy by length)"
                )
            ),
            gain=saved(
                mean_s,
                least * share * part,
                share * part,
                "what scales with positions shrinks by the share of padding",
            ),
            confidence=0.8 if observed.format == "run" else 0.5,
        )
    ]


def warm_up(observed: Observed) -> list[Finding]:
    """A first update (compiling, autotuning) that is a large part of a short run."""
    timed = [s for s in observed.steps if s.step_s]
    usual_s = observed.median("step_s")
    if (
        len(timed) < 6
        or not usual_s
        or timed[0].step > 2
        or observed.format == "hf"
        or observed.facts.compile == "off"
    ):
        return []
    updates = timed[-1].step - timed[0].step + 1  # a log may hold every tenth only
    first_s = timed[0].step_s or 0.0
    total_s = first_s + (updates - 1) * usual_s
    compiled = observed.plan is not None and observed.plan.compile != "off"
    extra_s = first_s - usual_s
    if extra_s / total_s < 0.15 or first_s < 5 * usual_s:
        return []
    steady_s = total_s - extra_s
    low, high = (
        (total_s / (steady_s * k) for k in reversed(COMPILING)) if compiled else (1.0, total_s / steady_s)
    )
    if high <= 1.02:
        return []
    fix = (
        "--set plan.compile=off for a run this short"
        if compiled
        else "keep the compiler's cache between runs, or do not compile a short run"
    )
    least, most = COMPILING
    pays_from = {k: int(extra_s / (usual_s * (k - 1))) + 1 for k in COMPILING}
    return [
        Finding(
            cause="compile-time",
            kind="cause",
            title=f"The first update takes {extra_s / total_s:.0%} of the run",
            evidence=(
                Evidence("first update", first_s, "s"),
                Evidence("later updates", usual_s, "s, median"),
                Evidence(
                    "updates",
                    updates,
                    f"in the log; compiling pays from {pays_from[most]} on if it brings {most}x,"
                    f" {pays_from[least]} at {least}x",
                ),
            ),
            fix=fix,
            gain=Gain(
                max(1.0, low),
                high,
                f"of the whole run: the first update's extra time against updates {least} to {most} times as"
                " long",
            ),
            confidence=0.7 if compiled else 0.4,
        )
    ]


def _waits(observed: Observed) -> dict[str, Any]:
    """What torch's detector saw of waits for the GPU, the last time it looked."""
    return next((event for event in reversed(observed.events) if event.get("event") == "waits_for_gpu"), {})


def waits(observed: Observed) -> list[Finding]:
    """A watched loop in which the host waits for the GPU: torch's detector saw it, and says where. It costs
    what the host does afterwards, which would be hidden behind the GPU's work, as far as that reaches: the
    update would take the longer of the two and not their sum. Where no gap shows, what it costs shows only
    without it."""
    event, gap_s, mean_s = _waits(observed), _gap_s(observed), observed.mean("step_s")
    if not event:
        return []
    share = _hidden_s(observed, gap_s) / mean_s if mean_s else 0.0
    gap = (
        (Evidence("nothing computed", gap_s * 1e3, "ms an update, median, data wait taken off"),)
        if share >= WORTH_SAYING
        else ()
    )
    return [
        Finding(
            cause="sync",
            kind="cause",
            title=(
                f"The host waits for the GPU {event.get('times')} time(s) in an update: {event.get('where')}"
            ),
            evidence=(
                Evidence(
                    "waits",
                    str(event.get("where")),
                    f"seen by torch.cuda.set_sync_debug_mode in the update after step {event.get('step')}",
                ),
                *gap,
            ),
            fix=(
                "read losses late, every N updates (.item(), .cpu(), print, `if tensor`); copy batches from"
                " pinned memory with non_blocking=True (Trainer: logging_nan_inf_filter=False)"
            ),
            gain=(
                saved(
                    mean_s or 0.0,
                    0.85 * share,
                    share,
                    "what the host does meanwhile hidden behind the GPU's work",
                )
                if gap
                else None
            ),
            confidence=0.9,
        )
    ]


RULES = (data_wait, host_gap, padding, warm_up, waits)
