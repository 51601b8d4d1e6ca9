"""The race: curves with known times, a common ladder, intervals over seeds, and the gate; no training and no clock."""

import json
import math
import os
import random
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from redline.cli.main import main
from redline.config.load import load_recipe, to_toml
from redline.errors import ConfigError, MachineError, StorageError, TrainingError
from redline.launch.processes import LAUNCHER, PROGRAM
from redline.machine.facts import GpuFacts, read_facts
from redline.measure.statistics import difference
from redline.tune import gate
from redline.tune.gate import recorded, slower_than
from redline.tune.race import (
    LONGEST_NAME,
    Arm,
    Lane,
    Point,
    Result,
    ends_apart,
    ladder,
    race,
    reached,
    rows,
    speed_up,
    standing,
    train_in_process,
)

EVERY = ["train.eval_every=10", "train.steps=40"]
NANO = load_recipe("nano", EVERY)
SLOW = load_recipe("nano", [*EVERY, "train.lr=1e-3"])
ARMS = (Arm("fast", NANO), Arm("slow", SLOW))


class Trainings:
    """Stands in for `redline train`: writes the record of a run whose loss falls by 1 every 10 updates, from 6 on. An
    update takes 1 s, or twice that at the lower learning rate, the first 3 s more; 5 s pass before the loop."""

    def __init__(self, joules: bool = False) -> None:
        self.calls: list[str] = []
        self.joules, self.fail, self.stop, self.slower = joules, "", "", 1.0

    def __call__(self, recipe: Path, run: Path, plan: Path | None, **_: object) -> str | None:
        self.calls.append(run.name)
        why = "stopped by signal" if self.stop and self.stop in run.name else "finished"
        if self.fail and self.fail in run.name:
            return "loss is nan at step 3"
        loaded = load_recipe(str(recipe))
        step_s = (2.0 if loaded.train.lr < 3e-3 else 1.0) * self.slower + 0.01 * loaded.train.seed
        run.mkdir()
        (run / "recipe.toml").write_text(recipe.read_text())
        lines = [self._line(step, step_s) for step in range(1, 41)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        told = [
            {"event": "start", "step": 0, "data": "d"},
            {"event": "start_up", "step": 1, "total_s": 8.0 + step_s},
            {"event": "end", "step": 40, "why": why},
        ]
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
        return None

    def _line(self, step: int, step_s: float) -> dict[str, Any]:
        line: dict[str, Any] = {"step": step, "loss": 6.0, "tokens": 100 * step, "step_s": step_s}
        line["elapsed_s"] = 3.0 + step * step_s
        line |= {"valid_loss": 6 - step / 10} if step % 10 == 0 else {}
        return line | ({"energy_j": 50.0 * line["elapsed_s"]} if self.joules else {})


def raced(folder: Path, train: Trainings, *, seeds: int = 2, arms: tuple[Arm, ...] = ARMS) -> Any:
    return race(arms, folder, read_facts(), seeds=seeds, train=train, progress=lambda text: None)


def test_seconds_count_the_start_up_and_net_seconds_do_not(tmp_path: Path) -> None:
    fast, slow = raced(tmp_path, Trainings(joules=True), seeds=1).lanes
    assert fast.start_up_s == slow.start_up_s == (8.0,)
    found = fast.at(4.0)[0]  # update 20
    assert (found.seconds, found.net_seconds, found.tokens) == (28.0, 20.0, 2000)
    assert found.joules == pytest.approx(50 * 23.0)
    assert slow.at(4.0)[0].net_seconds == 40.0
    assert reached(fast.curves[0], 3.5).net_seconds == 25.0  # halfway between two validations
    assert reached(fast.curves[0], 1.9) is None


def test_joules_reach_to_the_last_validation(tmp_path: Path) -> None:
    """50 W all along, counted until update 37: the run still ends 43 s and 2,150 J after the loop began."""
    raced(tmp_path, Trainings(joules=True), seeds=1)
    path = tmp_path / "fast-seed-0" / "metrics.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps(line | ({"energy_j": None} if line["step"] > 37 else {})) + "\n" for line in told)
    )
    curve = raced(tmp_path, Trainings(), seeds=1).lanes[0].curves[0]
    assert [point.joules for point in curve] == pytest.approx([50 * 13, 50 * 23, 50 * 33, 50 * 43])


