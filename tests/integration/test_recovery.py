"""What goes wrong in a run: memory, numbers, the disk, the folder, a checkpoint. Each is one clear line, and
nothing is lost.

Where a run can go on by itself it does, and trains what it would have trained; where it cannot, the same
command goes on when the cause is gone, and ends with the bits of a run that nothing happened to.
"""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline import (
    Nano,
    assert_close_training,
    assert_same_training,
    events,
    lines_written,
    one_line,
    steps,
    training,
    weights,
)
from precision import CLOSE
from warm import Done, Fault

from redline.launch.processes import out_of_memory_override, with_recovery
from redline.train.checkpoint import verify
from redline.train.places import step_folders


@pytest.fixture(scope="module")
def recipe(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nano.recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def reference(nano: Nano, recipe: Path) -> Path:
    """A run that nothing happened to."""
    nano.outcome(recipe, recipe.parent / "run")
    return recipe.parent / "run"


def checkpoints(run: Path) -> list[int]:
    """Steps of the checkpoints, every one of them whole."""
    found = step_folders(run / "checkpoints")
    for folder in found.values():
        verify(folder)
    return list(found)


def refused(done: Done, code: int) -> str:
    assert done.code == code, done.err
    assert done.out == ""
    return one_line(done.err)


class TestOutOfMemory:
    def test_the_micro_batch_shrinks_and_the_batch_stays(
        self, nano: Nano, recipe: Path, tmp_path: Path
    ) -> None:
        run, small = tmp_path / "run", tmp_path / "small"
        nano.outcome(recipe, run, fault=Fault("out_of_memory", above=2))
        nano.outcome(recipe, small, "--set", "plan.micro_batch=2")
        found = [
            (event["step"], event["micro_batch_before"], event["micro_batch"])
            for event in events(run, "out_of_memory")
        ]
        assert found == [(1, 8, 4), (1, 4, 2)]
        assert {event["batch_size"] for event in events(run, "out_of_memory")} == {8}
        assert_same_training(run, small)

    @pytest.mark.numerics
    def test_in_the_middle_of_a_run_and_of_an_update(self, nano: Nano, tmp_path: Path) -> None:
        """The second pass of the fourth update fails: its first pass must not count twice."""
        nano, recipe = nano.in_double(), nano.recipe(tmp_path, "train.steps=20")
        nano.outcome(recipe, tmp_path / "reference")
        run = tmp_path / "run"
        nano.outcome(
            recipe, run, "--set", "plan.micro_batch=4", fault=Fault("out_of_memory", above=2, from_pass=8)
        )
        (event,) = events(run, "out_of_memory")
        assert (event["step"], event["micro_batch"]) == (4, 2)
        assert_close_training(run, tmp_path / "reference", CLOSE)

    def test_what_fits_is_remembered(self, nano: Nano, recipe: Path, tmp_path: Path) -> None:
        run = tmp_path / "run"
        limit = Fault("out_of_memory", above=4)
        nano.outcome(recipe, run, fault=limit)
        shutil.rmtree(run / "checkpoints" / "step-00000040")
        nano.outcome(recipe, run, fault=limit)
        assert len(events(run, "out_of_memory")) == 1
        assert [event["micro_batch"] for event in events(run, "start", "resume")] == [8, 4]

    def test_the_micro_batch_divides_the_batch(self, nano: Nano, tmp_path: Path) -> None:
        recipe = nano.recipe(tmp_path, "train.batch_size=6", "train.steps=4")
        nano.outcome(recipe, tmp_path / "run", fault=Fault("out_of_memory", above=2))
        assert [event["micro_batch"] for event in events(tmp_path / "run", "out_of_memory")] == [3, 1]

    def test_nothing_left_to_shrink(self, nano: Nano, recipe: Path, tmp_path: Path) -> None:
        line = refused(nano.train(recipe, tmp_path / "run", fault=Fault("out_of_memory", above=0)), code=8)
        assert "out of memory at step 1 with micro-batch 1" in line
        assert "data.seq_len" in line

    def test_an_update_half_made_is_not_made_again(self, nano: Nano, tmp_path: Path) -> None:
        recipe = nano.recipe(tmp_path, "train.optimizer=muon", "train.steps=12")
        run = tmp_path / "run"
        line = refused(nano.train(recipe, run, fault=Fault("out_of_memory_in_update", update=9)), code=8)
        assert "while the weights were being changed" in line
        assert checkpoints(run) == [7]
        nano.outcome(recipe, run)
        nano.outcome(recipe, tmp_path / "reference")
        assert_same_training(run, tmp_path / "reference")

    @pytest.mark.numerics
    @pytest.mark.parametrize(("rank", "planned"), [(0, False), (1, True)])
    def test_one_of_two_processes(self, nano: Nano, tmp_path: Path, rank: int, planned: bool) -> None:
        """The launcher starts both again with half the micro-batch, whichever failed and wherever the plan
        came from."""
        nano, recipe = nano.in_double(), nano.recipe(tmp_path, "train.steps=8")
        nano.outcome(recipe, tmp_path / "reference")
        run, options = tmp_path / "run", ["--nproc", "2"]
        if planned:
            assert nano.warm.run("plan", recipe, *options, "--save", tmp_path / "plan.json").code == 0
            options += ["--plan", str(tmp_path / "plan.json")]
        fault = Fault("forked_members", fault="out_of_memory", above=2, only_rank=rank)
        assert nano.outcome(recipe, run, *options, fault=fault)["why"] == "finished"
        assert [event["micro_batch"] for event in events(run, "out_of_memory")] == [2]
        assert [event["micro_batch"] for event in events(run, "start")] == [4, 2]
        assert json.loads((run / "plan.json").read_text())["accumulation"]["value"] == 2
        assert_close_training(run, tmp_path / "reference", CLOSE)

    def test_the_launcher_gives_up_where_starting_again_changes_nothing(self, tmp_path: Path) -> None:
        file = tmp_path / "events.jsonl"
        happened = [
            {"event": "start"},
            {"event": "out_of_memory", "micro_batch": 2},
            {"event": "checkpoint", "step": 3},
        ]
        file.write_text("".join(json.dumps(event) + "\n" for event in happened))
        assert out_of_memory_override(file) == "plan.micro_batch=2"
        file.write_text(file.read_text() + '{"event": "resume"}\n')
        assert out_of_memory_override(file) is None
        assert out_of_memory_override(tmp_path / "none.jsonl") is None

        tried: list[list[str]] = []
        answers = iter(["plan.micro_batch=2", "plan.micro_batch=1", "plan.micro_batch=1"])
        assert with_recovery(lambda overrides: tried.append(list(overrides)) or 8, lambda: next(answers)) == 8
        assert tried == [[], ["--set", "plan.micro_batch=2"], ["--set", "plan.micro_batch=1"]]


class TestNotANumber:
    def test_a_gradient(self, nano: Nano, recipe: Path, reference: Path, tmp_path: Path) -> None:
        """It spoils the weights of the step that would be saved next; that checkpoint must not come to be."""
        run = tmp_path / "run"
        line = refused(nano.train(recipe, run, fault=Fault("gradient_not_a_number", update=14)), code=8)
        assert "grad_norm is nan at step 14" in line
        assert checkpoints(run) == [7, 10]
        assert len(steps(run)) == 13
        nano.outcome(recipe, run)
        assert_same_training(run, reference)

    def test_a_loss(self, nano: Nano, tmp_path: Path) -> None:
        """Without a fault: a rate at which the weights overflow. The same command comes to the same end."""
        recipe = nano.recipe(
            tmp_path,
            "train.lr=1e36",
            "train.schedule=constant",
            "train.warmup_steps=0",
            "train.checkpoint_every=1",
        )
        run = tmp_path / "run"
        line = refused(nano.train(recipe, run), code=8)
        assert "lower train.lr (now 1e+36)" in line
        kept = checkpoints(run)
        assert kept
        assert all(tensor.isfinite().all() for tensor in weights(run).values())
        assert refused(nano.train(recipe, run), code=8) == line
        assert checkpoints(run) == kept

    def test_overflow_in_fp16_skips_the_update_and_is_remembered(self, nano: Nano, tmp_path: Path) -> None:
        recipe = nano.recipe(tmp_path, "plan.precision=fp16", "train.steps=6", "train.checkpoint_every=4")
        run = tmp_path / "run"
        nano.outcome(recipe, run, fault=Fault("gradient_not_a_number", update=3))
        lines = steps(run)
        assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0, 0]
        assert [line["loss_scale"] for line in lines] == [65536.0] * 2 + [32768.0] * 4
        assert lines[2]["grad_norm"] is None
        assert lines[3]["grad_norm"] > 0
        before = training(run)
        shutil.rmtree(run / "checkpoints" / "step-00000006")
        nano.outcome(recipe, run)
        assert events(run, "resume")[0]["step"] == 4
        assert training(run) == before


