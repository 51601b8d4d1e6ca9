"""Sampling with a real, tiny model: what is drawn is scored and stored, compared with the training forward,
and resumed exactly."""

import itertools
import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from precision import CLOSE_FP32
from rft_model import CONFIG, TASK, events_of, letters_place, session_of
from test_server_engine import Fake, completion

from redline.cli.main import main
from redline.config.load import load_recipe
from redline.config.recipe import LoraConfig
from redline.engine.local import LocalEngine
from redline.engine.request import Completion, Engine, Request
from redline.errors import ConfigError, DataError, MachineError
from redline.model.lora import add_lora, merged
from redline.record.observe import SAMPLING, Observers
from redline.rft.run import generate_dataset
from redline.rft.sample import Outcome, _Drawing, logprob_gap, sample, spelling
from redline.rft.session import Session
from redline.rft.stats import export, stats
from redline.rft.store import Store
from redline.tasks.registry import load_task
from redline.tasks.task import Verdict, interval_95, shares
from redline.train.restore import open_weights


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_place(tmp_path_factory)


def draw(place: Path, run: Path, *overrides: str, watching: Any = None, **environment: str) -> Outcome:
    watchers = [watching] if watching else ()
    with session_of(place / "letters.toml", run, overrides, watchers, **environment) as session:
        return sample(session)