def test_every_seed_of_a_finished_arm_is_kept_and_an_interrupted_one_starts_over(tmp_path: Path) -> None:
    train = Trainings()
    raced(tmp_path, train)
    assert train.calls == ["fast-seed-0", "slow-seed-0", "fast-seed-1", "slow-seed-1"]
    events = tmp_path / "slow-seed-1" / "events.jsonl"
    events.write_text(events.read_text().rpartition('{"event": "end"')[0])
    train.calls.clear()
    raced(tmp_path, train)
    assert train.calls == ["slow-seed-1"]
    with pytest.raises(StorageError, match="another recipe"):
        raced(tmp_path, train, arms=(Arm("fast", SLOW),))


def test_runs_that_were_copied_are_kept_and_one_that_was_killed_at_its_start_is_not(tmp_path: Path) -> None:
    train = Trainings()
    raced(tmp_path, train)
    for path in tmp_path.glob("fast-seed-*.toml"):
        path.unlink()
    (tmp_path / "slow-seed-2").mkdir()
    (tmp_path / "slow-seed-2.toml").write_text(to_toml(replace(SLOW, train=replace(SLOW.train, seed=2))))
    train.calls.clear()
    raced(tmp_path, train, seeds=3)
    assert train.calls == ["fast-seed-2", "slow-seed-2"]
    (tmp_path / "fast-seed-3").mkdir()  # somebody's folder
    with pytest.raises(StorageError, match="another recipe"):
        raced(tmp_path, train, seeds=4)


def test_a_run_that_was_stopped_is_no_result(tmp_path: Path) -> None:
    train = Trainings()
    train.stop = "slow-seed-0"
    with pytest.raises(MachineError, match="stopped by signal"):
        raced(tmp_path, train)
    train.stop = ""
    train.calls.clear()
    raced(tmp_path, train, seeds=1)
    assert train.calls == ["slow-seed-0"]


def test_a_failed_run_is_told_and_the_race_goes_on(tmp_path: Path) -> None:
    train = Trainings()
    train.fail = "slow-seed-0"
    result = raced(tmp_path, train)
    assert result.lanes[1].failed == ("loss is nan at step 3",)
    assert len(result.lanes[1].curves) == 1
    table = {(row[0], row[1]): row for row in rows(result)}
    assert table["2", "slow"][2] == "1 of 2"
    assert table["2", "fast"][6] == "–"
    assert table["2", "slow"][7] == "–", "a speed-up over the seeds that got there would flatter"


def lane(name: str, *curves: tuple[float, ...]) -> Lane:
    """A recipe whose seeds validate every 10 s."""
    points = [
        tuple(Point(loss, 10.0 * n, 10.0 * n, 1.0, None) for n, loss in enumerate(losses, 1)) for losses in curves
    ]  # fmt: skip
    return Lane(name=name, fingerprint=name, curves=tuple(points), start_up_s=(), failed=())


def test_a_loss_is_reached_between_neighbours_also_if_it_had_risen() -> None:
    """3.4 lies between the validations at 20 s (3.8) and 30 s (3.2), two thirds of the way; at 15 s it was above."""
    (curve,) = lane("a", (3.5, 3.8, 3.2, 3.3)).curves
    found = reached(curve, 3.4)
    assert found is not None
    assert found.seconds == pytest.approx(20 + 10 * 2 / 3)
    assert lane("a", (3.5, 3.8, 3.2, 3.3)).lowest == [3.2]


