"""Reinforcement learning: losses and advantages against cases computed by hand, the loop on a tiny model."""

import json
import math
import threading
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rft_model import events_of, planned, tiny_model
from rl_model import kill_after, letters_rl, run_rl, training
from trl_losses import CAP, CLIP_HIGH, CLIP_LOW, STORED, VARIANTS, record

from redline.config.rl import RlConfig
from redline.engine.local import LocalEngine
from redline.errors import DataError, TrainingError
from redline.record.metrics import METRICS
from redline.record.run import read_lines
from redline.rl.algorithm import Columns, Part, columns_of, shared_tokens, shares_of
from redline.rl.grpo import GRPO, advantages, divergence, policy_loss
from redline.rl.imitation import IMITATION
from redline.rl.ppo import PPO, generalised_advantages, make_critic, value_loss
from redline.rl.rollout import Rollouts, shaped_reward
from redline.rl.samples import Group, Sample, Samples
from redline.rl.validation import make_validation
from redline.rl.watchdog import Watchdog
from redline.tasks.registry import load_task
from redline.tasks.task import interval_95, prompt_text
from redline.train.checkpoint import read_tensors
from redline.train.packed import Example
from redline.train.places import resolve
from redline.train.process import Process
from redline.train.restore import open_weights

RL = RlConfig(domains=("units",), clip_low=0.2, clip_high=0.28, importance_cap=2.0, max_new_tokens=100)


def answer(reward: float, size: int = 3, *, cut: bool = False) -> Sample:
    return Sample("text", reward, reward > 0, True, cut, tuple(range(size)), (-0.5,) * size)


def group(*rewards: float) -> Group:
    return Group(1, "units", 0, "q", "How far?", (1, 2), 0, tuple(map(answer, rewards)))


def test_answers_to_a_question_share_its_prompt_where_that_saves_enough() -> None:
    """Three answers of 4 tokens, 2 of them the prompt: two copies, 4 of 12 tokens, need not be read."""
    rows = GRPO.rows(group(1.0, 0.0, 1.0), (1.0, 0.0, 1.0))
    assert shared_tokens(rows) == 4
    assert shared_tokens(rows[:1]) == shared_tokens([]) == 0
    long = [replace(row, example=Example((1, 2), tuple(range(19)))) for row in rows]
    assert shared_tokens(long) == 0, "4 of 60 tokens are fewer than copies cost"


def test_answers_to_a_question_stay_on_one_process() -> None:
    rows = GRPO.rows(group(1.0, 0.0), (1.0, 0.0))
    both = [replace(row, example=Example((n,), row.example.answer)) for row in rows for n in (1, 2)]
    first, second = shares_of(both, 2)
    assert [row.example.prompt for row in first + second] == [(1,), (1,), (2,), (2,)]
    assert list(map(len, shares_of(rows, 2))) == [1, 1], "one question"


# ---- advantages and losses ----


def test_advantages_are_standard_deviations_from_the_mean_of_the_group():
    # mean 0.25; squares 0.5625 + 3 * 0.0625 = 0.75; over 3: variance 0.25, deviation 0.5
    assert advantages(group(), [1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3])
    assert sum(advantages(group(), [0.3, 0.9, 0.1])) == pytest.approx(0.0, abs=1e-12)


def test_grpo_learns_from_groups_with_different_rewards_only():
    assert GRPO.rows(group(1.0, 1.0), [1.0, 1.0]) == []
    rows = GRPO.rows(group(1.0, 0.0), [1.0, 0.0])
    assert [row.reward for row in rows] == [1.0, 0.0]
    assert rows[0].columns["advantage"].tolist() == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4)] * 3)
    assert rows[0].example.answer == (0, 1, 2)


