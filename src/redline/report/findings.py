"""What the diagnosis says of a run, in words for the page and the terminal. No torch."""

from dataclasses import dataclass

from redline.diagnose.finding import Finding
from redline.diagnose.own import read_run
from redline.diagnose.rules import diagnose
from redline.report.runs import Run


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


def findings(run: Run) -> list[FindingView] | None:
    """The findings, most worth first; None where there is nothing to diagnose."""
    if not run.metrics or run.workload != "pretrain":
        return None
    return [_view(finding) for finding in diagnose(read_run(run.path))]


def _view(finding: Finding) -> FindingView:
    gain = finding.gain
    return FindingView(
        title=finding.title,
        evidence=[f"{e.name}: {f'{e.value:.4g}' if isinstance(e.value, float) else e.value} {e.unit}".strip() for e in finding.evidence],
        fix=finding.fix,
        gain=f"{gain.low:.3g} to {gain.high:.3g}× predicted" if gain else "",
        gain_why=gain.why if gain else "",
        confidence=f"{finding.confidence:.0%}",
        optimisation=finding.optimisation or "",
    )
