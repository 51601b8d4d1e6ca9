"""An ablation with real child processes on a CPU, and what was finished is not measured again."""

import json
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.config.load import load_recipe
from redline.machine.facts import read_facts
from redline.measure.trial import Timing
from redline.plan.hardware import hardware_here
from redline.tune.ablate import AblationRow, ablate

TINY = [
    "model.num_layers=2", "model.hidden_size=64", "model.num_heads=2", "model.ffn_size=128",
    "model.context_length=128", "data.seq_len=64",
    "train.batch_size=8", "model.vocab_size=512",
]  # fmt: skip
QUICK = Timing(blocks=6, block_s=0.05, guard_steps=2, warmup_s=0.2, limit_s=120)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(
    folder: Path, study: str, only: tuple[str, ...], said: list[str]
) -> dict[tuple[str, str], AblationRow]:
    rows = ablate(
        load_recipe("nano", TINY), study, hardware_here(read_facts(), None), folder, only=only, minutes=5,
        progress=said.append,
        timing=QUICK,
    )  # fmt: skip
    return {(row.stage, row.name): row for row in rows}


def measuring(said: list[str]) -> list[str]:
    return [line for line in said if ": measuring" in line]


@pytest.mark.slow
def test_training_is_measured_once_and_goes_on_from_what_is_there(tmp_path: Path) -> None:
    said: list[str] = []
    rows = run(tmp_path / "run", "nano", ("sdpa", "bf16"), said)
    row = rows["one by one", "sdpa"]
    assert row.outcome == "ok"
    assert row.measured_ratio is not None
    assert row.low is not None
    assert row.high is not None
    assert row.low <= row.measured_ratio <= row.high
    assert "same training" in row.numerics
    assert rows["one by one", "bf16"].outcome == "not applicable"
    assert len(measuring(said)) >= 2
    again: list[str] = []
    assert run(tmp_path / "run", "nano", ("sdpa", "bf16"), again) == rows
    assert measuring(again) == []
    assert [row["name"] for row in json.loads((tmp_path / "run" / "ablation.json").read_text())] == [
        row.name for row in rows.values()
    ]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, part in (
        (["--only", "spda"], "did you mean 'sdpa'"),
        (["--minutes", "0"], "--minutes must be a finite number above 0"),
    ):
        assert main(["ablate", "nano", "--out", str(tmp_path / "run"), *arguments]) == 2
        assert part in capsys.readouterr().err