def test_the_loss_of_every_kind_of_token_by_hand():
    """Ratios 1.5, 1.5, 0.5, 0.5 with advantages 1, -1, 1, -1: only what would move further away is clipped."""
    old = torch.zeros(4)
    now = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    given = Columns(sampled=old, advantage=torch.tensor([1.0, -1.0, 1.0, -1.0]), old=old)
    found = policy_loss(now, given, RL)
    assert found["loss"].item() == pytest.approx(-1.28 + 1.5 - 0.5 + 0.8)
    assert float(found["clip_share"]) == 2
    found["loss"].backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0]), "d(ratio)/d(log p) is the ratio"


def test_on_policy_the_gradient_is_that_of_reinforce():
    now = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = policy_loss(now, Columns(sampled=now.detach(), advantage=torch.tensor([2.0, -3.0])), RL)
    found["loss"].backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-2.0, 3.0])
    assert found["loss"].item() == pytest.approx(1.0)
    assert float(found["entropy"]) == pytest.approx(3.0)


def test_what_the_engine_computes_differently_is_corrected_up_to_the_cap():
    now = torch.tensor([math.log(0.3), math.log(0.9)], requires_grad=True)
    engine = torch.tensor([math.log(0.2), math.log(0.3)])  # weights 1.5, and 3 cut to 2
    found = policy_loss(now, Columns(sampled=engine, advantage=torch.ones(2)), RL)
    found["loss"].backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.5, -2.0])
    assert float(found["logprob_gap"]) == pytest.approx(math.log(1.5) + math.log(3))
    without = policy_loss(
        now, Columns(sampled=engine, advantage=torch.ones(2)), replace(RL, importance_cap=0.0)
    )
    assert without["loss"].item() == pytest.approx(-2.0)


def test_the_divergence_is_k3():
    now, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    expected = 0.5 - math.log(0.5) - 1
    assert float(divergence(now, reference)) == pytest.approx(expected)
    given = Columns(sampled=now, advantage=torch.zeros(1), reference=reference)
    found = policy_loss(now, given, replace(RL, kl=0.1))
    assert found["loss"].item() == pytest.approx(0.1 * expected)
    assert float(found["kl"]) == pytest.approx(expected)


def test_imitation_is_cross_entropy_on_the_correct_answers():
    assert len(IMITATION.rows(group(1.0, 1.0), [1.0, 1.0])) == 2
    assert IMITATION.rows(group(0.0, 0.0), [0.0, 0.0]) == []
    (row,) = IMITATION.rows(group(0.0, 1.0), [0.0, 1.0])
    logprobs = torch.tensor([-1.0, -2.0, -4.0])
    assert float(IMITATION.loss(logprobs, columns_of([row], torch.device("cpu")), RL)["loss"]) == 7.0


def test_the_penalty_for_length_rises_over_the_last_fifth():
    sizes = [80, 90, 100]
    assert [shaped_reward(answer(1.0, n), RL) for n in sizes] == pytest.approx([1.0, 0.5, 0.0])
    assert shaped_reward(answer(1.0, 100), replace(RL, overlong="none")) == 1.0


def test_samples_survive_the_file_to_the_last_bit(tmp_path):
    drawn = replace(group(1.0, 0.5), step=7)
    samples = Samples(tmp_path)
    samples.add([drawn])
    (path,) = (tmp_path / "samples").iterdir()
    path.write_bytes(path.read_bytes() + b'{"step": 7, "dom')  # killed while it wrote the next
    assert Samples(tmp_path).of(7) == [drawn]
    samples.add([replace(drawn, number=1)])
    assert [kept.number for kept in samples.of(7)] == [0, 1]


# ---- the loop ----


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    letters_rl(folder, tiny_model(folder / "model"))
    return folder / "letters-rl.toml"


@pytest.fixture(scope="module")
def unbroken(place: Path) -> Path:
    run_rl(place, place.parent / "unbroken")
    return place.parent / "unbroken"


