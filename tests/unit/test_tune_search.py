"""The search against a machine of known speeds: it finds the fastest plan, refuses what is wrong, keeps to its
time and goes on after a kill. No process is started, and the clock moves by what the trials take."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from lab import HANGS, KILLED, Behaviour, Lab
from trials import TUNED

from redline.cli.tune import gain
from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.errors import ConfigError, TrainingError
from redline.machine.facts import read_facts
from redline.measure.statistics import Comparison
from redline.measure.trial import Trial, TrialFolder
from redline.plan.hardware import hardware_as
from redline.plan.plan import PLANNED, Plan, check_fit
from redline.plan.planner import make_plan
from redline.tune.candidates import candidates
from redline.tune.quality import Quality
from redline.tune.search import FINAL, shorten, tune
from redline.tune.store import TrialRow, TuningResult, tuned_plan, tuning_folder

H200 = hardware_as("h200-141g", 16)
FACTS = read_facts()
ONLY_ATTENTION = (
    "plan.micro_batch=64", "plan.compile=default", "plan.cross_entropy=fused", "plan.recompute=none",
    "plan.precision=bf16",
)  # fmt: skip


class Interrupted(BaseException):
    """The process was killed."""


@dataclass
class World:
    """What the machine is like; a test changes it before it tunes."""

    overhead: float = 4.0
    best: int = 64
    """The micro-batch beyond which a pass gets slower."""
    memory: float = 1.0
    """How many times what a sequence takes."""
    values: Mapping[tuple[str, Any], tuple[float, float]] = field(default_factory=dict)
    """Factor of the step time, and shift of the loss, of a plan that has a value."""
    failing: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    flash_memory: float = 1.0
    waits: float = 0.0
    noise: float = 0.004
    kill_at_start: int | None = None
    change: Callable[["World", dict[str, Any], Behaviour], Behaviour] = lambda world, plan, how: how
    """What else a test wants."""

    def __post_init__(self) -> None:
        self.lab = Lab(self.behaviour, capacity_bytes=140e9)
        self.lab.other_bytes = 10**9

    @property
    def started(self) -> list[dict[str, Any]]:
        return [values(trial) for trial in self.lab.started]

    def begun(self, attention: str) -> int:
        return sum(plan["attention"] == attention for plan in self.started)

    def behaviour(self, trial: Trial) -> Behaviour:
        if len(self.lab.started) == self.kill_at_start:
            raise Interrupted
        plan = values(trial)
        micro, tokens = plan["micro_batch"], 1024 * plan["micro_batch"] * plan["accumulation"]
        slow = 1 + self.overhead / micro + max(0, micro - self.best) / 200
        factors = [self.values[key] for key in plan.items() if key in self.values]
        active = (2e9 + 4e8 * micro * self.memory) * (
            self.flash_memory if plan["attention"] == "flash" else 1
        )
        step_s, shift = tokens / 5e5 * slow, sum(loss for _, loss in factors)
        for factor, _ in factors:
            step_s *= factor
        draw = random.Random(step_s)
        failing = [self.failing[key] for key in plan.items() if key in self.failing]
        how = Behaviour(
            step_s=step_s, noise=[draw.uniform(0, self.noise) for _ in range(50)], tokens=tokens,
            start_s=10.0 if plan["compile"] != "off" else 1.0, losses=[10.0 * (1 + shift)] * 5,
            waits=self.waits / plan["loader_threads"], taken_bytes=int(active),
            starts={0: failing[0]} if failing else {},
        )  # fmt: skip
        return self.change(self, plan, how)


def values(trial: Trial) -> dict[str, Any]:
    return {name: trial.setting["plan"][name]["value"] for name in PLANNED}


@pytest.fixture
def world() -> World:
    return World()


def search(
    world: World, tmp_path: Path, *overrides: str, minutes: float = 20.0, judge: Any = None
) -> tuple[Plan, TuningResult, Recipe]:
    recipe = load_recipe("gpt2-124m", overrides)
    said: list[str] = []
    with TrialFolder(tmp_path / "tuning") as folder:
        rules = make_plan(recipe, H200)
        plan, result = tune(
            recipe, rules, folder, minutes=minutes, progress=said.append, children=world.lab, judge=judge
        )
    assert all("left]" in line for line in said)
    assert not any(child.alive for child in world.lab.children)
    check_fit(plan, recipe, 1)
    return plan, result, recipe


def row_of(result: TuningResult, name: str) -> TrialRow:
    [row] = [row for row in result.rows if row.name.startswith(name)]
    return row


@pytest.mark.parametrize("verdict", ["not worse", "worse", "cannot tell"])
def test_a_plan_that_is_not_shown_to_train_as_well_is_not_taken(
    verdict: Any, world: World, tmp_path: Path
) -> None:
    """Flash is a fifth faster. The runs get the speed of the rules' plan, which says how many updates they have time
    for, and every process of the search has ended by then."""
    world.values = {("attention", "flash"): (0.8, 0.0)}
    asked: list[tuple[str, str, float]] = []

    class Judging:
        def same_training(self, before: Any, after: Any, tokens_per_s: float) -> Quality:
            assert not any(child.alive for child in world.lab.children)
            asked.append((before[1].attention, after[1].attention, tokens_per_s))
            return Quality(figure="loss", verdict=verdict)

    plan, result, recipe = search(world, tmp_path, *ONLY_ATTENTION, judge=Judging())
    ((before, after, tokens_per_s),) = asked
    assert (before, after) == ("cudnn", "flash")
    assert tokens_per_s == pytest.approx(0.8 * row_of(result, FINAL).tokens_per_s, rel=0.01)
    assert result.quality is not None
    assert result.quality.verdict == verdict
    kept = verdict == "not worse"
    assert (plan.attention == "flash", result.ratio > 1.2) == (kept, kept)
    again = tuned_plan(tmp_path / "tuning", recipe)
    assert again is not None
    assert again[1] == result


# ---- what is found ----


def test_a_rules_plan_that_is_best_stays_and_says_what_was_tried(world: World, tmp_path: Path) -> None:
    world.values = {("attention", "flash"): (1.05, 0), ("cross_entropy", "torch"): (1.08, 0)}
    plan, result, _ = search(world, tmp_path)
    assert (plan.micro_batch, plan.attention, plan.cross_entropy) == (64, "cudnn", "fused")
    assert result.ratio == 1.0
    assert plan.why["attention"].source == "measurement"
    assert "flash measured 0.95" in plan.why["attention"].reason
    tried = {row.name for row in result.rows if row.outcome}
    assert {"the rules' plan", "micro_batch 32", "micro_batch 128"} <= tried
    assert {"attention flash", "cross_entropy torch", "compile max-autotune-no-cudagraphs"} <= tried
    assert result.rows[-1].name.startswith("compile max"), "what compiles for minutes comes last"


def test_the_fastest_micro_batch_is_found_not_the_largest(world: World, tmp_path: Path) -> None:
    world.best, world.overhead = 16, 1.0
    plan, result, recipe = search(world, tmp_path)
    assert (plan.micro_batch, plan.accumulation) == (16, recipe.train.batch_size // 16)
    assert result.ratio > 1.1
    assert result.low > 1
    assert plan.why["micro_batch"].source == "measurement"
    assert plan.prediction.memory_bytes < make_plan(recipe, H200).prediction.memory_bytes


def test_better_values_are_kept_together_with_a_micro_batch_that_suits_them(
    world: World, tmp_path: Path
) -> None:
    world.values = {("attention", "flash"): (0.9, 0), ("cross_entropy", "torch"): (0.93, 0)}
    plan, result, _ = search(world, tmp_path)
    assert (plan.attention, plan.cross_entropy) == ("flash", "torch")
    assert result.ratio == pytest.approx(1 / (0.9 * 0.93), rel=0.02)
    assert result.rows[-1].name == "the winner against the rules' plan"


def test_a_faster_plan_that_trains_differently_is_never_chosen(world: World, tmp_path: Path) -> None:
    world.values = {("attention", "flash"): (0.5, 0.05)}
    plan, result, _ = search(world, tmp_path)
    assert plan.attention == "cudnn"
    row = row_of(result, "attention flash")
    assert row.comparison is not None
    assert row.comparison.verdict == "faster"
    assert row.note.startswith("refused")


@pytest.mark.parametrize("how", ["crashed", HANGS, "out_of_memory"])
def test_a_candidate_that_fails_is_a_row_and_the_search_goes_on(
    world: World, tmp_path: Path, how: str
) -> None:
    world.failing = {("compile", "max-autotune-no-cudagraphs"): how}
    world.values = {("attention", "flash"): (0.9, 0)}
    plan, result, _ = search(world, tmp_path, minutes=60)
    assert row_of(result, "compile max").outcome == ("timed_out" if how == HANGS else how)
    assert plan.attention == "flash"


def test_pins_are_left_alone(world: World, tmp_path: Path) -> None:
    world.best, world.values = 16, {("attention", "flash"): (0.5, 0)}
    plan, _, _ = search(world, tmp_path, "plan.micro_batch=64", "plan.attention=cudnn")
    assert (plan.micro_batch, plan.attention) == (64, "cudnn")
    assert {plan["micro_batch"] for plan in world.started} == {64}


def test_a_step_that_waits_for_data_gets_more_threads(world: World, tmp_path: Path) -> None:
    world.waits, world.values = 0.2, {("loader_threads", 2): (0.85, 0)}
    assert search(world, tmp_path)[0].loader_threads == 2


@pytest.mark.parametrize(("steps", "batch", "compiled"), [(10, 64, False), (25, 512, True), (15, 512, False)])
def test_compiling_is_paid_back_by_whole_updates_or_refused(
    world: World, tmp_path: Path, steps: int, batch: int, compiled: bool
) -> None:
    """Nine seconds of compiling. Of an update of 512, 0.55 s are gained, of a trial's of 256 half that: 17
    updates pay, not 33."""
    world.values = {("compile", "default"): (0.5, 0)}
    pay = [f"train.steps={steps}", "train.warmup_steps=0", f"train.batch_size={batch}", "plan.micro_batch=64"]
    plan, result, recipe = search(world, tmp_path, *pay, "plan.attention=cudnn", "plan.cross_entropy=fused")
    assert shorten(recipe, make_plan(recipe, H200)).train.batch_size == min(256, batch)
    assert (plan.compile == "default") == compiled
    assert ("pays back after" in row_of(result, "compile default").note) != compiled


# ---- memory ----


def test_larger_passes_are_not_tried_where_the_readings_say_they_do_not_fit(
    world: World, tmp_path: Path
) -> None:
    world.memory, world.best = 4.0, 1000  # 128 would take 207 GB; the planner's arithmetic thinks 53
    _, result, _ = search(world, tmp_path)
    assert max(plan["micro_batch"] for plan in world.started) == 64
    assert "from 2 readings" in row_of(result, "micro_batch 128").note


def test_a_rules_plan_that_does_not_fit_is_tried_with_smaller_passes(world: World, tmp_path: Path) -> None:
    world.memory = 8.0
    plan, result, _ = search(world, tmp_path)
    assert result.rows[0].outcome == "out_of_memory"
    assert plan.micro_batch == 32
    measured = f"16 measured {result.rows[2].comparison}"
    assert plan.why["micro_batch"].reason == f"micro-batch 64 ran out of memory; {measured}"
    assert plan.why["accumulation"].reason == "512 sequences per update / (32 per pass x 1 process)"
    assert (result.ratio, result.against) == (1.0, "the rules' plan cut to micro-batch 32")


def test_passes_are_halved_until_they_fit(world: World, tmp_path: Path) -> None:
    """Forty times what arithmetic says: 64, 32 and 16 do not fit."""
    world.memory = 40.0
    plan, result, _ = search(world, tmp_path)
    rules = [(row.name, row.outcome) for row in result.rows if row.name.startswith("the rules' plan")]
    failed = [("the rules' plan", "out_of_memory")] * 3
    assert rules == [*failed, ("the rules' plan cut to micro-batch 8", "ok")]
    assert plan.micro_batch == 8


def test_a_plan_that_does_not_fit_beside_the_best_is_measured_by_itself(world: World, tmp_path: Path) -> None:
    world.values, world.flash_memory = {("attention", "flash"): (0.9, 0)}, 4.5  # 124 of 140 GB, beside 28
    plan, result, _ = search(world, tmp_path, *ONLY_ATTENTION)
    row = row_of(result, "attention flash")
    assert row.comparison is not None
    assert (row.outcome, row.comparison.paired, plan.attention, result.paired) == (
        "ok",
        False,
        "flash",
        False,
    )
    lines = [json.loads(line) for line in (tmp_path / "tuning" / "trials.jsonl").read_text().splitlines()]
    assert [line["paired"] for line in lines] == [None, False, False]
    runs = len(world.started)
    again = search(world, tmp_path, *ONLY_ATTENTION)[1]
    assert len(world.started) == runs
    assert [row.comparison for row in again.rows] == [row.comparison for row in result.rows]


def test_a_plan_that_does_not_fit_by_itself_is_not_tried_again(world: World, tmp_path: Path) -> None:
    world.values, world.flash_memory = {("attention", "flash"): (0.9, 0)}, 6.0
    for _ in range(2):
        row = row_of(search(world, tmp_path, *ONLY_ATTENTION)[1], "attention flash")
        assert (row.outcome, row.verdict) == ("out_of_memory", "out_of_memory")
    assert world.begun("flash") == 2, "beside the best and alone"


def test_two_plans_known_not_to_fit_at_once_are_not_started_at_once(world: World, tmp_path: Path) -> None:
    """Arithmetic says 27 GB for each; the best was seen to take three times that."""
    world.memory, world.values = 3.0, {("attention", "flash"): (0.9, 0)}
    assert search(world, tmp_path, *ONLY_ATTENTION)[0].attention == "flash"
    assert world.begun("flash") == 2, "once in its pair, once in the last comparison"


# ---- failures ----


def test_a_rules_plan_that_crashes_once_is_started_again_and_one_that_does_not_run_is_one_line(
    world: World, tmp_path: Path
) -> None:
    world.change = lambda world, plan, how: replace(how, starts={1: "crashed"})
    assert search(world, tmp_path / "once", minutes=0.01)[1].rows[0].kept
    bad = World(failing={("attention", "cudnn"): "crashed"})
    with pytest.raises(TrainingError, match=r"does not run here \(crashed\): planted"):
        search(bad, tmp_path)
    assert search(World(), tmp_path)[1].rows[0].kept, "the next command tries it again"


def _dies_after_flash(count: int, how: str) -> Callable[[World, dict[str, Any], Behaviour], Behaviour]:
    """The plan with cuDNN dies in its blocks after flash was started, so many times."""
    left = [count]

    def change(world: World, plan: dict[str, Any], behaviour: Behaviour) -> Behaviour:
        if plan["attention"] == "flash" or not world.begun("flash") or not left[0]:
            return behaviour
        left[0] -= 1
        return replace(behaviour, blocks=dict.fromkeys(range(1000), how))

    return change


@pytest.mark.parametrize("how", ["crashed", KILLED])
def test_a_reference_that_dies_in_a_pair_is_started_again(world: World, tmp_path: Path, how: str) -> None:
    world.values, world.change = {("attention", "flash"): (0.9, 0)}, _dies_after_flash(1, how)
    plan, result, _ = search(world, tmp_path, *ONLY_ATTENTION)
    row = row_of(result, "attention flash")
    assert row.comparison is not None
    assert (plan.attention, row.comparison.paired) == ("flash", True)
    assert row.comparison.ratio == pytest.approx(1 / 0.9, rel=0.01)
    assert world.begun("flash") == 1, "it stayed warm while the other was started again"


@pytest.mark.parametrize("how", ["crashed", KILLED])
def test_without_a_reference_nothing_is_said_about_a_candidate(
    world: World, tmp_path: Path, how: str
) -> None:
    world.values, world.change = {("attention", "flash"): (0.9, 0)}, _dies_after_flash(10**6, how)
    plan, result, recipe = search(world, tmp_path, *ONLY_ATTENTION)
    row = row_of(result, "attention flash")
    assert (row.outcome, row.comparison, row.verdict) == ("ok", None, "not compared")
    assert row.note.startswith("the plan it is compared with crashed: ")
    assert plan.why["attention"] == make_plan(recipe, H200).why["attention"]
    assert result.ratio == 1.0
    well = World(values=world.values)
    assert search(well, tmp_path, *ONLY_ATTENTION)[0].attention == "flash", "and it is tried again"


def test_a_last_comparison_that_failed_is_said_and_made_again_by_the_next_command(
    world: World, tmp_path: Path
) -> None:
    world.values = {("attention", "flash"): (0.9, 0), ("cross_entropy", "torch"): (0.8, 0)}
    world.change = lambda world, plan, how: (
        replace(how, starts={0: "crashed"}) if _is_last(world, plan) else how
    )
    pins = ("plan.micro_batch=64", "plan.compile=default", "plan.precision=bf16")
    plan, result, recipe = search(world, tmp_path, *pins)
    assert tuned_plan(tmp_path / "tuning", recipe) == (plan, result)
    assert (plan.attention, plan.cross_entropy, result.unconfirmed) == ("flash", "torch", "planted")
    kept = [row.comparison for row in result.rows if row.comparison and row.kept]
    assert result.ratio == pytest.approx(1 / (0.9 * 0.8), rel=0.01), "the product of all that were kept"
    assert result.low == pytest.approx(kept[0].low * kept[1].low)
    assert result.high == pytest.approx(kept[0].high * kept[1].high)
    last = result.rows[-1]
    assert (last.name, last.verdict) == ("the winner against the rules' plan", "not compared")
    assert last.comparison is None
    assert last.note.startswith("failed: planted")
    world.change = lambda world, plan, how: how
    again = search(world, tmp_path, *pins)[1]
    assert again.unconfirmed == ""
    assert again.rows[-1].kept


def _is_last(world: World, plan: dict[str, Any]) -> bool:
    """The rules' plan, after both other values were started together."""
    rules = (plan["attention"], plan["cross_entropy"]) == ("cudnn", "fused")
    both = any((p["attention"], p["cross_entropy"]) == ("flash", "torch") for p in world.started)
    return rules and both


