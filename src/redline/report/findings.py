"""What the diagnosis says of a run, in words for the page and the terminal. No torch."""

import math
from dataclasses import dataclass

from redline.diagnose.answer import too_little, verdict
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.readers import own
from redline.diagnose.rules import diagnose
from redline.record.read import Run
from redline.record.units import format_amount, format_share
from redline.report.figures import Quality, Speed

EXPLAINED = 0.75
"""From this share of the attainable speed on, what is left needs no explanation: the roofline leaves out
launches and caches."""

NOT_IN_THE_MEDIAN = ("validation-pause", "checkpoint-pause", "compile-time", "stall", "slow-updates")
"""Causes that lie outside the usual update, whose speed is held against the attainable: they do not explain
the distance."""


@dataclass(frozen=True)
class FindingView:
    title: str
    evidence: list[str]
    fix: str
    gain: str
    """As a factor on the speed; empty where correcting a number makes nothing faster."""
    gain_why: str
    confidence: str
    optimisation: str
    finding: Finding
    """As the diagnosis gave it."""


def findings(run: Run, speed: Speed, quality: Quality) -> tuple[list[FindingView] | None, str]:
    """The findings, most worth first, and what is said beside them; None where there is nothing to
    diagnose."""
    sampled = any(event.get("event") == "sampling_end" for event in run.events)
    if not run.metrics and not sampled:
        return None, ""
    observed = own.observed(run)
    found = diagnose(observed)
    if not run.metrics:
        return [shown(finding) for finding in found] or None, ""
    return [shown(finding) for finding in found], " ".join(
        part for part in (filtered(run, quality), remark(observed, speed, found)) if part
    )


def shown(finding: Finding) -> FindingView:
    gain = finding.gain
    return FindingView(
        title=finding.title,
        evidence=[f"{e.name}: {format_amount(e.value, e.unit)}" for e in finding.evidence],
        fix=finding.fix,
        gain=f"{gain.low:.3g} to {gain.high:.3g}× predicted" if gain else "",
        gain_why=gain.why if gain else "",
        confidence=f"{finding.confidence:.0%}",
        optimisation=finding.optimisation or "",
        finding=finding,
    )


def remark(observed: Observed, speed: Speed, found: list[Finding]) -> str:
    """No finding is good news only where the speed is near what is attainable, and small findings do not
    explain a large distance."""
    share, little = speed.attained_share, too_little(observed)
    if share is None or share >= EXPLAINED or little:
        return (little or "") if found else verdict(observed, found).text
    only = f"why the updates reach only {format_share(share)} of the attainable speed"
    gains = [
        finding.gain.high for finding in found if finding.gain and finding.cause not in NOT_IN_THE_MEDIAN
    ]
    if not gains:
        return f"{'No finding' if found else 'Nothing found by the rules; none'} explains {only}."
    best = share * math.prod(gains)
    return (
        f"Without what is found it would be {format_share(best)} at most; no rule explains the rest of"
        f" {only}."
        if best < EXPLAINED
        else ""
    )


def filtered(run: Run, quality: Quality) -> str:
    """A loss of 0 beside a gradient that is not a number is none: the Trainer (which alone records its
    logging) has left the losses out."""
    if quality.bad_gradient_step is None or not any(event.get("event") == "logging" for event in run.events):
        return ""
    return (
        "The Trainer leaves losses that are not numbers out of what it logs (logging_nan_inf_filter, on by"
        " default): a loss of 0 is none."
    )
