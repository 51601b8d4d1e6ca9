"""The waterfall's decisions, with trials whose outcome is written down: what is kept, compared, skipped and
left out, and that nothing finished is measured again."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from lab import Behaviour, Lab

from redline.cli.main import main
from redline.config.load import build, load_recipe
from redline.config.recipe import LoraConfig
from redline.errors import ConfigError, StorageError
from redline.machine.facts import read_facts
from redline.measure.trial import GenerationSwitches, Timing, Trial, trial_key
from redline.optimizations.catalogue import Samples, find, study
from redline.plan.arithmetic import flops_per_token
from redline.plan.hardware import hardware_as
from redline.plan.plan import PLANNED, Hardware
from redline.record.units import exact, factor
from redline.report.ablation import ablation
from redline.report.grid import Output
from redline.report.terminal import print_ablation
from redline.tune.ablate import PUT_OFF, AblationRow, ablate, mfu
from redline.tune.arms import UpdateArms, arms_for, naive, rehearsed
from redline.tune.guard import SAME_BITS
from redline.tune.quality import Judge, Quality
from redline.tune.waterfall_table import COLUMNS, cells, markdown

RECIPE = load_recipe("seeds/002")
H200 = hardware_as("h200-141g", 16)
CPU = Hardware(
    title="a CPU", kind="cpu", memory_bytes=2**34, compute_capability=(), cores=2, peak_tflops={},
    measured_tflops={},
    bandwidth_bytes_per_s=None, source="test",
)  # fmt: skip
LOSSES = (11.0, 10.5, 10.0)
SAMPLES = Samples(prompts=32, samples=30, prompt_tokens=96, new_tokens=128)
ROW = AblationRow(name="sdpa", stage="one by one", workload="train", title="", claimed=None, source="")


def values(trial: Trial) -> dict[str, Any]:
    plan = trial.setting["plan"]
    return {name: plan[name]["value"] for name in PLANNED}


def measured(
    step_s: float, *, outcome: str = "ok", losses: tuple[float, ...] = LOSSES, tokens: int = 1000
) -> Behaviour:
    starts = {0: outcome} if outcome != "ok" else {}
    trained = {"losses": losses, "tokens": tokens, "starts": starts}
    return Behaviour(step_s=step_s, noise=(0.0,), takes_s=0.1, taken_bytes=2**30, **trained)


def by_the_book(trial: Trial) -> Behaviour:
    """A machine whose speeds follow from the plan: bf16 twice as fast, compiling 1.5x, recomputation 1.3x
    slower, the rest nothing."""
    plan = values(trial)
    step_s = {"fp32": 1.0, "tf32": 0.8, "bf16": 0.4, "fp8": 0.5}[plan["precision"]]
    step_s *= (1.0 if plan["compile"] == "off" else 1 / 1.5) * (1.3 if plan["recompute"] == "full" else 1.0)
    if plan["attention"] == "math":
        step_s *= 2
    rounding = 1.001 if plan["precision"] != "fp32" else 1.0
    return measured(step_s, losses=tuple(rounding * loss for loss in LOSSES))


Answer = Callable[[Trial], Behaviour]


def run(
    folder: Path,
    answer: Answer = by_the_book,
    *,
    hardware: Hardware = H200,
    name: str = "gpt2-124m",
    lab: Lab | None = None,
    only: tuple[str, ...] = (),
    minutes: float = 1000,
) -> dict[tuple[str, str], AblationRow]:
    """The study `name` on the recipe of seeds/002; that of gpt2-124m is the list for any recipe."""
    rows = ablate(
        RECIPE, name, hardware, folder, only=only, minutes=minutes, progress=lambda text: None,
        children=lab or Lab(answer),
    )  # fmt: skip
    return {(row.stage, row.name): row for row in rows}


# ---- decisions ----


def test_what_pays_is_kept_and_the_rest_leaves_the_state_alone(tmp_path: Path) -> None:
    rows = run(tmp_path)
    kept = [name for (stage, name), row in rows.items() if stage == "one by one" and row.kept]
    assert kept == ["tf32", "bf16", "sdpa", "no-recompute", "compile"]
    assert rows["one by one", "bf16"].measured_ratio == pytest.approx(0.8 / 0.4)
    assert rows["one by one", "sdpa"].measured_ratio == pytest.approx(2.0)
    assert rows["one by one", "fp8"].verdict == "slower"
    for name in ("loader-threads", "micro-batch", "fused-optimizer", "allocator", "compile-autotune"):
        assert rows["one by one", name].verdict == "not resolved", name
    assert rows["all", "all kept"].measured_ratio == pytest.approx(2 * 1.3 / (0.4 / 1.5))
    # TF32 is no longer there to be left out; bf16 left out of the best falls back to it.
    assert rows["leave one out", "tf32"].outcome == "no change"
    assert rows["leave one out", "bf16"].measured_ratio == pytest.approx(2.0)
    assert rows["leave one out", "compile"].measured_ratio == pytest.approx(1.5)


def test_a_row_shows_both_speeds_of_its_ratio(tmp_path: Path) -> None:
    """On a machine that gets slower from one comparison to the next, the speed in the row above is another."""

    def drifting(trial: Trial) -> Behaviour:
        found = by_the_book(trial)
        return replace(found, step_s=found.step_s * (1 + len(lab.started)))

    lab = Lab(drifting)
    rows = [row for row in run(tmp_path, lab=lab).values() if row.measured_ratio is not None]
    assert {row.stage for row in rows} == {"one by one", "all", "leave one out"}
    for row in rows:
        assert row.before_tokens_per_s
        assert row.tokens_per_s
        assert row.tokens_per_s / row.before_tokens_per_s == pytest.approx(row.measured_ratio), row
        both = f"{row.before_tokens_per_s:,.0f} → {row.tokens_per_s:,.0f} ("
        assert dict(zip(COLUMNS, cells(row), strict=True))["tokens/s (MFU)"].startswith(both)
    page = [row for chart in ablation([asdict(row) for row in rows]) for row in chart.rows]
    assert [row.speed for row in page] == [
        f"{exact(row.before_tokens_per_s)} to {exact(row.tokens_per_s)} tokens/s" for row in rows
    ]


def test_every_list_is_measured_before_anything_is_left_out(tmp_path: Path) -> None:
    """The time may not be enough for all, and a list says more than what its best would be without one of
    it."""
    faster = iter(range(1000))
    speeds: dict[str, float] = {}

    def answer(trial: Trial) -> Behaviour:
        return measured(speeds.setdefault(trial_key(trial), 1 / (1 + next(faster))), losses=(0.0,) * 3)

    rows = ablate(
        load_recipe("seeds/000"), "seeds/000", H200, tmp_path, minutes=1000, progress=lambda text: None,
        children=Lab(answer),
    )  # fmt: skip
    stages = [(row.workload, "left out" if row.stage == "leave one out" else "applied") for row in rows]
    assert list(dict.fromkeys(stages)) == [
        ("generate", "applied"),
        ("finetune", "applied"),
        ("generate", "left out"),
        ("finetune", "left out"),
    ]


def test_what_a_document_names_and_nothing_switches_is_a_row_that_says_so(tmp_path: Path) -> None:
    rows = run(tmp_path, name="seeds/002")
    assert (rows["one by one", "memory-map"].outcome, rows["one by one", "schedule"].outcome) == (
        "built in",
        "recipe",
    )
    assert "redline data build" in rows["one by one", "memory-map"].note


def test_every_row_that_was_measured_has_the_guards_verdict(tmp_path: Path) -> None:
    def answer(trial: Trial) -> Behaviour:
        found, plan = by_the_book(trial), values(trial)
        # another training only where both are on
        odd = plan["compile"] != "off" and plan["precision"] == "bf16"
        return replace(found, losses=tuple(3 * loss for loss in found.losses)) if odd else found

    assert all(
        "same training" in row.numerics
        for row in run(tmp_path / "good", name="seeds/002").values()
        if row.measured_ratio and row.name != "larger-batch"
    )
    rows = run(tmp_path / "bad", answer, only=("compile", "bf16"))
    assert [rows["one by one", name].kept for name in ("bf16", "compile")] == [True, False]
    assert "same training" in rows["leave one out", "bf16"].numerics
    assert ("all", "all kept") not in rows, "with one kept it is that one's own row"


def test_roundings_are_held_to_the_naive_state_and_do_not_add_up(tmp_path: Path) -> None:
    """Two changes of 0.9% each are within the band of 1% one by one, and not together; also where the naive
    state ran only in a pair."""

    def answer(trial: Trial) -> Behaviour:
        found, plan = by_the_book(trial), values(trial)
        off = 1.009 ** ((plan["precision"] == "bf16") + (plan["attention"] != "math"))
        return replace(found, losses=tuple(off * loss for loss in LOSSES))

    def naive_crashes_alone(trial: Trial) -> Behaviour:
        found, plan = answer(trial), values(trial)
        first = plan["precision"] == "fp32" and plan["attention"] == "math"
        return replace(found, starts={1: "crashed", 2: "crashed"}) if first else found

    for name, world in (("ok", answer), ("crashed", naive_crashes_alone)):
        rows = run(tmp_path / name, world, only=("bf16", "sdpa"))
        assert rows["baseline", "start"].outcome == name
        assert [rows["one by one", name].kept for name in ("bf16", "sdpa")] == [True, False], name


@pytest.mark.parametrize(("ever", "verdict", "kept"), [(True, "not compared", False), (False, "runs", True)])
def test_a_change_whose_state_before_fails_is_kept_only_where_that_never_ran(
    tmp_path: Path, ever: bool, verdict: str, kept: bool
) -> None:
    def answer(trial: Trial) -> Behaviour:
        if values(trial)["attention"] != "math":
            return measured(0.5)
        starts = dict.fromkeys(range(2 if ever else 1, 9), "crashed")
        blocks = dict.fromkeys(range(4, 99), "crashed")  # alone it has two, and one that does not count
        return replace(measured(1.0), starts=starts, blocks=blocks)

    row = run(tmp_path, answer, only=("sdpa",))["one by one", "sdpa"]
    assert (row.verdict, row.kept, row.measured_ratio) == (verdict, kept, None)


def test_without_a_baseline_a_change_is_compared_with_the_state_before_it(tmp_path: Path) -> None:
    def answer(trial: Trial) -> Behaviour:
        if values(trial)["attention"] == "math":
            return replace(measured(1.0), starts={1: "crashed", 2: "crashed"})
        return measured(1.0, losses=(1.0, 2.0, 3.0))

    assert "refused" in run(tmp_path, answer, only=("sdpa",))["one by one", "sdpa"].numerics


def test_a_guide_starts_where_it_starts_and_is_quoted_alone(tmp_path: Path) -> None:
    """Guide 002 starts compiled, in bf16, with 8 sequences a pass; its own claims stand beside its rows, those
    of others only where it makes none, and its claim of the whole is quoted instead of multiplying."""
    rows = run(tmp_path, name="seeds/002")
    start = rows["baseline", "start"].title
    assert all(
        words in start for words in ("precision bf16", "compile default", "micro_batch 8", "update foreach")
    )
    assert (rows["one by one", "fp8"].claimed, rows["one by one", "fp8"].source) == (
        (2, 2),
        "tuning guide 002 §2",
    )
    assert rows["one by one", "sdpa"].claimed is None, "the guide gives no number for it"
    assert (
        "precision bf16" in run(tmp_path / "only", name="seeds/002", only=("fp8",))["baseline", "start"].title
    )
    from_fp32 = run(tmp_path / "added", name="seeds/002", only=("bf16",))
    assert "precision fp32" in from_fp32["baseline", "start"].title, (
        "an entry of another list brings its own start"
    )
    by_others = run(tmp_path / "others")
    assert by_others["one by one", "sdpa"].claimed == (1.7, 3)
    assert by_others["all", "all kept"].claimed is None
    table = markdown(list(rows.values()), "seeds/002", "here")
    assert '| "TorchAO FP8 Integration ... Expected 2x speedup on H100" | 0.80x in tokens/s' in table


def test_mfu_counts_what_a_workload_computes() -> None:
    """Training: 6 FLOPs a weight and token and the scores of attention, of which a third is forward. Adapters spare the
    gradients of frozen weights and nothing of attention, and have products of their own: as the plan counts it."""
    model, T, peak = RECIPE.model, RECIPE.data.seq_len, 989e12
    D, F = model.hidden_size, model.ffn_size
    weights = model.num_layers * (4 * D * D + 3 * D * F) + model.vocab_size * D  # SwiGLU has three matrices
    scores = 12 * model.num_layers * D * T
    lora, adapters = LoraConfig(rank=4, targets=("q",)), model.num_layers * 4 * 2 * D
    row = replace(ROW, tokens_per_s=1000.0)
    expected = {
        ("train", None): 6 * weights + scores,
        ("finetune", None): 6 * weights + scores,
        ("finetune", lora): 4 * weights + 6 * adapters + scores,
        ("generate", lora): 2 * weights + scores / 3,
    }
    for (workload, adapter), flops in expected.items():
        found = mfu(replace(row, workload=workload), replace(RECIPE, lora=adapter), H200, T)
        assert found == pytest.approx(1000 * flops / peak, rel=1e-9)
    assert mfu(replace(row, tokens_per_s=None), RECIPE, H200, T) is None
    assert mfu(row, RECIPE, CPU, T) is None, "no peak is known"


def test_lora_of_a_pretraining_recipe_is_counted_as_the_trial_computes_it(tmp_path: Path) -> None:
    """With adapters, and in rows as long as those of the trial, not as the longest that the recipe allows."""
    rehearsal = rehearsed(RECIPE)
    length = 100
    tokens = length * rehearsal.train.batch_size
    lab = Lab(lambda trial: measured(1.0, tokens=tokens))
    rows = ablate(RECIPE, "seeds/003", H200, tmp_path, minutes=1000, progress=lambda text: None, children=lab)
    found = [row for row in rows if row.workload == "finetune" and row.mfu is not None]
    assert found
    flops = flops_per_token(RECIPE.model, length, rehearsal.lora)
    for row in found:
        assert row.mfu == pytest.approx((row.tokens_per_s or 0) * flops / 989e12)


def test_a_change_that_fails_the_guard_is_never_kept(tmp_path: Path) -> None:
    def wrong(trial: Trial) -> Behaviour:
        fast = values(trial)["precision"] == "bf16"
        return measured(0.5 if fast else 1.0, losses=(9.0, 8.0, 7.0) if fast else LOSSES)

    row = run(tmp_path, wrong, only=("bf16",))["one by one", "bf16"]
    assert row.verdict == "faster"
    assert not row.kept
    assert "not the same" in row.numerics.lower() or "outside" in row.numerics.lower()


def test_another_training_is_measured_and_never_kept(tmp_path: Path) -> None:
    def answer(trial: Trial) -> Behaviour:
        larger = "batch_size = 512" in trial.setting["recipe"]
        return measured(1.0, tokens=4000 if larger else 1000)

    row = run(tmp_path, answer, only=("larger-batch",))["one by one", "larger-batch"]
    assert row.measured_ratio == pytest.approx(4.0), "by tokens, since the steps differ"
    assert "another training" in row.numerics
    assert not row.kept


def test_the_mfu_of_another_training_counts_what_it_computes(tmp_path: Path) -> None:
    """Where it is tried, and in the rows of the best state once it is kept."""

    class Keeps(Judge):
        def other_training(self, before: Any, after: Any, tokens_per_s: float) -> Quality:
            return Quality(figure="seconds to the loss", verdict="not worse")

        same_training = other_training

    small = replace(RECIPE, train=replace(RECIPE.train, batch_size=32))
    judge = Keeps(
        folder=tmp_path,
        facts=read_facts(),
        seeds=2,
        seconds=1.0,
        margin=None,
        train=lambda *_: None,
        progress=str,
    )
    rows = ablate(
        small, "gpt2-124m", H200, tmp_path, only=("bf16", "sampled-softmax"), minutes=1000, progress=str,
        children=Lab(by_the_book), judge=judge,
    )  # fmt: skip
    found = {(row.stage, row.name): row for row in rows}
    whole, some = (
        flops_per_token(small.model, small.data.seq_len, candidates=count) for count in (0, 24_576)
    )
    assert some < whole
    expected = {
        ("baseline", "start"): whole, ("one by one", "bf16"): whole, ("one by one", "sampled-softmax"): some,
        ("all", "all kept"): some, ("leave one out", "bf16"): some, ("leave one out", "sampled-softmax"): some,
    }  # fmt: skip
    peak = H200.peak_tflops["bf16"] * 1e12
    assert {place: row.mfu for place, row in found.items()} == {
        place: pytest.approx((found[place].tokens_per_s or 0) * flops / peak)
        for place, flops in expected.items()
    }


def test_what_was_slower_is_tried_again_on_top_of_what_was_kept_after_it(tmp_path: Path) -> None:
    """bf16 costs time with explicit attention and pays with a kernel; recomputation does not pay at either
    time."""

    def answer(trial: Trial) -> Behaviour:
        plan = values(trial)
        half, kernel = plan["precision"] == "bf16", plan["attention"] != "math"
        return measured(
            (1.0 if kernel else 2.0)
            * (1.0 if not half else 0.5 if kernel else 1.1)
            * (1.3 if plan["recompute"] == "full" else 1.0)
        )

    rows = run(tmp_path, answer, only=("bf16", "sdpa", "recompute"))
    assert rows["one by one", "bf16"].verdict == "slower"
    assert (rows["second try", "bf16"].measured_ratio, rows["second try", "bf16"].kept) == (
        pytest.approx(2.0),
        True,
    )
    assert [row.kept for (stage, name), row in rows.items() if name == "recompute"] == [False, False]
    assert rows["all", "all kept"].measured_ratio == pytest.approx(4.0)
    text = markdown(list(rows.values()), "seeds/002", "here")
    places = [text.index(f"| {name} |") for name in ("bf16", "sdpa", "bf16, again", "all kept: sdpa, bf16")]
    assert places == sorted(places)


def test_what_did_not_fit_is_tried_again_when_there_is_room(tmp_path: Path) -> None:
    """Larger passes run out of memory with explicit attention, and pay with a kernel."""

    def answer(trial: Trial) -> Behaviour:
        plan = values(trial)
        large, kernel = plan["micro_batch"] > 8, plan["attention"] != "math"
        if large and not kernel:
            return measured(1.0, outcome="out_of_memory")
        return measured((0.5 if kernel else 1.0) * (0.8 if large else 1.0))

    rows = run(tmp_path, answer, name="seeds/002", only=("micro-batch", "sdpa"))
    assert rows["one by one", "micro-batch"].outcome == "out_of_memory"
    assert (rows["second try", "micro-batch"].measured_ratio, rows["second try", "micro-batch"].kept) == (
        pytest.approx(1.25),
        True,
    )


def test_what_lost_its_switch_to_a_rival_is_not_tried_again(tmp_path: Path) -> None:
    """bf16 is slower, FP8 is kept: bf16 again would be bf16 in the place of FP8."""

    def answer(trial: Trial) -> Behaviour:
        return measured({"fp32": 2.0, "tf32": 1.0, "bf16": 1.2, "fp8": 0.5}[values(trial)["precision"]])

    rows = run(tmp_path, answer, only=("tf32", "bf16", "compile", "fp8"))
    assert rows["one by one", "bf16"].verdict == "slower"
    assert rows["one by one", "fp8"].kept
    assert not [name for stage, name in rows if stage == "second try"]


def test_a_change_that_compiles_for_minutes_leaves_time_for_the_others(tmp_path: Path) -> None:
    """Its child does not answer within the two minutes given; the change after it is measured in what is left."""

    def answer(trial: Trial) -> Behaviour:
        slow, fused = values(trial)["compile"] != "default", values(trial)["update"] == "fused"
        return replace(measured(0.5 if fused else 1.0), start_s=300.0 if slow else 1.0)

    rows = run(tmp_path, answer, name="seeds/002", only=("compile-autotune", "fused-optimizer"), minutes=2)
    put_off = rows["one by one", "compile-autotune"]
    assert (put_off.outcome, put_off.note) == ("not run", PUT_OFF)
    assert rows["one by one", "fused-optimizer"].kept


def test_rows_of_fewer_rounds_are_marked() -> None:
    row = replace(ROW, measured_ratio=2.0, low=1.9, high=2.1)
    assert cells(replace(row, rounds=6))[4] == "1.90-2.10x"
    assert cells(replace(row, rounds=4))[4] == "1.90-2.10x*"


def test_what_there_was_no_time_for_is_named_below_the_table() -> None:
    late = replace(ROW, outcome="not run", note="late")
    text = markdown([replace(ROW, name="bf16"), late, replace(late, name="fp8")], "t", "here")
    assert "| bf16 |" in text
    assert "Not run for want of time: sdpa, fp8." in text
    assert "| sdpa" not in text


def test_a_crash_is_a_row_and_a_change_that_makes_it_run_is_kept(tmp_path: Path) -> None:
    def answer(trial: Trial) -> Behaviour:
        plan = values(trial)
        if plan["attention"] == "math":
            return measured(1.0, outcome="out_of_memory")
        return measured(1.0, outcome="crashed") if plan["compile"] != "off" else measured(1.0)

    rows = run(tmp_path, answer, only=("sdpa", "compile"))
    assert rows["baseline", "start"].outcome == "out_of_memory"
    assert (rows["one by one", "sdpa"].verdict, rows["one by one", "sdpa"].kept) == ("runs", True)
    assert (rows["one by one", "compile"].outcome, rows["one by one", "compile"].note) == (
        "crashed",
        "planted",
    )
    assert rows["leave one out", "sdpa"].outcome == "out_of_memory"


def test_what_does_not_apply_is_not_run(tmp_path: Path) -> None:
    lab = Lab(lambda trial: measured(1.0))
    rows = run(tmp_path, hardware=CPU, lab=lab, only=("bf16", "fp8", "sdpa"))
    assert rows["one by one", "bf16"].outcome == rows["one by one", "fp8"].outcome == "not applicable"
    assert len(lab.started) == 2, "the naive state and sdpa"


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path: Path) -> None:
    def interrupted(trial: Trial) -> Behaviour:
        if values(trial)["precision"] == "bf16":
            raise KeyboardInterrupt
        return by_the_book(trial)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupted)
    rows = json.loads((tmp_path / "ablation.json").read_text())
    assert [row["name"] for row in rows] == ["start", "tf32"]


def test_the_record_is_what_the_report_reads(tmp_path: Path) -> None:
    rows = list(run(tmp_path).values())
    saved = json.loads((tmp_path / "ablation.json").read_text())
    assert [row["name"] for row in saved] == [row.name for row in rows]
    promised = "name claimed measured_ratio low high verdict memory_bytes numerics outcome"
    assert all(set(promised.split()) <= set(row) for row in saved)
    assert sum(len(chart.rows) + len(chart.not_applicable) for chart in ablation(saved)) == len(saved)
    text = markdown(rows, "gpt2-124m", "here")
    assert text.count("\n| ") == len(rows) + 2  # two tables, each with a head
    assert all(len(cells(row)) == len(COLUMNS) for row in rows)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_can_be_read_in_a_terminal(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is longer than the terminal, no word is cut in two, and every row is there with its figures."""
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [
        *run(tmp_path / "gpu").values(),
        *run(tmp_path / "cpu", hardware=CPU, only=("bf16", "fp8", "sdpa")).values(),
    ]
    print_ablation(ablation([asdict(row) for row in rows]), Output())
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= columns
    words = {word.rstrip(",;:*") for line in lines for word in line.split()}
    for row in rows:
        said = [row.name, row.verdict, row.title if row.stage == "all" else ""]
        said += [f"{factor(row.measured_ratio)}×", f"{exact(row.tokens_per_s)}"] if row.measured_ratio else []
        assert {word.rstrip(",;:*") for text in said for word in text.split()} <= words, row.name
    assert [line for line in lines if "left out of the best" in line]


