"""The report's figures against sums done by hand, its verdicts, and what it does with folders that are not as
they should be."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from run_folders import ABLATION, EVALUATIONS, EVENTS, jsonl, lines, plan, write_rft, write_run

from redline.cli.main import main
from redline.record.follow import Tail
from redline.record.metrics import PHASES
from redline.record.read import read_run, read_runs
from redline.record.run import RunFolder
from redline.record.units import DASH, fact, format_share
from redline.report import view
from redline.report.ablation import ablation
from redline.report.compare import Comparable, ratio
from redline.report.figures import Summary, time_parts
from redline.report.page import page
from redline.report.series import curves
from redline.report.view import RunView, accuracies, plan_rows, side_by_side


def spent(folder: Path) -> dict[str, float]:
    return {part.name: part.elapsed_s for part in time_parts(read_run(folder))}


class TestFigures:
    def test_speed_leaves_out_the_first_updates_and_counts_them_in_the_whole_run(
        self, tmp_path: Path
    ) -> None:
        speed = Summary(read_run(write_run(tmp_path / "a"))).speed
        assert speed.update is not None
        assert (speed.update.value, speed.update.low, speed.update.high, speed.update.updates) == (
            2000,
            2000,
            2000,
            35,
        )
        assert speed.whole_run == pytest.approx(40_000 / 27.75)
        assert speed.attained_share == pytest.approx(2000 / 2500)
        assert (speed.mfu, speed.ceiling_share, speed.step_s) == (0.4, 0.6, 0.5)
        assert "989 TFLOP/s" in speed.mfu_note
        assert "680 TFLOP/s" in speed.ceiling_note

    def test_the_interval_is_that_of_six_blocks(self, tmp_path: Path) -> None:
        made = lines(65)
        for line in made[5:]:  # six blocks of ten: medians 1, 2, 3, 4, 5, 6
            line["tokens_per_s"] = (line["step"] - 6) // 10 + 1
        update = Summary(read_run(write_run(tmp_path / "a", metrics=made))).speed.update
        assert update is not None
        assert (update.value, update.low, update.high) == (3.5, 1, 6)

    def test_the_parts_of_the_time_add_up_and_are_right(self, tmp_path: Path) -> None:
        parts = spent(write_run(tmp_path / "a"))
        first_s = 4 + 4 * 1 - 5 * 0.5
        assert parts == pytest.approx(
            {
                "updates": 25.5 - first_s - 2.0,
                "data wait": 2.0,
                "first updates": first_s,
                "checkpoints": 0.25,
                "validation": 2.0,
            }
        )
        assert sum(parts.values()) == pytest.approx(27.75)

    def test_a_wait_for_the_first_batch_is_no_part_of_the_first_updates(self, tmp_path: Path) -> None:
        """It was counted twice, and the phases of the updates that much too short."""
        made = lines()
        made[0]["data_wait_s"] = 3.0
        parts = spent(write_run(tmp_path / "a", metrics=made))
        first_s = (4 - 3) + 4 * (1 - 0.05) - 5 * (0.5 - 0.05)
        assert parts["updates"] == pytest.approx(40 * (0.5 - 0.05))
        assert parts["first updates"] == pytest.approx(first_s)
        assert parts["data wait"] == pytest.approx(3 + 39 * 0.05)
        assert sum(parts.values()) == pytest.approx(27.75)

    def test_the_time_before_a_fork_is_no_validation(self, tmp_path: Path) -> None:
        """A fork counts on from its parent, here from update 100 and 90 seconds."""
        made = [line | {"step": line["step"] + 100, "elapsed_s": line["elapsed_s"] + 90} for line in lines()]
        begun = EVENTS[0] | {"event": "resume", "step": 100}
        ended = EVENTS[3] | {"elapsed_s": EVENTS[3]["elapsed_s"] + 90}
        parts = spent(write_run(tmp_path / "a", metrics=made, events=[begun, *EVENTS[1:3], ended]))
        whole = spent(write_run(tmp_path / "b"))
        assert parts == pytest.approx(whole | {"before the fork": 90.0})

    @pytest.mark.parametrize(("updates", "left_out"), [(40, 5), (6, 2)])
    def test_it_says_how_many_first_updates_it_leaves_out(self, tmp_path: Path, updates, left_out) -> None:
        path = write_run(tmp_path / "a", metrics=lines(updates), events=EVENTS[:1])
        (first,) = [part for part in Summary(read_run(path)).time if part.name == "first updates"]
        assert first.note == f"compilation and warm-up beyond the median; updates: {left_out}"

    @pytest.mark.parametrize(
        "beside", [(), ("copy_s",), ("generate_s", "copy_s"), ("copy_s", "communication_s"), tuple(PHASES)]
    )
    def test_neighbours_in_the_bar_of_the_time_differ_in_colour(
        self, tmp_path: Path, beside: tuple[str, ...]
    ) -> None:
        phases = dict.fromkeys(["forward_s", "backward_s", "optimizer_s", *beside], 0.01)
        bars = RunView(
            read_run(write_run(tmp_path / "a", metrics=[line | phases for line in lines(40)]))
        ).time_stack
        assert {PHASES[name] for name in phases} <= {bar.name for bar in bars}
        assert all(left.kind != right.kind for left, right in pairwise(bars))

    def test_recorded_phases_split_the_updates(self, tmp_path: Path) -> None:
        made = [line | {"forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.05} for line in lines()]
        parts = spent(write_run(tmp_path / "a", metrics=made))
        assert parts["backward"] == pytest.approx(2 * parts["forward"])
        assert parts["forward"] == pytest.approx(2 * parts["optimiser update"])
        assert sum(parts.values()) == pytest.approx(27.75)

    def test_the_time_of_an_rft_run_is_that_of_all_its_stages(self, tmp_path: Path) -> None:
        run = read_run(write_rft(tmp_path / "a"))
        parts = {part.name: part for part in time_parts(run)}
        assert (parts["sampling"].elapsed_s, parts["tests"].elapsed_s) == (10.0, 3.0)
        assert sum(part.elapsed_s for part in parts.values()) == pytest.approx(10 + 3 + 25.5)
        assert parts["updates"].note.startswith("fine-tuning on the samples")
        bars = {bar.name: bar.note for bar in RunView(run).speed_bars}
        assert bars["fine-tuning"] == "without sampling and tests"
        assert "whole run" not in bars

    def test_generation_is_a_part_of_its_own(self, tmp_path: Path) -> None:
        """Beside the phases of the update, and alone where no other is marked."""
        made = [
            line | {"generate_s": 0.1, "forward_s": 0.05, "backward_s": 0.1, "optimizer_s": 0.05}
            for line in lines()
        ]
        parts = spent(write_run(tmp_path / "a", metrics=made))
        assert parts["generation"] == pytest.approx(parts["backward"])
        assert sum(parts.values()) == pytest.approx(27.75)
        made = [line | {"generate_s": 0.1} for line in lines()]
        alone = spent(write_run(tmp_path / "b", metrics=made))
        assert alone["generation"] == pytest.approx(parts["generation"])
        assert alone["updates"] == pytest.approx(
            sum(parts[name] for name in ("forward", "backward", "optimiser update", "between phases"))
        )

    def test_the_first_updates_after_a_resume_count_in_no_speed(self, tmp_path: Path) -> None:
        made = lines()
        for line in made[20:25]:
            line |= {"tokens_per_s": 1.0, "step_s": 3.0}
        events = [*EVENTS[:1], {"at": 1.0, "event": "resume", "step": 20}, *EVENTS[1:]]
        summary = Summary(read_run(write_run(tmp_path / "a", metrics=made, events=events)))
        assert summary.attempts == 2
        assert summary.speed.update is not None
        assert (summary.speed.update.low, summary.speed.update.updates) == (2000, 30)

    def test_memory_predicted_beside_seen(self, tmp_path: Path) -> None:
        memory = Summary(read_run(write_run(tmp_path / "a"))).memory
        assert memory.error == pytest.approx(0.5)
        assert memory.predicted_parts_bytes == {"weights": 2**30, "activations": 2**31}

    def test_on_a_cpu_no_prediction_stands_beside_the_memory_of_the_process(self, tmp_path: Path) -> None:
        changed = {"hardware": plan()["hardware"] | {"kind": "cpu"}}
        memory = Summary(read_run(write_run(tmp_path / "a", plan_changes=changed))).memory
        assert (memory.error, memory.predicted_bytes, memory.predicted_parts_bytes) == (None, None, {})
        assert memory.seen_note == "of the whole process, Python and torch included"

    @pytest.mark.parametrize(
        ("losses", "step"),
        [
            ([1.0, None, None], 2),
            ([None, 1.0], None),
            ([math.nan, math.inf], 1),
            ([1.0, None, "absent"], 2),
            ([1.0, "absent"], None),
            ([], None),
        ],
    )
    def test_from_where_the_loss_is_no_number(
        self, tmp_path: Path, losses: list[Any], step: int | None
    ) -> None:
        made = [
            {"step": place} | ({} if loss == "absent" else {"loss": loss})
            for place, loss in enumerate(losses, start=1)
        ]
        assert Summary(read_run(write_run(tmp_path / "a", metrics=made))).quality.nan_step == step

    def test_numbers_that_are_not_there_stay_unknown(self, tmp_path: Path) -> None:
        made = [{"step": 1, "loss": None, "step_s": 1.0}, {"step": 2, "loss": math.nan, "mfu": None}]
        summary = Summary(read_run(write_run(tmp_path / "a", metrics=made, events=[])))
        found = (summary.updates, summary.quality.last_loss, summary.speed.update, summary.speed.mfu)
        assert found == (2, None, None, None)
        RunView(read_run(tmp_path / "a"))

    @pytest.mark.parametrize(
        ("last", "ending", "text"),
        [
            ({"event": "end", "why": "finished"}, "finished", "finished"),
            ({"event": "end", "why": "stopped by signal"}, "stopped", "stopped by signal"),
            ({"event": "failed", "error": "the disk is full"}, "failed", "the disk is full"),
            ({"event": "resume", "step": 3}, "running", "last line 0 s ago"),
        ],
    )
    def test_state(self, tmp_path: Path, last: dict[str, str], ending: str, text: str) -> None:
        state = read_run(write_run(tmp_path / "a", events=[EVENTS[0], last])).state
        assert (state.ending, state.text) == (ending, text)

    def test_a_run_that_writes_nothing_any_more_is_not_called_running(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "a", events=EVENTS[:1])
        for name in ("metrics.jsonl", "events.jsonl", "recipe.toml"):
            os.utime(path / name, (1_700_000_000, 1_700_000_000))
        assert read_run(path).state.ending == "no end recorded"

    def test_a_run_whose_process_was_killed_is_not_called_running(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "a", events=EVENTS[:1])
        owner = os.fork()
        if owner == 0:
            try:
                RunFolder(path).__enter__()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        told = ("killed", f"process {owner} is gone without recording an end: killed, or crashed", True)
        for flags in (os.WEXITED | os.WNOWAIT, os.WEXITED):  # its parent takes note late
            os.waitid(os.P_PID, owner, flags)
            state = read_run(path).state
            assert (state.ending, state.text, state.over) == told
        for changed, ending in (
            ({"events": [*EVENTS[:1], {"event": "out_of_memory", "micro_batch": 2}]}, "running"),
            ({"events": EVENTS}, "finished"),
        ):
            assert dataclasses.replace(read_run(path), **changed).state.ending == ending
        with RunFolder(path):
            assert read_run(path).state.ending == "running", "the process that resumes it lives"
        assert read_run(path).state.ending == "running", "it left the folder in order"

    @pytest.mark.parametrize(
        ("events", "evaluations", "silent", "ending"),
        [
            ([{"event": "sampling_end", "at": 5.0, "why": "finished"}], [], False, "running"),
            ([{"event": "sampling_end", "at": 5.0, "why": "finished"}], [], True, "between stages"),
            ([{"event": "sampling_end", "at": 5.0, "why": "stopped by signal"}], [], False, "stopped"),
            (
                [{"event": "training_on_samples", "at": 5.0, "why": "finished"}],
                [{"weights": "base", "at": 6.0}],
                False,
                "running",
            ),
            (
                [{"event": "training_on_samples", "at": 5.0, "why": "finished"}],
                [{"weights": "samples", "at": 6.0}],
                False,
                "finished",
            ),
        ],
    )
    def test_the_stages_of_an_rft_run(
        self,
        tmp_path: Path,
        events: list[dict[str, Any]],
        evaluations: list[dict[str, Any]],
        silent: bool,
        ending: str,
    ) -> None:
        (tmp_path / "recipe.toml").write_text('name = "units"\nworkload = "rft"\n')
        jsonl(tmp_path / "events.jsonl", events)
        jsonl(tmp_path / "evaluations.jsonl", evaluations)
        run = dataclasses.replace(read_run(tmp_path), silent_s=1000.0 if silent else 1.0)
        assert run.state.ending == ending


class TestComparison:
    def test_the_same_training_on_the_same_hardware_compares(self, tmp_path: Path) -> None:
        changed = {"micro_batch": {"value": 5, "reason": "tried", "source": "user"}}
        runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", plan_changes=changed)])
        verdict = Comparable(runs)
        assert (verdict.level, verdict.differences, verdict.plan_differences) == (
            "yes",
            [],
            ["micro_batch: 10 | 5"],
        )

    def test_other_hardware_leaves_only_the_losses(self, tmp_path: Path) -> None:
        changed = {"hardware": plan()["hardware"] | {"title": "NVIDIA A100"}}
        verdict = Comparable(
            read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", plan_changes=changed)])
        )
        assert verdict.level == "loss only"
        assert "NVIDIA H200 | NVIDIA A100" in verdict.text

    def test_another_training_of_the_same_work_compares_in_speed_and_the_difference_is_named(
        self, tmp_path: Path
    ) -> None:
        paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=50)]
        verdict = Comparable(read_runs(paths))
        assert (verdict.level, verdict.differences) == ("yes", ["train.steps: 40 | 50"])
        assert "compares the validation losses of different recipes" in verdict.text
        (paths[1] / "plan.json").write_text(json.dumps(plan(work="other")))
        assert Comparable(read_runs(paths)).level == "loss only"
        assert "against the first" not in dict(side_by_side([RunView(run) for run in read_runs(paths)]))
        written = (paths[1] / "recipe.toml").read_text()
        (paths[1] / "recipe.toml").write_text(written.replace("tinyshakespeare", "other"))
        assert Comparable(read_runs(paths)).level == "no"
        (paths[1] / "plan.json").write_text(json.dumps(plan()))
        assert Comparable(read_runs(paths)).level == "speed only"
        assert "against the first" in dict(side_by_side([RunView(run) for run in read_runs(paths)]))
        (paths[1] / "recipe.toml").unlink()
        assert Comparable(read_runs(paths)).level == "no"

    def test_a_run_that_diverged_before_its_validation_leaves_the_others_comparable(
        self, tmp_path: Path
    ) -> None:
        paths = [write_run(tmp_path / f"run-{steps}", steps=steps) for steps in (40, 50, 60)]
        blind = [{k: v for k, v in line.items() if k != "valid_loss"} for line in lines()]
        jsonl(paths[2] / "metrics.jsonl", blind)
        verdict = Comparable(read_runs(paths))
        assert (verdict.level, "without a validation, so not compared: run-60" in verdict.text) == (
            "yes",
            True,
        )
        jsonl(paths[1] / "metrics.jsonl", blind)
        assert Comparable(read_runs(paths)).level == "speed only"
        jsonl(paths[1] / "metrics.jsonl", lines())
        written = (paths[2] / "recipe.toml").read_text()
        (paths[2] / "recipe.toml").write_text(written.replace("tinyshakespeare", "other"))
        assert Comparable(read_runs(paths)).level == "speed only"

    def test_one_recipe_on_data_that_changed_is_no_comparison_of_losses(self, tmp_path: Path) -> None:
        paths = [write_run(tmp_path / name) for name in ("a", "b")]
        for path, data in zip(paths, ("d", "e"), strict=True):
            events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
            jsonl(
                path / "events.jsonl",
                [event | {"data": data} if event["event"] == "start" else event for event in events],
            )
        verdict = Comparable(read_runs(paths))
        assert verdict.level == "speed only"
        assert verdict.text.endswith("; they read different data")

    @pytest.mark.parametrize(("steps", "axis"), [(40, "step"), (50, "elapsed_s")])
    def test_a_page_of_different_trainings_opens_by_time(self, tmp_path: Path, steps: int, axis: str) -> None:
        runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=steps)])
        shown = page([RunView(run, place) for place, run in enumerate(runs)])
        assert re.findall(r'data-axis="(\w+)" aria-pressed="true"', shown) == [axis]
        assert len(re.findall(r'data-axis="\w+" aria-pressed="false"', shown)) == 2

    def test_how_often_a_run_validates_and_saves_is_no_other_training(self, tmp_path: Path) -> None:
        paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
        with (paths[1] / "recipe.toml").open("a") as recipe:
            recipe.write("eval_every = 10\ncheckpoint_every = 5\nkeep_checkpoints = 1\n")
        verdict = Comparable(read_runs(paths))
        assert (verdict.level, len(verdict.differences)) == ("yes", 3)

    def test_a_ratio_is_resolved_only_where_its_interval_leaves_out_one(self, tmp_path: Path) -> None:
        steady = Summary(read_run(write_run(tmp_path / "a")))
        twice = Summary(read_run(write_run(tmp_path / "b", metrics=lines(faster=2))))
        found = ratio(steady, twice)
        assert found is not None
        assert (found.value, "not resolved" in str(found)) == (2, False)
        same = ratio(steady, steady)
        assert same is not None
        assert (same.value, "not resolved" in str(same)) == (1, True)
        stood = [line | {"tokens_per_s": 0.0} for line in lines()]
        assert ratio(Summary(read_run(write_run(tmp_path / "c", metrics=stood))), steady) is None

    def test_processes_of_the_same_code_differ_by_more_than_their_blocks_show(self, tmp_path: Path) -> None:
        """Each run is steady to the digit, and yet 1.5% between two of them is no difference; 5% is."""
        runs = [
            Summary(read_run(write_run(tmp_path / f"{faster}", metrics=lines(faster=faster))))
            for faster in (1.0, 1.015, 1.05)
        ]
        same, faster = (ratio(runs[0], run) for run in runs[1:])
        assert "not resolved" in str(same)
        assert "not resolved" not in str(faster)
        assert faster is not None
        assert (faster.low, faster.high) == (pytest.approx(1.05 * 0.98), pytest.approx(1.05 * 1.02))

    def test_folders_of_one_name_are_told_apart(self, tmp_path: Path) -> None:
        runs = read_runs([write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")])
        assert [run.label for run in runs] == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]


class TestCurves:
    def test_short_runs_are_drawn_as_they_are(self) -> None:
        found = curves(lines())
        assert (found["each"], found["axes"]["step"]) == (1, list(range(1, 41)))
        assert found["curves"]["loss"] == {"mean": pytest.approx([5 - step / 20 for step in range(1, 41)])}

    def test_thinned_curves_keep_means_and_spikes_and_every_validation(self) -> None:
        made = lines(1000)
        made[123]["loss"] = 99.0
        for line in made[::10]:
            line["valid_loss"] = 1.0
        found = curves(made, most_points=100)
        assert found["each"] == 10
        assert len(found["axes"]["step"]) == 100
        assert found["curves"]["loss"]["high"][12] == 99.0
        assert found["curves"]["loss"]["mean"][0] == pytest.approx(
            sum(5 - step / 20 for step in range(1, 11)) / 10
        )
        assert len(found["validation"]["valid_loss"]) == 101

    def test_what_is_no_number_becomes_null(self) -> None:
        found = curves([{"step": 1, "loss": math.nan}, {"step": 2, "loss": 1.5}, {"step": 3, "loss": None}])
        assert found["curves"]["loss"]["mean"] == [None, 1.5, None]
        json.dumps(found, allow_nan=False)


class TestTail:
    def test_half_a_line_waits_for_its_rest(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        tail = Tail(path)
        assert tail.read() == []
        path.write_text('{"step": 1}\n{"st')
        assert tail.read() == [{"step": 1}]
        with path.open("a") as file:
            file.write('ep": 2}\n')
        assert tail.read() == [{"step": 1}, {"step": 2}]
        assert tail.replaced == 0

    def test_a_file_that_was_cut_back_is_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_text('{"step": 1}\n{"step": 2}\n')
        tail = Tail(path)
        tail.read()
        # longer: only its identity tells
        (tmp_path / "new").write_text('{"step": 1}\n{"step": 2, "again": true}\n{"step": 3}\n')
        os.replace(tmp_path / "new", path)
        assert [line["step"] for line in tail.read()] == [1, 2, 3]
        assert tail.replaced == 1


class TestTables:
    def test_the_ablation_stands_on_a_logarithmic_scale(self) -> None:
        (chart,) = ablation(ABLATION)  # from 0.5 to 8: four doublings, and 4% of that on both sides
        assert chart.one == pytest.approx(100 * (1 + 0.16) / (4 + 0.32))
        assert chart.rows[0].at == pytest.approx(100 * (3 + 0.16) / (4 + 0.32))
        assert chart.rows[0].interval_at == pytest.approx((100 * (2 + 0.16) / 4.32, 100 * 2 / 4.32))
        assert (chart.rows[0].claimed, chart.rows[0].measured, chart.rows[1].claimed) == (
            "1.5 to 2×",
            "4.00×",
            "–",
        )

    def test_facts_carry_their_units(self) -> None:
        assert fact("stalled_s", 0.25) == "stalled 250 ms"
        assert fact("size_bytes", 2**20) == "size 1.0 MiB"
        assert fact("tokens_per_s", 41234.5) == "tokens 41,234/s"
        assert (fact("best", True), fact("step", 1000)) == ("best yes", "step 1,000")

    def test_what_redline_ablate_writes_is_grouped_by_stage(self) -> None:
        rows = [
            {"name": "naive", "stage": "baseline", "workload": "train", "tokens_per_s": 5503.4},
            {
                "name": "bf16",
                "stage": "one by one",
                "workload": "train",
                "claimed": [3.0, 3.0],
                "outcome": "not applicable",
                "note": "a CPU",
            },
            {
                "name": "sdpa",
                "stage": "leave one out",
                "workload": "train",
                "measured_ratio": 1.2,
                "verdict": "faster",
                "kept": True,
            },
        ]
        first, second = ablation(rows)
        assert ([row.name for row in first.rows], first.rows[0].speed) == (["naive"], "5,503 tokens/s")
        assert first.not_applicable == [("bf16", "a CPU")]
        assert (second.title, second.rows[0].verdict) == (
            "pre-training, left out of the best, one at a time",
            "faster, kept",
        )

    def test_claims_have_three_digits(self) -> None:
        (chart,) = ablation([{"name": "all", "claimed": [3.16404, 280.8]}])
        assert chart.rows[0].claimed == "3.16 to 281×"

    def test_accuracies(self) -> None:
        assert [(test.name, test.accuracy) for test in accuracies([*EVALUATIONS, {"weights": "base"}])] == [
            ("before", 0.06),
            ("after RFT", 0.63),
        ]


class TestCommand:
    def test_tables_page_and_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        paths = [str(write_run(tmp_path / name)) for name in ("a", "b")]
        assert main(["report", paths[0]]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        for part in (
            "2,000 tokens/s",
            "2,500 tokens/s",
            "MFU 40.0%",
            "of the attainable speed 80.0%",
            "because",
            "perplexity 25.79",
        ):
            assert part in shown
        assert (tmp_path / "a" / "report.html").read_text().startswith("<!doctype html>")
        assert main(["report", *paths, "--json", "--out", str(tmp_path / "both.html")]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["comparable"]["level"] == "yes"
        first = found["runs"][0]
        assert (first["plan"], first["events"]) == (plan(), EVENTS)
        assert [finding["cause"] for finding in first["findings"]] == [
            shown.cause for shown in RunView(read_run(tmp_path / "a")).findings or []
        ]
        assert [run["speed"]["update"]["value"] for run in found["runs"]] == [2000, 2000]
        assert [part["name"] for part in first["time"]][:2] == ["updates", "data wait"]
        assert "<title>a, b " in (tmp_path / "both.html").read_text()

    @pytest.mark.parametrize(
        ("name", "text", "part"),
        [
            ("plan.json", "{", "plan.json is damaged"),
            ("plan.json", "[]", "must hold a table"),
            ("metrics.jsonl", "{\n", "is damaged"),
        ],
    )
    def test_damaged_files_are_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, part: str
    ) -> None:
        path = write_run(tmp_path / "a")
        (path / name).write_text(text)
        assert main(["report", str(path)]) == 3
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert part in shown.err

    def test_a_loss_that_is_no_number_any_more_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        made = [line | {"loss": None if line["step"] > 31 else line["loss"]} for line in lines()]
        assert main(["report", str(write_run(tmp_path / "a", metrics=made))]) == 0
        shown = capsys.readouterr().out
        assert "× 3.450 nats/token" in shown
        assert "not a number  from update 32 on" in shown

    def test_evidence_is_written_as_redline_diagnose_writes_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = str(
            write_run(
                tmp_path / "a", metrics=[line | {"data_wait_s": line["step_s"] / 3} for line in lines()]
            )
        )
        assert main(["report", path]) == 0
        assert "wait: 33.3% of the update" in " ".join(capsys.readouterr().out.split())
        assert main(["diagnose", path]) == 0
        assert "33.3% of the update" in capsys.readouterr().out

    def test_nothing_found_is_said(self, tmp_path: Path) -> None:
        made = [line | {"data_wait_s": 0.0} for line in lines()]
        shown = RunView(read_run(write_run(tmp_path / "a", metrics=made, events=EVENTS[:1])))
        assert (shown.findings, shown.remark) == ([], "Nothing found that would bring more than 5%.")

    def test_findings_of_an_rft_run_are_those_of_redline_diagnose(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_rft(tmp_path / "a")
        assert main(["report", str(path), "--json"]) == 0
        told = [finding["cause"] for finding in json.loads(capsys.readouterr().out)["runs"][0]["findings"]]
        assert main(["diagnose", str(path), "--json"]) == 0
        assert told == [finding["cause"] for finding in json.loads(capsys.readouterr().out)["findings"]]
        assert "few-correct" in told

    def test_an_rft_run_that_only_sampled_has_findings_too(self, tmp_path: Path) -> None:
        for name, correct, causes in (("a", 10, ["few-correct"]), ("b", 100, None)):
            path = write_rft(tmp_path / name, correct=correct)
            (path / "train-samples" / "metrics.jsonl").unlink()
            found = RunView(read_run(path)).findings
            assert (None if found is None else [each.cause for each in found]) == causes

    def test_a_folder_of_rounds_is_reported_side_by_side(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for place in (1, 2, 10):
            write_rft(tmp_path / "rft" / f"round-{place}", sample=f'sampler = "{place}"\n')
        assert main(["report", str(tmp_path / "rft"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [run["label"] for run in found["runs"]] == ["round-1", "round-2", "round-10"]
        assert found["comparable"]["level"] == "accuracy only"
        assert found["page"] == str(tmp_path / "rft" / "report.html")

    def test_what_is_no_run_folder_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for path in (tmp_path / "none", tmp_path):
            assert main(["report", str(path)]) == 3
            assert "run folder" in capsys.readouterr().err

    def test_it_runs_where_torch_is_not_installed(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "a")
        program = (
            "import sys; sys.modules['torch'] = None\nfrom redline.cli.main import"
            f" main\nsys.exit(main(['report', {str(path)!r}]))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_large_numbers_of_a_plan_are_read_by_their_groups(tmp_path: Path) -> None:
    changed = {"flops_per_token": {"value": 2949120, "source": "observed", "reason": "6 a weight"}}
    values = {
        name: value
        for name, value, *_ in plan_rows(read_run(write_run(tmp_path / "a", plan_changes=changed)))
    }
    assert (values["flops_per_token"], values["micro_batch"]) == ("2,949,120", "10")


def test_a_plan_of_another_version_is_shown(tmp_path: Path) -> None:
    changed = {
        "new_value": {"value": 3, "reason": "later", "source": "measurement"},
        "prediction": None,
        "hardware": 7,
    }
    run = read_run(write_run(tmp_path / "a", plan_changes=changed))
    assert [name for name, *_ in RunView(run).plan] == ["precision", "micro_batch", "new_value"]
    assert Summary(run).hardware is None


def test_words_about_a_wrong_limit_are_in_the_note_of_a_tile() -> None:
    note = "of the peak (so the limit is too low)"
    assert view._limit_tile("MFU", 1.901, "of the peak") == view.Tile("MFU", format_share(1.901), note)
    assert view._limit_tile("MFU", 0.5, "of the peak") == view.Tile("MFU", format_share(0.5), "of the peak")
    assert view._limit_tile("MFU", None, "of the peak").value == DASH
