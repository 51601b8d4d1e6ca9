"""`redline rl doctor`, `rl compare` and what tune, ablate and verify make of a recipe of reinforcement learning, on a
tiny model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from precision import CLOSE_FP32
from rft_model import planned, tiny_model
from rl_model import letters_rl
from test_report_rl import write_rl

from redline.cli.main import main
from redline.config.rl import RlConfig
from redline.diagnose.answer import split
from redline.diagnose.readers.own import read_run
from redline.diagnose.rules import diagnose
from redline.measure.training import TrainingSubject
from redline.measure.trial import train_trial
from redline.plan.plan import check_fit
from redline.rl import doctor
from redline.rl.doctor import DomainReport, Gap, Report, advice
from redline.rl.rehearsal import random_rows
from redline.tasks.sandbox import LAYERS
from redline.tune.verify import verify

Capture = pytest.CaptureFixture[str]
RL = RlConfig(domains=("units",), group_size=8, max_new_tokens=64)
GOOD = DomainReport("units", 32, 0.4, 0.4, 0.2, 0.1, 0.0, 20.0, 0, 1e-3, [])
REPORT = Report([GOOD], Gap(1e-3, 1e-2, 100, []), {}, 0, 100.0, 2.0, 1.0, None, "limits", [])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    return letters_rl(folder, tiny_model(folder / "model"))


def test_a_sound_recipe_gets_no_advice() -> None:
    assert list(advice(REPORT, RL)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"unread": 0.6, "solved": 0.0}, "no answer was found in 60% of the texts"),
        ({"solved": 0.0}, "none of 32 answers was correct"),
        ({"solved": 1.0}, "every answer was correct"),
        ({"even": 0.75}, "in 75% of the groups all answers earned the same"),
        ({"cut": 0.25}, r"25% of the answers ran out of tokens: raise rl.max_new_tokens (now 64)"),
        ({"failed": 3}, "the scorer failed on 3 of 32 answers"),
    ],
)
def test_what_is_wrong_with_a_domain_is_said_once(changed: dict[str, float], said: str) -> None:
    (line,) = advice(replace(REPORT, domains=[replace(GOOD, **changed)]), RL)
    assert line.startswith("units: ")
    assert said in line


def test_engines_that_differ_and_scorers_that_hold_the_gpu_up_are_named() -> None:
    (line,) = advice(replace(REPORT, gap=Gap(0.2, 1.0, 100, [])), RL)
    assert "differ by 0.200 nats per token: keep rl.importance_cap" in line
    (line,) = advice(replace(REPORT, scoring_s=3.0), RL)
    assert "Scoring a step takes 3.0 s and generating it 2.0 s" in line


def test_a_weak_sandbox_matters_where_programs_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "weakness", lambda: "generated code runs under limits alone")
    assert list(advice(REPORT, RL)) == []
    assert list(advice(REPORT, replace(RL, domains=("code",)))) == [
        "code: generated code runs under limits alone."
    ]


def test_the_doctor_draws_through_the_loops_own_path(recipe: Path, capsys: Capture) -> None:
    assert main(["rl", "doctor", str(recipe), "--questions", "3", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (domain,) = found["domains"]
    assert (domain["name"], domain["answers"]) == ("letters", 3 * 8)
    assert 0 < domain["tokens"] <= 2
    assert domain["reward"] == domain["solved"], "the task's reward is 1 where it is correct"
    assert domain["failed"] == 0
    assert 0 < found["gap"]["tokens"] <= 16 * 2
    assert found["gap"]["most"] < CLOSE_FP32, "the same weights in fp32"
    token, engine, trainer = found["gap"]["beside"][0]
    assert isinstance(token, str)
    assert engine == pytest.approx(trainer, abs=CLOSE_FP32)
    assert found["sandbox"].startswith(LAYERS)
    assert found["memory_bytes"] == sum(found["memory_parts_bytes"].values())
    assert main(["rl", "doctor", str(recipe), "--questions", "2", "--device", "cpu"]) == 0
    assert "letters" in capsys.readouterr().out


def test_two_runs_are_compared(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    runs = [str(write_rl(tmp_path / name, units=share)) for name, share in (("base", 0.4), ("pcgrad", 0.6))]
    page = tmp_path / "page.html"
    assert main(["rl", "compare", *runs, "--out", str(page)]) == 0
    told = capsys.readouterr().out
    assert "pcgrad is better on units" in told
    assert "One run each" in told
    assert "  difference, points " in told, "below its row a difference still has its name"
    assert "pcgrad is better on units" in page.read_text()
    assert main(["rl", "compare", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"].startswith("pcgrad is better")


def test_the_diagnosis_of_a_run_names_slow_rewards(tmp_path: Path) -> None:
    folder = write_rl(tmp_path / "a")
    path = folder / "metrics.jsonl"
    more = {"reward_s": 0.4}
    path.write_text(
        "".join(json.dumps(json.loads(line) | more) + "\n" for line in path.read_text().splitlines())
    )
    found = {finding.cause: finding for finding in diagnose(read_run(folder))}
    assert found["slow-reward"].title == "Computing rewards takes 40% of the step"
    assert "redline rl doctor" in found["slow-reward"].fix


def test_what_a_step_spends_on_the_critic_and_the_reference_is_no_gap(tmp_path: Path) -> None:
    """A second: generation, weights, rewards, reference, critic and the policy's update leave nothing between them."""
    spent_s = {"generate_s": 0.3, "weights_s": 0.01, "reward_s": 0.01, "reference_s": 0.08, "critic_s": 0.3}
    spent_s |= {"forward_s": 0.1, "backward_s": 0.17, "combine_s": 0.01, "optimizer_s": 0.02}
    path = write_rl(tmp_path / "a") / "metrics.jsonl"
    lines = [json.loads(line) | {"step_s": 1.0} | spent_s for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    observed = read_run(path.parent)
    assert "host-gap" not in {finding.cause for finding in diagnose(observed)}
    nothing = {"data wait": 0.0, "idle": 0.0}
    known = {name.removesuffix("_s"): seconds for name, seconds in spent_s.items()}
    assert split(observed) == pytest.approx(known | nothing, abs=1e-9)
    path.write_text(
        "".join(json.dumps(line | {"forward_s": None, "backward_s": None}) + "\n" for line in lines)
    )
    assert split(read_run(path.parent))["other"] == pytest.approx(0.27)


def test_the_plan_says_where_pcgrad_keeps_its_gradients_and_why(recipe: Path, capsys: Capture) -> None:
    task = recipe.parent / "letters.py"
    (recipe.parent / "other.py").write_text(task.read_text())
    domains = f'rl.domains=["{task}:make", "{recipe.parent / "other.py"}:make"]'
    command = ["rl", "run", str(recipe), "--dry-run", "--json", "--set", domains, "--set", "rl.pcgrad=tensor"]
    assert main(command) == 0
    kept = json.loads(capsys.readouterr().out)["pcgrad_kept_on"]
    assert kept["value"] == "device"
    assert kept["reason"].startswith("they fit: 0.00 GiB of gradients")
    assert main(command[:5]) == 0
    assert "pcgrad_kept_on" not in capsys.readouterr().out


def test_verify_checks_generation_and_update(recipe: Path) -> None:
    shaped, plan, _ = planned(recipe, ())
    checks = {check.name: check.status for check in verify(shaped, plan, progress=lambda text: None)}
    assert "failed" not in checks.values()
    assert checks["log-probabilities of the engine"] == "passed"
    assert checks["loss and gradients"] == "passed"


def test_a_saved_plan_and_the_update_as_a_trial(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    """Trials of one recipe compute the same loss on the same tokens, whatever the passes."""
    losses = []
    for micro_batch in (2, 1):
        shaped, plan, _ = planned(recipe, [f"plan.micro_batch={micro_batch}"])
        assert plan.micro_batch * plan.accumulation == shaped.rows_per_update
        check_fit(plan, shaped, world_size=1)
        subject = TrainingSubject(train_trial(shaped, plan).setting)
        subject.step()
        subject.drain()
        assert subject.tokens_per_step == sum(row.example.length for row in random_rows(shaped))
        losses += subject.losses
        subject.close()
    assert losses[0] == pytest.approx(losses[1], rel=CLOSE_FP32)
    smaller = shaped.with_rows(3)
    assert smaller.rows_per_update == len(random_rows(smaller)) == 3
    assert main(["optimizations", str(recipe), "--as", "h200", "--json"]) == 0
    rows = {row["name"]: row["why_not"] for row in json.loads(capsys.readouterr().out)}
    assert rows["finetune-passes"] is rows["slots"] is None
    assert rows["compile"] is None, "the tuner may try it"
    _, pinned, _ = planned(recipe, ["plan.compile=default"])
    assert pinned.compile == "default"