def test_any_switch_of_the_workload_can_be_asked_for_and_nothing_else(tmp_path: Path) -> None:
    asked = run(tmp_path, only=("selective-recompute", "compile", "sdpa"))
    assert [name for stage, name in asked if stage == "one by one"] == [
        "sdpa",
        "compile",
        "selective-recompute",
    ]
    with pytest.raises(ConfigError, match="switches nothing in train"):
        run(tmp_path, only=("packing",))
    with pytest.raises(ConfigError, match="it is built in"):
        run(tmp_path, only=("pinned-memory",))
    with pytest.raises(ConfigError, match="did you mean 'sdpa'"):
        run(tmp_path, only=("spda",))


# ---- states ----


def test_the_naive_state_is_every_switch_off_and_the_batch_stays() -> None:
    names = "tf32 bf16 sdpa compile no-recompute micro-batch fused-optimizer fp8"
    state = naive([find(name) for name in names.split()], H200)
    assert state == {
        "precision": "fp32", "attention": "math", "compile": "off", "recompute": "full", "micro_batch": 8,
        "update": "loop",
    }  # fmt: skip
    recipe, plan = UpdateArms(recipe=RECIPE, hardware=H200, timing=Timing()).plan(state)
    assert (plan.micro_batch, plan.accumulation, plan.update) == (8, 16, "loop")
    assert recipe.fingerprint == RECIPE.fingerprint
    assert plan.work == RECIPE.work