def stored(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Every sample by its name, without when it was drawn."""
    with Store(run / "samples.db", create=False) as store:
        rows = list(store.rows(store.latest()[0]))
    named = {
        (row["question"], row["sample"]): {key: value for key, value in row.items() if key != "at"}
        for row in rows
    }
    assert len(named) == len(rows)
    return named


def assert_same_samples(run: Path, reference: Path) -> None:
    """Equal but for the last bits of log-probabilities, which depend on what shares a batch."""
    found, expected = stored(run), stored(reference)
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        assert {key: value for key, value in found[name].items() if "logprob" not in key} == {
            key: value for key, value in row.items() if "logprob" not in key
        }
        assert found[name]["logprob_sum"] == pytest.approx(row["logprob_sum"], rel=CLOSE_FP32)


@pytest.fixture(scope="module")
def unbroken(place: Path) -> Path:
    run = place / "unbroken"
    assert draw(place, run).why == "finished"
    return run


def test_every_sample_is_scored_and_described(place, unbroken):
    task = load_task(f"{place}/letters.py:make")
    questions = {question.id: question for question in task.questions("train", 20, 0)}
    rows = stored(unbroken)
    for (question, _), row in rows.items():
        assert Verdict(
            row["correct"], row["parsed"], row["reward"], row["answer"], row["reason"]
        ) == task.score(questions[question], row["text"])
        assert row["question_text"] == questions[question].text
        assert 1 <= row["tokens"] <= 2
        assert row["logprob_min"] <= row["logprob_mean"] <= 0
        assert math.isclose(row["logprob_mean"] * row["tokens"], row["logprob_sum"])
        assert (row["reasoning_key"] is not None) == row["correct"]
    found = stats(unbroken)
    assert found["correct"] == sum(row["correct"] for row in rows.values()) > 10
    assert found["tokens"] == sum(row["tokens"] for row in rows.values())


def test_the_record_says_how_far_engine_and_training_disagree(unbroken):
    (gap,) = events_of(unbroken, "logprob_gap")
    assert 0 <= gap["mean"] <= gap["max"] < 1e-4
    assert gap["completions"] == 20


def test_the_disagreement_is_measured_right(place):
    with session_of(place / "letters.toml", place / "gap") as session:
        speaker = session.sampler
        request = Request(prompt=(5, 6, 7), sampling=session.settings(()), samples=3)
        with LocalEngine(
            speaker.model, speaker.tokenizer, max_prompt_tokens=8, max_new_tokens=2, slots=3
        ) as engine:
            completions = list(engine.run([request]))
        exact = logprob_gap(speaker.model, completions)
        moved = [
            replace(c, logprobs=tuple(x + 0.5 * (c.sample == 1) for x in c.logprobs)) for c in completions
        ]
        found = logprob_gap(speaker.model, moved)
    close = CLOSE_FP32 * math.log(CONFIG.vocab_size)  # about what a log-probability is
    assert exact["max"] < close
    assert found["max"] == pytest.approx(0.5, abs=close)
    assert found["mean"] == pytest.approx(0.5 / 3, abs=close)


def test_a_finished_run_draws_nothing_more(place, unbroken):
    before = stored(unbroken)
    outcome = draw(place, unbroken)
    assert (outcome.why, outcome.drawn, outcome.samples) == ("finished", 0, len(before))
    assert stored(unbroken) == before


def test_killed_after_the_last_sample_the_next_attempt_records_the_end(place, tmp_path):
    outcome = draw(place, tmp_path)
    events = tmp_path / "events.jsonl"
    events.write_text("".join(line for line in events.open() if '"sampling_end"' not in line))
    for _ in range(2):  # and says it once
        assert draw(place, tmp_path).drawn == 0
        (end,) = events_of(tmp_path, "sampling_end")
        assert (end["why"], end["samples"], end["solved"]) == ("finished", outcome.samples, outcome.solved)


class Stopping(Observers):
    """Stops the run like Ctrl-C after some samples, and notes what it was shown."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.seen = after, list[dict[str, Any]]()

    def metrics(self, facts: dict[str, Any]) -> None:
        import os
        import signal

        self.seen.append(facts)
        if self.after and facts["samples"] >= self.after:
            self.after = 0
            os.kill(os.getpid(), signal.SIGINT)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "stage":
            self.stage = facts


def test_stopped_and_resumed_gives_what_an_unbroken_run_gives(place, unbroken, tmp_path):
    drawn = 0
    for after in (100, 250, 400):
        outcome = draw(place, tmp_path / "run", watching=Stopping(after), MICRO_BATCH_SIZE="16")
        assert outcome.why == "stopped by signal"
        drawn += outcome.drawn
        assert outcome.samples == drawn >= after
    outcome = draw(place, tmp_path / "run", MICRO_BATCH_SIZE="16")
    assert outcome.why == "finished"
    assert_same_samples(tmp_path / "run", unbroken)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["slots"]["value"] == 16
    assert plan["slots"]["source"] == "environment"


def test_who_watches_sees_it_grow(place, tmp_path):
    watching = Stopping(0)
    outcome = draw(place, tmp_path / "run", watching=watching)
    *facts, last = watching.seen
    assert (watching.stage["name"], watching.stage["questions"]) == ("sample", 20)
    assert set(last) == set(SAMPLING)
    assert last["samples"] == outcome.samples
    assert last["correct"] == outcome.correct
    assert last["questions_done"] == last["questions"] == 20
    assert last["samples_left"] == 0
    assert all(a["samples"] < b["samples"] for a, b in itertools.pairwise(facts))


def test_another_seed_draws_other_texts_and_another_recipe_is_refused(place, unbroken, tmp_path):
    draw(place, tmp_path / "other", "train.seed=4")
    mine, theirs = stored(tmp_path / "other"), stored(unbroken)
    shared = mine.keys() & theirs.keys()
    assert sum(mine[key]["text"] == theirs[key]["text"] for key in shared) < len(shared) / 2
    with pytest.raises(ConfigError, match=r"sample\.temperature \(1\.0 before, 0\.5 now\)"):
        draw(place, unbroken, "sample.temperature=0.5")


def test_a_prompt_that_does_not_fit_is_refused(place, tmp_path):
    with pytest.raises(ConfigError, match=r"do not fit the model.s context of 128.*max_new_tokens"):
        draw(place, tmp_path / "run", "sample.max_new_tokens=127")


class Broken(Engine):
    """An engine that gives the same sample twice."""

    def run(self, requests: Any) -> Iterator[Completion]:
        request = next(iter(requests))
        for _ in range(2):
            yield Completion(request=request, sample=0, text="a", tokens=(), logprobs=(), finish="stop")
        yield from ()

    def close(self) -> None: ...


def test_an_error_behind_the_engine_ends_the_run_and_is_raised(place, tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "sampling_engine", lambda self, asked, **_: Broken())
    with pytest.raises(sqlite3.IntegrityError):
        draw(place, tmp_path / "run")


def test_running_out_of_memory_halves_the_slots_and_goes_on(place, unbroken, tmp_path, monkeypatch):
    class ShortOfMemory(LocalEngine):
        def __init__(self, *given: Any, slots: int, **named: Any) -> None:
            super().__init__(*given, slots=slots, **named)
            self.fits = slots <= 16

        def run(self, requests: Any) -> Iterator[Completion]:
            for number, one in enumerate(super().run(requests)):
                if not self.fits and number == 30:
                    raise torch.OutOfMemoryError("out of memory")
                yield one

    monkeypatch.setattr("redline.rft.session.LocalEngine", ShortOfMemory)
    outcome = draw(place, tmp_path / "run")
    assert outcome.why == "finished"
    assert outcome.drawn == outcome.samples
    assert_same_samples(tmp_path / "run", unbroken)
    events = events_of(tmp_path / "run", "out_of_memory")
    assert [(event["slots_before"], event["slots"]) for event in events] == [(64, 32), (32, 16)]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["slots"]["value"], plan["slots"]["source"]) == (16, "measurement")