class TestDisk:
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        """A disk with room for two checkpoints and a half."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1200k", "redline-test", disk],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("only root may mount a small disk; the limit on file sizes is tested everywhere")
        yield disk
        subprocess.run(["umount", "--lazy", disk], check=True)

    def test_full(self, nano: Nano, recipe: Path, reference: Path, disk: Path) -> None:
        run = disk / "run"
        line = refused(nano.train(recipe, run), code=5)
        assert line.startswith(f"redline: the disk is full: a checkpoint could not be written to {run}")
        assert "free some space and run the same command" in line
        kept = checkpoints(run)
        assert kept
        assert refused(nano.train(recipe, run), code=5) == line
        assert checkpoints(run) == kept
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        nano.outcome(recipe, run)
        assert_same_training(run, reference)

    @pytest.mark.parametrize("what", ["a checkpoint", "metrics.jsonl"])
    def test_refuses_a_write(
        self, nano: Nano, recipe: Path, reference: Path, tmp_path: Path, what: str
    ) -> None:
        """A write that is cut off in the middle: of a checkpoint's shard, and of a line of the metrics."""
        run = tmp_path / "run"
        assert nano.outcome(recipe, run, fault=Fault("signalled_at", update=12))["step"] == 12
        written = (run / "metrics.jsonl").stat().st_size
        # the next line stands before the next checkpoint
        limit = written + 100 if what == "metrics.jsonl" else 100_000
        line = refused(nano.train(recipe, run, fault=Fault("small_files", size_bytes=limit)), code=5)
        assert line.startswith(f"redline: {what} cannot be written to {run}")
        assert checkpoints(run) == [10, 12]
        nano.outcome(recipe, run)
        assert_same_training(run, reference)


