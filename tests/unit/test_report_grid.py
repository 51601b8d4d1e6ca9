"""Ablations in a terminal of 80 columns: no name is cut, and what has no room in a line stands
below it."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from redline.cli.main import main
from redline.config.load import load_recipe, to_toml
from redline.record.read import read_run
from redline.record.units import factor
from redline.report.grid import Grid
from redline.report.terminal import print_report
from redline.report.view import RunView

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
    print_report([RunView(read_run(folder))], console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_an_ablation_is_readable_in_every_width(tmp_path: Path, width: int) -> None:
    (tmp_path / "ablation.json").write_text(json.dumps(ROWS))
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
    ):
        assert word in shown


def test_an_ablation_has_no_progress_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "ablation.json").write_text(json.dumps(ROWS))
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe("nano")))
    assert RunView(read_run(tmp_path)).progress is None


def test_what_has_no_room_stands_below_the_row(tmp_path: Path) -> None:
    (tmp_path / "ablation.json").write_text(json.dumps(ROWS))
    lines = [" ".join(line.split()) for line in printed(tmp_path, 80).splitlines()]
    assert lines[lines.index("memory 1.0 GiB; numerics same training (rounding: loss 1e-07)") - 1].endswith(
        "not resolved"
    )
    assert "not applicable here: selective-recompute (needs a CUDA device, and this is a CPU)" in " ".join(
        lines
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


def test_a_number_below_its_row_has_the_name_of_its_column() -> None:
    """`0.05 ms` alone under a row of the doctor's table was the time of what?"""
    console = Console(file=io.StringIO(), width=30)
    row = ("units", "57.8%", "0.05 ms", "a remark")
    console.print(Grid(("domain", "no answer found", "scoring", "about"), [row], right=(1, 2)))
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.splitlines()[-1].strip() == "scoring 0.05 ms; a remark"
