"""What makes updates uneven: evaluations and checkpoints that the record names, slow updates that come every N or at
random, and a speed that changes in mid-run."""

import math
from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise
from statistics import fmean, median, pstdev

from redline.diagnose.finding import Finding, found
from redline.diagnose.observed import Observed, Step
from redline.diagnose.rules.update import taking_turns
from redline.record.read import before_fork_s
from redline.record.units import format_duration

LEAST_EXPLAINED = 0.5
"""A period that explains less of the slow updates does not count."""
CHANCE = 0.01
"""A period is reported if random slow updates would look as regular in fewer runs than this."""
SLOW = 1.5
"""An update is slow if it takes at least this many times the median."""
SPREADS = 4.0
"""An update at no fixed interval is slow only if it lies this many times further above the median than the quickest tenth
lies below it: where all updates differ, as on a busy machine, the slow ones are like the others."""
FEWEST_SLOW = 3
"""Fewer slow updates may be chance."""
LONGEST_SEARCH = 20_000
"""Lines searched for a period; in a longer log, the last ones."""
REGIME = 1.3
"""How far apart two speeds of a run must be to count as two."""
REGIME_LINES = 10
"""The fewest lines that a speed must last."""


def period_of(excess_s: dict[int, float], steps: list[int], stride: int = 1) -> tuple[int, int, float] | None:
    """The N and the remainder for which slow updates come every N updates, and how well that explains them (0 to 1).

    Explained is the share of the excess time that falls on those updates, times the share of those updates that are
    slow: a busy machine makes some other updates slow too, but not by as much. A log of every tenth update shows nothing
    but multiples of ten.
    """
    best = None
    total_s, span = sum(excess_s.values()), steps[-1] - steps[0]
    most_s = list(accumulate(sorted(excess_s.values(), reverse=True)))
    for n in range(2 * stride, max(3 * stride, span // 2 + 1) if span > 0 else 0, stride):
        if most_s[min(len(most_s), span // n + 1) - 1] <= LEAST_EXPLAINED * total_s:
            # even the slowest updates, as many as fall on every Nth, explain too little; a larger N has fewer
            break
        sums = dict[int, float]()
        for step, over_s in excess_s.items():
            sums[step % n] = sums.get(step % n, 0.0) + over_s
        rest = max(sums, key=lambda place: sums[place])
        share, least = sums[rest] / total_s, best[2] if best else LEAST_EXPLAINED
        # Counting the quick ones means looking at all updates, so do it only where the slow ones explain enough.
        if share > least and (hits := sum(step % n == rest for step in excess_s)) >= 3:
            score = share * hits / sum(step % n == rest for step in steps)
            best = (n, rest, score) if score > least else best
    return best


def chance_of(excess_s: dict[int, float], steps: list[int], period: int, rest: int) -> float:
    """An upper bound on how often randomly slow updates would fall on some period as these do on theirs.

    It is the hypergeometric chance that lines about as slow as the period's own fall on its places this often, times the
    number of periods and first places in which as many slow ones would have looked as regular. Three of 30 lines, each
    ten after the other, come about by chance in 0.9% of the runs, three of 25 lines in 1.1%.
    """
    hits = [step for step in excess_s if step % period == rest]
    alike_s = 0.5 * median(excess_s[step] for step in hits)
    lines, places = len(steps), sum(step % period == rest for step in steps)
    slow = sum(value >= alike_s for value in excess_s.values())
    hit = sum(excess_s[step] >= alike_s for step in hits)
    often = range(hit, min(places, slow) + 1)
    ways = sum(math.comb(places, k) * math.comb(lines - places, slow - k) for k in often)
    classes = 0
    for n in range(2, lines // 2 + 1):  # of a period's first places, those with as many places in these lines
        each, more = divmod(lines, n)
        classes += more * (hit <= each + 1 <= places) + (n - more) * (hit <= each <= places)
    return ways / math.comb(lines, slow) * classes


def _slow(observed: Observed) -> tuple[dict[int, float], dict[int, float], float]:
    """The time of each update, how much longer the slow ones took than the usual one (empty if they are too few), and the
    usual one. What the record names is not counted: generation, comparisons, waits for data, the Trainer's logs."""
    steady, logs_s = observed.steady[-LONGEST_SEARCH:], _logs_s(observed)
    logged = {after.step for now, after in pairwise(observed.steps) if logs_s and now.loss is not None}
    took_s = {s.step: (s.step_s or 0.0) - (s.generate_s or 0.0) - (s.diagnose_s or 0.0) for s in steady}
    for step in logged & took_s.keys():
        took_s[step] -= fmean(logs_s)
    if _uneven_tokens(observed):  # longer texts take longer
        usual = median(s.tokens or 1.0 for s in steady)
        took_s = {s.step: took_s[s.step] * usual / (s.tokens or usual) for s in steady}
    if len(steady) < 12 or (usual_s := median(took_s.values())) <= 0:
        return took_s, {}, 0.0
    slow = {s.step: s for s in steady if took_s[s.step] > SLOW * usual_s}
    excess_s = {step: took_s[step] - usual_s - s.felt_wait_s for step, s in slow.items()}
    excess_s = {step: value for step, value in excess_s.items() if value > 0}
    return took_s, excess_s if len(excess_s) >= FEWEST_SLOW else {}, usual_s


def stalls(observed: Observed) -> list[Finding]:
    """Updates that are slow every N updates: a checkpoint, a flush, a garbage collection inside the loop."""
    stride, (took_s, excess_s, usual_s) = observed.stride, _slow(observed)
    steps = list(took_s)
    best = period_of(excess_s, steps, stride) if excess_s else None
    if best is None or chance_of(excess_s, steps, *best[:2]) > CHANCE:
        return []
    period, rest, explained = best
    hits = [step for step in excess_s if step % period == rest]
    # A log of every tenth update that shows one of them shows all slow ones, and one in ten of the others.
    logged_s = sum(excess_s[step] for step in hits) / len(steps)
    lost_s = logged_s if observed.lines_are_means else logged_s / stride
    share = lost_s / ((observed.mean("step_s") or 0.0) - logged_s + lost_s)
    slow_s, count, first = median(took_s[s] for s in hits), len(hits), hits[0]
    times, means = slow_s / usual_s, stride > 1 and observed.lines_are_means
    one = f"the mean of {stride}" if means else "one"
    some = f"; only every {stride}th is in the log, so it may be more often"
    often = "" if stride == 1 or means else some
    return found("stall", locals(), strength=explained)


def slow_updates(observed: Observed) -> list[Finding]:
    """Slow updates at no fixed interval: what makes them slow is not in the log, but that they cost something is."""
    took_s, excess_s, usual_s = _slow(observed)
    mean_s = observed.mean("step_s")
    if not mean_s or not excess_s:
        return []
    usual_spread_s = usual_s - sorted(took_s.values())[len(took_s) // 10]
    excess_s = {step: value for step, value in excess_s.items() if value > SPREADS * usual_spread_s}
    share, count = sum(excess_s.values()) / len(took_s) / mean_s, len(excess_s)
    slow_s = median(took_s[step] for step in excess_s or took_s)
    return found("slow-updates", locals(), strength=0.4) if count >= FEWEST_SLOW else []


def _uneven_tokens(observed: Observed) -> bool:
    """Whether the updates of a foreign log hold different numbers of tokens, and take longer the more they hold."""
    told = [(s.step_s or 0.0, s.tokens or 0.0) for s in observed.steady]
    if observed.kind == "run" or len(told) < 3 or min(tokens for _, tokens in told) <= 0:
        return False
    spreads = [pstdev(values) / fmean(values) for values in ([t for t, _ in told], [t / n for t, n in told])]
    return max(n for _, n in told) > 1.1 * min(n for _, n in told) and spreads[1] < spreads[0]


def regime_change(observed: Observed) -> list[Finding]:
    """A run with two speeds, each for a long time: something outside the training changed. The median hides it. Times are
    smoothed, and per token if updates differ in tokens, because longer texts do not mean a slower machine."""
    by_token, steady = _uneven_tokens(observed), observed.steady
    times = [(s.step_s or 0.0) / (s.tokens or 1.0 if by_token else 1.0) for s in steady]
    if len(times) < 4 * REGIME_LINES:
        return []
    smooth = [median(times[max(0, at - 4) : at + 5]) for at in range(len(times))]
    values = sorted(smooth)
    fast, slow = values[len(values) // 20], values[-len(values) // 20 - 1]
    between = sum(1.12 * fast < value < slow / 1.12 for value in values)
    pairs = zip(steady, (value > math.sqrt(fast * slow) for value in smooth), strict=True)
    blocks = [(which, [s for s, _ in each]) for which, each in groupby(pairs, lambda pair: pair[1])]
    long = [(which, each) for which, each in blocks if len(each) >= max(REGIME_LINES, 0.02 * len(times))]
    parts = [[s for which, each in long if which is kind for s in each] for kind in (False, True)]
    told = sum(map(len, parts))
    apart = slow >= REGIME * fast and between <= 0.12 * len(times) and all(parts)
    if not apart or len(long) > 6 or told < 0.9 * len(times):
        return []
    longest, share = max((each for which, each in long if which), key=len), len(parts[1]) / told
    total = share * slow + (1 - share) * fast
    first, last, ratio, lost = longest[0].step, longest[-1].step, slow / fast, 1 - fast / total
    fast_took, slow_took = (format_duration(median(s.step_s or 0.0 for s in each)) for each in parts)
    gain = max(1.0, 0.9 * total / fast), total / fast
    return found("regime-change", locals(), strength=0.8)


def growing(observed: Observed) -> list[Finding]:
    """Updates that take longer and longer, without a jump: something in the program grows."""
    times = [s.step_s or 0.0 for s in observed.steady]
    grows = observed.trainer.entry.get("grows") or observed.facts.response_length or _uneven_tokens(observed)
    if grows or len(times) < 4 * REGIME_LINES:
        return []
    part = len(times) // 8
    parts = [median(times[at : at + part]) for at in range(0, 8 * part, part)]
    fast, slow, total = parts[0], parts[-1], fmean(times)
    jumps = [after - before for before, after in pairwise(parts)]
    if slow < REGIME * fast or min(jumps) < 0 or max(jumps) > 0.5 * (slow - fast):
        return []
    ratio, lost, gain = slow / fast, 1 - fast / total, (max(1.0, 0.9 * total / fast), total / fast)
    fast_took, slow_took = format_duration(fast), format_duration(slow)
    return found("regime-change", locals(), "grows", strength=0.6)


def _logs_s(observed: Observed) -> list[float]:
    """The time of each log that the Trainer's callback saw (observe/trainer.py)."""
    told = [event for event in observed.events if event.get("event") == "logging" and event.get("times")]
    return [float(e["stalled_s"]) / int(e["times"]) for e in told for _ in range(int(e["times"]))]


def _own_pauses(observed: Observed) -> tuple[dict[str, list[float]], float]:
    """Validations and checkpoints of our own runs, named by the events; and the run's time."""
    lines = observed.steps
    events = {(event.get("event"), event.get("step")): event for event in observed.events}
    ended_s = events.get(("end", lines[-1].step), {}).get("elapsed_s") or 0.0
    end = [Step(step=0, step_s=0.0, elapsed_s=ended_s)] if ended_s > (lines[-1].elapsed_s or 0.0) else []
    lost: dict[str, list[float]] = {"validation": [], "checkpoint": [], "logging": _logs_s(observed)}
    for now, after in pairwise([*lines, *end]):
        apart_s = (after.elapsed_s or 0.0) - (now.elapsed_s or 0.0) - (after.step_s or 0.0)
        stalled_s = events.get(("checkpoint", now.step), {}).get("stalled_s")
        if stalled_s is not None:  # a kill may have taken it
            lost["checkpoint"].append(float(stalled_s))
        if ("validation", now.step) in events:
            lost["validation"].append(max(0.0, apart_s - float(stalled_s or 0.0)))
    before_s = before_fork_s(list(observed.events), lines[0].elapsed_s, lines[0].step_s)
    return lost, max(lines[-1].elapsed_s or 0.0, ended_s) - before_s


def _told_pauses(observed: Observed) -> tuple[dict[str, list[float]], float]:
    """Validations and checkpoints of other logs whose time they show; and the run's time."""
    lost: dict[str, list[float]] = {}
    for event in observed.events:
        if "took_s" in event:
            lost.setdefault(event["event"], []).append(float(event["took_s"]))
    timed, mean_s = [s for s in observed.steps if s.step_s], observed.mean("step_s")
    if not lost or not mean_s:
        return {}, 0.0
    a_line = observed.stride if observed.lines_are_means else 1
    first_s = min(timed[0].step_s or mean_s, 20 * mean_s if observed.lines_are_means else math.inf)
    updates_s = (timed[-1].step - timed[0].step + a_line) * mean_s + a_line * (first_s - mean_s)
    return lost, updates_s + sum(sum(each_s) for each_s in lost.values())


def pauses(observed: Observed) -> Iterator[Finding]:
    """Validations, checkpoints and the Trainer's logs, as a share of the run."""
    # our own runs have one at the end, which no interval makes rarer
    fewest = 2 if observed.kind == "run" else 1
    if len(observed.steps) < 3:
        return
    lost, total_s = _own_pauses(observed) if observed.kind == "run" else _told_pauses(observed)
    for what, times_s in lost.items():
        if (count := len(times_s)) < fewest:
            continue
        each_s, share = sum(times_s) / count, sum(times_s) / total_s if total_s > 0 else 0.0
        cause, variant = ("host-gap", "logging") if what == "logging" else (f"{what}-pause", "")
        yield from found(cause, locals(), variant)


def planned_pauses(observed: Observed) -> list[Finding]:
    """Evaluations that are long by the settings, where no line tells their time."""
    facts, told = observed.facts, any("took_s" in event for event in observed.events)
    lines = observed.format in ("runs", "csv", "jsonl")
    if not facts.eval_iters or not facts.eval_interval or told or not lines:
        return []
    passes = 2 * facts.eval_iters
    share = 1 / (1 + 1.5 * facts.eval_interval * (facts.accumulation or 1.0) / facts.eval_iters)
    return found("validation-pause", locals(), "settings", strength=0.6)


def uneven(observed: Observed) -> list[Finding]:
    """Two speeds, or slow updates every N, or else at no fixed interval; quick and slow ones in turns are the loader's."""
    if observed.kind == "run":
        return stalls(observed) or slow_updates(observed)
    # some updates generate, and it is not said which
    if observed.facts.response_length and not observed.part("gen"):
        return regime_change(observed)
    two_speeds = taking_turns(observed) or regime_change(observed) or growing(observed)
    return two_speeds or stalls(observed) or slow_updates(observed)
