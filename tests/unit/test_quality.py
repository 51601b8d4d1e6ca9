"""The quality guard: its error rate by simulation, verdicts on runs whose figures are written down, and real trainings
at nano size: an equal arm passes, and one that learns nothing does not."""

import json
import math
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from test_ablate import H200, RECIPE, by_the_book, measured, values

from redline.cli.arguments import SHARED
from redline.cli.main import main
from redline.config.load import build, load_recipe
from redline.config.recipe import Recipe
from redline.machine.facts import read_facts
from redline.measure.statistics import paired, pairs_to_tell, within
from redline.measure.trial import Trial
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.report.ablation import ablation
from redline.report.grid import Output
from redline.report.terminal import print_ablation
from redline.train.restore import with_shape
from redline.tune.ablate import AblationRow, ablate
from redline.tune.quality import Judge, Quality
from redline.tune.waterfall_table import markdown

# ---- statistics ----


@pytest.mark.parametrize("seeds", [2, 3, 6])
@pytest.mark.parametrize("verdict", ["not worse", "worse"])
def test_each_verdict_is_wrong_once_in_twenty_times_at_the_margin(seeds: int, verdict: str) -> None:
    """A true difference that equals the margin is the worst case, and the test is exact for normal noise: 5% of N
    trials, give or take four standard deviations of a binomial."""
    trials, rng, margin = 2000, random.Random(seeds), 0.01
    wrong = sum(
        within(paired([rng.gauss(margin, 0.02) for _ in range(seeds)]), margin) == verdict
        for _ in range(trials)
    )
    assert abs(wrong - 0.05 * trials) <= 4 * math.sqrt(trials * 0.05 * 0.95)


def test_the_interval_of_pairs_is_students() -> None:
    """By hand: differences 1, 2, 3 have variance 1, so the error is sqrt(1/3), and t with 2 degrees is 2.920."""
    found = paired([1.0, 2.0, 3.0])
    assert (found.mean, found.high) == (2.0, pytest.approx(2 + 2.920 / math.sqrt(3)))
    assert paired([1.0]).high == math.inf
    assert within(paired([0.0, 0.0]), 0.01) == "not worse"


def test_as_many_seeds_as_it_says_would_tell() -> None:
    seen = [0.0, 0.02, -0.02]  # mean 0, standard deviation 0.02
    assert within(paired(seen), 0.01) == "cannot tell"
    n = pairs_to_tell(seen, 0.01)
    assert n == 14  # (1.812 x 0.02 / 0.01)^2 = 13.1
    assert pairs_to_tell([0.0, 0.02, -0.02], 0.05) == 3  # 2.920 x 0.02 / sqrt(3) = 0.034; with 2: 0.089
    assert pairs_to_tell([0.01, 0.01], 0.01) is None
    assert pairs_to_tell([0.5], 0.01) is None


# ---- verdicts ----


class Figures:
    """Stands in for `redline train`: writes a run that ends with the loss that the recipe's optimiser and the plan's
    precision give, and takes 1 s an update, or half of that under Muon."""

    def __init__(self, **losses: float) -> None:
        self.losses, self.calls, self.fail = losses, list[tuple[str, int]](), ""

    def __call__(self, recipe: Path, run: Path, plan: Path | None) -> str | None:
        loaded = load_recipe(str(recipe))
        assert plan is not None
        precision = json.loads(plan.read_text())["precision"]["value"]
        self.calls.append((precision, loaded.train.seed))
        if self.fail == precision:
            return "loss is nan at step 3"
        end = self.losses.get(precision, 4.0) + 0.001 * loaded.train.seed
        step_s = 0.5 if loaded.train.optimizer == "muon" else 1.0
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(recipe.read_text())
        (run / "checkpoints").mkdir()
        lines = [
            {
                "step": n, "loss": 5.0, "tokens": n, "step_s": step_s, "elapsed_s": n * step_s,
                "valid_loss": end + (10 - n) / 10,
            }
            for n in range(1, 11)
        ]  # fmt: skip
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "events.jsonl").write_text('{"event": "end", "step": 10, "why": "finished"}\n')
        return None


def judge(folder: Path, train: Any, **options: Any) -> Judge:
    return Judge(
        folder=folder, facts=read_facts(), train=train, progress=lambda text: None,
        **({"seeds": 3, "seconds": 100.0, "margin": None} | options),
    )  # fmt: skip


