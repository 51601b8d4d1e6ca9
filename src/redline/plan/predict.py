"""What the arithmetic says of a recipe under the values of a plan: its longest row and its memory."""

from collections.abc import Mapping
from typing import Any

from redline.config.recipe import Recipe
from redline.plan import arithmetic, reinforcement
from redline.plan.plan import Hardware


def longest_row(recipe: Recipe) -> int:
    """Tokens of a sequence. Of an example the most that the recipe says; RFT knows only the length of the
    answers, and takes the prompts to be as long."""
    if recipe.rl is not None:
        return min(recipe.rl.max_prompt_tokens + recipe.rl.max_new_tokens, recipe.model.context_length)
    if recipe.workload == "rft":
        return min(2 * recipe.sample.max_new_tokens, recipe.model.context_length)
    return recipe.data.seq_len or recipe.model.context_length


def predicted_memory(
    recipe: Recipe, hardware: Hardware, world_size: int, values: Mapping[str, Any]
) -> arithmetic.Memory:
    """What a plan of these values should take on one device."""
    cuda, precision = hardware.kind == "cuda", values["precision"]
    found = arithmetic.memory(
        recipe.model,
        recipe.train,
        lora=recipe.lora,
        dfa=recipe.feedback,
        seq_len=longest_row(recipe),
        micro_batch=values["micro_batch"],
        accumulation=recipe.rows_per_update // world_size // values["micro_batch"],
        precision=precision,
        recompute=values["recompute"],
        loss_chunks=values["loss_chunks"],
        world_size=world_size,
        fused=arithmetic.fuses(compiled=values["compile"] != "off", cuda=cuda, precision=precision),
        fused_loss=values["cross_entropy"] == "fused",
    )
    return reinforcement.beside(found, recipe, values, world_size, tokens=longest_row(recipe))
