"""The examples as a user runs them: each writes a run folder that `redline diagnose` and `redline report`
read, and its fault is found."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = {"own_loop.py": ("padding", 80), "hf_trainer.py": ("needless-recomputation", 40)}
"""What each example does wrong on purpose, and its updates."""
MOST_S = 30
"""Fifteen on a machine that nobody else uses."""


def called(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "REDLINE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("name", FAULTS)
def test_an_example_runs_and_its_fault_is_found(name: str, tmp_path: Path) -> None:
    cause, updates = FAULTS[name]
    folder, redline = tmp_path / "run", (sys.executable, "-m", "redline.cli.main")
    began_at = time.perf_counter()
    shown = called(sys.executable, str(ROOT / "examples" / name), str(folder), cache=tmp_path).stderr
    assert time.perf_counter() - began_at < MOST_S
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(lines) == updates
    assert losses[-1] < 0.8 * losses[0], "it learns"

    found = json.loads(called(*redline, "diagnose", str(folder), "--json", cache=tmp_path).stdout)
    assert (found["format"], found["steps"], found["repairs"]) == ("run", updates, [])
    assert found["findings"][0]["cause"] == cause
    assert f"1. {found['findings'][0]['title']}" in shown, "what the example printed at its end"

    report = called(*redline, "report", str(folder), cache=tmp_path).stdout
    assert found["findings"][0]["title"][:40] in report
    assert "finished" in report
    assert "fp32" in report
    assert "Where the time went" in report
    assert (folder / "report.html").stat().st_size > 50_000
    summary = json.loads(called(*redline, "report", str(folder), "--json", cache=tmp_path).stdout)["runs"][0]
    assert summary["updates"] == updates
    assert summary["parameters"] > 100_000
    assert summary["speed"]["update"]["value"] > 0
