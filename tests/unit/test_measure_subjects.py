"""What trials measure, in this process on a CPU: every way to generate and to fine-tune computes the same numbers,
on the work it says."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from redline.config.load import load_recipe, to_toml
from redline.config.recipe import Recipe
from redline.machine.facts import read_facts
from redline.measure.generation import MOST_UNCACHED, GenerationSubject, spread
from redline.measure.training import TrainingSubject, padded, random_rows, whole_batches
from redline.measure.trial import GenerationSwitches, Timing
from redline.optimizations.catalogue import Samples
from redline.plan.hardware import hardware_here
from redline.train.packed import Packed, exact
from redline.train.restore import with_shape
from redline.tune.arms import UpdateArms, rehearsed
from redline.tune.guard import EXACT_BAND

RECIPE = load_recipe(
    "nano",
    [
        "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1",
        "model.ffn_size=64",
        "model.context_length=128", "model.vocab_size=320", "data.seq_len=64", "train.batch_size=8",
        "train.lr=1e-3", "train.length_ramp_steps=3",
    ],
)  # fmt: skip
WORK = Samples(prompts=4, samples=3, prompt_tokens=12, new_tokens=9)


def generation(**how: Any) -> GenerationSubject:
    setting = {
        "recipe": to_toml(RECIPE),
        "device": "cpu",
        "samples": asdict(WORK),
        "how": asdict(GenerationSwitches(precision="fp32", **how).in_force()),
    }
    return GenerationSubject(setting)


@pytest.mark.parametrize(
    "how",
    [
        {"cached": False, "merged": False},
        {"cached": False},
        {"refilled": False, "shared": False, "slots": 5},
        {"refilled": False},
        {"shared": False},
        {"slots": 2},
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
    assert generation(refilled=False, slots=5).tokens_per_step == sum(spread(5, WORK.new_tokens))
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


# ---- updates ----

CPU = hardware_here(replace(read_facts(), gpus=()), None)


def trained(recipe: Recipe, **state: Any) -> TrainingSubject:
    arms = UpdateArms(recipe=recipe, hardware=CPU, timing=Timing())
    return TrainingSubject(arms.trial({"precision": "fp32", **state}).setting)


def finetuned(recipe: Recipe | None = None, **state: Any) -> TrainingSubject:
    return trained(recipe or rehearsed(RECIPE), **state)


def test_pre_training_is_measured_on_whole_sequences() -> None:
    """Whatever the first updates of its recipe read."""
    arm = trained(RECIPE)
    assert RECIPE.train.length_ramp_steps
    assert arm.trainer.source.next().inputs_BT.shape == (8, RECIPE.data.seq_len)
    arm.close()


def losses(arm: TrainingSubject, steps: int = 3) -> list[float]:
    for _ in range(steps):
        arm.step()
    arm.drain()
    arm.close()
    return arm.losses


def test_padding_and_recomputation_change_the_work_and_not_the_training() -> None:
    expected = losses(finetuned())
    assert expected[0] > 1
    assert losses(finetuned(padded=True)) == pytest.approx(expected, rel=EXACT_BAND["fp32"])
    assert losses(finetuned(recompute="full")) == pytest.approx(expected, rel=EXACT_BAND["fp32"])
    assert losses(finetuned(micro_batch=2)) == pytest.approx(expected, rel=EXACT_BAND["fp32"])
    assert losses(finetuned(micro_batch=4, padded=True)) == pytest.approx(expected, rel=EXACT_BAND["fp32"])


def test_a_padded_row_computes_every_position() -> None:
    arm, plain = finetuned(padded=True), finetuned()
    objective = arm.trainer.objective
    assert isinstance(objective, Packed)
    (shape,) = set(objective.shapes)
    assert shape == padded(objective.updates, RECIPE.train.batch_size, RECIPE.data.seq_len)
    assert shape.tokens == RECIPE.train.batch_size * RECIPE.data.seq_len
    assert arm.tokens_per_step < shape.tokens / 2, "most of it is padding"
    assert arm.tokens_per_step == plain.tokens_per_step, "which does not count"
    halved = finetuned(padded=True, micro_batch=RECIPE.train.batch_size // 2)
    assert isinstance(halved.trainer.objective, Packed)
    assert {of_a_pass.tokens for of_a_pass in halved.trainer.objective.shapes} == {shape.tokens / 2}
    for each in (arm, plain, halved):
        each.close()


def test_random_rows_have_the_tasks_lengths_and_a_trial_never_ends() -> None:
    rows = random_rows(RECIPE.model.vocab_size, 128)
    assert rows == random_rows(RECIPE.model.vocab_size, 128)
    assert {len(row.prompt) for row in rows} == set(range(18, 37))
    assert {len(row.answer) for row in rows} == set(range(10, 27))
    assert len(whole_batches(rows, 32)) == 992
    arm = finetuned()
    assert isinstance(arm.trainer.objective, Packed)
    updates = arm.trainer.objective.updates
    assert arm.tokens_per_step == round(sum(exact(update).tokens for update in updates) / len(updates))
    arm.trainer.source.done = len(updates) - 1  # type: ignore[attr-defined]
    assert len(losses(arm, steps=2)) == 2


def test_a_fine_tuning_recipe_is_measured_on_its_own_model_and_examples(tmp_path: Path) -> None:
    chats = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(9) for b in range(9)]
    source = tmp_path / "sums.jsonl"
    source.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    sets = [f"data.source={source}", "prompt.mode=text", "data.valid_fraction=0", "train.batch_size=16"]
    arm = finetuned(with_shape(load_recipe("finetune", sets)))
    assert isinstance(arm.trainer.objective, Packed)
    examples = [example for update in arm.trainer.objective.updates for example in update]
    assert len(examples) == 3 * 80, "three epochs of the five whole batches of 81 rows"
    assert len(losses(arm)) == 3


def test_rft_is_measured_on_its_model_with_rows_of_its_length() -> None:
    recipe = with_shape(load_recipe("rft/demo"))
    arm = finetuned(recipe)
    assert isinstance(arm.trainer.objective, Packed)
    longest = exact([example for update in arm.trainer.objective.updates for example in update]).longest
    assert longest <= 0.5 * 2 * recipe.sample.max_new_tokens
    assert len(losses(arm, steps=1)) == 1
