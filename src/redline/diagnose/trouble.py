"""Failures that a log shows: running out of memory, a Ray cluster that does not come up, a loss that is not a
number. Advice, no gain."""

import re
from collections.abc import Sequence

from redline.diagnose.finding import Evidence, Finding
from redline.diagnose.observed import Observed, Step

LINES = {
    "out-of-memory": (
        ("out of memory", "outofmemoryerror"),
        r"CUDA out of memory|OutOfMemoryError",
        "The log ran out of GPU memory",
        (
            "halve the micro-batch and double the accumulation (the batch stays the same); then recomputation"
            " on; then a shorter sequence. Fewer loader workers only help host memory"
        ),
    ),
    "ray-timeout": (
        ("register_center",),
        r"register_center.*tim(?:ed|e) ?out|Failed to get register_center_actor",
        "Ray's workers did not find each other in time",
        (
            "trainer.ray_wait_register_center_timeout=600; `ray status` must show all GPUs before the start;"
            " `ray stop` on every node first"
        ),
    ),
}
"""Of each failure: words without which a log need not be searched, what its line looks like, a title, and
what to do."""
NOT_A_NUMBER = re.compile(r"(?:loss|grad_norm)[^\n]{0,12}\b(?:nan|inf)\b", re.IGNORECASE)
SKIPS = 0.1
"""Share of the lines up to which gradient norms that are none are a loss scaler's skips: it looks for the
largest scale that holds."""
BETTER = "a lower learning rate, gradients clipped to 1.0"
SCALED = "bf16 instead of fp16 (fp16 needs a loss scaler)"


def _ended_by(observed: Observed) -> list[str]:
    """What our own runs say they failed of."""
    return [str(event.get("error", "")) for event in observed.events if event.get("event") == "failed"]


def in_the_text(observed: Observed) -> list[Finding]:
    """A line of a console log, or the last event of a run, that names a known failure."""
    if observed.format == "document":
        return []
    found = []
    text = "\n".join([observed.text, *_ended_by(observed)])
    low = text.lower()
    for cause, (words, pattern, title, fix) in LINES.items():
        if not any(word in low for word in words):
            continue
        lines = [line.strip() for line in text.splitlines() if re.search(pattern, line, re.IGNORECASE)]
        if lines:
            evidence = (Evidence("lines", len(lines), f"the first: {lines[0][:160]}"),)
            found.append(
                Finding(
                    cause=cause,
                    kind="failure",
                    title=title,
                    evidence=evidence,
                    fix=fix,
                    gain=None,
                    confidence=0.9,
                )
            )
    return found


def _lost(steps: Sequence[Step]) -> list[int]:
    """Updates whose loss is none, or whose gradient is: an update that a loss scaler skips is among them only
    where they are many, or the last ones."""
    norms = [s.step for s in steps if s.bad_norm]
    skipped = 0 < len(norms) <= SKIPS * len(steps) and not steps[-1].bad_norm
    return [s.step for s in steps if s.not_a_number or (s.bad_norm and not skipped)]


def not_a_number(observed: Observed) -> list[Finding]:
    """Updates whose loss or gradient is none, or a failure that says so."""
    lost = _lost(observed.steps)
    told = [text for text in _ended_by(observed) if NOT_A_NUMBER.search(text)]
    if not lost and not told:
        return []
    at = re.search(r"at step (\d+)", told[-1]) if told else None
    since = f" from update {lost[0]} on" if lost else f" at update {at[1]}" if at else ""
    if lost and lost[-1] != observed.steps[-1].step:
        since = f" in {len(lost)} of the updates, the first {lost[0]}"
    evidence = (
        [
            Evidence(
                "updates",
                len(lost),
                f"with a loss or gradient norm that is none, of {len(observed.steps)} on record",
            )
        ]
        if lost
        else []
    )
    evidence += (
        [Evidence("the run ended", told[-1].partition(":")[0][:160], "by its last event")] if told else []
    )
    return [
        Finding(
            cause="not-a-number",
            kind="failure",
            title=f"The loss or the gradient is not a number{since}",
            evidence=tuple(evidence),
            fix=_better(observed, told),
            gain=None,
            confidence=0.95,
        )
    ]


def _better(observed: Observed, told: list[str]) -> str:
    """What the run itself advises; else fp16 first where it is known to be, and last where nothing is
    known."""
    if told and (advice := re.search(r"at step \d+: (.+)", told[-1], re.DOTALL)):
        return advice[1]
    return {"fp16": f"{SCALED}, {BETTER}", None: f"{BETTER}; where it is fp16, {SCALED}"}.get(
        observed.facts.precision, BETTER
    )


def out_of_memory(observed: Observed) -> list[Finding]:
    """Our own runs halve the pass by themselves; what that cost is said, and how to start with what fits."""
    events = [
        event for event in observed.events if event["event"] == "out_of_memory" and "micro_batch" in event
    ]
    if not events:
        return []
    last = events[-1]
    return [
        Finding(
            cause="out-of-memory",
            kind="cause",
            title=(
                f"The run ran out of memory {len(events)} time(s) and went on with a micro-batch of"
                f" {last['micro_batch']}"
            ),
            evidence=(
                Evidence(
                    "micro-batch",
                    f"{events[0].get('micro_batch_before')} to {last['micro_batch']}",
                    f"at step {last.get('step')}",
                ),
            ),
            fix=(
                f"--set plan.micro_batch={last['micro_batch']}; if that is slow, --set"
                " plan.recompute=selective with a larger one"
            ),
            gain=None,
            confidence=0.95,
        )
    ]


RULES = (in_the_text, not_a_number, out_of_memory)
