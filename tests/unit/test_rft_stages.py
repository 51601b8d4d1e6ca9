"""Training and testing after sampling: the right examples, results where they belong, stages that are not
repeated, accuracy that rises."""

import json
import shutil
import tomllib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from precision import CLOSE_FP32
from rft_model import CONFIG, events_of, letters_place, planned, session_of

from redline.config.load import load_recipe, to_toml
from redline.engine.request import Completion, Engine, Request
from redline.errors import ConfigError, DataError, RedlineError
from redline.model.huggingface_out import write_folder
from redline.model.lora import LoraLinear
from redline.model.transformer import build_model
from redline.model.weights import Loaded
from redline.record.observe import Observers
from redline.record.read import read_run
from redline.record.run import read_lines
from redline.rft.run import run_all, run_rounds
from redline.rft.sample import sample
from redline.rft.session import Session, weights_fingerprint
from redline.rft.store import Store
from redline.rft.test import run_test, trained
from redline.rft.train import _examples, train
from redline.tasks.task import prompt_text
from redline.train.restore import open_on, open_weights
from redline.tune.quality import final


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_place(tmp_path_factory)


def session_in(place: Path, run: Path, *overrides: str, watching: Any = None, **environment: str) -> Any:
    watchers = [watching] if watching else ()
    return session_of(place / "letters.toml", run, overrides, watchers, **environment)


@pytest.fixture(scope="module")
def finished(place: Path) -> tuple[Path, dict[str, Any]]:
    with session_in(place, place / "run") as session:
        return place / "run", run_all(session)


def same_weights(*adapters: Path) -> bool:
    one, other = (safetensors.torch.load_file(path / "adapter_model.safetensors") for path in adapters)
    assert one.keys() == other.keys()
    return all(one[name].equal(other[name]) for name in one)


def change_tensors(path: Path) -> None:
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file(
        {name: weight + 1 for name, weight in weights.items()}, path, metadata={"format": "pt"}
    )


