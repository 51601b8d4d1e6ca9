"""Memory that reinforcement learning takes beside its training: the engine, a reference, a critic, the gradients of
several domains."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from redline.config.recipe import Recipe
from redline.plan.arithmetic import BYTES, Memory, adapter_parameters, parameters, slot_bytes
from redline.plan.plan import Plan

GENERATION_SHARE = 0.4
"""Of the device's memory that the slots of the engine may take, which stays open beside the training."""


def beside(
    training: Memory, recipe: Recipe, values: Mapping[str, Any], world_size: int, *, tokens: int
) -> Memory:
    """The memory of a training with what a recipe of workload rl holds beside it; others as they are."""
    if recipe.rl is None:
        return training
    precision = values["precision"]
    return replace(
        training,
        generation=generation_bytes(recipe, values["slots"], precision, world_size, tokens),
        companions=companions_bytes(recipe, world_size),
    )


def generation_bytes(recipe: Recipe, slots: int, precision: str, world_size: int, tokens: int) -> int:
    """The engine: its slots, and a copy of the weights where the trainer's own have another dtype or lie spread over
    processes."""
    copied = world_size > 1 or (BYTES[precision] < 4 and recipe.lora is None)
    weights = BYTES[precision] * parameters(recipe.model).total if copied else 0
    return slots * slot_bytes(recipe.model, tokens=tokens, precision=precision) + weights


def companions_bytes(recipe: Recipe, world_size: int) -> int:
    """A frozen reference (with adapters it is the model without them), and a critic of the model's own size with
    gradients and AdamW's state, whose activations come when the actor's are gone."""
    assert recipe.rl is not None
    reference = 4 if recipe.rl.kl > 0 and recipe.lora is None else 0
    critic = 16 if recipe.rl.algorithm == "ppo" else 0
    return parameters(recipe.model).total * (reference + critic) // world_size


def pcgrad_place(recipe: Recipe, plan: Plan, usable_share: float) -> tuple[Literal["device", "host"], str]:
    """Where PCGrad keeps the gradients of all domains but one, and why. A second backward pass would need no less: the
    weight of a domain is known only when all gradients are."""
    assert recipe.rl is not None
    lora, model = recipe.lora, recipe.model
    learning = parameters(model).total if lora is None else adapter_parameters(model, lora)
    kept = 4 * learning * (len(recipe.rl.domains) - 1) // plan.world_size
    free = int(usable_share * plan.hardware.memory_bytes) - plan.prediction.memory_bytes
    sizes = f"{kept / 2**30:.2f} GiB of gradients, {free / 2**30:.1f} GiB free by prediction"
    return ("device", f"they fit: {sizes}") if kept <= free else ("host", f"they do not fit: {sizes}")
