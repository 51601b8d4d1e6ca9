"""A diagnosis as one HTML page, in the report's frame (page.py): what each run is, what holds it back, what to change,
and the curves. No torch."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redline.diagnose.answer import verdict, what_it_is
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed, Step
from redline.record.files import write_atomic
from redline.report.findings import shown
from redline.report.page import assembled, macros
from redline.report.series import curves


def write_page(answers: Sequence[tuple[Observed, list[Finding]]], out: Path) -> None:
    """Write the page of these runs."""
    views = [_view(observed, findings) for observed, findings in answers]
    drawn = [
        {"label": view["label"], "place": place, "lines": {}, **curves(_lines(observed.steps))}
        for place, (view, (observed, _)) in enumerate(zip(views, answers, strict=True))
    ]
    title = ", ".join(view["label"] for view in views)
    filled = {"head": str(macros().diagnosis(views)), "outcome": "", "why": ""}
    write_atomic(out, assembled(title, filled, drawn, []))


def _view(observed: Observed, findings: list[Finding]) -> dict[str, Any]:
    return {
        "label": Path(observed.source).name,
        "facts": what_it_is(observed),
        "notes": observed.notes,
        "verdict": verdict(observed, findings),
        "findings": [shown(finding) for finding in findings],
        "remark": "",
    }


def _lines(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Updates as lines for the report's curves: tokens counted from the start, and their speed."""
    lines, tokens, elapsed_s = [], 0.0, 0.0
    for step in steps:
        tokens, elapsed_s = tokens + (step.tokens or 0.0), step.elapsed_s or elapsed_s + (step.step_s or 0.0)
        speed = step.tokens / step.step_s if step.tokens and step.step_s else None
        line = asdict(step) | {"tokens": tokens or None, "elapsed_s": elapsed_s, "tokens_per_s": speed}
        lines.append(line | ({"loss": None} if step.not_a_number else {}))
    return lines