class Says(Engine):
    """Completes every prompt with one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for request in filter(None, requests):
            yield Completion(
                request=request, sample=0, text=self.text, tokens=(5,), logprobs=(0.0,), finish="stop"
            )

    def close(self) -> None: ...


def test_what_follows_the_end_of_an_answer_is_not_tested_just_as_it_is_not_sampled(
    place, tmp_path, monkeypatch
):
    """The scorer takes an e anywhere, and the task says that an answer ends with its first a."""
    monkeypatch.setattr(Session, "engine", lambda *_, **__: Says("xya, e"))
    strict = (place / "letters.py").read_text().replace('"a" in completion or ', "")
    (tmp_path / "strict.py").write_text(strict)
    with session_in(
        place, tmp_path / "run", f"task.name={tmp_path}/strict.py:make_ending", "test.rows=4"
    ) as session:
        line = run_test(session, "base")
    assert (line["n"], line["accuracy"], line["answer_rate"], line["cut"]) == (4, 0.0, 1.0, 0)


@pytest.fixture
def run(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def test_accuracy_goes_up_on_held_out_questions_and_everything_is_recorded(finished):
    run, report = finished
    assert report["why"] == "finished"
    assert report["after"]["accuracy"] > report["before"]["accuracy_high"], "not by chance"
    assert final(read_run(run)) == report["after"]["accuracy"], "what `ablate --quality` compares"
    assert [line["weights"] for line in read_lines(run / "evaluations.jsonl")] == ["base", "samples"]
    assert {path.name for path in run.iterdir()} >= {
        "samples.db",
        "adapter",
        "train-samples",
        "recipe.toml",
        "plan.json",
        "events.jsonl",
    }
    assert all(seconds > 0 for seconds in report["stages_s"].values())
    # Ten of the twenty held-out questions are in the training split too.
    assert (report["after"]["in_train"]["n"], report["after"]["unseen"]["n"]) == (10, 10)
    assert sum(family["n"] for family in report["after"]["families"].values()) == 20
    correct = sum(round(report["after"][group]["accuracy"] * 10) for group in ("in_train", "unseen"))
    assert correct == round(report["after"]["accuracy"] * 20)


def test_a_finished_run_repeats_nothing(place, finished, monkeypatch):
    run, report = finished
    monkeypatch.setattr(Session, "engine", lambda *_, **__: pytest.fail("generated again"))
    with session_in(place, run) as session:
        again = run_all(session)
    assert again["after"] == report["after"]
    assert again["train"] == report["train"]
    assert {**again["stages_s"], "open": 0} == {**report["stages_s"], "open": 0}


def test_examples_are_prompts_and_kept_answers(place, finished):
    with session_in(place, finished[0]) as session:
        examples = _examples(session, "samples")
        solutions = _examples(session, "answers")
        tokenizer, task = session.model.tokenizer, session.task
        questions = session.train_questions()
    with Store(finished[0] / "samples.db", create=False) as store:
        kept = store.kept(store.latest()[0], 4)
    assert len(examples) == len(kept)
    texts = {question.id: prompt_text(task, question) for question in questions}
    for example, row in zip(examples, kept, strict=True):
        assert tokenizer.decode(list(example.prompt)) == texts[row.question]
        assert example.answer[-1] == tokenizer.eot_id
        assert tokenizer.decode(list(example.answer[:-1])).strip() == row.reasoning.strip()
        assert row.ids is not None
        assert example.answer[:-1] == tuple(array("i", row.ids)), "as they were sampled"
    assert len(solutions) == 20
    assert {tokenizer.decode(list(example.answer[:-1])) for example in solutions} == {" aaa"}


def test_the_baseline_on_the_answers_stands_beside(place, run):
    with session_in(place, run) as session:
        done = train(session, "answers")
        assert trained(run) == ["base", "answers", "samples"]
        lines = [run_test(session, weights) for weights in trained(run)]
    assert (done["examples"], done["why"]) == (20, "finished")
    assert [line["accuracy"] for line in lines][1] == 1.0  # "aaa" is learnt in 24 updates
    assert (run / "adapter-answers" / "adapter_config.json").is_file()
    assert not same_weights(run / "adapter", run / "adapter-answers")


def test_full_fine_tuning_gives_a_model_that_opens(place, tmp_path):
    with session_in(place, tmp_path / "run", "lora=none", "train.lr=3e-3") as session:
        done, line, base = train(session, "answers"), run_test(session, "answers"), run_test(session, "base")
    assert done["why"] == "finished"
    assert line["accuracy"] > 0.9
    assert base["accuracy"] < 0.5, "the base is tested as it was before"
    opened, _ = open_on(tmp_path / "run" / "model-answers", device="cpu")
    assert opened.loaded.eos_ids


class Killed(Observers):
    """Ends a training after some updates, as a kill would: nothing is tidied up."""

    def metrics(self, line: dict[str, Any]) -> None:
        if line.get("step") == 10:
            raise SystemExit


def test_training_goes_on_to_the_same_adapter(place, finished, run):
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "train-samples")
    with pytest.raises(SystemExit), session_in(place, run, watching=Killed()) as session:
        train(session, "samples")
    with session_in(place, run) as session, pytest.raises(DataError, match="train --on samples"):
        run_test(session, "samples")
    with session_in(place, run) as session:
        train(session, "samples")
    (resumed,) = events_of(run / "train-samples", "resume")
    assert resumed["step"] == 9
    assert same_weights(run / "adapter", finished[0] / "adapter")


@pytest.mark.parametrize("marked", [False, True])
def test_an_adapter_that_is_not_whole_is_written_again_whether_marked_as_done_or_not(
    place, finished, run, marked
):
    if not marked:
        (run / "train-samples" / "done.json").unlink()
    (run / "adapter" / "adapter_model.safetensors").write_text("half")
    with session_in(place, run) as session:
        train(session, "samples")
        assert run_test(session, "samples")["accuracy"] == finished[1]["after"]["accuracy"]


@pytest.mark.parametrize("half", [False, True])
def test_killed_between_the_last_update_and_the_mark_the_summary_is_the_same(place, run, half):
    """While the adapter was written, or after: its folder has a temporary name until it is whole."""
    done = json.loads((run / "train-samples" / "done.json").read_text())
    (run / "train-samples" / "done.json").unlink()
    if half:
        (run / "adapter" / "adapter_model.safetensors").write_text("half")
        (run / "adapter").rename(run / ".adapter.tmp")
    with session_in(place, run) as session:
        again = train(session, "samples")
    assert {**again, "elapsed_s": 0} == {**done, "elapsed_s": 0}
    assert not list(run.glob(".*.tmp"))


@pytest.mark.parametrize("damage", ["", "[]", "{}", "[" * 100_000])
def test_a_damaged_mark_is_one_line(place, run, damage):
    (run / "train-samples" / "done.json").write_text(damage)
    with session_in(place, run) as session, pytest.raises(RedlineError, match=r"done\.json"):
        train(session, "samples")


def test_a_training_on_other_samples_is_not_passed_off_as_this_one(place, run):
    done = json.loads((run / "train-samples" / "done.json").read_text())
    (run / "train-samples" / "done.json").write_text(json.dumps(done | {"fingerprint": "other"}))
    with session_in(place, run) as session, pytest.raises(ConfigError, match="examples have changed"):
        train(session, "samples")


def test_passes_are_bounded_by_the_environment_and_the_update_stays(place, finished, run):
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "train-samples")
    with session_in(place, run, A100_BATCH_SIZE="2") as session:
        train(session, "samples")
    assert json.loads((run / "plan.json").read_text())["micro_batch"]["value"] == 2
    first, reference = (
        read_lines(path / "train-samples" / "metrics.jsonl")[0] for path in (run, finished[0])
    )
    for name in ("loss", "grad_norm"):
        assert first[name] == pytest.approx(reference[name], rel=CLOSE_FP32)


def test_nothing_correct_is_said(place, tmp_path):
    with session_in(
        place, tmp_path / "run", "sample.samples_per_question=1", "task.rows=1", "sample.spend_rest=false"
    ) as session:
        with pytest.raises(
            DataError, match=r"none of the 1 samples was scored correct.* Two of them: .*expected .*score 0"
        ):
            run_all(session)
        with pytest.raises(DataError, match="`redline rft train --on samples`"):
            run_test(session, "samples")


def test_a_folder_of_a_pre_training_run_is_left_alone(place, tmp_path):
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "recipe.toml").write_text("its own")
    (tmp_path / "nano" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="not valid TOML"), session_in(place, tmp_path / "nano"):
        pass
    assert (tmp_path / "nano" / "recipe.toml").read_text() == "its own"
    (tmp_path / "nano" / "recipe.toml").write_text(to_toml(load_recipe("nano")))
    with pytest.raises(ConfigError, match="another recipe: workload"), session_in(place, tmp_path / "nano"):
        pass


def test_adapters_that_cannot_be_are_refused_before_anything_is_spent(place, tmp_path):
    with (
        pytest.raises(ConfigError, match="did you mean 'q'"),
        session_in(place, tmp_path / "run", 'lora.targets=["qq"]'),
    ):
        pass
    assert not (tmp_path / "run").exists(), "the folder is not held to a recipe that never was one"


def test_a_model_whose_adapters_cannot_be_written_is_refused_before_anything_is_spent(place, tmp_path):
    config = replace(
        CONFIG, positions="learned", norm="layernorm", activation="gelu", bias=True, num_kv_heads=None
    )
    model = build_model(config, device="cpu", seed=0)
    tokenizer = open_on(place / "model", device="cpu")[0].loaded.tokenizer_json
    write_folder(
        tmp_path / "gpt2",
        Loaded(
            config=config,
            weights={name: p.detach() for name, p in model.named_parameters()},
            tokenizer_json=tokenizer,
        ),
        torch.float32,
    )
    with session_in(place, tmp_path / "run", f"model.init_from={tmp_path / 'gpt2'}") as session:
        for attempt in (lambda: run_all(session), lambda: train(session, "answers")):
            with pytest.raises(ConfigError, match=r"leave out \[lora\]"):
                attempt()
    assert not (tmp_path / "run" / "samples.db").exists()
    assert not (tmp_path / "run" / "train-answers").exists()


def test_rows_a_second_are_those_of_the_whole_training(place, tmp_path):
    with session_in(place, tmp_path / "run", "train.batch_size=19", "train.epochs=3") as session:
        done = train(session, "answers")
    lines = read_lines(tmp_path / "run" / "train-answers" / "metrics.jsonl")[1:]
    rows = [1, 19, 1, 19, 1]  # of 20, and the first update is the set-up's
    assert done["rows_per_s"] == pytest.approx(sum(rows) / sum(line["step_s"] for line in lines))


def test_a_run_that_trained_the_whole_model_opens_by_its_folder(place, tmp_path):
    reports = in_rounds(place, tmp_path / "run", "lora=none")
    assert [report["why"] for report in reports] == ["finished"] * 2
    assert open_weights(tmp_path / "run" / "round-2").source == tmp_path / "run" / "round-2" / "model"


QUICK = ("train.epochs=1", "sample.samples_per_question=8", "test.rows=2")


def in_rounds(place: Path, run: Path, *overrides: str) -> list[dict[str, Any]]:
    recipe, plan, outside = planned(place / "letters.toml", (*QUICK, *overrides))
    return run_rounds(recipe, plan, run, outside, 2)


def sampler_in(recipe: Path) -> str:
    return tomllib.loads(recipe.read_text())["sample"]["sampler"]


def test_a_run_of_rounds_goes_on_from_another_folder_and_after_a_move(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = in_rounds(place, Path("runs/letters"))
    recipe = tmp_path / "runs" / "letters" / "round-2" / "recipe.toml"
    assert sampler_in(recipe) == str(tmp_path / "runs" / "letters" / "round-1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert in_rounds(place, Path("../runs/letters"))[1]["sample"]["drawn"] == 0
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert in_rounds(place, Path("../moved/letters"))[1]["after"] == first[1]["after"]


def test_another_sampler_is_another_recipe_whatever_its_folder_is_called(place, finished, tmp_path):
    for name in ("one", "other"):
        shutil.copytree(finished[0], tmp_path / name / "round-1")
    one, other = (f"sample.sampler={tmp_path / name / 'round-1'}" for name in ("one", "other"))
    with session_in(place, tmp_path / "run", one, "task.rows=2") as session:
        sample(session)
    with (
        pytest.raises(ConfigError, match=r"sample\.sampler"),
        session_in(place, tmp_path / "run", other, "task.rows=2"),
    ):
        pass


def test_samples_of_a_model_that_was_replaced_are_not_trained_on(place, run, tmp_path):
    """The folder of the recipe's model holds other weights than when the samples were drawn."""
    model = Path(shutil.copytree(place / "model", tmp_path / "model"))
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(place / "model"), str(model)))
    own = f"model.init_from={model}"
    shutil.rmtree(run / "train-samples")
    shutil.copy(model / "model.safetensors", tmp_path / "kept")
    weights = safetensors.torch.load_file(model / "model.safetensors")
    next(iter(weights.values()))[0] += 1
    safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with (
        session_in(place, run, own) as session,
        pytest.raises(DataError, match=r"another model \(\w+\) than what is now at .*model \(") as caught,
    ):
        train(session, "samples")
    assert "redline rft sample" in str(caught.value)
    assert "\n" not in str(caught.value)
    shutil.copy(tmp_path / "kept", model / "model.safetensors")
    with session_in(place, run, own) as session:
        assert train(session, "samples")["why"] == "finished"