def waterfall(
    folder: Path, judge: Judge, only: tuple[str, ...], answer: Any = by_the_book
) -> dict[tuple[str, str], AblationRow]:
    rows = ablate(
        RECIPE, "gpt2-124m", H200, folder, only=only, minutes=1000, progress=lambda text: None,
        children=Lab(answer), judge=judge,
    )  # fmt: skip
    return {(row.stage, row.name): row for row in rows}


def test_what_is_faster_and_trains_worse_is_not_kept(tmp_path: Path) -> None:
    """bf16 loses 0.02, twice the margin; TF32 nothing. What was slower is not trained."""
    train = Figures(bf16=4.02)
    rows = waterfall(tmp_path, judge(tmp_path / "q", train), ("tf32", "bf16"))
    tf32, bf16 = rows["one by one", "tf32"], rows["one by one", "bf16"]
    assert tf32.quality is not None
    assert bf16.quality is not None
    assert (tf32.quality.verdict, tf32.kept) == ("not worse", True)
    assert (bf16.quality.verdict, bf16.kept, bf16.verdict) == ("worse", False, "faster")
    assert bf16.quality.worse_by == pytest.approx(0.02)
    assert sorted(train.calls) == [(p, s) for p in ("bf16", "fp32", "tf32") for s in range(3)], (
        "each arm once"
    )
    assert not list((tmp_path / "q").rglob("checkpoints"))
    train.calls.clear()
    again = waterfall(tmp_path, judge(tmp_path / "q", train), ("tf32", "bf16"))
    assert (again, train.calls) == (rows, []), "finished runs are kept"


def test_the_columns_are_named_after_what_was_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(waterfall(tmp_path, judge(tmp_path / "q", Figures(bf16=4.02)), ("tf32", "bf16")).values())
    saved = json.loads((tmp_path / "ablation.json").read_text())
    assert [build(AblationRow, row, where="row") for row in saved] == rows
    head, *lines = (line for line in markdown(rows, "t", "").splitlines() if line.startswith("| "))
    place = [cell.strip() for cell in head.split("|")].index("loss")
    cells = {line.split("|")[1].strip(): line.split("|")[place].strip() for line in lines}
    assert cells["bf16"] == "4.0010 → 4.0210, +0.0200 [+0.0200, +0.0200], worse by more than 0.01"
    print_ablation(ablation(saved), Output(width=300))
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("change") and " loss " in line]
    assert cells["bf16"] in shown
    (chart,) = [chart for chart in ablation(saved) if "one by one" in chart.title]
    (row,) = [row for row in chart.rows if row.name == "bf16"]
    assert f"loss {cells['bf16']}" in row.details  # what the page shows


def test_an_arm_that_diverges_is_worse_and_one_without_a_reference_cannot_tell(tmp_path: Path) -> None:
    train = Figures()
    train.fail = "tf32"
    row = waterfall(tmp_path / "a", judge(tmp_path / "q", train), ("tf32",))["one by one", "tf32"]
    assert (row.kept, str(row.quality)) == (False, "worse: seed 0 failed: loss is nan at step 3")
    train.fail = "fp32"
    row = waterfall(tmp_path / "b", judge(tmp_path / "p", train), ("tf32",))["one by one", "tf32"]
    assert row.quality is not None
    assert (row.kept, row.quality.verdict) == (False, "cannot tell")


def test_a_judged_run_that_was_killed_resumes(tmp_path: Path) -> None:
    """Its result does not depend on its time, unlike that of a race."""
    there = list[bool]()

    class Killed(Figures):
        def __call__(self, recipe: Path, run: Path, plan: Path | None) -> str | None:
            there.append((run / "checkpoints").exists())
            if len(there) == 1:
                (run / "checkpoints").mkdir(parents=True)
                (run / "recipe.toml").write_text(recipe.read_text())
                raise KeyboardInterrupt
            shutil.rmtree(run, ignore_errors=True)
            return super().__call__(recipe, run, plan)

    arms = [planned(load_recipe("nano"), micro_batch=size) for size in (8, 4)]
    judging = judge(tmp_path, Killed(), seeds=1)
    with pytest.raises(KeyboardInterrupt):
        judging.same_training(arms[0], arms[1], 1e4)
    judging.same_training(arms[0], arms[1], 1e4)
    assert there == [False, True, False]


def test_runs_that_hold_nothing_out_cannot_tell(tmp_path: Path) -> None:
    class Blind(Figures):
        def __call__(self, recipe: Path, run: Path, plan: Path | None) -> str | None:
            super().__call__(recipe, run, plan)
            (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "elapsed_s": 1.0}\n')
            return None

    arms = [planned(load_recipe("nano"), micro_batch=size) for size in (8, 4)]
    found = judge(tmp_path, Blind()).same_training(arms[0], arms[1], 1e4)
    assert str(found).startswith("cannot tell: seed 0 before the change: the run held nothing out")


