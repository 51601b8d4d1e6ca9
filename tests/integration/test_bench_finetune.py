"""`redline bench finetune` really trains, both sides of it: the same losses from Hugging Face's Trainer with
PEFT, on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from precision import CLOSE_FP32

from redline.bench import finetune, results
from redline.cli.main import main
from redline.machine.facts import read_facts
from redline.measure.child import named


def test_both_sides_are_measured_on_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has torch already."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(results, "rows_of", lambda function, setting: named(function)(setting))
    told: list[str] = []
    path = finetune.bench_finetune(
        "quick", read_facts(), tmp_path, arms=["hf-seeds", "graph"], progress=told.append
    )
    assert [line.partition(":")[0] for line in told] == [
        finetune.LABELS["hf-seeds"],
        finetune.LABELS["graph"],
    ]
    theirs, ours = json.loads(path.with_suffix(".json").read_text())["rows"]
    assert (theirs["row"], ours["row"]) == ("hf-seeds", "graph")
    assert len(theirs["losses"]) == 6
    # the updates are too small to enlarge what rounding leaves; batches differ by a hundred times as much
    assert ours["losses"][:6] == pytest.approx(theirs["losses"], rel=CLOSE_FP32)
    assert ours["losses"][-1] < ours["losses"][0]
    for row in (theirs, ours):
        assert 0 < row["low"] <= row["rows_per_s"] <= row["high"]
        assert row["update_ms"] > 0
        assert len(row["blocks"]) == 3
    table = path.read_text()
    assert f"| {ours['rows_per_s']:,.0f} |" in table
    assert f"{ours['loss_differences']['hf-seeds']:.2g} over 6 updates" in table


def test_a_wrong_arm_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "finetune", "--quick", "--arm", "peft"]) == 2
    assert "--arm must be one of hf-seeds, hf-best, graph, fp32, got 'peft'" in capsys.readouterr().err