class TestFolder:
    def test_cannot_be_written(self, nano: Nano, recipe: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        line = refused(nano.train(recipe, tmp_path / "file" / "run"), code=5)
        assert f"the run folder cannot be written to {tmp_path / 'file' / 'run'}" in line

    def test_is_in_use(self, nano: Nano, tmp_path: Path) -> None:
        recipe = nano.recipe(tmp_path, "train.steps=100000")
        run = tmp_path / "run"
        first = nano.start(recipe, run)
        while first.alive() and lines_written(run) == 0:
            time.sleep(0.01)
        line = refused(nano.train(recipe, run), code=5)
        assert (
            line
            == f"redline: {run} is in use by another process: wait for it, or give another folder with --run"
        )
        assert first.alive()
        first.send(signal.SIGINT)
        done = first.wait()
        assert done.code == 0
        assert len(steps(run)) == json.loads(done.out)["step"]

    def test_holds_another_recipe(self, nano: Nano, recipe: Path, reference: Path) -> None:
        before = (reference / "recipe.toml").read_bytes()
        line = refused(
            nano.train(recipe, reference, "--set", "train.lr=0.5", "--set", "train.steps=7"), code=2
        )
        assert f"{reference} holds a run of another recipe: train.lr (" in line
        assert "train.steps" not in line, "more or fewer steps would extend the run"
        assert (reference / "recipe.toml").read_bytes() == before

    def test_belongs_to_other_tokens(self, nano: Nano, recipe: Path, tmp_path: Path) -> None:
        corpus = tmp_path / "verses.jsonl"
        shutil.copy(nano.cache / "verses.jsonl", corpus)
        options = ("--set", f"data.source={corpus}", "--set", "train.steps=8")
        nano.outcome(recipe, tmp_path / "run", *options, fault=Fault("signalled_at", update=5))
        corpus.write_text("\n".join(reversed(corpus.read_text().splitlines())) + "\n")
        line = refused(nano.train(recipe, tmp_path / "run", *options), code=4)
        assert "the data has changed since" in line


class TestDamagedCheckpoint:
    @pytest.mark.parametrize("damage", ["truncated", "one byte", "state", "missing"])
    def test_is_refused_and_the_one_before_it_offered(
        self, nano: Nano, recipe: Path, reference: Path, tmp_path: Path, damage: str
    ) -> None:
        run = tmp_path / "run"
        nano.outcome(recipe, run, fault=Fault("signalled_at", update=24))
        assert checkpoints(run) == [20, 21, 24]
        newest = run / "checkpoints" / "step-00000024"
        (shard,) = newest.glob("*.safetensors")
        harm(shard, newest / "state.json", damage)
        line = refused(nano.train(recipe, run), code=4)
        assert str(newest / "state.json" if damage == "state" else shard) in line
        assert line.endswith(f"the previous good checkpoint is step 21: remove {newest} to resume from it")
        assert len(steps(run)) == 24, "nothing is cut before the checkpoint is known to be good"
        shutil.rmtree(newest)
        nano.outcome(recipe, run)
        assert events(run, "resume")[-1]["step"] == 21
        assert events(run, "resume")[-1]["metrics_dropped"] == 3
        assert_same_training(run, reference)


def harm(shard: Path, state: Path, damage: str) -> None:
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1000])
    else:
        path = state if damage == "state" else shard
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