def test_a_time_that_is_only_known_to_be_short_is_marked() -> None:
    """The second recipe is below 4.0, where the first ends after 20 s, by its first validation after 10 s."""
    slow, fast = lane("slow", (5.0, 4.0), (5.0, 4.0)), lane("fast", (3.9, 3.0), (3.9, 3.0))

    def at_4(*lanes: Lane) -> dict[str, tuple[str, ...]]:
        found = Result(machine={}, data={}, seeds=2, rungs=(4.0,), lanes=lanes)
        return {row[1]: row for row in rows(found)}

    assert at_4(slow, fast)["slow"][3] == "20.0"
    assert (at_4(slow, fast)["fast"][3], at_4(slow, fast)["fast"][7]) == ("≤ 10.0", "≥ 2.00x [2.00, 2.00]")
    assert at_4(fast, slow)["slow"][7] == "≤ 0.50x [0.50, 0.50]"
    assert at_4(fast, replace(fast, name="too"))["too"][7] == "–"
    one_seed = lane("some", (3.9, 3.0), (5.0, 4.0))
    assert at_4(slow, one_seed)["some"][3] == "≤ 15.0 [10.0, 20.0]"
    assert at_4(slow, lane("exact", (4.0,), (4.0,)))["exact"][3] == "10.0", "validated when it was there"


def test_where_recipes_end_is_compared_over_the_seeds() -> None:
    """By hand: means 3.2 and 3.05, variances 0.02 and 0.005 of two seeds each: an error of sqrt(0.0125), 1.47 degrees of
    freedom, so t is 6.314 and half the interval 0.7059."""
    base, other = lane("base", (5.0, 3.1), (5.0, 3.3)), lane("other", (5.0, 3.0), (5.0, 3.1))
    assert ends_apart(base, other) == "-0.1500 [-0.8559, +0.5559]"
    assert ends_apart(base, lane("one", (3.0,))) == "-0.2000 (one seed: no interval)"
    assert ends_apart(base, replace(other, curves=())) == ""


def test_a_speed_up_is_of_all_seeds() -> None:
    base, other = lane("base", (5.0, 4.0), (5.0, 4.0)), lane("other", (5.0, 3.0), (5.0, 4.5))
    found = {
        row[:2]: row
        for row in rows(Result(machine={}, data={}, seeds=2, rungs=(4.6, 4.0), lanes=(base, other)))
    }
    assert found["4.6", "other"][7].startswith("0.95x [")  # 14 s over the root of 12 s x 18 s
    assert found["4", "other"][2:4] == ("1 of 2", "15.0")
    assert found["4", "other"][7] == "–"
    assert (speed_up(base, other, 4.0), speed_up(other, base, 4.0)) == ("–", "–")
    assert (
        speed_up(lane("one", (5.0, 3.0)), lane("two", (5.0, 1.0)), 4.0) == "1.20x (one seed: no interval)"
    )  # 15 and 12.5 s


def test_a_row_has_the_median_the_lowest_and_the_highest_of_the_seeds() -> None:
    curves = [
        (Point(5.0, 4.0, 2.0, 5e5, 500.0), Point(4.0, 10.0, 8.0, 1.5e6, 2000.0)),
        (Point(5.0, 4.0, 2.0, 5e5, 500.0), Point(4.0, 20.0, 18.0, 2.5e6, 3000.0)),
    ]
    found = replace(lane("a"), curves=tuple(curves))
    result = Result(machine={}, data={}, seeds=2, rungs=(4.0, 3.0), lanes=(found,))
    assert rows(result) == [
        (
            "4",
            "a",
            "2 of 2",
            "15.0 [10.0, 20.0]",
            "13.0 [8.0, 18.0]",
            "2.000 [1.500, 2.500]",
            "2.5 [2.0, 3.0]",
            "",
        ),
        ("3", "a", "0 of 2", "not reached", "", "", "", ""),
    ]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.source=other", "data.source (tinyshakespeare and other)"),
        ("model.vocab_size=2048", "model.vocab_size (1024 and 2048)"),
        ("data.tokenizer=t.json", "data.tokenizer (bpe and t.json)"),
        ("train.eval_sequences=8", "train.eval_sequences (64 and 8)"),
        ("data.valid_fraction=0.2", "data.valid_fraction (0.1 and 0.2)"),
    ],
)
def test_recipes_whose_losses_do_not_compare_are_refused_by_name(
    tmp_path: Path, override: str, key: str
) -> None:
    with pytest.raises(ConfigError, match="cannot race") as refused:
        raced(tmp_path, Trainings(), arms=(Arm("a", NANO), Arm("b", load_recipe("nano", [*EVERY, override]))))
    assert key in str(refused.value)