def test_a_rules_plan_that_the_system_kills_is_tried_with_smaller_passes(
    world: World, tmp_path: Path
) -> None:
    world.values = {("attention", "flash"): (0.9, 0)}
    world.change = lambda world, plan, how: (
        replace(how, starts={0: KILLED}) if plan["micro_batch"] > 32 else how
    )
    plan, result, _ = search(world, tmp_path)
    note = "micro-batch 64 was killed twice, maybe for lack of memory: killed by signal 9"
    assert result.rows[0].note.startswith(note)
    assert [p["micro_batch"] for p in world.started[:2]] == [64, 64], "once more before it is cut"
    assert (plan.micro_batch, plan.attention) == (32, "flash")
    assert (result.rows[1].name, result.rows[1].kept) == ("the rules' plan cut to micro-batch 32", True)
    assert result.rows[-1].name == "the winner against the rules' plan cut to micro-batch 32"
    assert result.ratio == pytest.approx(1 / 0.9, rel=0.02)
    assert plan.why["micro_batch"].reason.startswith(note.split(":")[0])
    assert "(32 per pass" in plan.why["accumulation"].reason


@pytest.mark.parametrize(("kills", "flash", "ratio"), [(1, 1.05, 1.0), (2, 1.05, 1.0), (2, 0.9, 1 / 0.9)])
def test_a_rules_plan_that_runs_after_all_is_no_gain_over_itself(
    world: World, tmp_path: Path, kills: int, flash: float, ratio: float
) -> None:
    """Killed once by chance it stays what the search starts from. Killed twice, it is tried again by the walk
    upwards: what is found is held against it, not against what it was cut to."""
    world.values = {("attention", "flash"): (flash, 0), ("cross_entropy", "torch"): (1.1, 0)}
    world.change = lambda world, plan, how: (
        replace(how, starts={1: KILLED, kills: KILLED}) if plan["micro_batch"] == 64 else how
    )
    plan, result, _ = search(world, tmp_path)
    assert (result.rows[1].name == "the rules' plan cut to micro-batch 32") == (kills == 2)
    assert (plan.micro_batch, result.against) == (64, "the rules' plan")
    assert result.ratio == pytest.approx(ratio, rel=0.02)


