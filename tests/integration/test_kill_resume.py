"""Killed and resumed equals unbroken, to the last bit: every line, every tensor, nothing twice, nothing
missing.

Kills come at random moments of a run and at every place of a checkpoint's commit; requests to stop come as
Ctrl-C and SIGTERM. Whatever stopped a run, the same command goes on with it, until it ends where a run that
was left alone ends.
"""

import random
import shutil
import signal
from pathlib import Path

import pytest
from pipeline import Nano, assert_same_training, assert_same_weights, events, one_line, steps
from warm import Fault

from redline.record.read import read_run
from redline.record.run import read_lines
from redline.record.words import told
from redline.train.checkpoint import verify
from redline.train.places import step_folders

VARIANTS = {
    "adamw": (),
    "muon": ("train.optimizer=muon", "train.muon_normalize=true"),
    "stream": ("data.stream=true",),
    "fp16": ("plan.precision=fp16", "train.steps=20"),
    "favor": (
        "model.attention=favor", "model.features=16", "model.redraw_every=5",
        "train.orthogonality=0.01", "train.orthogonality_warmup_steps=10",
    ),
    "dfa": ("train.rule=dfa", "dfa.feedback=generated", "dfa.top_blocks=1", "train.steps=20"),
    "accumulated": (
        "plan.micro_batch=2", "train.clip_norm=0", "train.schedule=wsd", "train.length_ramp_steps=4",
        "train.softmax_candidates=250",
    ),
}  # fmt: skip


NOTHING_LEARNED = "train.lr=1e-30"
"""So small beside any weight that fp32 rounds the update away: the validation loss keeps its bits, and is never
better."""