def test_too_few_seeds_say_how_many_would_tell(tmp_path: Path) -> None:
    quality = Quality(
        figure="accuracy", verdict="cannot tell", before=(0.5, 0.6), after=(0.5, 0.5), worse_by=0.05,
        low=-0.265, high=0.365, margin=0.02, seeds_to_tell=19,
    )  # fmt: skip
    assert str(quality) == (
        "0.5500 → 0.5000, -0.0500 [-0.3650, +0.2650], cannot tell (margin 0.02), about 19 seeds would tell"
    )
    found = waterfall(tmp_path, judge(tmp_path / "q", Figures(), seeds=1), ("tf32",))["one by one", "tf32"]
    assert found.quality is not None
    assert (found.quality.verdict, found.quality.high) == ("cannot tell", None)


def test_another_training_is_kept_if_it_reaches_the_loss_sooner(tmp_path: Path) -> None:
    """Muon's updates are slower by tokens/s here, and its run reaches the same loss in half the time. Changes after
    it are compared with it, and at the end it can be left out."""

    def answer(trial: Trial) -> Any:
        muon = '"muon"' in trial.setting["recipe"]
        step_s = (2.0 if muon else 1.0) * (0.5 if values(trial)["precision"] == "tf32" else 1.0)
        return measured(step_s, losses=(9.0,) if muon else (11.0,))

    train = Figures()
    rows = waterfall(tmp_path, judge(tmp_path / "q", train), ("muon", "tf32"), answer)
    muon, tf32 = rows["one by one", "muon"], rows["one by one", "tf32"]
    assert muon.quality is not None
    assert tf32.quality is not None
    assert (muon.kept, muon.verdict, muon.quality.figure) == (True, "slower", "seconds to the loss")
    assert math.exp(-(muon.quality.worse_by or 0)) == pytest.approx(2.0)
    assert str(muon.quality) == "10.0 → 5.0 s to a loss of 4.0020, 2.00x [2.00, 2.00], sooner"
    assert (tf32.kept, "same training" in tf32.numerics) == (True, True)
    assert rows["leave one out", "muon"].outcome == "ok"
    assert "another training" in rows["leave one out", "muon"].numerics


def test_another_training_is_timed_by_the_speed_of_the_state_before_it(tmp_path: Path) -> None:
    """128 x 1,024 tokens an update at 13.1072M tokens/s, twice the first state's: 10,000 updates in 100 s, so half of the
    recipe's 20,000 and half of its warm-up of 2,000; and 20 validations."""
    tokens, seen = 128 * 1024, list[Any]()

    class Seen(Figures):
        def __call__(self, recipe: Path, run: Path, plan: Path | None) -> str | None:
            seen.append(load_recipe(str(recipe)).train)
            return super().__call__(recipe, run, plan)

    def answer(trial: Trial) -> Any:
        return measured(0.01 if values(trial)["precision"] == "tf32" else 0.02, tokens=tokens)

    rows = waterfall(tmp_path, judge(tmp_path / "q", Seen()), ("tf32", "muon"), answer)
    assert rows["one by one", "tf32"].kept
    assert {(t.warmup_steps, t.eval_every) for t in seen if t.max_hours == 100 / 3600} == {(1000, 500)}


@pytest.mark.parametrize(
    ("higher_by", "said"),
    [
        ((0.1, 0.1, 0.11), "worse: 0 of 3 seeds reached a loss of 4.0020"),
        ((-0.1, -0.1, 0.01), "cannot tell: 2 of 3 seeds reached a loss of 4.0020"),  # the mean is lower
    ],
)
def test_another_training_is_worse_only_if_its_losses_are(
    tmp_path: Path, higher_by: tuple[float, ...], said: str
) -> None:
    class Trained(Figures):
        def __call__(self, recipe: Path, run: Path, plan: Path | None) -> str | None:
            loaded = load_recipe(str(recipe)).train
            self.losses = {"fp32": 4.0 + (higher_by[loaded.seed] if loaded.optimizer == "muon" else 0.0)}
            return super().__call__(recipe, run, plan)

    recipe = load_recipe("nano")
    muon = replace(recipe, train=replace(recipe.train, optimizer="muon"))
    arms = [planned(each, precision="fp32") for each in (recipe, muon)]
    assert str(judge(tmp_path, Trained()).other_training(arms[0], arms[1], 1e4)) == said