# ---- time, and the next command ----


def test_the_time_is_kept_and_what_was_left_out_is_said(world: World, tmp_path: Path) -> None:
    _, result, _ = search(world, tmp_path, minutes=0.01)
    assert len(world.started) == 1
    assert "attention flash" in result.untried


def test_time_for_the_last_comparison_is_always_set_aside(world: World, tmp_path: Path) -> None:
    """The rules' plan takes 14 s, a comparison 18: of 48 there are 34 left, enough for one and not for two."""
    _, result, _ = search(world, tmp_path, *ONLY_ATTENTION, minutes=48 / 60)
    assert result.untried == ("attention flash",)
    assert "remain before the last comparison" in result.rows[1].note
    assert len(world.started) == 1


@pytest.mark.parametrize("slow", [{"starts": {0: HANGS}}, {"takes_s": 20.0}])
def test_a_candidate_that_is_not_done_in_time_is_tried_by_the_next_command(
    world: World, tmp_path: Path, slow: dict[str, Any]
) -> None:
    world.values = {("attention", "flash"): (0.9, 0)}
    world.change = lambda world, plan, how: replace(how, **slow) if plan["attention"] == "flash" else how
    _, result, _ = search(world, tmp_path, *ONLY_ATTENTION, minutes=1.0)
    assert result.elapsed_s < 60 + 5
    assert result.untried == ("attention flash",)
    assert (result.rows[1].outcome, result.rows[1].verdict) == (None, "not tried")
    well = World(values=world.values)
    assert search(well, tmp_path, *ONLY_ATTENTION)[0].attention == "flash"


