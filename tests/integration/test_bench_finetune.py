"""`redline bench finetune` really trains, both sides of it: the same losses from Hugging Face's Trainer with
PEFT, on a CPU."""

import json
from pathlib import Path

import pytest
from precision import CLOSE_FP32
from warm import Warm


@pytest.mark.slow
def test_both_sides_are_measured_on_the_same_work(warm: Warm, tmp_path: Path) -> None:
    done = warm.run("bench", "finetune", "--quick", "--arm", "hf-seeds", "--arm", "graph", "--out", tmp_path)
    assert done.code == 0, done.err
    [path] = tmp_path.glob("finetune-quick_*.json")
    theirs, ours = json.loads(path.read_text())["rows"]
    assert (theirs["row"], ours["row"]) == ("hf-seeds", "graph")
    assert len(theirs["losses"]) == 6
    # the updates are too small to enlarge what rounding leaves; batches differ by a hundred times as much
    assert ours["losses"][:6] == pytest.approx(theirs["losses"], rel=CLOSE_FP32)
    assert ours["losses"][-1] < ours["losses"][0]
    for row in (theirs, ours):
        assert 0 < row["low"] <= row["rows_per_s"] <= row["high"]
        assert row["update_ms"] > 0
    table = path.with_suffix(".md").read_text()
    assert f"| {ours['rows_per_s']:,.0f} |" in table
    assert f"{ours['loss_differences']['hf-seeds']:.2g} over 6 updates" in table


def test_a_wrong_arm_is_one_clear_line(warm: Warm, tmp_path: Path) -> None:
    done = warm.run("bench", "finetune", "--quick", "--arm", "peft", "--out", tmp_path)
    assert done.code == 2
    assert "--arm must be one of hf-seeds, hf-best, graph, compiled, fp32, got 'peft'" in done.err