def test_another_training_that_is_later_at_the_loss_is_worse(tmp_path: Path) -> None:
    """Without a margin: it has to be sooner."""
    recipe = load_recipe("nano")
    muon = replace(recipe, train=replace(recipe.train, optimizer="muon"))
    found = judge(tmp_path, Figures()).other_training(planned(muon), planned(recipe), 1e4)
    assert str(found) == "5.0 → 10.0 s to a loss of 4.0020, 0.50x [0.50, 0.50], later"
    assert not found.passed


@pytest.mark.parametrize(("fails", "verdict"), [("muon", "worse"), ("adamw", "cannot tell")])
def test_another_training_that_fails_is_worse_than_one_that_does_not(
    tmp_path: Path, fails: str, verdict: str
) -> None:
    class Failing(Figures):
        def __call__(self, recipe: Path, run: Path, plan: Path | None) -> str | None:
            if load_recipe(str(recipe)).train.optimizer == fails:
                return f"{fails} diverged"
            return super().__call__(recipe, run, plan)

    recipe, said = load_recipe("nano"), list[str]()
    muon = replace(recipe, train=replace(recipe.train, optimizer="muon"))
    judging = replace(judge(tmp_path, Failing()), progress=said.append)
    found = judging.other_training(planned(recipe), planned(muon), 1e4)
    assert str(found) == f"{verdict}: a run failed: {fails} diverged"
    assert said[0].startswith("before the change, seed 0")
    assert any(line.startswith("with the change, seed 2") for line in said)


def test_a_recipe_that_ends_by_the_clock_is_compared_over_the_same_updates(tmp_path: Path) -> None:
    """Of 100 s at 2 updates/s it warms up for 40 of 200 updates, whatever its 5,000 steps say: in 30 s, 12 of 60; its
    momentum and its ramp of the length likewise. Against another training it keeps a clock, of 30 s."""
    ramps = ["train.warmup_steps=40", "train.muon_warmup_steps=50", "train.length_ramp_steps=60"]
    ramps += [
        "train.target_loss=3.5",
        "train.early_stop_evals=2",
    ]  # either would end both arms at the same loss
    recipe = load_recipe("nano", ["train.steps=5000", *ramps, f"train.max_hours={100 / 3600!r}"])
    seen = list[Any]()

    def train(recipe: Path, run: Path, plan: Path | None) -> str:
        seen.append(load_recipe(str(recipe)).train)
        return "that is enough"

    judging, speed = judge(tmp_path, train, seeds=1, seconds=30.0), 2.0 * recipe.tokens_per_step
    muon = replace(recipe, train=replace(recipe.train, optimizer="muon"))
    judging.same_training(planned(recipe, micro_batch=4), planned(recipe, micro_batch=2), speed)
    judging.other_training(planned(recipe), planned(muon), speed)
    ends = [(t.steps, t.warmup_steps, t.muon_warmup_steps, t.length_ramp_steps, t.max_hours) for t in seen]
    assert set(ends[:2]) == {(60, 12, 15, 18, None)}
    assert set(ends[2:]) == {(5000, 12, 15, 18, 30 / 3600)}
    assert [(t.target_loss, t.early_stop_evals) for t in seen[1:3]] == [(None, 0), (None, 2)]


def test_a_recipe_without_a_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "seeds/000", "--quality", "--out", str(tmp_path / "a")]) == 2
    assert "--quality compares training runs" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tune", "ablate"])
@pytest.mark.parametrize("option", ["--seeds", "--seconds", "--margin"])
def test_what_only_quality_needs_is_refused_without_it(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "nano", option, "5"]) == 2
    assert f"{option} does nothing without --quality" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "seeds", "seconds"), [([], 3, 60.0), (["--seeds", "5", "--seconds", "7"], 5, 7.0)]
)
def test_the_defaults_of_quality_are_those_that_its_help_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], seeds: int, seconds: float
) -> None:
    judges = list[Judge]()
    monkeypatch.setattr("redline.cli.ablate.ablate", lambda *_, judge, **__: judges.append(judge) or [])
    monkeypatch.setattr("redline.cli.ablate.tokenise", lambda recipe: None)
    assert main(["ablate", "nano", "--quality", *given, "--out", str(tmp_path)]) == 0
    assert (judges[0].seeds, judges[0].seconds, judges[0].margin) == (seeds, seconds, None)
    assert "(default: 3)" in SHARED["QUALITY"]
    assert "(default: 60)" in SHARED["QUALITY"]