def test_a_last_comparison_for_which_the_time_was_over_is_said(world: World, tmp_path: Path) -> None:
    """Once flash has won everything takes twenty times as long."""
    world.values = {("attention", "flash"): (0.9, 0)}
    world.change = lambda world, plan, how: (
        replace(how, takes_s=10.0) if len(world.lab.blocks) > 7 + 14 else how
    )
    plan, result, _ = search(world, tmp_path, *ONLY_ATTENTION, minutes=1.0)
    assert (plan.attention, result.unconfirmed) == ("flash", "time ran out")
    assert result.ratio == pytest.approx(1 / 0.9, rel=0.01)
    assert result.rows[-1].verdict == "not compared"


def test_finished_trials_are_not_repeated_and_a_torn_line_is_no_trouble(world: World, tmp_path: Path) -> None:
    world.values = {("attention", "flash"): (0.9, 0)}
    first = search(world, tmp_path)[0]
    trials = tmp_path / "tuning" / "trials.jsonl"
    runs = len(world.started)
    assert search(world, tmp_path)[0] == first
    assert len(world.started) == runs, "everything was known"
    lines = trials.read_text().splitlines(keepends=True)
    trials.write_text("".join(lines[:-4]) + lines[-4][:30])  # killed while a line was being written
    assert search(world, tmp_path)[0].attention == first.attention == "flash"
    assert runs < len(world.started) < 2 * runs


