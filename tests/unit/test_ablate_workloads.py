"""Generation and fine-tuning as trials, in this process on a CPU: every switch computes the same numbers, on
the work it says."""

from dataclasses import asdict
from typing import Any

import pytest

from redline.config.load import load_recipe, to_toml
from redline.measure.finetuning import FinetuningSubject, examples
from redline.measure.generation import MOST_UNCACHED, GenerationSubject, spread
from redline.optimizations.catalogue import Samples
from redline.optimizations.work import Finetuning, Generating
from redline.train.packing import exact

RECIPE = load_recipe(
    "nano",
    [
        "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1",
        "model.ffn_size=64",
        "model.context_length=128", "model.vocab_size=320", "data.seq_len=64", "train.batch_size=8",
        "train.lr=1e-3",
    ],
)  # fmt: skip
WORK = Samples(prompts=4, samples=3, prompt_tokens=12, new_tokens=9)


def generation(**how: Any) -> GenerationSubject:
    setting = {
        "recipe": to_toml(RECIPE),
        "device": "cpu",
        "samples": asdict(WORK),
        "how": asdict(Generating(precision="fp32", **how).in_force()),
    }
    return GenerationSubject(setting)


@pytest.mark.parametrize(
    "how",
    [
        {"cached": False, "merged": False},
        {"cached": False},
        {"refilled": False, "shared": False, "sequences": 5},
        {"refilled": False},
        {"shared": False},
        {"sequences": 2},
        {},
    ],
    ids=str,
)
def test_every_way_to_generate_gives_the_references_log_probabilities(how: dict[str, Any]) -> None:
    arm = generation(**how)
    arm.step()
    arm.drain()
    assert len(arm.losses) == WORK.prompts
    assert max(arm.losses) < 1e-4
    arm.close()


def test_a_wrong_cache_would_be_seen() -> None:
    arm = generation()
    assert arm.engine is not None
    read = arm.engine.decoder.forward.prefill

    def wrong(*given: Any) -> None:
        read(*given)
        arm.engine.decoder.forward.state.prompt_kv.mul_(1.5)  # type: ignore[union-attr]

    arm.engine.decoder.forward.prefill = wrong  # type: ignore[method-assign]
    arm.step()
    assert max(arm.losses) > 1e-4


def test_tokens_counted_are_those_within_the_lengths() -> None:
    assert spread(3, 9) == [3, 6, 9]
    assert spread(4, 9) == [3, 5, 7, 9]
    assert generation().tokens_per_step == WORK.samples * sum(spread(WORK.prompts, WORK.new_tokens))
    assert generation(refilled=False, sequences=5).tokens_per_step == sum(spread(5, WORK.new_tokens))
    assert generation(cached=False).tokens_per_step == sum(
        spread(WORK.prompts * WORK.samples, WORK.new_tokens)
    )
    assert WORK.prompts * WORK.samples < MOST_UNCACHED


def test_the_engine_does_the_work_it_is_timed_for() -> None:
    arm = generation()
    arm.step()
    assert arm.engine is not None
    checked = arm.engine.stats.new_tokens
    arm.step()
    assert arm.engine.stats.new_tokens - checked == arm.tokens_per_step
    assert arm.engine.stats.requests == 3 * WORK.prompts
    apart = generation(shared=False)
    apart.step()
    assert apart.engine is not None
    assert apart.engine.stats.requests == WORK.prompts + WORK.prompts * WORK.samples


# ---- fine-tuning ----


def finetuned(**how: Any) -> FinetuningSubject:
    setting = {"recipe": to_toml(RECIPE), "device": "cpu", "how": asdict(Finetuning(precision="fp32", **how))}
    return FinetuningSubject(setting)


def losses(arm: FinetuningSubject) -> list[float]:
    for _ in range(3):
        arm.step()
    arm.drain()
    return arm.losses


def test_padding_and_recomputation_change_the_work_and_not_the_training() -> None:
    expected = losses(finetuned())
    assert expected[0] > 1
    assert losses(finetuned(padded=True)) == pytest.approx(expected, rel=1e-5)
    assert losses(finetuned(recompute="full")) == pytest.approx(expected, rel=1e-6)
    half = RECIPE.train.batch_size // 2
    assert losses(finetuned(rows=half, padded=True)) == pytest.approx(expected, rel=1e-5)


def test_a_padded_row_computes_every_position() -> None:
    arm = finetuned(padded=True)
    (shape,) = set(arm.trainer.objective.shapes)
    assert shape is not None
    assert shape.tokens == RECIPE.train.batch_size * RECIPE.data.seq_len
    assert arm.tokens_per_step < shape.tokens / 2, "most of it is padding"
    halved = finetuned(padded=True, rows=RECIPE.train.batch_size // 2)
    (of_a_pass,) = set(halved.trainer.objective.shapes)
    assert of_a_pass is not None
    assert of_a_pass.tokens == shape.tokens / 2
    assert arm.tokens_per_step == finetuned().tokens_per_step, "which does not count"


def test_rows_have_the_tasks_lengths_and_a_trial_never_ends() -> None:
    rows = examples(RECIPE)
    assert len(rows) == 1000
    assert exact(rows).longest <= RECIPE.data.seq_len
    arm = finetuned()
    arm.trainer.source.done = len(arm.trainer.source.updates) - 1
    arm.step()
    arm.step()
    arm.drain()
    assert len(arm.losses) == 2
