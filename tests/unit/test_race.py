"""The race: curves with known times, a common ladder, intervals over seeds, and the gate; no training and no clock."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from redline.config.load import load_recipe
from redline.errors import ConfigError, StorageError
from redline.machine.facts import read_facts
from redline.measure.statistics import difference
from redline.tune.race import Arm, Lane, Point, ladder, race, reached, rows, slower_than

EVERY = ["train.eval_every=10", "train.steps=40"]
NANO = load_recipe("nano", EVERY)
SLOW = load_recipe("nano", [*EVERY, "train.lr=1e-3"])


class Trainings:
    """Stands in for `redline train`: writes the record of a run whose loss falls by 1 every 10 updates, from 6 on. An
    update takes 1 s, or twice that at the lower learning rate, the first 3 s more; 5 s pass before the loop."""

    def __init__(self, joules: bool = False) -> None:
        self.calls: list[str] = []
        self.joules, self.fail, self.slower = joules, "", 1.0

    def __call__(self, recipe: Path, run: Path, plan: Path | None) -> str | None:
        self.calls.append(run.name)
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
            {"event": "end", "step": 40, "why": "finished"},
        ]
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
        return None

    def _line(self, step: int, step_s: float) -> dict[str, Any]:
        line: dict[str, Any] = {"step": step, "loss": 6.0, "tokens": 100 * step, "step_s": step_s}
        line["elapsed_s"] = 3.0 + step * step_s
        line |= {"valid_loss": 6 - step / 10} if step % 10 == 0 else {}
        return line | ({"energy_j": 50.0 * line["elapsed_s"]} if self.joules else {})


def raced(folder: Path, train: Trainings, *, seeds: int = 2, arms: tuple[Arm, ...] = ()) -> Any:
    arms = arms or (Arm("fast", NANO), Arm("slow", SLOW))
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


def test_a_failed_run_is_told_and_the_race_goes_on(tmp_path: Path) -> None:
    train = Trainings()
    train.fail = "slow-seed-0"
    result = raced(tmp_path, train)
    assert result.lanes[1].failed == ("loss is nan at step 3",)
    assert len(result.lanes[1].curves) == 1
    table = {(row[0], row[1]): row for row in rows(result)}
    assert table["2", "slow"][2] == "1 of 2"
    assert table["2", "fast"][6] == "–"


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


def test_the_ladder_has_what_every_lane_reached_at_the_end(tmp_path: Path) -> None:
    def lane(name: str, *losses: float) -> Lane:
        curve = [Point(loss, 1.0 + i, 1.0, 1.0, None) for i, loss in enumerate(losses)]
        return Lane(name=name, fingerprint=name, curves=[curve], start_up_s=[0.0], failed=[])

    lanes = [lane("a", 5.0, 4.0, 3.3), lane("b", 6.0, 4.4567)]
    rungs = ladder(lanes)
    assert {3.3, 4.457} <= set(rungs)
    assert list(rungs) == sorted(rungs, reverse=True)
    assert rungs[0] <= 5.0
    assert all(any(lane.at(rung) for lane in lanes) for rung in rungs)
    assert ladder([replace(lanes[0], curves=[])]) == ()


def test_a_gate_passes_the_same_times_and_names_what_became_slower(tmp_path: Path) -> None:
    train = Trainings()
    before = raced(tmp_path / "a", train, seeds=3)
    record = tmp_path / "a" / "race.json"
    assert slower_than(before, record) == []
    train.slower = 1.2
    (now,) = slower_than(raced(tmp_path / "b", train, seeds=3, arms=(Arm("fast", NANO),)), record)
    assert now.startswith("fast takes 1.1")
    shorter = replace(before.lanes[0], curves=[curve[:-1] for curve in before.lanes[0].curves])
    assert "0 of 3 seeds" in slower_than(replace(before, lanes=[shorter]), record)[0]
    elsewhere = replace(before, machine={**before.machine, "gpus": [{"name": "another"}]})
    with pytest.raises(ConfigError, match="another kind of machine"):
        slower_than(elsewhere, record)
    record.write_text("{}")
    with pytest.raises(ConfigError, match=r"not the race\.json"):
        slower_than(before, record)


def test_the_interval_over_seeds_is_welchs() -> None:
    """By hand: variances 1 and 4 over 3 and 3 give an error of sqrt(5/3) and 2.94 degrees of freedom: t is 2.920."""
    found = difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(2.920 * math.sqrt(5 / 3))
    assert difference([1.0], [2.0, 3.0]).low == -math.inf
    assert asdict(difference([1.0, 1.0], [2.0, 2.0])) == {"mean": 1.0, "low": 1.0, "high": 1.0}