def test_killed_and_started_again_it_goes_on(world: World, tmp_path: Path) -> None:
    """What stood there is not run again, and the result is that of a search nobody killed."""
    world.values, world.kill_at_start = {("attention", "flash"): (0.9, 0)}, 5
    with pytest.raises(Interrupted):
        search(world, tmp_path)
    trials = tmp_path / "tuning" / "trials.jsonl"
    before = trials.read_bytes().splitlines()
    assert len(before) >= 3
    world.kill_at_start = None
    plan = search(world, tmp_path)[0]
    after = trials.read_bytes().splitlines()
    assert after[: len(before)] == before
    keys = [json.loads(line)["key"] for line in after]
    assert len(keys) == len(set(keys)), "no trial was run twice"
    undisturbed = World(values=world.values)
    assert plan == search(undisturbed, tmp_path / "undisturbed")[0]


def test_a_tuned_plan_is_found_by_the_machine_the_work_of_an_update_and_the_pins(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))

    def folder(*overrides: str) -> Path:
        return tuning_folder(FACTS, make_plan(load_recipe("gpt2-124m", overrides), H200))

    same = ("train.lr=1e-3", "train.steps=90000", "train.seed=3", "train.checkpoint_every=7", "data.source=x")
    assert {folder(), folder(*same)} == {folder()}, "none of them changes the work of an update"
    other = ("train.batch_size=64", "train.optimizer=muon", "data.seq_len=512", "plan.compile=off")
    assert len({folder(), *(folder(override) for override in other)}) == 1 + len(other)
    plan, result, recipe = search(world, tmp_path)
    assert tuned_plan(tmp_path / "tuning", recipe) == (plan, result)
    assert tuned_plan(tmp_path / "tuning", load_recipe("gpt2-124m", same)) == (plan, result)
    assert tuned_plan(tmp_path / "nothing", recipe) is None
    with pytest.raises(ConfigError, match=r"made for another workload .*run `redline tune` again"):
        tuned_plan(tmp_path / "tuning", load_recipe("gpt2-124m", ["train.batch_size=64"]))
    (tmp_path / "tuning" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="run `redline tune` again"):
        tuned_plan(tmp_path / "tuning", recipe)


