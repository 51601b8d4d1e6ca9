"""The examples as a user runs them: each writes a run folder that `redline diagnose` and `redline report`
read, and its fault is found."""

import json
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from redline.cli.main import main

ROOT = Path(__file__).parents[2]
FAULTS = {"own_loop.py": ("padding", 80), "hf_trainer.py": ("needless-recomputation", 40)}
"""What each example does wrong on purpose, and its updates."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def layers_take_time(clock: object) -> Iterator[None]:
    """A millisecond each, by the tests' clock: the findings are then those of the loop and not of the machine."""
    added = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: time.sleep(1e-3))
    yield
    added.remove()


@pytest.mark.parametrize("name", FAULTS)
def test_an_example_runs_and_its_fault_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cause, updates = FAULTS[name]
    folder, example = tmp_path / "run", str(ROOT / "examples" / name)
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [example, str(folder)])
    runpy.run_path(example, run_name="__main__")
    shown = capsys.readouterr().err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(lines) == updates
    assert losses[-1] < 0.8 * losses[0], "it learns"

    def said(*arguments: str) -> str:
        assert main([*arguments, str(folder)]) == 0
        return capsys.readouterr().out

    found = json.loads(said("diagnose", "--json"))
    assert (found["format"], found["steps"], found["notes"]) == ("run", updates, [])
    assert found["findings"][0]["cause"] == cause
    assert f"1. {found['findings'][0]['title']}" in shown, "what the example printed at its end"

    report = said("report")
    assert found["findings"][0]["title"][:40] in report
    assert "finished" in report
    assert "fp32" in report
    assert "Where the time went" in report
    assert (folder / "report.html").stat().st_size > 50_000
    summary = json.loads(said("report", "--json"))["runs"][0]
    assert summary["updates"] == updates
    assert summary["parameters"] > 100_000
    assert summary["speed"]["update"]["value"] > 0