def test_the_reward_rises(place, tmp_path):
    run_rl(place, tmp_path / "run", ["train.steps=12"])
    rewards = [line["reward"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.3


def test_the_record_names_everything_and_the_result_can_be_opened(unbroken):
    lines = read_lines(unbroken / "metrics.jsonl")
    known = {name.partition(".")[0] for name in METRICS}
    assert {name.partition(".")[0] for line in lines for name in line} <= known
    assert lines[0]["reward.letters"] == lines[0]["reward"]
    assert lines[0]["logprob_gap"] < 1e-4, "the engine and the trainer compute the same"
    assert lines[0]["clip_share"] == 0, "on policy nothing is clipped"
    assert lines[-1]["valid_accuracy.letters"] == lines[-1]["valid_accuracy"]
    assert (unbroken / "model" / "config.json").is_file()


def test_the_same_seed_gives_the_same_run_and_another_another(place, unbroken, tmp_path):
    run_rl(place, tmp_path / "again", ["train.steps=3"])
    assert training(tmp_path / "again")[:2] == training(unbroken)[:2]
    run_rl(place, tmp_path / "other", ["train.seed=4", "train.steps=1"])
    assert training(tmp_path / "other")[0]["new_tokens"] != 0
    assert Samples(tmp_path / "other").of(1) != Samples(unbroken).of(1)


@pytest.mark.parametrize("drawn", [3, 14])
def test_a_run_that_was_killed_loses_and_repeats_no_answer(place, unbroken, tmp_path, monkeypatch, drawn):
    """The groups that are in the files are not drawn again."""
    generated = kill_after(monkeypatch, drawn)
    with pytest.raises(KeyboardInterrupt):
        run_rl(place, tmp_path / "run")
    run_rl(place, tmp_path / "run")
    assert len(generated) == len(set(generated)), "no group was drawn twice"
    assert training(tmp_path / "run") == training(unbroken)
    weights = [read_tensors(resolve(run), "model.") for run in (tmp_path / "run", unbroken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


# ---- PPO ----


def test_generalised_advantages_are_the_naive_double_sum():
    """A_t is the sum of 0.95^k over the errors of the value from t on."""
    values = [0.2, 0.5, 0.4, 0.9]
    errors = [0.5 - 0.2, 0.4 - 0.5, 0.9 - 0.4, 1.0 - 0.9]
    expected = [sum(0.95**k * errors[t + k] for k in range(4 - t)) for t in range(4)]
    found, returned = generalised_advantages(1.0, np.array(values))
    assert found.tolist() == pytest.approx(expected)
    assert returned.tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])


def test_the_value_loss_is_clipped_around_the_old_value():
    zeros = torch.zeros(2)
    given = Columns(sampled=zeros, advantage=zeros, value=torch.zeros(2), returned=torch.tensor([1.0, 0.1]))
    # 0.5 stands for 0.2 at most: an error of 0.8, not 0.5; 0.1 is within the clip
    found = value_loss(torch.tensor([0.5, 0.1]), given)
    assert found.item() == pytest.approx(0.5 * 0.8**2)


def test_the_critic_learns_what_answers_earn(place):
    """Two answers to one prompt, which differ in their first token: after it the critic can tell them apart."""
    recipe, plan, _ = planned(place, ["rl.algorithm=ppo", "rl.critic_lr=3e-3"])
    critic = make_critic(
        open_weights(Path(recipe.model.init_from)), recipe, plan, Process(0, 1, torch.device("cpu"))
    )
    assert recipe.rl is not None
    asked = Group(
        1, "letters", 0, "q", "Which?", (1, 2, 3), 0, (answer(1.0), replace(answer(0.0), tokens=(5, 6, 7)))
    )
    rows = PPO.rows(asked, [1.0, 0.0])
    for _ in range(60):
        critic.expect([rows])
        critic.improve(Part([("", rows)], 6.0, 0))
    critic.expect([rows])
    assert rows[0].columns["value"][-1] > 0.8
    assert rows[1].columns["value"][-1] < 0.2
    whole = np.concatenate([row.columns["advantage"] for row in rows])
    assert (float(whole.mean()), float(whole.std())) == pytest.approx((0.0, 1.0), abs=1e-5), "whitened"


def test_ppo_that_was_killed_resumes_to_the_same_bits(place, tmp_path, monkeypatch):
    ppo = ["rl.algorithm=ppo", "rl.critic_lr=3e-3", "train.steps=8", "rl.updates_per_rollout=2"]
    run_rl(place, tmp_path / "whole", ppo)
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert all(line["skipped_groups"] == 0 for line in lines), "a critic learns from every group"
    assert all(line["critic_loss"] >= 0 and line["critic_s"] > 0 for line in lines)
    next_ = Rollouts.next

    def broken(self: Rollouts) -> Any:
        if self.done == 5:
            raise KeyboardInterrupt
        return next_(self)

    monkeypatch.setattr(Rollouts, "next", broken)
    with pytest.raises(KeyboardInterrupt):
        run_rl(place, tmp_path / "run", ppo)
    monkeypatch.undo()
    run_rl(place, tmp_path / "run", ppo)
    assert training(tmp_path / "run") == training(tmp_path / "whole")


@pytest.mark.parametrize(
    "overrides",
    [["rl.algorithm=imitation"], ["lora.rank=2", "rl.kl=0.05"], ["rl.kl=0.05", "rl.updates_per_rollout=4"]],
    ids=lambda overrides: overrides[0],
)
def test_every_way_to_learn_runs_and_is_recorded(place, tmp_path, overrides):
    outcome = run_rl(place, tmp_path / "run", [*overrides, "train.steps=2", "rl.rows=8"])
    assert outcome.why == "finished"
    line = read_lines(tmp_path / "run" / "metrics.jsonl")[0]
    if "rl.kl=0.05" in overrides:
        assert line["reference_s"] > 0
        assert line["kl"] >= 0
    assert (tmp_path / "run" / ("adapter" if "lora.rank=2" in overrides else "model")).is_dir()


def test_a_validation_asks_every_held_out_question_once_and_counts_domains_equally():
    """Of four questions the first and the last are answered correctly, of the other domain's one it is that one."""
    right = {("a", 0), ("a", 3), ("b", 0)}
    model: Any = None
    held_out = {"a": [object()] * 4, "b": [object()]}
    domains: Any = SimpleNamespace(
        by_name=held_out,
        held_out=held_out.get,
        answers=lambda run, asked: [(key, (SimpleNamespace(correct=key in right),)) for key in asked],
    )
    found: list[dict[str, float]] = []
    for rank in range(2):
        process = SimpleNamespace(rank=rank, world_size=2, sums=lambda *own: list(own))
        policy: Any = SimpleNamespace(
            process=process, phase=lambda name: None, speaking=lambda: nullcontext()
        )
        found.append(make_validation(domains, policy)(model, 1))
    shares = [{name: one[f"valid_accuracy.{name}"] for name in held_out} for one in found]
    assert shares == [{"a": 0.25, "b": 1.0}, {"a": 0.25, "b": 0.0}], "every second question, of 4 and 1"
    assert found[0]["valid_accuracy"] == 0.625
    assert (found[0]["valid_accuracy_low.a"], found[0]["valid_accuracy_high.a"]) == interval_95(0.25, 4)


def test_prompts_that_are_all_too_long_are_one_line_also_if_only_the_held_out_ones_are(place, tmp_path):
    """The training questions begin with numbers of one digit, the held-out ones have two."""
    tokenizer, task = (
        open_weights(place.parent / "model").tokenizer,
        load_task(f"{place.parent}/letters.py:make"),
    )
    short, long = (
        len(tokenizer.encode_prompt(prompt_text(task, task.questions(split, 1, 0)[0])))
        for split in ("train", "valid")
    )
    assert short < long
    for most, evals in ((1, 0), (short, 0), (short, 2)):
        sets = ["train.steps=2", f"train.eval_every={evals}", f"rl.max_prompt_tokens={most}"]
        with pytest.raises(
            DataError, match=rf"every prompt of domain letters is longer than .* \({most}\): raise it"
        ):
            run_rl(place, run := tmp_path / f"{most}-{evals}", sets)
        lines = run / "metrics.jsonl"
        assert not lines.exists() or not read_lines(lines), "nothing was trained"


def test_a_step_without_a_lesson_changes_nothing_and_says_so(place, tmp_path):
    """All answers have two tokens, all that they may have, and answers that were cut are left out."""
    run_rl(place, tmp_path / "run", ["rl.overlong=mask", "train.steps=1", "rl.refills=0"])
    trained = read_tensors(resolve(tmp_path / "run"), "model.")
    base = open_weights(place.parent / "model").loaded.weights
    assert all(torch.equal(trained[name], base[name]) for name in trained)
    events = events_of(tmp_path / "run", "nothing_to_learn")
    assert [event["step"] for event in events] == [1]


FAILING = """
import os
from letters import make as letters
from dataclasses import replace

def make(data):
    task = letters(data)
    def score(question, completion):
        if "c" in completion:
            os._exit(3)
        if "b" in completion:
            raise ValueError("cannot read this")
        return task.score(question, completion)
    return replace(task, score=score)
"""


def test_a_scorer_that_raises_or_dies_costs_its_own_answer(place, tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text(f"import sys\nsys.path.insert(0, {str(place.parent)!r})\n{FAILING}")
    run_rl(place, tmp_path / "run", [f"rl.domains=['{failing}:make']", "train.steps=1"])
    failed = [answer for one in Samples(tmp_path / "run").of(1) for answer in one.answers if answer.reason]
    assert failed
    assert all(answer.reward == 0 and not answer.correct for answer in failed)
    (event,) = events_of(tmp_path / "run", "scorer_failed")
    assert event["answers"] == len(failed)


def test_out_of_memory_while_generating_goes_on_with_half_of_the_slots(
    place, unbroken, tmp_path, monkeypatch
):
    real = LocalEngine.run

    def limited(self: LocalEngine, requests: Any) -> Any:
        completions = real(self, requests)
        yield next(completions)
        if self.room.slots > 8:
            completions.close()
            raise torch.OutOfMemoryError("injected")
        yield from completions

    monkeypatch.setattr(LocalEngine, "run", limited)
    run_rl(place, tmp_path / "run", ["train.steps=1", "plan.slots=16"])
    (event,) = events_of(tmp_path / "run", "out_of_memory")
    assert (event["slots_before"], event["slots"]) == (16, 8)
    drawn = [
        {group.key: [answer.tokens for answer in group.answers] for group in Samples(run).of(1)}
        for run in (tmp_path / "run", unbroken)
    ]
    assert drawn[0] == drawn[1]


def test_every_domain_has_its_share_and_their_gradients_are_compared(place, tmp_path):
    other = tmp_path / "others.py"
    other.write_text((place.parent / "letters.py").read_text())
    domains = f"rl.domains=['{place.parent / 'letters.py'}:make', '{other}:make']"
    run_rl(
        place,
        tmp_path / "run",
        [
            domains,
            "rl.weights=[3.0, 1.0]",
            "rl.refills=0",
            "rl.pcgrad=tensor",
            "train.steps=2",
            "rl.group_size=16",
        ],
    )
    for step in (1, 2):
        asked = [group.domain for group in Samples(tmp_path / "run").of(step)]
        assert (asked.count("letters"), asked.count("others")) == (3, 1)
    line = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert -1 <= line["cosine.letters.others"] <= 1
    assert {"reward.letters", "reward.others", "accuracy.others"} <= line.keys()


# ---- the watchdog ----


class Hands:
    """A clock whose hands are set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_phase_far_beyond_its_usual_time_is_named_once():
    told: list[dict[str, Any]] = []
    clock = Hands()
    dog = Watchdog(lambda kind, **facts: told.append({"kind": kind, **facts}), alone=True, clock=clock)
    for _ in range(3):
        dog.phase("generate")
        clock.now_s += 60
        dog.phase("update")
        clock.now_s += 20
    dog.phase("generate")
    clock.now_s += 599
    assert dog.check() is None, "ten times the usual 60 s are not over"
    clock.now_s += 2
    assert dog.check() == "generate"
    assert dog.check() is None
    assert told == [{"kind": "phase_hung", "phase": "generate", "spent_s": 601.0, "usual_s": 60.0}]


def test_short_phases_and_first_ones_have_patience():
    clock = Hands()
    dog = Watchdog(lambda kind, **facts: None, alone=True, clock=clock)
    dog.phase("generate")
    clock.now_s += 3000
    assert dog.check() is None, "the first may compile"
    dog.phase("update")
    clock.now_s += 1
    dog.phase("update")
    clock.now_s += 299
    assert dog.check() is None
    clock.now_s += 2
    assert dog.check() == "update"


def test_a_run_whose_generation_hangs_ends_with_a_checkpoint_and_resumes(
    place, unbroken, tmp_path, monkeypatch
):
    clock = Hands()
    monkeypatch.setattr("redline.rl.run.Watchdog", partial(Watchdog, clock=clock, poll_s=0.01))
    generate = Rollouts._generate

    def hanging(self: Rollouts, drawing: Any, *how: Any) -> Any:
        if drawing.step == 4:
            clock.now_s += 1e6
            threading.Event().wait()
        return generate(self, drawing, *how)

    with monkeypatch.context() as patched:
        patched.setattr(Rollouts, "_generate", hanging)
        with pytest.raises(TrainingError, match=r"the phase generate hung.*a checkpoint was saved"):
            run_rl(place, tmp_path / "run")
    assert resolve(tmp_path / "run").name == "step-00000003"
    run_rl(place, tmp_path / "run")
    assert training(tmp_path / "run") == training(unbroken)


def test_a_run_that_ends_by_its_hours_has_a_result(place, tmp_path):
    assert run_rl(place, tmp_path / "run", ["train.max_hours=1e-9"]).why.startswith("time limit")
    assert open_weights(tmp_path / "run").source == tmp_path / "run" / "model"


# ---- beside TRL ----


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_trl_s(name):
    """TRL's own `_compute_loss` as it was recorded (trl_losses.py): the loss, each token's term, the gradient."""
    stored = json.loads(STORED.read_text())
    given = {key: torch.tensor(value, dtype=torch.float64) for key, value in stored["inputs"].items()}
    variant, theirs = VARIANTS[name], stored["variants"][name]
    kept, now = given["mask"].bool(), given["now"].clone().requires_grad_()
    rl = replace(
        RL,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        kl=variant["kl"],
        importance_cap=CAP if variant["corrected"] else 0.0,
    )
    columns = Columns(
        sampled=given["engine"][kept],
        advantage=given["advantage"][:, None].expand(3, 7)[kept],
        old=given["old"][kept] if variant["old"] else None,
        reference=given["reference"][kept] if variant["kl"] else None,
    )
    loss = policy_loss(now[kept], columns, rl)["loss"] / kept.sum()
    loss.backward()
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
    close(loss.item(), theirs["loss"])
    close(now.grad, torch.tensor(theirs["gradient"], dtype=torch.float64))
    for place in kept.nonzero().tolist():
        one = tuple(place)
        alone = Columns(
            *(
                None if (found := getattr(columns, field.name)) is None else _only(found, kept, one)
                for field in fields(Columns)
            )
        )
        close(policy_loss(now.detach()[one][None], alone, rl)["loss"].item(), theirs["terms"][one[0]][one[1]])


def _only(values: torch.Tensor, kept: torch.Tensor, place: tuple[int, ...]) -> torch.Tensor:
    """The value of one token."""
    whole = torch.zeros(kept.shape, dtype=values.dtype)
    whole[kept] = values
    return whole[place][None]


@pytest.mark.slow
def test_the_record_of_trl_s_losses_is_what_trl_computes():
    pytest.importorskip("trl.trainer.grpo_trainer", reason="pip install 'redline[bench]'")
    stored, now = json.loads(STORED.read_text()), record()
    for name in VARIANTS:
        for key in ("loss", "terms", "gradient"):
            torch.testing.assert_close(
                torch.tensor(now["variants"][name][key]), torch.tensor(stored["variants"][name][key])
            )