def test_a_name_that_no_folder_can_have_is_cut_there_and_whole_in_the_result(tmp_path: Path) -> None:
    names, train = [f"nano-{'train.lr=1e-3-' * 20}{end}" for end in ("a", "b")] + ["é" * 190], Trainings()
    arms = tuple(Arm(name, NANO) for name in names)
    assert [lane.name for lane in raced(tmp_path, train, arms=arms).lanes] == names
    assert len(set(train.calls)) == 6
    assert max(len(call.encode()) for call in train.calls) <= LONGEST_NAME + len("-seed-0")
    assert all(call.startswith(("nano-train.lr=1e-3-train.lr=1e-3", "éééé")) for call in train.calls)
    again = Trainings()
    raced(tmp_path, again, arms=arms)
    assert again.calls == []
    assert Arm("x" * 200, NANO).place(tmp_path, 3).name == "x" * 200 + "-seed-3"


def test_the_ladder_has_round_losses_and_what_every_lane_reached_at_the_end() -> None:
    """Both had validated 5.0, the lowest is 3.3: six rungs would be 0.283 apart, so they are 0.5 apart."""
    lanes = [lane("a", (5.0, 4.0, 3.3)), lane("b", (6.0, 4.4567), (6.0, 4.2))]
    assert ladder([lane("a", (5.0, 1.0))]) == (5.0, 4.0, 3.0, 2.0, 1.0)
    assert ladder(lanes) == (5.0, 4.5, 4.457, 4.0, 3.5, 3.3)
    assert ladder([lane("a", (4.0,)), lane("b", (4.0,))]) == (4.0,)
    assert ladder([replace(lanes[0], curves=())]) == ()


def test_the_ladder_of_a_race_ends_at_its_target(tmp_path: Path) -> None:
    """Its runs end there; how far below it their last validations lie is chance."""
    arm = Arm("fast", load_recipe("nano", [*EVERY, "train.target_loss=3.123"]))
    result = raced(tmp_path, Trainings(), arms=(arm,))
    assert (result.rungs[-1], result.rungs.count(3.123)) == (3.123, 1)
    free = lane("free", (5.0, 2.0))
    near, far = (replace(lane("a", (5.0, 3.0)), target=target) for target in (3.5, 4.0))
    assert ladder([near, far])[-1] == 3.5
    assert ladder([near, free])[-1] == 2.0


def test_a_run_that_was_kept_from_other_hardware_or_data_is_refused(tmp_path: Path) -> None:
    train = Trainings()
    assert raced(tmp_path, train, seeds=1).tokens == "d"
    plan = tmp_path / "fast-seed-0" / "plan.json"
    plan.write_text(json.dumps({"hardware": {"title": "another GPU"}}))
    with pytest.raises(StorageError, match=r"different hardware \(another GPU and None\)"):
        raced(tmp_path, train)
    plan.unlink()
    events = tmp_path / "slow-seed-0" / "events.jsonl"
    events.write_text(events.read_text().replace('"data": "d"', '"data": "e"'))
    with pytest.raises(StorageError, match=r"different tokens \(d and e\)"):
        raced(tmp_path, train)