def test_no_memory_for_one_sequence_is_said(place, tmp_path, monkeypatch):
    def none_at_all(self: LocalEngine, requests: Any) -> Iterator[Completion]:
        raise torch.OutOfMemoryError("out of memory")
        yield

    monkeypatch.setattr(LocalEngine, "run", none_at_all)
    with pytest.raises(MachineError, match="one sequence at a time"):
        draw(place, tmp_path / "run")


def test_a_server_can_write_the_samples(place, tmp_path):
    fake = Fake()
    try:
        fake.owner = "sglang"  # which counts tokens and does not tell them
        fake.answer = lambda body, call: (
            200,
            completion("a" if body["seed"] % 2 else "\ud83d", finish_reason="stop")
            | {"usage": {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}},
        )
        outcome = draw(place, tmp_path / "run", f"sample.server={fake.url}", "sample.samples_per_question=6")
    finally:
        fake.server.shutdown()
        fake.server.server_close()
    assert (outcome.why, outcome.samples) == ("finished", 120)
    assert 0 < outcome.correct < 120
    rows = stored(tmp_path / "run")
    assert {row["tokens"] for row in rows.values()} == {7}
    assert outcome.tokens == stats(tmp_path / "run")["tokens"] == 7 * 120
    assert {row["logprob_mean"] for row in rows.values()} == {None}
    prompts = {body["prompt"] for body in fake.bodies}
    assert len(prompts) == 20
    assert all(prompt.startswith("Question: Write ") for prompt in prompts), (
        "text: a server has a tokenizer of its own"
    )
    assert not events_of(tmp_path / "run", "logprob_gap")