def test_a_pass_divides_the_batch_and_kernels_fall_back_with_the_precision() -> None:
    arms = UpdateArms(
        recipe=load_recipe("seeds/002", ["train.batch_size=12"]), hardware=H200, timing=Timing()
    )
    assert arms.plan({"micro_batch": 8})[1].micro_batch == 6
    best = {"precision": "bf16", "cross_entropy": "fused", "attention": "cudnn"}
    without = arms.plan({**best, "precision": "tf32"})[1]
    assert (without.cross_entropy, without.attention) == ("torch", "auto")
    assert arms.plan({"allocator": ""})[1].allocator == ""


def test_a_change_brings_no_other_with_it() -> None:
    """Left to itself the planner would answer bf16 with the fused loss and cuDNN, and bf16 would be credited
    with all three."""
    arms = UpdateArms(recipe=RECIPE, hardware=H200, timing=Timing())
    held = arms.held({"precision": "fp32"})
    before, after = (arms.plan({**held, "precision": precision})[1] for precision in ("fp32", "bf16"))
    assert {name for name in after.why if getattr(before, name) != getattr(after, name)} == {"precision"}
    free = arms.plan({"precision": "bf16"})[1]
    assert (free.cross_entropy, free.attention) == ("fused", "cudnn")


def test_switches_that_turn_nothing_make_the_same_trial() -> None:
    assert (
        GenerationSwitches(cached=False, graphs=True).in_force()
        == GenerationSwitches(cached=False, graphs=False).in_force()
    )
    assert GenerationSwitches(merged=False).in_force() == GenerationSwitches()
    assert (
        GenerationSwitches(refilled=False, clear_cache=True).in_force()
        != GenerationSwitches(refilled=False).in_force()
    )
    arms = arms_for("generate", RECIPE, H200, samples=SAMPLES, timing=Timing())
    assert trial_key(arms.trial({"merged": False})) == trial_key(arms.trial({}))
    assert trial_key(arms.trial({"shared": False})) != trial_key(arms.trial({}))
    one = arms_for("generate", RECIPE, H200, samples=replace(SAMPLES, prompts=8, samples=1), timing=Timing())
    for switch in ({"shared": False}, {"slots": 8}):
        assert trial_key(one.trial(switch)) == trial_key(one.trial({}))
    assert trial_key(one.trial({"slots": 7})) != trial_key(one.trial({}))


