"""What the diagnosis says about a run, in words for the page and the terminal. No torch."""

from dataclasses import dataclass

from redline.diagnose.answer import verdict
from redline.diagnose.finding import Finding
from redline.diagnose.readers import own
from redline.diagnose.rules import diagnose
from redline.record.read import Run
from redline.record.units import format_amount


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


def findings(run: Run) -> tuple[list[FindingView] | None, str]:
    """The findings, the most valuable first, and the verdict; None if there is nothing to diagnose."""
    sampled = any(event.get("event") == "sampling_end" for event in run.events)
    if not run.metrics and not sampled:
        return None, ""
    observed = own.observed(run)
    found = diagnose(observed)
    views = [shown(finding) for finding in found]
    return (views, verdict(observed, found).text) if run.metrics else (views or None, "")


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