def test_the_page_of_an_ablation_says_how_it_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, stand_in in (("ablate", lambda *given, **named: []), ("tokenise", str)):
        monkeypatch.setattr(f"redline.cli.ablate.{name}", stand_in)
    given = ["nano", "--minutes", "3", "--quality", "--seeds", "4", "--seconds", "20", "--margin", "0.02"]
    assert main(["ablate", *given, "--markdown", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "--quality --seeds 4 --seconds 20 --margin 0.02" in shown


# ---- real trainings ----

TINY = [
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.ffn_size=64",
    "model.context_length=64", "data.seq_len=32", "train.batch_size=8", "model.vocab_size=512",
    "train.steps=20", "train.lr=1e-2", "train.warmup_steps=0", "train.eval_sequences=16",
]  # fmt: skip


def train_here(recipe: Path, run: Path, plan: Path | None) -> str | None:
    """`redline train` without the seconds that a process takes to start."""
    code = main(["train", str(recipe), "--run", str(run), "--plan", str(plan), "--quiet"])
    return None if code == 0 else f"exit code {code}"


def planned(recipe: Recipe, **pins: Any) -> tuple[Recipe, Any]:
    pinned = replace(recipe, plan=replace(recipe.plan, **pins))
    return pinned, make_plan(pinned, hardware_here(read_facts(), None))


def test_an_equal_arm_passes_and_one_that_learns_nothing_does_not(tmp_path: Path) -> None:
    """Passes of another size change the order of sums in fp32: by 1e-5 of the loss at most (guard.py), below the
    margin. Without a learning rate the loss stays near ln 512 = 6.24. The other arm learns which of the 512 tokens
    occur, ten words' worth, so its loss falls by far more than it differs from seed to seed."""
    rng, words = random.Random(0), ("to", "be", "or", "not", "that", "is", "the", "question", "my", "lord")
    for split, count in (("train", 4000), ("valid", 1000)):
        path = tmp_path / "text" / f"{split}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(rng.choices(words, k=count)))
    recipe = load_recipe("nano", [*TINY, f"data.source={path.parent}"])
    judging = judge(tmp_path / "q", train_here, seeds=2)
    equal = judging.same_training(planned(recipe, micro_batch=8), planned(recipe, micro_batch=4), 1e6)
    assert equal.verdict == "not worse", equal
    assert equal.worse_by == pytest.approx(0.0, abs=1e-3)
    still = replace(recipe, train=replace(recipe.train, lr=1e-12))
    worse = judging.same_training(planned(recipe, micro_batch=8), planned(still, micro_batch=8), 1e6)
    assert worse.verdict == "worse", worse
    assert worse.before == equal.before, "the arm before the change was not trained again"
    assert min(worse.after) > 6.0
    assert asdict(worse)["margin"] == 0.01


def test_rft_is_judged_by_its_accuracy_after_training(tmp_path: Path) -> None:
    """More is better, of the weights trained on samples, and the margin is that of an accuracy. That a real run holds
    this figure is tested in test_rft_stages.py."""
    accuracies = {8: 0.60, 4: 0.58, 2: 0.40, 1: 0.0}  # by the plan's micro-batch; a seed adds its tenth

    def train(recipe: Path, run: Path, plan: Path | None) -> None:
        assert plan is not None
        seed, size = load_recipe(str(recipe)).train.seed, json.loads(plan.read_text())["micro_batch"]["value"]
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(recipe.read_text())
        shares = {"base": 0.1, "answers": 0.2, "samples": accuracies[size] + 0.1 * seed}
        lines = [{"at": 1.0, "weights": name, "accuracy": share} for name, share in shares.items()]
        (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    recipe = with_shape(load_recipe("rft/demo"))
    judging, arms = judge(tmp_path, train), {size: planned(recipe, micro_batch=size) for size in accuracies}
    found = judging.same_training(arms[8], arms[4], 0.0)
    assert str(found) == "0.7000 → 0.6800, -0.0200 [-0.0200, -0.0200], not worse by more than 0.05"
    assert found.before == pytest.approx((0.6, 0.7, 0.8))
    assert judging.same_training(arms[8], arms[2], 0.0).verdict == "worse"
    assert judging.same_training(arms[2], arms[8], 0.0).verdict == "not worse"
    found = judging.same_training(arms[1], arms[8], 0.0)
    assert (found.before[0], found.verdict) == (0.0, "not worse"), "no answer was right before the change"
    assert "-0.0000" not in str(judging.same_training(arms[8], arms[8], 0.0))
    found = replace(judging, seeds=1).same_training(arms[1], arms[8], 0.0)
    assert str(found) == "cannot tell: no answer was correct before the change, so none can be lost"
