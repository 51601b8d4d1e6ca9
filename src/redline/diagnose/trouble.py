"""Failures that a log records: running out of memory, a Ray cluster that does not come up, a loss that is not a number. Advice, no gain."""

import re

from redline.diagnose.finding import Evidence, Finding
from redline.diagnose.observed import Observed

LINES = {
    "out-of-memory": (
        r"CUDA out of memory|OutOfMemoryError",
        "The log ran out of GPU memory",
        "halve the micro-batch and double the accumulation (the batch stays the same); then recomputation on; then a shorter sequence. "
        "Fewer loader workers only help host memory",
    ),
    "ray-timeout": (
        r"register_center.*tim(?:ed|e) ?out|Failed to get register_center_actor",
        "Ray's workers did not find each other in time",
        "trainer.ray_wait_register_center_timeout=600; `ray status` must show all GPUs before the start; `ray stop` on every node first",
    ),
    "not-a-number": (
        r"loss[^\n]{0,12}\bnan\b|grad_norm[^\n]{0,12}\bnan\b",
        "The loss or the gradient is not a number",
        "bf16 instead of fp16 (fp16 needs a loss scaler), a lower learning rate, gradients clipped to 1.0",
    ),
}


def in_the_text(observed: Observed) -> list[Finding]:
    """A line of a console log that names a known failure."""
    if observed.format == "document":
        return []
    found = []
    for cause, (pattern, title, fix) in LINES.items():
        lines = [line.strip() for line in observed.text.splitlines() if re.search(pattern, line, re.IGNORECASE)]
        if lines:
            evidence = (Evidence("lines", len(lines), f"the first: {lines[0][:160]}"),)
            found.append(Finding(cause=cause, kind="cause", title=title, evidence=evidence, fix=fix, gain=None, confidence=0.9))
    return found


def out_of_memory(observed: Observed) -> list[Finding]:
    """Our own runs halve the pass by themselves; what that cost is said, and how to start with what fits."""
    events = [event for event in observed.events if event["event"] == "out_of_memory" and "micro_batch" in event]
    if not events:
        return []
    last = events[-1]
    return [
        Finding(
            cause="out-of-memory",
            kind="cause",
            title=f"The run ran out of memory {len(events)} time(s) and went on with a micro-batch of {last['micro_batch']}",
            evidence=(
                Evidence("micro-batch", f"{events[0].get('micro_batch_before')} to {last['micro_batch']}", f"at step {last.get('step')}"),
            ),
            fix=f"--set plan.micro_batch={last['micro_batch']}; if that is slow, --set plan.recompute=selective with a larger one",
            gain=None,
            confidence=0.95,
        )
    ]


RULES = (in_the_text, out_of_memory)
