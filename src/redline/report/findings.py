"""What the diagnosis says about a run, in words for the page and the terminal. No torch."""

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
"""Above this share of the attainable speed nothing needs explaining: the roofline ignores launches and caches."""

NOT_IN_THE_MEDIAN = ("validation-pause", "checkpoint-pause", "stall", "slow-updates")
"""Causes outside the median update, which is what is compared with the attainable speed."""


@dataclass(frozen=True)
class FindingView:
    title: str
    evidence: list[str]
    fix: str
    gain: str
    """As a factor on the speed; empty if the fix makes nothing faster."""
    gain_why: str
    confidence: str
    optimisation: str
    finding: Finding


def findings(run: Run, speed: Speed, quality: Quality) -> tuple[list[FindingView] | None, str]:
    """The findings, the most valuable first, and a remark; None if there is nothing to diagnose."""
    sampled = any(event.get("event") == "sampling_end" for event in run.events)
    if not run.metrics and not sampled:
        return None, ""
    observed = own.observed(run)
    found = diagnose(observed)
    views = [shown(finding) for finding in found]
    if not run.metrics:
        return views or None, ""
    return views, f"{filtered(run, quality)} {remark(observed, speed, found)}".strip()


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
    """Whether the findings explain the distance to the attainable speed."""
    share, little = speed.attained_share, too_little(observed)
    if share is None or share >= EXPLAINED or little:
        return (little or "") if found else verdict(observed, found).text
    only = f"why the updates reach only {format_share(share)} of the attainable speed"
    gains = [f.gain.high for f in found if f.gain and f.cause not in NOT_IN_THE_MEDIAN]
    if not gains:
        return f"{'No finding' if found else 'Nothing found by the rules; none'} explains {only}."
    if (best := share * math.prod(gains)) >= EXPLAINED:
        return ""
    return f"With everything fixed it would be {format_share(best)} at most; no rule explains the rest of {only}."


def filtered(run: Run, quality: Quality) -> str:
    """A loss of 0 beside a gradient that is not a number: the Trainer (only its runs have the event) hides losses."""
    if quality.bad_gradient_step is None or not any(event.get("event") == "logging" for event in run.events):
        return ""
    return "The Trainer does not log losses that are not numbers (logging_nan_inf_filter): a loss of 0 is one of them."