def test_names_that_share_a_folder_are_refused(tmp_path: Path) -> None:
    assert (
        Arm("speedrun/45s@plan.compile=off", NANO).place(tmp_path, 1).name
        == "speedrun-45s-plan.compile=off-seed-1"
    )
    with pytest.raises(ConfigError, match="are the same: a/b, a-b"):
        raced(tmp_path, Trainings(), arms=(Arm("a/b", NANO), Arm("a-b", SLOW)))
    long = [Arm(f"a{mark}b" * LONGEST_NAME, NANO).place(tmp_path, 1) for mark in "/-"]
    assert long[0] != long[1], "the hash is that of the whole name"


def test_a_gate_passes_the_same_times_and_names_what_became_slower(tmp_path: Path) -> None:
    train = Trainings()
    before = raced(tmp_path / "a", train, seeds=3)
    assert recorded(tmp_path / "a" / "race.json", ARMS, read_facts(), 3).lanes == before.lanes
    assert slower_than(before, before) == []
    train.slower = 1.2
    (now,) = slower_than(raced(tmp_path / "b", train, seeds=3, arms=(Arm("fast", NANO),)), before)
    assert now.startswith("fast takes 56.4 s to a loss of 2; recorded 48.4 s (1.17x, at least 1.1")
    shorter = replace(before.lanes[0], curves=[curve[:-1] for curve in before.lanes[0].curves])
    (ends,) = slower_than(replace(before, lanes=[shorter]), before)
    assert ends == "fast gets to a loss of 3.0000; recorded 2.0000 (1.0000, at least 1.0000, higher)"


def test_a_gate_rarely_stops_what_is_as_fast() -> None:
    """Losses fall in a straight line, and where they end differs by seed: of two races alike, the worst seed of the second
    ends higher in half of the cases. Each of the two verdicts is wrong in 5%: of 400, give or take four deviations."""
    rng, races = random.Random(0), 400

    def ran(end: float = 3.0) -> Result:
        ends = [end + rng.gauss(0.0, 0.02) for _ in range(3)]
        found = lane("a", *(tuple(6.0 - (6.0 - end) * n / 18 for n in range(1, 19)) for end in ends))
        return Result(machine={}, data={}, seeds=3, rungs=(), lanes=(found,))

    stopped = sum(bool(slower_than(ran(), ran())) for _ in range(races))
    assert stopped <= 0.1 * races + 4 * math.sqrt(races * 0.1 * 0.9)
    assert all(slower_than(ran(3.3), ran()) for _ in range(50))


def test_a_gate_is_judged_at_the_target() -> None:
    """Both end where a validation first finds the target, so the lower one is not the better one."""
    target, low, high = 3.8, lane("a", (5.0, 3.70), (5.0, 3.71)), lane("a", (5.0, 3.78), (5.0, 3.79))
    then, now = (
        Result(machine={}, data={}, seeds=2, rungs=(), lanes=(replace(found, target=target),)) for found in (low, high)
    )  # fmt: skip
    assert slower_than(now, then) == []


def test_a_gate_is_not_judged_below_the_target_of_either() -> None:
    """The record trained on to 3.0; this race ends at 4.0, which both reached after 20 s."""
    then, now = lane("a", (5.0, 4.0, 3.0), (5.0, 4.0, 3.0)), lane("a", (5.0, 4.0), (5.0, 4.0))
    both = [
        Result(machine={}, data={}, seeds=2, rungs=(), lanes=(found,))
        for found in (replace(now, target=4.0), then)
    ]
    assert slower_than(*both) == []
    late = replace(lane("a", (5.0, 4.5, 4.0), (5.0, 4.5, 4.0)), target=4.0)
    assert slower_than(replace(both[0], lanes=(late,)), both[1])[0].startswith(
        "a takes 30.0 s to a loss of 4;"
    )