def test_a_chat_server_is_asked_with_messages(place, tmp_path):
    fake = Fake()
    try:
        fake.answer = lambda body, call: (
            200,
            {"choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]},
        )
        url = f"{fake.url}/v1/chat/completions"
        outcome = draw(place, tmp_path / "run", f"sample.server={url}", "sample.samples_per_question=1")
    finally:
        fake.server.shutdown()
        fake.server.server_close()
    assert outcome.correct == outcome.samples == len(fake.bodies) > 0
    asked = fake.bodies[0]["messages"][-1]
    assert asked["role"] == "user"
    assert asked["content"].startswith("Write "), "the question itself, not a text to be continued"


def test_answers_whose_scorer_fails_are_wrong_and_counted(place, tmp_path):
    head = "def score(question, completion):\n"
    fails = TASK.replace(head, f"{head}    assert 'e' not in completion\n")
    (tmp_path / "fails.py").write_text(fails)
    outcome = draw(place, tmp_path / "run", f"task.name={tmp_path}/fails.py:make")
    failed = [row for row in stored(tmp_path / "run").values() if row["reason"]]
    assert outcome.scorer_failures == len(failed) > 0
    assert not any(row["correct"] for row in failed)


def test_answers_that_were_cut_are_not_correct_are_not_kept_and_are_counted(place, tmp_path, capsys):
    """The scorer takes an a or an e; the task says that an answer ends with its first a. Two tokens are seldom
    enough for a model to end it otherwise."""
    watching = Stopping(0)
    outcome = draw(place, tmp_path / "run", f"task.name={place}/letters.py:make_ending", watching=watching)
    rows = stored(tmp_path / "run").values()
    cut = [row for row in rows if row["finish"] == "length"]
    assert [row for row in cut if "e" in row["text"]], "some would have scored as correct"
    assert not [row for row in cut if row["correct"] or row["reasoning_key"] or row["text"].endswith("a")]
    assert all(row["tokens"] < 2 or "a" in row["text"] for row in rows if row["correct"])
    assert outcome.correct == sum(row["correct"] for row in rows) > 0
    assert outcome.cut == len(cut) == stats(tmp_path / "run")["cut"] == watching.seen[-1]["cut"]
    (end,) = events_of(tmp_path / "run", "sampling_end")
    assert end["cut"] == len(cut)
    assert main(["rft", "stats", str(tmp_path / "run")]) == 0
    assert f"{len(cut):,} ran out of tokens" in capsys.readouterr().out
    export(tmp_path / "run", tmp_path / "rft.json", per_question=0)
    kept = {reasoning for _, _, reasoning in json.loads((tmp_path / "rft.json").read_text())}
    assert kept
    assert kept <= {row["text"].strip() for row in rows if row["finish"] == "stop"}


def test_generate_dataset_writes_triples(place, tmp_path):
    settings = {"recipe": str(place / "letters.toml"), "overrides": ("sample.keep_per_question=2",)}
    count = generate_dataset(tmp_path / "rft.json", 30, 1.0, 8, **settings)
    triples = json.loads((tmp_path / "rft.json").read_text())
    assert len(triples) == count > 5
    assert all(
        text.startswith("Write ") and answer == "a" and set("ae") & set(reasoning)
        for text, answer, reasoning in triples
    )
    assert max([text for text, _, _ in triples].count(text) for text, _, _ in triples) <= 2
    # goes on, and there is nothing left
    assert generate_dataset(tmp_path / "rft.json", 30, 1.0, 8, **settings) == count
    with pytest.raises(DataError, match="no samples"):
        stats(tmp_path)


def test_generate_dataset_that_is_stopped_does_not_pass_a_part_off_as_all(place, tmp_path, monkeypatch):
    keep = _Drawing._keep

    def keep_and_stop(self, *arguments):
        keep(self, *arguments)
        self.budget.stop()  # as Ctrl-C does

    with monkeypatch.context() as patched:
        patched.setattr(_Drawing, "_keep", keep_and_stop)
        with pytest.raises(KeyboardInterrupt, match="it resumes from"):
            generate_dataset(tmp_path / "rft.json", 30, 1.0, 8, recipe=str(place / "letters.toml"))
    assert not (tmp_path / "rft.json").exists()
    assert generate_dataset(tmp_path / "rft.json", 30, 1.0, 8, recipe=str(place / "letters.toml")) > 5


# ---- shares ----


def verdicts(correct: int, parsed: int, n: int) -> Sequence[Verdict]:
    return [Verdict(i < correct, i < parsed, 0.0, None) for i in range(n)]


def test_shares_have_wilsons_interval():
    found = shares(verdicts(4, 20, 100))
    # Reference: statsmodels.stats.proportion.proportion_confint(4, 100, method="wilson"), and the same for
    # 20.
    assert (found["n"], found["accuracy"], found["answer_rate"]) == (100, 0.04, 0.2)
    assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx((0.0156637, 0.0983716), abs=1e-6)
    assert (found["answer_rate_low"], found["answer_rate_high"]) == pytest.approx(
        (0.1333669, 0.2888292), abs=1e-6
    )
    assert interval_95(0.0, 10)[0] == 0.0
    assert interval_95(1.0, 10)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("truth", [0.04, 0.3, 0.62, 0.9])
def test_the_interval_holds_the_truth_as_often_as_it_says(truth):
    def chance(hits: int) -> float:
        return math.comb(100, hits) * truth**hits * (1 - truth) ** (100 - hits)

    held = sum(
        chance(hits)
        for hits in range(101)
        if interval_95(hits / 100, 100)[0] <= truth <= interval_95(hits / 100, 100)[1]
    )
    assert 0.92 < held < 0.98


def test_what_is_trained_may_show_fewer_examples_than_the_sampler_saw(place: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(place / "letters.toml"), ["prompt.shots=1", "prompt.trained_shots=0"])
    same = load_recipe(str(place / "letters.toml"), ["prompt.shots=1"])
    assert recipe.sampling == same.sampling, "the samples are the same ones"
    examples = (("Write 1", "a"), ("Write 2", "e"))
    shots = ["prompt.shots=1", "prompt.trained_shots=0"]
    with session_of(place / "letters.toml", tmp_path / "run", shots) as session:
        session.task = replace(session.task, examples=examples)
        questions = session.train_questions()[:1]
        assert "Write 1" in session.ask(questions, session.model)[0].text
        assert "Write 1" not in session.ask(questions, session.model, trained=True)[0].text
    assert same.prompt.shots_of(trained=True) == 1


def test_an_engine_refuses_adapters_that_are_not_merged(place: Path, tmp_path: Path) -> None:
    with session_of(place / "letters.toml", tmp_path / "run") as session:
        model = session.model.model
        add_lora(model, LoraConfig(rank=2), seed=0)
        with LocalEngine(
            model, session.model.tokenizer, slots=1, max_prompt_tokens=4, max_new_tokens=2
        ) as engine:
            request = Request(prompt=(5, 6), sampling=session.settings(()))
            with pytest.raises(ConfigError, match="not merged"):
                list(engine.run([request]))
            with merged(model):
                assert len(list(engine.run([request]))) == 1


def test_the_tokens_of_an_answer_are_those_that_were_sampled(place: Path) -> None:
    tokenizer = open_weights(place / "model").tokenizer
    # Byte by byte, as a model may sample what the tokenizer would merge.
    apart = [token for letter in " Answer: b c" for token in tokenizer.encode([letter])[0]]
    assert apart != tokenizer.encode([" Answer: b c"])[0]
    assert spelling(apart, "Answer: b", tokenizer) == tuple(apart[: len(" Answer: b")])
    assert spelling(apart, "Answer: b c", tokenizer) == tuple(apart)
    merged = tokenizer.encode([" Answer: b c"])[0]
    assert spelling(merged, "Ans", tokenizer) is None, "it ends inside a token"
    assert spelling(merged, "another text", tokenizer) is None