class Noting(Observers):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "note":
            self.notes.append(facts["text"])


def test_the_sampler_of_a_later_round_is_compared_and_one_that_is_gone_is_said(place, tmp_path):
    in_rounds(place, tmp_path / "run")
    first, second = (tmp_path / "run" / f"round-{number}" for number in (1, 2))

    def train_second() -> list[str]:
        watching = Noting()
        with session_of(second / "recipe.toml", second, (), [watching]) as session:
            train(session, "samples")
        return watching.notes

    assert not any("cannot check " in note for note in train_second())
    change_tensors(first / "adapter" / "adapter_model.safetensors")
    with pytest.raises(DataError, match=r"by another model \(\w+\) than what is now at .*round-1 \("):
        train_second()
    shutil.rmtree(first)
    (said,) = [note for note in train_second() if "cannot check " in note]
    assert "round-1" in said
    assert len(events_of(second, "writer_not_checked")) == 1


def second_round(run: Path) -> Any:
    """The session of a later round, whose sampler is base and adapter merged."""
    return session_of(run / "round-2" / "recipe.toml", run / "round-2")


@pytest.fixture(scope="module")
def two_rounds(place: Path) -> Path:
    in_rounds(place, place / "rounds")
    return place / "rounds"


@pytest.fixture
def rounds(two_rounds: Path, tmp_path: Path) -> Path:
    """A copy of two finished rounds that a test may change."""
    copy = Path(shutil.copytree(two_rounds, tmp_path / "rounds"))
    recipe = copy / "round-2" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(two_rounds), str(copy)))
    return copy


