"""Where the time of an update goes: rules on the parts that a log holds. Each predicts what its fix saves.

A share is counted against the mean update (what is paid), medians where one slow update would mislead. Rules that compare
with the plan the planner would have made are in plans.py, those on what comes every N updates in pauses.py.
"""

from collections.abc import Iterator
from statistics import fmean, median

from redline.diagnose.finding import WORTH_SAYING, Finding, found
from redline.diagnose.observed import Observed
from redline.record.metrics import PHASES
from redline.record.read import WARM_UP

FEWEST_TURNS = 60
"""The fewest updates in which turns can be told from chance."""
LAUNCH_BOUND = 0.85
"""Where the host spends at least this share of the step issuing it, the GPU waits for the host."""


def data_wait(observed: Observed) -> list[Finding]:
    """The loader is slower than the step."""
    mean_s, plan = observed.mean("step_s"), observed.plan
    if not mean_s or not observed.enough or observed.mean("data_wait_s") is None:
        return []
    wait_s = fmean(s.felt_wait_s for s in observed.steady)
    share = wait_s / mean_s
    left = 1 - share
    streams = observed.recipe is not None and observed.recipe.data.stream
    variant = "" if plan is None else "stream" if streams else "own"
    return found("slow-loader", locals(), variant)


def taking_turns(observed: Observed) -> list[Finding]:
    """Quick and slow updates in turns: a few loader workers that cannot keep up deliver their batches together."""
    times = [s.step_s for s in observed.steady if s.step_s]
    waits, draws = observed.mean("data_wait_s"), observed.facts.response_length  # perhaps in turns
    if len(times) < FEWEST_TURNS or observed.stride > 1 or draws or waits is not None:
        return []
    threes = zip(times, times[1:], times[2:], strict=False)
    turns = sum((a < b > c) or (a > b < c) for a, b, c in threes) / (len(times) - 2)
    middle = median(times)
    quick_s, slow_s = median(t for t in times if t <= middle), median(t for t in times if t >= middle)
    # Of random times two thirds are higher or lower than both neighbours, give or take 0.42 / sqrt(n).
    if turns < 2 / 3 + 5 * 0.42 / len(times) ** 0.5 or slow_s < 1.5 * quick_s:
        return []
    share = min(0.9, 1 - quick_s / fmean(times))
    return found("slow-loader", locals(), "turns", strength=0.75)


def gaps(observed: Observed) -> Iterator[Finding]:
    """Time of an update that neither its phases nor the loader account for: logging, an observer, a wait for the GPU. The
    median, because what comes every N updates is a stall and has its own rule.

    Where torch's detector saw the host wait (a watched loop), that costs as much of the gap as would hide behind the
    GPU's work, generation aside, in which the host looks at every token: the update would take the longer of the two and
    not their sum. Where no gap shows, only a run without the wait shows what it costs."""
    idle = [(s, left_s) for s in observed.steady if (left_s := s.idle_s) is not None]
    event, mean_s = observed.last_event("waits_for_gpu"), observed.mean("step_s")
    whole_s = median(left_s - s.felt_wait_s for s, left_s in idle) if idle else 0.0
    busy_s = [(s.step_s or 0.0) - left_s - (s.generate_s or 0.0) for s, left_s in idle]
    hides_s = min(whole_s, median(busy_s)) if busy_s and event else 0.0
    gap_s = whole_s - hides_s
    if mean_s and observed.enough:
        share = gap_s / mean_s
        hidden = f", and {hides_s * 1e3:.3g} ms that would hide behind the GPU's work" if hides_s > 0 else ""
        yield from found("host-gap", locals())
    if event:
        share = hides_s / mean_s if mean_s else 0.0
        told = {"gap_s": whole_s, "saves": (0.85 * share, share)} if share >= WORTH_SAYING else {}
        yield from found("sync", {"observed": observed} | event | told)


def _waits_for_launches(observed: Observed) -> bool:
    """Whether the GPU waits for the host: issuing an update takes as long as the update. A host that runs ahead is held
    up once CUDA's queue is full and then seems as slow as the GPU, so the first updates, in which it was not full, must
    say the same."""
    if not (observed.facts.gpus or observed.facts.gpu):
        return False
    timed = [s for s in observed.steps[1:] if s.issue_s and s.step_s]
    shares = [(s.issue_s or 0.0) / max(1e-9, (s.step_s or 0.0) - (s.data_wait_s or 0.0)) for s in timed]
    return bool(shares) and min(*shares[:WARM_UP], median(shares)) > LAUNCH_BOUND


def _scales_with_positions(observed: Observed, mean_s: float) -> tuple[float, float, str]:
    """The part of the step that computes padded rows, the least share of that part that shrinks with its positions, and
    how it is known.

    Forward and backward shrink with the positions, up to what a pass costs whatever it computes (launches, weights
    read, gradients written): 15% of them at most in passes that fill the device, and all where the GPU waits for
    launches. Generation and the optimiser's update do not. Where phases are not recorded, the least allows for an
    optimiser and a host that take a third of the step.
    """
    forward, backward = observed.share("forward_s"), observed.share("backward_s")
    trained = ("update actor", "update critic", "old log prob", "ref", "values")
    named = sum(observed.part(name) or 0.0 for name in trained)
    if forward and backward:
        part, least, known = min(1.0, forward + backward), 0.85, "forward and backward"
    elif named:
        part, least, known = min(1.0, named / mean_s), 0.6, "updates and log-probabilities"
    elif any(observed.share(name) for name in PHASES):
        part, least = max(0.0, 1 - observed.share("generate_s") - observed.share("optimizer_s")), 0.6
        known = "all but generation and the optimiser, as forward and backward are not both marked"
    else:
        part, least, known = 1.0, 0.6, "all of it, as no phases are recorded"
    if _waits_for_launches(observed):
        return part, 0.0, f"{known}; but the GPU waits for the host, whatever it computes"
    return part, least, known


def _padded(observed: Observed) -> tuple[float, str, float]:
    """The share of positions without a token, of what, and how well that is known."""
    facts, measured = observed.facts, observed.mean("padding_share")
    if measured is not None:
        return measured, "of all positions", 1.0
    if facts.remove_padding == "true" or facts.packing == "on":
        return 0.0, "", 0.0
    used = (facts.prompt_length, facts.response_length)
    rooms = {"that a padded row has": (facts.prompt_room, facts.response_room)}
    rooms["up to the longest row"] = (observed.other("prompt length max"), facts.longest_response)
    for said, room in rooms.items() if all(used) else ():
        if all(room):
            positions = sum(filter(None, room))
            sure = 0.9 if facts.remove_padding == "false" and said.endswith("has") else 0.5
            return 1 - sum(filter(None, used)) / positions, f"of the {positions:,.0f} positions {said}", sure
    tokens, rows = observed.median("tokens"), (facts.batch_size or 0.0) * (facts.seq_len or 0.0)
    if tokens and rows and tokens < 0.7 * rows:
        return 1 - tokens / rows, f"of {facts.batch_size:,.0f} x {facts.seq_len:,.0f} positions", 0.5
    return 0.0, "", 0.0


def padding(observed: Observed) -> list[Finding]:
    """Positions computed that hold no token."""
    (share, of, sure), mean_s = _padded(observed), observed.mean("step_s")
    if not share or not mean_s or not observed.enough:
        return []
    part, least, known = _scales_with_positions(observed, mean_s)
    saves = least * share * part, share * part
    return found("padding", locals(), strength=sure) if saves[1] >= WORTH_SAYING else []