# ---- small things ----


def test_long_updates_are_cut_to_whole_passes_and_short_ones_are_not() -> None:
    recipe = load_recipe("gpt2-124m")
    assert shorten(recipe, make_plan(recipe, H200)).train.batch_size == 256
    small = load_recipe("gpt2-124m", ["train.batch_size=64"])
    assert shorten(small, make_plan(small, H200)) is small


def test_several_processes_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("gpt2-124m")
    rules = make_plan(recipe, H200, world_size=2)
    with TrialFolder(tmp_path) as folder, pytest.raises(ConfigError, match="one process"):
        tune(recipe, rules, folder, minutes=1, progress=print)


@pytest.mark.parametrize(
    ("recompute", "tried"),
    [("none", []), ("selective", ["recompute none"]), ("full", ["recompute none", "recompute selective"])],
)
def test_only_less_recomputation_is_tried(recompute: str, tried: list[str]) -> None:
    recipe = load_recipe("gpt2-124m")
    plan = replace(make_plan(recipe, H200), recompute=recompute)
    found = candidates(recipe, plan, fixed=(), data_wait_share=0.0)
    assert sorted(candidate.name for candidate in found if "recompute" in candidate.change) == tried


def test_what_is_printed_says_against_what_and_how_the_speed_was_measured() -> None:
    slower = Comparison(ratio=0.98, low=0.9, high=1.05, verdict="not resolved", paired=True)
    start = TrialRow(
        name="the rules' plan", predicted=None, outcome="ok", tokens_per_s=1e3, verdict="kept", kept=True
    )
    last = TrialRow(
        name=f"{FINAL} the rules' plan", predicted=None, outcome="ok", comparison=slower,
        verdict="not resolved",
    )  # fmt: skip
    same = replace(TUNED, ratio=1.0, low=1.0, high=1.0, rows=(start,))
    assert gain(same) == "the rules' plan is the fastest found: 1.0k tokens/s measured alone"
    assert gain(replace(same, rows=(start, last))).endswith("1.0k tokens/s measured in turns with another")
    apart = replace(last, comparison=replace(slower, paired=False))
    assert gain(replace(same, rows=(start, replace(last, name="attention flash"), apart))).endswith(
        "measured alone"
    )
    cut = replace(same, against="the rules' plan cut to micro-batch 2")
    assert gain(cut).startswith("the rules' plan cut to micro-batch 2 is the fastest found")
    gained = gain(replace(cut, ratio=1.2, low=1.1, high=1.3))
    assert "x [1.100, 1.300] the rules' plan cut to micro-batch 2, in turns" in gained
