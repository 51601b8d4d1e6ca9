"""What holds a run up every so many updates: evaluations and checkpoints that the record names, and slow
updates that it does not explain."""

import math
from itertools import accumulate, pairwise
from statistics import median

from redline.diagnose.causes import WORTH_SAYING, felt_wait_s, saved
from redline.diagnose.finding import SLOW_UPDATES, Evidence, Finding
from redline.diagnose.logging import logged_s
from redline.diagnose.observed import Observed

LEAST_EXPLAINED = 0.5
"""A period that explains less of the slow updates is none."""
CHANCE = 0.01
"""A period is told where slow updates at random would look as regular in fewer runs than this."""
SLOW = 1.5
"""An update is slow from this many times the median on."""
SPREADS = 4.0
"""How many times further above the median than the quickest tenth is below it an update at no fixed interval
must be: where all of them differ, as on a busy machine, the slow ones are like the others."""
FEWEST_SLOW = 3
"""Fewer slow updates are chance."""
LESS_OFTEN = {
    "validation": {
        "run": "train.eval_every, or a smaller train.eval_sequences",
        "hf": "eval_steps, or a smaller evaluation set",
        "nanogpt": "eval_interval, or a smaller eval_iters",
        "torchtitan": "validation.freq, or fewer validation.steps",
        "verl": "trainer.test_freq, or fewer rows in data.val_files",
        "watched": "interval (Trainer: eval_steps), or on fewer rows",
    },
    "checkpoint": {
        "run": "train.checkpoint_every",
        "torchtitan": "checkpoint.interval, or checkpoint.async_mode=async",
        "verl": "trainer.save_freq",
        "watched": "interval (Trainer: save_steps)",
    },
}