def test_a_gate_says_that_a_recipe_or_the_data_changed() -> None:
    both = lane("fast", (5.0, 4.0), (5.0, 4.0))
    before = Result(machine={}, data={}, seeds=2, rungs=(), lanes=(both,), tokens="d")
    assert gate.changed([Arm("fast", NANO), Arm("new", NANO)], before) == ["fast"]
    same = replace(before, lanes=(replace(before.lanes[0], fingerprint=NANO.fingerprint),))
    assert gate.changed([Arm("fast", NANO)], same) == []
    with pytest.raises(ConfigError, match="the data has changed"):
        slower_than(replace(before, tokens="e"), before)
    assert slower_than(before, replace(before, tokens=None)) == [], "older records do not say"


@pytest.mark.parametrize("date", ["20261118", "20261119"])
def test_the_shipped_records_can_be_compared_with(date: str) -> None:
    """As a race on an H200 whose files have the names of then would do it."""
    path = Path(__file__).parents[2] / "benchmarks" / f"race-seeds_nvidia-h200_{date}.json"
    found = json.loads(path.read_text())
    recipe = load_recipe(
        "speedrun/45s", [f"{key}={found['data'][key]}" for key in ("data.source", "data.tokenizer")]
    )
    here = replace(read_facts(), gpus=tuple(GpuFacts(**gpu) for gpu in found["machine"]["gpus"]))
    before = recorded(path, [Arm("speedrun/45s", recipe)], here, 3)
    assert "Wikipedia" in before.note
    again = replace(before, lanes=tuple(lane for lane in before.lanes if lane.name == "speedrun/45s"))
    assert len(again.lanes) == 1
    assert slower_than(again, before) == []


def test_a_gate_stops_what_is_as_fast_at_first_and_ends_higher() -> None:
    then, now = lane("a", (5.0, 4.0, 3.0), (5.0, 4.0, 3.01)), lane("a", (5.0, 4.0, 4.0), (5.0, 4.0, 4.01))
    both = [Result(machine={}, data={}, seeds=2, rungs=(), lanes=(found,)) for found in (now, then)]
    assert slower_than(*both)[0].startswith("a gets to a loss of 4.0")


def test_a_gate_counts_seeds_that_failed(tmp_path: Path) -> None:
    before = raced(tmp_path, Trainings(), seeds=3)
    first = before.lanes[0]
    worse = replace(first, curves=first.curves[:2], failed=("loss is nan",))
    (why,) = slower_than(replace(before, lanes=(worse,)), before)
    assert why == "fast failed with 1 of 3 seeds; recorded 0 of 3"
    assert slower_than(replace(before, lanes=(worse,)), replace(before, lanes=(worse,))) == []
    all_of_them = replace(first, curves=(), failed=("loss is nan",) * 3)
    assert "failed with 3 of 3 seeds" in slower_than(replace(before, lanes=(all_of_them,)), before)[0]


def test_a_record_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    raced(tmp_path, Trainings(), seeds=2)
    record = tmp_path / "race.json"
    whole = json.loads(record.read_text())

    def refused(why: str, arms: tuple[Arm, ...] = ARMS, seeds: int = 2, **changed: Any) -> None:
        record.write_text(json.dumps(whole | changed))
        with pytest.raises(ConfigError, match=why):
            recorded(record, arms, read_facts(), seeds)

    refused("another kind of machine", machine={**whole["machine"], "gpus": [{"name": "another"}]})
    refused("other data", arms=(Arm("fast", load_recipe("nano", [*EVERY, "data.source=x"])),))
    refused("none of these recipes", arms=(Arm("new", NANO),))
    refused("at least 2", seeds=1)
    refused("at least 2", lanes=[lane | {"curves": lane["curves"][:1]} for lane in whole["lanes"]])
    record.write_text("{}")
    with pytest.raises(ConfigError, match=r"not the race\.json"):
        recorded(record, ARMS, read_facts(), 2)