def test_a_switch_that_gives_the_same_plan_is_not_measured_against_itself(tmp_path: Path) -> None:
    """Guide 004 begins with the passes that the planner takes too."""
    rows = ablate(
        load_recipe("seeds/004"), "seeds/004", H200, tmp_path, only=("micro-batch",), minutes=1000,
        progress=lambda text: None, children=Lab(by_the_book),
    )  # fmt: skip
    assert [(row.name, row.outcome) for row in rows] == [("start", "ok"), ("micro-batch", "no change")]


def test_the_allocator_is_not_compared_where_the_user_has_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    row = run(tmp_path, only=("allocator",))["one by one", "allocator"]
    assert row.outcome == "not applicable"
    assert row.note.startswith("PYTORCH_ALLOC_CONF is set")


def test_what_should_round_and_gives_the_same_bits_is_doubted(tmp_path: Path) -> None:
    """by_the_book's losses follow from the precision alone, as if no other switch had an effect."""
    rows = run(tmp_path, only=("bf16", "sdpa", "no-recompute"))
    doubted = {name for (stage, name), row in rows.items() if row.numerics.endswith(SAME_BITS)}
    assert doubted == {"sdpa"}
    assert rows["one by one", "sdpa"].numerics.startswith("same training (rounding: loss 1e-03")


