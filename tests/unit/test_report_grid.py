"""Ablations and tunings in a terminal of 80 columns: no name is cut, and what has no room in a line stands
below it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folders import jsonl

from redline.cli.main import main
from redline.config.load import load_recipe, to_toml
from redline.record.read import read_run
from redline.record.units import factor
from redline.report.grid import Grid
from redline.report.terminal import print_report
from redline.report.view import view

MACHINE = "231e4345ebbc-4e0d3cb6efc7"
ROWS = [
    {
        "name": "cuda-graphs-decode", "stage": "second try", "workload": "generate", "claimed": [1.05, 1.15],
        "measured_ratio": 1.104,
        "low": 0.994, "high": 1.128, "verdict": "not resolved", "memory_bytes": 2**30,
        "numerics": "same training (rounding: loss 1e-07)",
    },
    {"name": "selective-recompute", "workload": "generate", "outcome": "not applicable", "note": "needs a CUDA device, and this is a CPU"},
]  # fmt: skip


def printed(folder: Path, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report([view(read_run(folder))], console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def trial(name: str) -> dict[str, Any]:
    measured = {
        "outcome": "ok",
        "blocks_s": [1.0, 2.0],
        "steps_per_block": 3,
        "tokens_per_step": 1000,
        "warmup_steps": 7,
    }
    return {
        "key": "k",
        "name": name,
        "machine": MACHINE,
        "measured": measured | {"first_step_s": 0.9, "elapsed_s": 8.0},
    }


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_an_ablation_is_readable_in_every_width(tmp_path: Path, width: int) -> None:
    (tmp_path / "ablation.json").write_text(json.dumps(ROWS))
    jsonl(
        tmp_path / "trials.jsonl",
        [trial("generate cuda-graphs-decode: before"), trial("generate selective-recompute")],
    )
    shown = printed(tmp_path, width)
    assert "…" not in shown
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    for word in (
        "cuda-graphs-decode",
        "selective-recompute",
        "1.05 to 1.15×",
        "0.994 to 1.13×",
        "not resolved",
        "applicable",
        "667/s",
    ):
        assert word in shown
    assert MACHINE[:6] not in shown


def test_what_has_no_room_stands_below_the_row(tmp_path: Path) -> None:
    (tmp_path / "ablation.json").write_text(json.dumps(ROWS))
    jsonl(tmp_path / "trials.jsonl", [trial("generate cuda-graphs-decode: before")])
    lines = [" ".join(line.split()) for line in printed(tmp_path, 80).splitlines()]
    assert lines[lines.index("1.0 GiB; same training (rounding: loss 1e-07)") - 1].endswith("not resolved")
    assert "not applicable here: selective-recompute (needs a CUDA device, and this is a CPU)" in " ".join(
        lines
    )
    at = lines.index("generate cuda-graphs-decode: before ok 667/s 3")
    assert lines[at + 1].startswith("tokens per step 1,000; warmup steps 7; first step 900 ms")


def test_a_tuning_has_its_verdict_in_the_line(tmp_path: Path) -> None:
    slower = {"ratio": 0.8, "low": 0.75, "high": 0.85, "verdict": "slower", "paired": True}
    row = {
        "name": "recompute selective",
        "tokens_per_s": 800.0,
        "comparison": slower,
        "verdict": "slower",
        "note": "same training",
    }
    jsonl(tmp_path / "trials.jsonl", [trial("recompute selective")])
    (tmp_path / "result.json").write_text(json.dumps({"ratio": 1.0, "rows": [row]}))
    lines = [" ".join(line.split()) for line in printed(tmp_path, 80).splitlines()]
    assert (
        lines[lines.index("recompute selective 800/s 0.800× slower 0.750 to 0.850×") + 1] == "same training"
    )


def test_what_was_measured_has_three_digits_and_its_speed(tmp_path: Path) -> None:
    assert [factor(value) for value in (0.9996, 0.978, 1.5, 12.345, 768.13)] == [
        "1.00",
        "0.978",
        "1.50",
        "12.3",
        "768",
    ]
    (tmp_path / "ablation.json").write_text(
        json.dumps([ROWS[0] | {"measured_ratio": 1.0, "tokens_per_s": 38197.4}])
    )
    for width in (80, 160):
        shown = printed(tmp_path, width)
        assert "1.00×" in shown
        assert "38,197 tokens/s" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_table_breaks_a_word_or_loses_one(width: int) -> None:
    words = [f"word{'x' * (n % 13)}{n}" for n in range(60)]
    rows = [("a heading",), *((f"name-{n}", str(n), "short", " ".join(words[n:])) for n in (0, 30, 55))]
    console = Console(file=io.StringIO(), width=width)
    console.print(Grid(("name", "number", "kind", "text"), rows, right=(1,)))
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in shown.splitlines())
    expected = [word for row in rows for cell in row for word in cell.split()]
    names = {"name", "number", "kind", "text"}  # of columns that stand below there are none
    assert sorted(word for word in shown.split() if word not in names) == sorted(expected)


@pytest.mark.parametrize(
    "command", [["recipes"], ["tasks"], ["tasks", "units", "--count", "3"], ["machine", "--facts"], ["plan", "nano"], ["optimizations"]]
)  # fmt: skip
def test_every_table_of_the_command_line_fits_in_80_columns(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line.rstrip()) > 80] == []


def test_a_folder_without_a_plan_has_its_recipes_own_fingerprint(tmp_path: Path) -> None:
    """What `redline ablate` prints of it."""
    recipe = load_recipe("seeds/002", ["train.batch_size=16", "plan.micro_batch=4"])
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert read_run(tmp_path).fingerprint == recipe.fingerprint
    (tmp_path / "recipe.toml").write_text('name = "of another version"\n[model]\ndepth = 3\n')
    assert read_run(tmp_path).fingerprint is None