@pytest.fixture(scope="module")
def references(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each variant its recipe and a run that nobody disturbed."""
    made = {}
    for name, overrides in VARIANTS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = (nano.recipe(folder, *overrides), folder / "run")
        nano.outcome(*made[name])
    return made


def assert_record_is_true(run: Path) -> None:
    """No attempt starts before a checkpoint that was announced to it; what lies on the disk is whole and was announced
    once; nothing else lies there."""
    announced = 0
    for event in events(run):
        if event["event"] in ("start", "resume"):
            assert event["step"] >= announced
            assert (event["event"] == "resume") == (event["step"] > 0)
        if event["event"] in ("checkpoint", "resume"):
            announced = event["step"]
    assert announced == len(steps(run))
    told = [event["step"] for event in events(run, "checkpoint")]
    for step, folder in step_folders(run / "checkpoints").items():
        assert told.count(step) == 1
        verify(folder)
    assert [path.name for path in run.rglob(".*") if path.name != ".lock"] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_random_moments(
    nano: Nano, references: dict[str, tuple[Path, Path]], tmp_path: Path, variant: str
) -> None:
    recipe, reference = references[variant]
    run = tmp_path / "run"
    rng = random.Random(variant)
    for _ in range(4):  # an update makes some hundred calls, a checkpoint some thousand
        fault = Fault("kill_after", update=rng.randint(1, 6), calls=int(10 ** rng.uniform(0, 4)))
        assert nano.train(recipe, run, fault=fault).code == -signal.SIGKILL
    assert nano.outcome(recipe, run)["why"] == "finished"
    assert_same_training(run, reference)
    assert_record_is_true(run)


@pytest.mark.slow
def test_killed_at_every_place_of_a_commit(nano: Nano, tmp_path: Path) -> None:
    """Every change to the disk of a short run with two checkpoints is once what it no longer does."""
    # A rate so low that the first validation stays the best: its mark, once lost, would not be made again.
    brief = (
        "train.steps=4",
        "train.checkpoint_every=2",
        "train.eval_every=2",
        "train.eval_sequences=4",
        "train.keep_checkpoints=1",
    )
    recipe = nano.recipe(tmp_path, *brief, NOTHING_LEARNED)
    reference = tmp_path / "reference"
    nano.outcome(recipe, reference)
    assert [event["best"] for event in events(reference, "validation")] == [True, False]
    killed, torn = 0, 0
    for call in range(1, 200):
        run = tmp_path / str(call)
        command = nano.start(recipe, run, fault=Fault("kill_at", call=call, under=str(run)))
        if command.wait().code != -signal.SIGKILL:
            break
        killed += 1
        torn += any((run / "checkpoints").glob(".tmp-step-*"))
        nano.outcome(recipe, run)
        assert_same_training(run, reference)
        assert_record_is_true(run)
    assert 40 < killed < 199
    assert torn > 5


def test_a_checkpoint_whose_announcement_a_kill_took_is_announced_by_the_next_attempt(
    nano: Nano, tmp_path: Path
) -> None:
    run, record = tmp_path / "run", tmp_path / "run" / "events.jsonl"
    nano.outcome(nano.recipe(tmp_path, "train.steps=4", "train.checkpoint_every=2"), run)
    record.write_text("".join(line for line in record.open() if '"checkpoint", "step": 4' not in line))
    nano.outcome(nano.recipe(tmp_path, "train.steps=6", "train.checkpoint_every=2"), run)
    told = events(run, "checkpoint", "resume")
    assert [(event["event"], event["step"]) for event in told] == [
        ("checkpoint", 2), ("checkpoint", 4), ("resume", 4), ("checkpoint", 6),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_ends_the_run_cleanly(
    nano: Nano, references: dict[str, tuple[Path, Path]], tmp_path: Path, number: signal.Signals
) -> None:
    recipe, reference = references["adamw"]
    run = tmp_path / "run"
    said = nano.outcome(recipe, run, fault=Fault("signalled_at", update=9, number=int(number)))
    assert (said["why"], said["step"]) == ("stopped by signal", 9)
    assert len(steps(run)) == 9 == max(step_folders(run / "checkpoints"))
    assert events(run)[-1]["why"] == "stopped by signal"
    assert nano.outcome(recipe, run)["step"] == 40
    assert [event["step"] for event in events(run, "start", "resume")] == [0, 9]
    assert_same_training(run, reference)
    assert_record_is_true(run)


def test_a_finished_run_is_left_as_it_is(nano: Nano, references: dict[str, tuple[Path, Path]]) -> None:
    recipe, reference = references["adamw"]
    before = (reference / "metrics.jsonl").read_bytes()
    assert nano.outcome(recipe, reference) == {
        "run": str(reference),
        "step": 40,
        "why": "finished",
        "metrics": {},
    }
    assert (reference / "metrics.jsonl").read_bytes() == before


def test_updates_that_the_record_has_lost_are_written_down_and_a_fork_owes_none(
    nano: Nano, tmp_path: Path
) -> None:
    recipe = nano.recipe(tmp_path, "train.steps=6", "train.eval_every=0", "train.checkpoint_every=0")
    nano.outcome(recipe, tmp_path / "run")
    record = tmp_path / "run" / "metrics.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:2]))
    longer = nano.recipe(tmp_path, "train.steps=8", "train.eval_every=0", "train.checkpoint_every=0")
    nano.outcome(longer, tmp_path / "run")
    (lost,) = [event for event in events(tmp_path / "run") if event["event"] == "updates_not_recorded"]
    assert (lost["first"], lost["last"]) == (3, 6)
    assert told("updates_not_recorded", lost) == "updates 3 to 6 are missing from metrics.jsonl"
    found = read_run(tmp_path / "run")
    assert [line["step"] for line in found.metrics] == [1, 2, 7, 8]
    nano.outcome(longer, tmp_path / "run")
    assert len(events(tmp_path / "run", "updates_not_recorded")) == 1, "told once"
    assert found.holes == [(3, 6)]
    longest = nano.recipe(tmp_path, "train.steps=9", "train.eval_every=0", "train.lr=1e-4")
    nano.outcome(longest, tmp_path / "fork", "--fork", str(tmp_path / "run"))
    assert "updates_not_recorded" not in [event["event"] for event in events(tmp_path / "fork")]
    assert read_run(tmp_path / "fork").holes == []


def test_a_fork_that_was_killed_begins_where_it_began_also_if_its_parent_went_on(
    nano: Nano, tmp_path: Path
) -> None:
    """The parent is at update 4, the fork is killed before its first checkpoint, and the parent goes on to 6."""
    few = ("train.eval_every=0", "train.checkpoint_every=4")
    parent, run, reference = (tmp_path / name for name in ("parent", "run", "reference"))

    def recipe(*more: str) -> Path:
        (folder := tmp_path / "-".join(more)).mkdir(exist_ok=True)
        return nano.recipe(folder, *few, *more)

    nano.outcome(recipe("train.steps=4"), parent)
    forked = (recipe("train.steps=9", "train.lr=1e-4"), run, "--fork", str(parent))
    nano.outcome(forked[0], reference, *forked[2:])
    assert nano.train(*forked, fault=Fault("kill_after", update=3, calls=0)).code == -signal.SIGKILL
    assert read_lines(run / "metrics.jsonl")[0]["step"] == 5
    assert not step_folders(run / "checkpoints")
    nano.outcome(recipe("train.steps=6"), parent)
    nano.outcome(*forked)
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [5, 6, 7, 8, 9]
    assert_same_weights(run, reference)
    (told,) = events(run, "forked")
    assert told["source"].endswith("step-00000004")
    (run / "checkpoints").rename(tmp_path / "lost")
    (parent / "checkpoints" / "step-00000004").rename(tmp_path / "pruned")
    assert "began with step-00000004" in one_line(nano.train(*forked).err)


@pytest.mark.parametrize("place", ["extended", "forked"])
def test_what_was_changed_is_told_once_wherever_the_kill_came(nano: Nano, tmp_path: Path, place: str) -> None:
    """A kill at each of the first changes to the folder."""
    few = ("train.eval_every=0", "train.checkpoint_every=0")
    short, long = tmp_path / "short", tmp_path / "long"
    short.mkdir()
    long.mkdir()
    first, then = nano.recipe(short, *few, "train.steps=2"), nano.recipe(long, *few, "train.steps=3")
    nano.outcome(first, tmp_path / "parent")
    for call in range(1, 15):
        run, options = tmp_path / str(call), []
        if place == "extended":
            shutil.copytree(tmp_path / "parent", run)
        else:
            options = ["--fork", str(tmp_path / "parent")]
        fault = Fault("kill_at", call=call, under=str(run))
        assert nano.train(then, run, *options, fault=fault).code == -signal.SIGKILL
        nano.outcome(then, run, *options)
        (told,) = events(run, place)
        assert told["changed"] == {"train.steps": [2, 3]}


def test_early_stop_is_the_same_after_a_kill(nano: Nano, tmp_path: Path) -> None:
    """Validations at 2, 4, 6 and 8, of which only the first is better than what was before."""
    often = ("train.checkpoint_every=2", "train.eval_every=2", "train.early_stop_evals=3")
    recipe = nano.recipe(tmp_path, *often, NOTHING_LEARNED)
    reference, run = tmp_path / "reference", tmp_path / "run"
    outcome = nano.outcome(recipe, reference)
    assert outcome["why"] == "early stop: 3 validations without a better loss"
    assert [event["best"] for event in events(reference, "validation")] == [True, False, False, False]
    assert nano.train(recipe, run, fault=Fault("kill_after", update=7, calls=0)).code == -signal.SIGKILL
    assert nano.outcome(recipe, run)["step"] == outcome["step"] == 8
    assert events(run, "resume")[0]["step"] in (4, 6), "validations without a gain on both sides of the kill"
    assert_same_training(run, reference)
    assert nano.outcome(recipe, run)["why"] == outcome["why"]
    assert len(steps(run)) == 8


def test_a_target_ends_the_run_and_changes_nothing_else(
    nano: Nano, references: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """The loss at update 20 ends a run there, also if it was killed on the way; without the target the same folder
    goes on to where a run that had none ended."""
    recipe, reference = references["adamw"]
    losses = {event["step"]: event["valid_loss"] for event in events(reference, "validation")}
    run, target = tmp_path / "run", ("--set", f"train.target_loss={losses[20]!r}")
    killed = nano.train(recipe, run, *target, fault=Fault("kill_after", update=12, calls=0))
    assert killed.code == -signal.SIGKILL
    why = f"target loss of {losses[20]:g} reached ({losses[20]:.4f})"
    for _ in range(2):  # and it stays reached
        done = nano.outcome(recipe, run, *target)
        assert (done["step"], done["why"]) == (20, why)
    assert read_run(run).state.ending == "finished"
    assert nano.outcome(recipe, run)["why"] == "finished"
    assert_same_training(run, reference)


def test_the_record_says_where_the_start_up_went(references: dict[str, tuple[Path, Path]]) -> None:
    (told_once,) = events(references["adamw"][1], "start_up")
    parts = [
        value
        for name, value in told_once.items()
        if name.endswith("_s") and name not in ("total_s", "compile_s")
    ]
    assert {"python_s", "plan_s", "import_s", "data_s", "build_s", "first_update_s"} <= told_once.keys()
    assert sum(parts) == pytest.approx(told_once["total_s"], abs=0.001 * len(parts))
    assert min(parts) >= 0


def test_the_clock_ends_the_run_and_the_schedule(nano: Nano, tmp_path: Path) -> None:
    """One hour at three minutes an update, with a kill after the eighth: its time since the checkpoint at 7
    is lost with it."""
    recipe = nano.recipe(tmp_path, "train.steps=100000", "train.max_hours=1", "train.eval_every=0")
    run = tmp_path / "run"
    killed = nano.train(recipe, run, fault=Fault("clock_of_updates", update_s=180.0, killed_at=8))
    assert killed.code == -signal.SIGKILL
    done = nano.outcome(recipe, run, fault=Fault("clock_of_updates", update_s=180.0))
    assert (done["why"], done["step"]) == ("time limit of 1 h", 21)
    lines = steps(run)
    assert [line["elapsed_s"] for line in lines] == pytest.approx([180.0 * line["step"] for line in lines])
    assert "valid_loss" in lines[-1]
    rates = [line["lr"] for line in lines[4:]]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.009
    assert rates[-1] == pytest.approx(0.001), "min_lr_ratio of the peak"
    assert nano.outcome(recipe, run)["metrics"] == {}
    assert len(steps(run)) == len(lines)
