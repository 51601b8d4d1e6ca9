"""The notebook runs from its first cell to its last, and is stored without what its cells printed."""

import json
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "notebooks" / "okadfa.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_stripped() -> None:
    assert CODE
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At nano size, for a few updates, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("redline.machine.ceilings.load_or_measure", lambda *_, **__: None)
    scope: dict[str, object] = {}
    for cell in CODE:
        source = "".join(cell["source"]).replace("STEPS = 200", "STEPS = 4")
        exec(compile(source, "okadfa.ipynb", "exec"), scope)
    shown = capsys.readouterr().out
    assert "perplexity" in shown
    assert "First Citizen:" in shown
    lines = [
        json.loads(line) for line in (tmp_path / "runs/okadfa-nano/metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 4
    assert all(-1 <= line["dfa_cosine"] <= 1 for line in lines)
    assert (tmp_path / "runs/okadfa-nano/report.html").stat().st_size > 10_000