def period_of(excess_s: dict[int, float], steps: list[int], stride: int = 1) -> tuple[int, int, float] | None:
    """The N and the remainder for which slow updates come every N updates, and how well that explains them (0
    to 1).

    Explained is the share of the excess time that falls on those updates, times the share of those updates
    that are slow: a busy machine makes some other updates slow too, but not by as much. A log of every tenth
    update shows nothing but multiples of ten.
    """
    best: tuple[int, int, float] | None = None
    total_s, span = sum(excess_s.values()), steps[-1] - steps[0]
    if span <= 0:
        return None
    most_s = list(accumulate(sorted(excess_s.values(), reverse=True)))
    for n in range(2 * stride, max(3 * stride, span // 2 + 1), stride):
        if most_s[min(len(most_s), span // n + 1) - 1] <= LEAST_EXPLAINED * total_s:
            # not even the slowest updates, as many as fall on every Nth, would explain enough; a larger N has
            # fewer
            break
        hits_of: dict[int, list[int]] = {}
        for step in excess_s:
            hits_of.setdefault(step % n, []).append(step)
        for rest, hits in hits_of.items():
            share = sum(excess_s[step] for step in hits) / total_s
            least = best[2] if best else LEAST_EXPLAINED
            # Counting the quick ones takes a look at all updates: only where the slow ones explain enough.
            if (
                len(hits) >= 3
                and share > least
                and (score := share * len(hits) / sum(step % n == rest for step in steps)) > least
            ):
                best = (n, rest, score)
    return best


def chance_of(excess_s: dict[int, float], steps: list[int], period: int, rest: int) -> float:
    """How often slow updates at random would fall on some period as these do on theirs, at most.

    The chance that of all lines those that are about as slow as the period's own fall on its places as often
    as they do (hypergeometric), times the number of periods and first places in which as many slow ones would
    have looked as regular: three of 30 lines, each ten after the other, stand so by chance in 0.9 % of the
    runs, of 25 lines in 1.1 %.
    """
    hits = [step for step in excess_s if step % period == rest]
    alike_s = 0.5 * median(excess_s[step] for step in hits)
    lines, places = len(steps), sum(step % period == rest for step in steps)
    slow, hit = (
        sum(value >= alike_s for value in excess_s.values()),
        sum(excess_s[step] >= alike_s for step in hits),
    )
    chance = sum(
        math.exp(_log_ways(places, k) + _log_ways(lines - places, slow - k) - _log_ways(lines, slow))
        for k in range(hit, min(places, slow) + 1)
        if slow - k <= lines - places
    )
    return chance * sum(_classes(lines, n, hit, places) for n in range(2, lines // 2 + 1))


def _classes(lines: int, period: int, fewest: int, most: int) -> int:
    """How many of a period's first places come to between so many places in so many lines."""
    each, more = divmod(lines, period)
    return (more if fewest <= each + 1 <= most else 0) + (period - more if fewest <= each <= most else 0)


def _log_ways(many: int, few: int) -> float:
    """The logarithm of the number of ways to choose a few of many."""
    return math.lgamma(many + 1) - math.lgamma(few + 1) - math.lgamma(many - few + 1)


def _slow(observed: Observed) -> tuple[dict[int, float], dict[int, float], float]:
    """What each update took, what the slow ones took longer than the usual one, and the usual one. Generation
    is not counted, for texts drawn every N updates are no stall, nor is a wait for data. No slow ones where
    there are too few to tell."""
    steady = observed.steady
    logs_s = logged_s(observed)  # the Trainer's, which have their own rule
    took_s = {s.step: (s.step_s or 0.0) - (s.generate_s or 0.0) - logs_s.get(s.step, 0.0) for s in steady}
    if len(steady) < 12 or (usual_s := median(took_s.values())) <= 0:
        return took_s, {}, 0.0
    slow = {s.step: s for s in steady if took_s[s.step] > SLOW * usual_s}
    excess_s = {step: took_s[step] - usual_s - felt_wait_s(s) for step, s in slow.items()}
    excess_s = {step: value for step, value in excess_s.items() if value > 0}
    return took_s, excess_s if len(excess_s) >= FEWEST_SLOW else {}, usual_s


def stalls(observed: Observed) -> list[Finding]:
    """Updates that are slow every N updates: a checkpoint, a flush, a garbage collection inside the loop."""
    steady, stride = observed.steady, observed.stride
    took_s, excess_s, usual_s = _slow(observed)
    steps = [s.step for s in steady]
    found = period_of(excess_s, steps, stride) if excess_s else None
    if found is None or chance_of(excess_s, steps, *found[:2]) > CHANCE:
        return []
    period, rest, explained = found
    hits = [step for step in excess_s if step % period == rest]
    # A log of every tenth update that shows one of them shows all slow ones, and one in ten of the others.
    logged_s = sum(excess_s[step] for step in hits) / len(steady)
    lost_s = logged_s if observed.lines_are_means else logged_s / stride
    mean_s = (observed.mean("step_s") or 0.0) - logged_s + lost_s
    if lost_s / mean_s < WORTH_SAYING:
        return []
    longest_s, share = median(took_s[step] for step in hits), lost_s / mean_s
    one = f"the mean of {stride}" if observed.lines_are_means and stride > 1 else "one"
    seldom = (
        f"; only every {stride}th is in the log, so it may be more often"
        if stride > 1 and not observed.lines_are_means
        else ""
    )
    return [
        Finding(
            cause="stall",
            kind="cause",
            title=f"Every {period} updates {one} takes {longest_s / usual_s:.1f} times as long",
            evidence=(
                Evidence(
                    "slow updates",
                    longest_s * 1e3,
                    f"ms, median of {len(hits)} (the first at step {hits[0]}){seldom}",
                ),
                Evidence("other updates", usual_s * 1e3, "ms, median"),
                Evidence("explained by the period", explained, "share of the slow updates' excess"),
            ),
            fix=(
                f"find what the program does every {period} updates (saving, logging, clearing a cache); do"
                " it in a thread, or less often"
            ),
            gain=saved(mean_s, 0.85 * share, share, "all updates as fast as the usual one"),
            confidence=0.9 * explained,
        )
    ]


def slow_updates(observed: Observed) -> list[Finding]:
    """Slow updates at no fixed interval: what makes them slow is not in the log, but that they cost something
    is."""
    took_s, excess_s, usual_s = _slow(observed)
    mean_s = observed.mean("step_s")
    if not mean_s or not excess_s:
        return []
    usual_spread_s = usual_s - sorted(took_s.values())[len(took_s) // 10]
    excess_s = {step: value for step, value in excess_s.items() if value > SPREADS * usual_spread_s}
    share = sum(excess_s.values()) / len(took_s) / mean_s
    if len(excess_s) < FEWEST_SLOW or share < WORTH_SAYING:
        return []
    return [
        Finding(
            cause=SLOW_UPDATES,
            kind="cause",
            title=f"{share:.0%} of the time is lost in {len(excess_s)} slow updates at no fixed interval",
            evidence=(
                Evidence(
                    "slow updates",
                    median(took_s[step] for step in excess_s) * 1e3,
                    f"ms, median of {len(excess_s)}",
                ),
                Evidence("other updates", usual_s * 1e3, "ms, median"),
                Evidence("lost", share, "of the time, data wait taken off"),
            ),
            fix=(
                "the log does not say why: look for garbage collection (gc.disable() and gc.collect() every N"
                " updates), another program on the machine, rows of uneven length, compiling anew for each"
                " new length"
            ),
            gain=saved(mean_s, 0.0, share, "at best all updates as fast as the usual one"),
            confidence=0.3,
        )
    ]


def _own_pauses(observed: Observed) -> tuple[dict[str, list[float]], float]:
    """Of our own runs: validations and checkpoints stand between updates, and the events say which was which.
    Also the run's time."""
    lines = observed.steps
    events = {(event["event"], event.get("step")): event for event in observed.events}
    gaps_s = [
        (now.step, (after.elapsed_s or 0.0) - (now.elapsed_s or 0.0) - (after.step_s or 0.0))
        for now, after in pairwise(lines)
    ]
    last_s, ended_s = (
        lines[-1].elapsed_s or 0.0,
        events.get(("end", lines[-1].step), {}).get("elapsed_s", 0.0),
    )
    if ended_s > last_s:
        gaps_s.append((lines[-1].step, ended_s - last_s))
    lost: dict[str, list[float]] = {"validation": [], "checkpoint": []}
    for step, gap_s in gaps_s:
        stalled_s = float(events.get(("checkpoint", step), {}).get("stalled_s", 0.0))
        if ("checkpoint", step) in events:
            lost["checkpoint"].append(stalled_s)
        if ("validation", step) in events:
            lost["validation"].append(max(0.0, gap_s - stalled_s))
    return lost, max(last_s, ended_s)


def _told_pauses(observed: Observed) -> tuple[dict[str, list[float]], float]:
    """Of other logs: the validations and checkpoints whose time they show, beside the updates and what the
    first took longer."""
    lost: dict[str, list[float]] = {}
    for event in observed.events:
        if "took_s" in event:
            lost.setdefault(event["event"], []).append(float(event["took_s"]))
    timed, mean_s = [s for s in observed.steps if s.step_s], observed.mean("step_s")
    if not lost or not mean_s:
        return {}, 0.0
    a_line = observed.stride if observed.lines_are_means else 1
    updates = timed[-1].step - timed[0].step + a_line
    paused_s = sum(sum(each_s) for each_s in lost.values())
    return lost, updates * mean_s + a_line * ((timed[0].step_s or mean_s) - mean_s) + paused_s


def pauses(observed: Observed) -> list[Finding]:
    """Validations and checkpoints, as a share of the run."""
    if len(observed.steps) < 3:
        return []
    lost, total_s = _own_pauses(observed) if observed.format == "run" else _told_pauses(observed)
    told = "watched" if observed.format == "run" and observed.recipe is None else observed.format
    return [
        Finding(
            cause=f"{kind}-pause",
            kind="cause",
            title=f"{kind.capitalize()} takes {sum(each_s) / total_s:.0%} of the run",
            evidence=(
                Evidence(f"{kind}s", len(each_s), "between the updates"),
                Evidence("each", sum(each_s) / len(each_s), "s"),
                Evidence("run", total_s, "s"),
            ),
            fix=f"do it less often: a larger {LESS_OFTEN[kind][told]}",
            gain=saved(
                observed.mean("step_s") or 0.0,
                0.5 * sum(each_s) / total_s,
                0.9 * sum(each_s) / total_s,
                "of the whole run, half as often or ten times",
            ),
            confidence=0.9,
        )
        for kind, each_s in lost.items()
        if total_s > 0 and sum(each_s) / total_s >= WORTH_SAYING
    ]


def uneven(observed: Observed) -> list[Finding]:
    """Slow updates: every N, or else at no fixed interval."""
    return stalls(observed) or slow_updates(observed)


RULES = (uneven, pauses)