def test_the_command_prints_a_table_that_fits_and_exits_with_1_if_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = Trainings()
    train.fail = "lr=1e-3"
    stand_ins = {"race.train_in_process": train, "ceilings_of": str, "tokenise": lambda recipe: None}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(f"redline.cli.race.{name}", stand_in)
    monkeypatch.setenv("COLUMNS", "60")
    sets = [part for value in EVERY for part in ("--set", value)]
    command = ["race", "nano", "nano@train.lr=1e-3", *sets, "--seeds", "2", "--out"]
    assert main([*command, str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "M tokens 0.004" in shown, "a cell below its row has the name of its column"
    assert "[lowest, highest]; seconds since the\ncommand," in shown.replace(" \n", "\n"), "no word is broken"
    assert "nano: lowest losses 2.0000, 2.0000; start-up 8.0, 8.0 s\n" in shown
    assert "nano@train.lr=1e-3: no run finished\n  a run failed: loss is nan at step 3\n" in shown
    assert (tmp_path / "a" / "report.html").exists()
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(to_toml(NANO))
    long = "mine.toml@train.lr=3e-3@train.batch_size=16"
    assert main(["race", long, *sets, "--seeds", "1", "--out", str(tmp_path / "long")]) == 0
    shown = capsys.readouterr().out
    assert "   2  recipe 1  1 of 1  48.0" in shown
    assert ", against the first" not in shown
    train.fail = ""
    assert main([*command[:-3], "--seeds", "1", "--out", str(tmp_path / "two")]) == 0
    ended = "nano@train.lr=1e-3: lowest losses 2.0000, against the first +0.0000 (one seed: no interval); start-up 8.0 s\n"
    assert ended in capsys.readouterr().out
    assert "recipe 1, mine@train.lr=3e-3@train.batch_size=16: lowest losses 2.0000;" in shown
    train.slower = 2.0
    record = str(tmp_path / "a" / "race.json")
    assert main([*command, str(tmp_path / "a"), "--against", record]) == 2, (
        "its runs are kept: no slower, ever"
    )
    assert "give another --out" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "b"), "--against", record, "--json"]) == 1
    found, told = capsys.readouterr()
    (slower,) = json.loads(found)["slower"]
    assert slower.startswith("nano takes 88.2 s to a loss of 2; recorded 48.2 s")
    assert told.endswith(f"slower than {record}: {slower}\n")
    assert "another fingerprint" not in told
    Path(record).write_text(
        Path(record).read_text().replace(load_recipe("nano", EVERY).fingerprint, "0" * 16)
    )
    assert main([*command, str(tmp_path / "b"), "--against", record]) == 1
    assert f"nano has another fingerprint in {record}" in capsys.readouterr().err
    Path(record).write_text(json.dumps(json.loads(Path(record).read_text()) | {"tokens": "then"}))
    monkeypatch.setattr("redline.cli.race.tokenise", lambda recipe: "now")
    assert main([*command, str(tmp_path / "c"), "--against", record]) == 2
    assert "the data has changed since the record was made" in capsys.readouterr().err
    assert not (tmp_path / "c").exists(), "it says so before anything trains"


def test_a_process_that_crashed_is_a_run_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA error ends in a traceback; the other recipes of the night still race."""
    (tmp_path / "recipe.toml").write_text(to_toml(NANO))
    ended = {
        1: ("Traceback ...\ntorch.AcceleratorError: CUDA error", "`redline train` ended with exit code 1: torch.AcceleratorError: CUDA error"),
        -9: ("", "`redline train` ended with exit code -9: "),
        2: ("plan ...\nredline: loss is nan at step 3", "loss is nan at step 3"),
        0: ("redline: not an error", None),
    }  # fmt: skip
    for code, (told, why) in ended.items():
        done = subprocess.CompletedProcess([], code, "", told)
        monkeypatch.setattr("redline.tune.race.subprocess.run", lambda *_, done=done, **__: done)
        assert train_in_process(tmp_path / "recipe.toml", tmp_path, None) == why


def test_a_run_is_the_command_that_a_user_would_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for RFT and RL; the plan only if there is one. It ends with this process."""
    seen = list[Any]()

    def command(given: list[str], env: dict[str, str], **how: object) -> subprocess.CompletedProcess[str]:
        seen.append((given[len(PROGRAM) :], env[LAUNCHER], how["capture_output"], how["text"]))
        return subprocess.CompletedProcess(given, 0, "", "")

    monkeypatch.setattr("redline.tune.race.subprocess.run", command)
    recipe, run, plan = tmp_path / "recipe.toml", tmp_path / "run", tmp_path / "plan.json"
    for name, verb, given in (("nano", ["train"], None), ("rft/demo", ["rft", "run"], plan)):
        recipe.write_text(to_toml(load_recipe(name)))
        train_in_process(recipe, run, given)
        extra = ["--plan", str(plan)] if given else []
        told = [*verb, str(recipe), "--run", str(run), "--quiet", *extra]
        assert seen[-1] == (told, str(os.getpid()), True, True)


