"""The speed gate of `redline bench --against`: written speeds, no stopwatch."""

import json
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from redline.bench.finetune import BENCH
from redline.bench.results import page_of, slower
from redline.bench.results import recorded as record_of
from redline.cli.main import main
from redline.errors import ConfigError
from redline.machine.facts import read_facts

ROOT = Path(__file__).parents[2] / "benchmarks"


def speed(rate: float, spread: float = 0.01) -> dict[str, float]:
    return {"tokens_per_s": rate, "low": rate * (1 - spread), "high": rate * (1 + spread)}


@pytest.fixture
def recorded() -> dict[str, Any]:
    plan, recipe = (
        {"precision": {"value": "bf16"}, "prediction": {"flops_per_token": 6_000_000}},
        {"name": "r", "train": {"batch_size": 8, "optimizer": "adamw"}, "data": {"seq_len": 16}},
    )
    arms = {"loop": {"speeds": {"loop": speed(1000)}}, "hf": {"speeds": {"hf": speed(800)}}}
    machine = {"gpus": [{"name": "NVIDIA H200"}], "cpu_name": "x", "cpu_cores": 8}
    return {"machine": machine, "results": [{"recipe": recipe, "plan": plan, "arms": arms}]}


def with_speed(recorded: dict[str, Any], arm: str, found: dict[str, Any]) -> dict[str, Any]:
    changed = deepcopy(recorded)
    changed["results"][0]["arms"][arm] = found
    return changed


@pytest.mark.parametrize(
    ("rate", "bad"),
    [(1000, False), (1100, False), (965, False), (955, True)],  # 990 recorded at least, less 2%: 970.2; 955 x 1.01 = 964.6
)  # fmt: skip
def test_slower_is_what_lies_below_the_recorded_interval(
    recorded: dict[str, Any], rate: float, bad: bool
) -> None:
    found = slower(with_speed(recorded, "loop", {"speeds": {"loop": speed(rate)}}), recorded)
    assert bool(found) == bad
    if bad:
        assert found == [
            "r bf16, 128 tokens of 6.000 MFLOP per update with adamw, loop: 955/s, at most 965; recorded 1,000, at least 990"
        ]


def test_an_arm_that_fails_is_slower_and_an_alternative_is_not_judged(recorded: dict[str, Any]) -> None:
    assert len(slower(with_speed(recorded, "loop", {"failed": "out of memory"}), recorded)) == 1
    assert slower(with_speed(recorded, "hf", {"speeds": {"hf": speed(8)}}), recorded) == []


def test_what_cannot_be_compared_is_refused(recorded: dict[str, Any], tmp_path: Path) -> None:
    for table, key, value in (
        ("recipe", "train", {"batch_size": 4, "optimizer": "adamw"}),
        ("recipe", "train", {"batch_size": 8, "optimizer": "muon"}),
        ("plan", "prediction", {"flops_per_token": 5_000_000}),  # another shape or length under the same name
    ):
        other = deepcopy(recorded)
        other["results"][0][table][key] = value
        with pytest.raises(ConfigError, match="no arm of this benchmark"):
            slower(recorded, other)
    record, here = tmp_path / "record.json", asdict(read_facts())
    for found, why in (
        ({}, "not the JSON of a benchmark"),
        ({"machine": here, "lanes": []}, "holds no speed"),  # a race's
        (recorded | {"machine": {**here, "gpus": [{"name": "another"}]}}, "another kind of machine"),
    ):
        record.write_text(json.dumps(found))
        with pytest.raises(ConfigError, match=why):
            record_of(record, read_facts())
    record.write_text(json.dumps(recorded | {"machine": here}))
    assert record_of(record, read_facts())["results"] == recorded["results"]


SHIPPED = [
    path
    for what in ("train", "generate", "finetune", "rl")
    for path in ROOT.glob(f"{what}_nvidia-h200_*.json")
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_result_passes_against_itself_and_fails_at_half_the_speed(path: Path) -> None:
    then = json.loads(path.read_text())
    assert slower(then, then) == []

    def halved(value: Any) -> Any:
        if isinstance(value, list):
            return [halved(item) for item in value]
        if not isinstance(value, dict):
            return value
        rates = ("tokens_per_s", "rows_per_s", "low", "high")
        return {k: v / 2 if k in rates and isinstance(v, float) else halved(v) for k, v in value.items()}

    assert slower(halved(then), then)


@pytest.mark.parametrize("command", [["race", "nano"], ["bench", "rl", "--quick"], ["bench", "train"]])
def test_a_wrong_record_is_refused_before_anything_is_measured(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*given: object) -> None:
        raise AssertionError("it went on to measure")

    for name in ("race.ceilings_of", "bench._train", "bench._measure"):
        monkeypatch.setattr(f"redline.cli.{name}", measured)
    assert main([*command, "--against", "nowhere.json"]) == 2
    assert capsys.readouterr().err == "redline: nowhere.json cannot be read: No such file or directory\n"
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert main([*command, "--against", str(wrong)]) == 2
    assert f"{wrong} is not the" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "what"), [(["train", "--recipe", "nano"], "train"), (["rl", "--quick"], "rl-quick")]
)
def test_a_record_is_not_overwritten_by_what_is_compared_with_it(
    command: list[str],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The next comparison would then be with the slower result."""
    monkeypatch.chdir(tmp_path)
    record = page_of(Path("benchmarks"), what, read_facts())
    assert main(["bench", *command, "--against", str(record.with_suffix(".json"))]) == 2
    assert "is the file this benchmark writes: give another --out" in capsys.readouterr().err


def test_a_page_of_one_arm_announces_no_comparison() -> None:
    lines = BENCH.page(read_facts(), "quick", [{"row": "graph", "failed": "memory", "loss_differences": {}}])
    assert lines[-1].startswith("| redline")
    assert "Largest difference" not in "".join(lines)