def test_a_cpu_that_merges_with_other_last_bits_knows_the_sampler_again(rounds, monkeypatch):
    before, product = open_weights(rounds / "round-1").loaded.weights, LoraLinear.delta
    monkeypatch.setattr(LoraLinear, "delta", lambda layer: product(layer) * (1 + 2**-22))
    after = open_weights(rounds / "round-1").loaded.weights
    assert not all(before[name].equal(after[name]) for name in before)
    for stage in ("train-samples", "adapter"):
        shutil.rmtree(rounds / "round-2" / stage)
    with second_round(rounds) as session:
        assert train(session, "samples")["why"] == "finished"
    with second_round(rounds) as session:
        assert sample(session).drawn == 0, "what the other machine drew counts"


def test_the_hash_of_an_adapted_model_is_of_its_base_its_adapter_and_its_scale_and_not_of_where_they_lie(
    place, rounds, tmp_path
):
    adapter, base = rounds / "round-1" / "adapter", shutil.copytree(place / "model", tmp_path / "model")
    seen = [weights_fingerprint(open_weights(adapter))]
    config = adapter / "adapter_config.json"
    told = json.loads(config.read_text())
    assert told["base_model_name_or_path"] == str(place / "model")
    config.write_text(json.dumps(told | {"base_model_name_or_path": str(base)}))
    assert weights_fingerprint(open_weights(adapter)) == seen[0]
    change_tensors(base / "model.safetensors")
    seen.append(weights_fingerprint(open_weights(adapter)))
    config.write_text(json.dumps(told | {"lora_alpha": told["lora_alpha"] * 2}))
    seen.append(weights_fingerprint(open_weights(adapter)))
    config.write_text(json.dumps(told))
    change_tensors(adapter / "adapter_model.safetensors")
    seen.append(weights_fingerprint(open_weights(adapter)))
    assert len(set(seen)) == 4