def test_a_race_that_no_run_finished_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = Trainings()
    train.fail = "nano"
    for name, stand_in in (("race.train_in_process", train), ("ceilings_of", str), ("tokenise", str)):
        monkeypatch.setattr(f"redline.cli.race.{name}", stand_in)
    assert main(["race", "nano", "--out", str(tmp_path)]) == TrainingError.exit_code
    assert capsys.readouterr().err.endswith("redline: no run of the race finished: loss is nan at step 3\n")


@pytest.mark.parametrize("recipe", ["finetune", "rft/demo", "rl/demo"])
def test_only_pretraining_races(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["race", recipe]) == 2
    workload = recipe.partition("/")[0]
    assert capsys.readouterr().err.endswith(f": a race needs pretrain recipes, got workload {workload}\n")


def test_a_target_is_taken_with_all_its_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, stand_in in (("race.train_in_process", Trainings()), ("ceilings_of", str), ("tokenise", str)):
        monkeypatch.setattr(f"redline.cli.race.{name}", stand_in)
    sets = [part for value in EVERY for part in ("--set", value)]
    command = [
        "race",
        "nano",
        *sets,
        "--seeds",
        "1",
        "--target",
        "3.1234567",
        "--json",
        "--out",
        str(tmp_path),
    ]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["lanes"][0]["target"] == 3.1234567


def test_the_interval_over_seeds_is_welchs() -> None:
    """By hand: variances 1 and 4 over 3 and 3 give an error of sqrt(5/3) and 2.94 degrees of freedom: t is 2.920."""
    found = difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(2.920 * math.sqrt(5 / 3))
    six = [
        sign * math.sqrt(5) for sign in (-1, -1, -1, 1, 1, 1)
    ]  # variance 6, so parts of 1: 10 degrees of freedom
    assert difference(six, six).high == pytest.approx(1.812 * math.sqrt(2))
    assert difference([1.0], [2.0, 3.0]).low == -math.inf
    assert asdict(difference([1.0, 1.0], [2.0, 2.0])) == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_a_race_tells_where_a_run_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its process runs: from its record, which the process may be writing, and nothing before there is one."""
    heard, told = threading.Event(), list[str]()

    def progress(text: str) -> None:
        told.append(text)
        heard.set()

    def command(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        torn = json.dumps({"step": 1200, "loss": 2.5, "elapsed_s": 30.0}) + '\n{"step": 12'
        (tmp_path / "metrics.jsonl").write_text(torn)
        assert heard.wait(60)
        return subprocess.CompletedProcess([], 0, "", "")

    (tmp_path / "recipe.toml").write_text(to_toml(NANO))
    monkeypatch.setattr("redline.tune.race.TELL_EVERY_S", 0.001)
    monkeypatch.setattr("redline.tune.race.subprocess.run", command)
    assert train_in_process(tmp_path / "recipe.toml", tmp_path, None, progress=progress) is None
    assert set(told) == {"  step 1,200, loss 2.500, 30 s"}
    assert standing({"step": 3, "loss": None, "elapsed_s": 1.0}) == "step 3, 1.0 s"
