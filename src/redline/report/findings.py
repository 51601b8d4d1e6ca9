"""What the diagnosis says of a run, in words for the page and the terminal. No torch."""

from dataclasses import dataclass

from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.own import read_run
from redline.diagnose.rules import diagnose
from redline.diagnose.summary import nothing_found, too_little
from redline.record.units import format_amount, format_share
from redline.report.figures import Speed
from redline.report.runs import Run

EXPLAINED = 0.75
"""From this share of the attainable speed on, what is left needs no explanation: the roofline leaves out launches and caches."""


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


def findings(run: Run, speed: Speed) -> tuple[list[FindingView] | None, str]:
    """The findings, most worth first, and what to say where there are none; None where there is nothing to diagnose."""
    if not run.metrics or run.workload != "pretrain":
        return None, ""
    observed = read_run(run.path)
    return [_view(finding) for finding in diagnose(observed)], nothing(observed, speed)


def _view(finding: Finding) -> FindingView:
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


def nothing(observed: Observed, speed: Speed) -> str:
    """No finding is good news only where the speed is near what is attainable."""
    share = speed.attained_share
    if share is None or share >= EXPLAINED or too_little(observed):
        return nothing_found(observed)
    return f"Nothing found by the rules; none explains why the updates reach only {format_share(share)} of the attainable speed."