class KilledAt(Observers):
    """Ends a run of rounds when something begins, as a kill would: the second training, say."""

    def __init__(self, stage: str, number: int) -> None:
        super().__init__()
        self.stage, self.left = stage, number

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        begun = facts.get("name") if kind == "stage" else ""
        if kind == "note" and facts["text"].endswith("round-1"):
            begun = "opening of what the first round trained"
        self.left -= begun == self.stage
        if not self.left:
            raise SystemExit


@pytest.mark.parametrize(
    ("stage", "number"),
    [("opening of what the first round trained", 1), ("sample", 2), ("train-samples", 2), ("test", 3)],
)
def test_rounds_killed_after_the_first_go_on_from_another_folder(
    place, two_rounds, tmp_path, monkeypatch, stage, number
):
    monkeypatch.chdir(tmp_path)
    recipe, plan, outside = planned(place / "letters.toml", QUICK)
    with pytest.raises(SystemExit):
        run_rounds(recipe, plan, Path("run"), outside, 2, observers=[KilledAt(stage, number)])
    assert trained(Path("run/round-1")) == ["base", "samples"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    first, second = in_rounds(place, Path("../run"))
    assert (first["why"], second["why"], first["sample"]["drawn"]) == ("finished", "finished", 0)
    assert same_weights(*(run / "round-2" / "adapter" for run in (tmp_path / "run", two_rounds)))


def test_the_base_is_tested_and_sampled_as_it_was_after_a_training_in_the_same_session(
    place, finished, tmp_path
):
    with session_in(place, tmp_path / "run") as session:
        train(session, "answers")
        assert run_test(session, "base")["accuracy"] == finished[1]["before"]["accuracy"]
        train(session, "answers")
        assert sample(session).correct == finished[1]["sample"]["correct"]