# ---- the folder ----


def test_the_rows_of_another_list_are_not_written_over(tmp_path: Path) -> None:
    whole = run(tmp_path)
    saved = (tmp_path / "ablation.json").read_text()
    with pytest.raises(StorageError, match=r"results of another list \(tf32, bf16.*--out"):
        run(tmp_path, only=("sdpa",))
    assert (tmp_path / "ablation.json").read_text() == saved
    (tmp_path / "ablation.json").write_text(json.dumps(json.loads(saved)[:4]))  # it was killed
    assert run(tmp_path).keys() == whole.keys()
    (tmp_path / "ablation.json").write_text("[{]")
    with pytest.raises(StorageError, match="is damaged"):
        run(tmp_path)


def test_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert main(["ablate", "nano", "--only", "sdpa", "--out", str(tmp_path)]) == StorageError.exit_code
    assert "holds a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_first_state_that_does_not_fit_is_a_row_and_not_the_end(tmp_path: Path) -> None:
    large, lab = load_recipe("llama-1.3b", ["data.source=tinyshakespeare"]), Lab(lambda trial: measured(1.0))
    how = {"only": ("micro-batch",), "minutes": 1, "progress": lambda text: None, "children": lab}
    rows = ablate(large, "llama-1.3b", hardware_as("t4-16g", 8), tmp_path, **how)
    assert rows[0].outcome == "out_of_memory"
    assert "does not fit" in rows[0].note


