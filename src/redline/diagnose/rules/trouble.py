"""What a log shows of a run that did not train: memory that ran out, a loss that is not a number or breaks away, an
error at the end. Advice, no gain.

A line counts only where it is an error: printed settings and source code name the same words.
"""

import re
from collections.abc import Iterator, Sequence
from statistics import median

from redline.diagnose.data import patterns
from redline.diagnose.finding import Finding, found
from redline.diagnose.observed import Observed, Step

LINE = patterns("trouble")
SKIPS = 0.1
"""Up to this share of the lines, a gradient norm that is not a number is a loss scaler's skip."""
BROKEN = 1.5
"""A loss that lies this many times above what it had reached, and stays there, has broken away."""


def _ended_by(observed: Observed) -> list[str]:
    """Why our own runs say they failed."""
    return [str(event.get("error", "")) for event in observed.events if event.get("event") == "failed"]


def ran_out_of_memory(observed: Observed) -> list[Finding]:
    """A line that says which allocation failed."""
    facts = observed.facts
    text = "\n".join([observed.text, *_ended_by(observed)])
    hits = text.split("\n") if "out of memory" in text.lower() else []
    hits = [line for line in hits if LINE["memory"].search(line)]
    if not hits:
        return []
    matches = {name: pattern.search(hits[-1]) for name, pattern in patterns("allocator").items()}
    said = {name: next(filter(None, hit.groups())) if hit else None for name, hit in matches.items()}
    more = f"; or {observed.trainer.options['selective']}" if facts.recompute in (None, "off") else ""
    unused, expandable = said["unused"] or "", "expandable_segments:True" in text.replace(hits[-1], "")
    if unused.endswith("GiB") and float(unused.split()[0]) > 2 and not expandable:
        more += f". {unused} were reserved and unused: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    went_on = observed.updates > 10 and len(hits) < 3 and text.rfind(hits[-1]) < 0.5 * len(text)
    tokens, when = facts.tokens_a_pass, "" if observed.steps else " before the first update"
    line = None if said["wanted"] else hits[-1].strip()[:160]
    return found("out-of-memory", locals() | said, strength=0.7 if went_on else 1.0)


def ended(observed: Observed) -> Iterator[Finding]:
    """A line near the end that says why the job stopped."""
    tail = observed.text[-100_000:]
    for cause, pattern in patterns("endings").items():
        if hit := pattern.search(tail):
            line = tail[tail.rfind("\n", 0, hit.start()) + 1 : hit.end()].strip()[-160:]
            yield from found(cause, locals())


def crash(observed: Observed) -> list[Finding]:
    """A traceback behind the last update: the error that it ends with."""
    at = observed.text.rfind("Traceback (most recent call last)")
    behind = observed.text[at:] if at >= 0 else ""
    done = observed.planned is not None and observed.updates >= observed.planned
    early = bool(observed.steps) and at < 0.7 * len(observed.text)
    lines = observed.text[-100_000:].split("\n") if LINE["launcher"].search(behind) else behind.split("\n")
    errors = [match[1][:200] for line in lines if (match := LINE["error"].match(line.strip()))]
    errors = [error for error in errors if not LINE["launcher"].search(error)] or errors
    if not errors or "out of memory" in behind.lower() or done or early or "KeyboardInterrupt" in errors[0]:
        return []
    error = errors[0]
    return found("crash", locals(), strength=0.9)


def _lost(steps: Sequence[Step]) -> list[int]:
    """Updates whose loss or gradient is not a number; a loss scaler's skips only if many, or the last."""
    norms = [s.step for s in steps if s.bad_norm]
    skipped = 0 < len(norms) <= SKIPS * len(steps) and not steps[-1].bad_norm
    return [s.step for s in steps if s.not_a_number or (s.bad_norm and not skipped)]


def not_a_number(observed: Observed) -> list[Finding]:
    """Updates whose loss or gradient is not a number, or a failure that says so."""
    steps, lost = observed.steps, _lost(observed.steps)
    told = [text for text in _ended_by(observed) if LINE["not_a_number"].search(text)]
    told += [hit[0] for hit in [LINE["stopped"].search(observed.text[-2000:])] if hit]
    if not lost and not told:
        return []
    at = re.search(r"at step (\d+)", told[-1]) if told else None
    since = f" from update {lost[0]} on" if lost else f" at update {at[1]}" if at else ""
    losses = sum(s.not_a_number or s.bad_norm or (s.loss or s.grad_norm) is not None for s in steps)
    always = len(steps) > 5 and bool(lost) and lost[0] <= steps[2].step and len(lost) >= 0.95 * losses
    passed = bool(lost) and not told and len(lost) <= SKIPS * len(steps) and lost[-1] < steps[-1].step
    if always:
        since = " in every line"
    elif lost and lost[-1] != steps[-1].step:
        since = f" in {len(lost)} of the updates, the first {lost[0]}"
    advice = re.search(r"at step \d+: (.+)", told[-1], re.DOTALL) if told else None
    no_bf16 = observed.spec is not None and observed.spec.bf16_tflops is None
    by_precision = "" if no_bf16 else {"fp16": "fp16", None: "unknown"}.get(observed.facts.precision, "")
    variant = "told" if advice else "always" if always else by_precision
    count, lines, ending = len(lost) or None, len(steps), told[-1].partition(":")[0][:160] if told else None
    kind, strength = ("cause", 0.7) if passed else (None, 1.0)
    return found("not-a-number", locals(), variant, kind=kind, strength=strength)


def loss_spike(observed: Observed) -> list[Finding]:
    """A loss that jumps and does not come back."""
    losses = [(s.step, s.loss) for s in observed.steps if s.loss is not None]
    losses = losses[len(losses) // 10 :]
    if len(losses) < 40 or any(loss <= 0 for _, loss in losses) or _lost(observed.steps):
        return []
    window = max(5, len(losses) // 40)
    starts = range(0, len(losses) - window + 1, window)
    smooth = [median(loss for _, loss in losses[at : at + window]) for at in starts]
    best = smooth[0]
    for at, value in enumerate(smooth[:-2]):
        if value > BROKEN * best and min(smooth[at:]) > BROKEN * best:
            since, step = median(smooth[at:]), losses[at * window][0]
            return found("loss-spike", locals())
        best = min(best, value)
    return []


def halved(observed: Observed) -> list[Finding]:
    """Our own runs halve the pass when memory runs out: say what that cost, and how to start with what fits."""
    events = [e for e in observed.events if e.get("event") == "out_of_memory" and "micro_batch" in e]
    if not events:
        return []
    last, times, before = events[-1], len(events), events[0].get("micro_batch_before")
    shown = locals() | {"change": f"{before} to {last['micro_batch']}"}
    return found("out-of-memory", last | shown, "halved", kind="cause")
