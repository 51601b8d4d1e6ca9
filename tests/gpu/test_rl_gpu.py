"""Reinforcement learning on a real GPU: the engine speaks with the weights that learn, and the model learns."""

from pathlib import Path

import pytest

from redline.cli.main import main
from redline.record.run import read_lines

BF16_LOGPROB = 0.05
"""Nats. The engine and the trainer round the same bf16 activations in another order: 8 bits of mantissa (2**-8) on
logits of up to 10 or so."""


@pytest.mark.parametrize("lora", [False, True])
def test_the_demo_learns(tmp_path: Path, lora: bool) -> None:
    adapter = ["lora.rank=16", "lora.alpha=32", "train.lr=2e-3"] if lora else []
    sets = [part for value in ["train.steps=12", "test.rows=64", *adapter] for part in ("--set", value)]
    run = tmp_path / "run"
    assert main(["rl", "run", "rl/demo", "--run", str(run), "--quiet", *sets]) == 0
    lines = read_lines(run / "metrics.jsonl")
    assert len(lines) == 12
    early, late = (sum(line["reward"] for line in part) / 3 for part in (lines[:3], lines[-3:]))
    assert late > early
    assert max(line["logprob_gap"] for line in lines) < BF16_LOGPROB
    for line in lines:
        parts_s = line["generate_s"] + line["reward_s"] + line["weights_s"] + line["update_s"]
        assert parts_s <= line["step_s"] * 1.01
        assert 0 < line["actor_mfu"] < 1
    assert (run / ("adapter" if lora else "model")).is_dir()