# ---- what was measured ----


def test_the_page_of_claims_is_the_tools_own() -> None:
    """Every table of docs/claims.md is what `--markdown` makes of the rows that were recorded."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "claims.md").read_text(encoding="utf-8").partition("<!-- tables -->")[2]
    recorded = json.loads((root / "benchmarks" / "claims_nvidia-h200_20261116.json").read_text())
    assert list(recorded) == [f"seeds/00{n}" for n in range(5)]
    for name, rows in recorded.items():
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        tables = markdown([build(AblationRow, row, where=name) for row in rows], name, "")
        assert tables.partition("\n### ")[2].strip() == section.partition("\n### ")[2].strip()
        assert all(find(row["name"]) for row in rows if row["stage"] == "one by one")


def test_the_page_of_claims_quotes_the_guides() -> None:
    """Where the guides lie beside the checkout (../shared/seeds), every quotation is theirs, word for word between
    its ellipses."""
    folder = Path(__file__).parents[3] / "shared" / "seeds"
    if not folder.exists():
        pytest.skip("the guides are not on this machine")
    for number in range(5):
        (path,) = folder.glob(f"00{number}_*.txt")
        said = _plain(path.read_text(encoding="utf-8", errors="replace"))
        quotes = [quote.words for part in study(f"seeds/00{number}") for quote in part.quotes]
        assert quotes
        pieces = [_plain(piece) for words in quotes for piece in re.split(r" \.\.\. |, |: |; ", words)]
        assert [piece for piece in pieces if piece not in said] == [], path.name


def _plain(text: str) -> str:
    """Without Markdown's marks and line ends."""
    return " ".join(re.sub(r"[*|`⚡]", " ", text).split())
