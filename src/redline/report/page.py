"""The report as one HTML page: works offline, opens from the disk, fits a phone, light and dark. No torch.

Templates, style, script and the chart library (uPlot, vendored with its licence) are in assets/ and go into the page.
All text of a run is escaped by Jinja; the curves go in as JSON. A content security policy names the page's own
scripts by their hashes and forbids everything else, so that neither a file of a run nor a bug of ours can make the
page load or send anything.
"""

import base64
import functools
import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from redline import __version__
from redline.diagnose.answer import verdict, what_it_is
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed, Step
from redline.record import units
from redline.record.files import write_atomic
from redline.record.metrics import METRICS, Metric
from redline.report.compare import Comparable
from redline.report.reinforcement import Compared
from redline.report.series import CHARTS, Chart, curves
from redline.report.view import RunView, side_by_side, when

ASSETS = Path(str(resources.files("redline"))) / "report" / "assets"
UPLOT = "uPlot-1.6.32.min"


def write_page(runs: list[RunView], out: Path) -> None:
    write_atomic(out, page(runs))


def page(runs: list[RunView], live: dict[str, int] | None = None) -> str:
    """The whole page. `live`, for a watched run: generation and offset of what is drawn."""
    return assembled(parts(runs), [_curves(run) for run in runs], runs, live)


def assembled(
    filled: dict[str, str], drawn: list[dict[str, Any]], runs: list[RunView], live: dict[str, int] | None
) -> str:
    """A page with these parts, the curves of some runs, and the details of those that are our own."""
    script = _asset("language.js") + _asset(f"{UPLOT}.js") + _asset("charts.js")
    connect = "connect-src 'self'; " if live is not None else ""
    policy = (
        f"default-src 'none'; {connect}img-src data:; style-src 'unsafe-inline'; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    own = dict.fromkeys(name for run in drawn for name in run["curves"] if name not in CHARTS)
    trainings = {shown.run.fingerprint for shown in runs}
    return _templates().get_template("page.html.j2").render(
        title=", ".join(run["label"] for run in drawn),
        policy=policy,
        style=_asset(f"{UPLOT}.css") + _asset("page.css"),
        parts=filled,
        runs=runs,
        live=live is not None,
        made_at=when(time.time()),
        axis="elapsed_s" if len(trainings) > 1 else "step",  # updates of different trainings are different work
        version=__version__,
        data=_json({"charts": [*map(_chart, (*CHARTS, *own))], "runs": drawn, "live": live}),
        script=script,
    )  # fmt: skip


def parts(runs: list[RunView]) -> dict[str, str]:
    """The parts that change during a run, by their element ids."""
    verdict = Comparable([shown.run for shown in runs]) if len(runs) > 1 else None
    found = {name: str(getattr(macros(), name)(runs, verdict)) for name in ("head", "outcome", "why")}
    return found | {f"events-{shown.place}": str(macros().events(shown)) for shown in runs}


def _curves(shown: RunView) -> dict[str, Any]:
    """What the browser draws of a run: its curves, and the predictions as horizontal lines."""
    speed, memory = shown.summary.speed, shown.summary.memory
    lines = {
        "tokens_per_s": [("attainable", speed.attainable), ("matmul ceiling", speed.ceiling)],
        "memory_bytes": [("predicted", memory.predicted_bytes)],
    }
    known = {name: [{"label": k, "value": v} for k, v in pairs if v] for name, pairs in lines.items()}
    return {"label": shown.run.label, "place": shown.place, "lines": known, **curves(shown.run.metrics)}


def _chart(name: str) -> dict[str, Any]:
    chart = CHARTS.get(name, Chart(name, "plain", from_zero=False))
    metric = METRICS.get(name, Metric("1", name))
    unit = "" if metric.unit == "1" else metric.unit
    meaning = f"{metric.meaning} ({metric.unit})" if unit else metric.meaning
    short = chart.title.lower() if name in METRICS and not chart.title.isupper() else chart.title
    return {"name": name, "short": short, "unit": unit, "meaning": meaning, **vars(chart)}


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": units.format_bytes, "count": units.format_count, "duration": units.format_duration,
        "share": units.format_share, "limit_share": units.format_limit_share, "exact": units.exact, "when": when,
        "coded": _coded,
    }  # fmt: skip
    environment.globals |= {"side_by_side": side_by_side, "judged": _judged}
    return environment


def _coded(text: str) -> Markup:
    """The text, with what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _judged(runs: list[RunView]) -> Compared | None:
    """The second of two runs of reinforcement learning against the first."""
    return Compared(runs[0].run, runs[1].run) if len(runs) == 2 and all(run.rl for run in runs) else None


def macros() -> Any:
    """The macros of parts.html.j2."""
    return _templates().get_template("parts.html.j2").module


@functools.cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(value: Any) -> str:
    """JSON that cannot close the script element around it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# ---- a diagnosis ----


def write_diagnosis(answers: Sequence[tuple[Observed, list[Finding]]], out: Path) -> None:
    """Write the page of a diagnosis: what each run is, what holds it back, what to change, and the curves."""
    views: list[dict[str, Any]] = [
        {
            "label": Path(observed.source).name, "facts": what_it_is(observed), "notes": observed.notes,
            "verdict": verdict(observed, findings), "findings": findings, "remark": "",
        }
        for observed, findings in answers
    ]  # fmt: skip
    drawn = [
        {"label": view["label"], "place": place, "lines": {}, **_drawn(observed.steps)}
        for place, (view, (observed, _)) in enumerate(zip(views, answers, strict=True))
    ]
    filled = {"head": str(macros().diagnosis(views)), "outcome": "", "why": ""}
    write_atomic(out, assembled(filled, drawn, [], live=None))


def _drawn(steps: Sequence[Step]) -> dict[str, Any]:
    """The curves that have more than one point to join."""
    found = curves(_lines(steps))
    many = {name for name, curve in found["curves"].items() if sum(v is not None for v in curve["mean"]) > 1}
    return found | {"curves": {name: curve for name, curve in found["curves"].items() if name in many}}


def _lines(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Updates as lines for the report's curves: tokens counted from the start, and their speed."""
    lines, tokens, elapsed_s = [], 0.0, 0.0
    for step in steps:
        tokens, elapsed_s = tokens + (step.tokens or 0.0), step.elapsed_s or elapsed_s + (step.step_s or 0.0)
        speed = step.tokens / step.step_s if step.tokens and step.step_s else None
        line = asdict(step) | {"tokens": tokens or None, "elapsed_s": elapsed_s, "tokens_per_s": speed}
        lines.append(line | ({"loss": None} if step.not_a_number else {}))
    return lines
