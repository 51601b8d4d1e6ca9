"""What the arithmetic says of a recipe under the values of a plan: its longest row, its memory, and where PCGrad keeps
its gradients."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from redline.config.recipe import Recipe
from redline.plan.arithmetic import (
    BYTES,
    Memory,
    adapter_parameters,
    fuses,
    memory,
    parameters,
    slot_bytes,
    validation_bytes,
)
from redline.plan.plan import Hardware, Plan

MEMORY_SHARE = 0.92
"""Share of a device's memory that a plan may fill; the rest is for context, workspaces and fragmentation."""
RL_GENERATION_SHARE = 0.4
"""Share of the device's memory that an engine may take if it stays open during training (RL)."""
OWN_COPY_SHARE = 0.5
"""The most that weights, gradients and optimiser state may take for each node to have a copy."""


def longest_row(recipe: Recipe) -> int:
    """Tokens of the longest sequence. RFT knows only the length of answers, and assumes that prompts are as long."""
    if recipe.rl is not None:
        return min(recipe.rl.max_prompt_tokens + recipe.rl.max_new_tokens, recipe.model.context_length)
    if recipe.workload == "rft":
        return min(2 * recipe.sample.max_new_tokens, recipe.model.context_length)
    return recipe.data.seq_len or recipe.model.context_length


def predicted_memory(
    recipe: Recipe, hardware: Hardware, world_size: int, values: Mapping[str, Any]
) -> Memory:
    """Predicted memory of a plan with these values on one device; in RL, with the engine and the models beside it."""
    cuda, precision = hardware.kind == "cuda", values["precision"]
    tokens = values["micro_batch"] * longest_row(recipe)
    training = memory(
        recipe,
        values,
        tokens=tokens,
        accumulation=recipe.rows_per_update // world_size // values["micro_batch"],
        fused=fuses(compiled=values["compile"] != "off", cuda=cuda, precision=precision),
    )
    if recipe.workload == "pretrain" and values["graph"] and recipe.data.valid_fraction:
        # A graph keeps the memory of its activations, so a validation finds none of it free.
        kept = training.workspace + validation_bytes(recipe.model, values, tokens)
        return replace(training, workspace=kept)
    if recipe.rl is None:
        return training
    generation = generation_bytes(recipe, values["slots"], precision, world_size, longest_row(recipe))
    return replace(training, generation=generation, companions=companions_bytes(recipe, values["shards"]))


def generation_bytes(recipe: Recipe, slots: int, precision: str, world_size: int, tokens: int) -> int:
    """The engine's slots, and a copy of the weights if the trainer's have another dtype or are sharded."""
    copied = world_size > 1 or (BYTES[precision] < 4 and recipe.lora is None)
    weights = BYTES[precision] * parameters(recipe.model).total if copied else 0
    return slots * slot_bytes(recipe.model, tokens=tokens, precision=precision) + weights


def companions_bytes(recipe: Recipe, shards: int) -> int:
    """A frozen reference (with adapters: the model without them), and a critic with its gradients and AdamW state."""
    assert recipe.rl is not None
    reference = 4 if recipe.rl.kl > 0 and recipe.lora is None else 0
    critic = 16 if recipe.rl.algorithm == "ppo" else 0
    return parameters(recipe.model).total * (reference + critic) // shards


def shards_of(
    recipe: Recipe, hardware: Hardware, world_size: int, nodes: int, values: Mapping[str, Any]
) -> tuple[int, str]:
    """How many processes hold one copy of the weights, and why: those of a node if its memory allows, because then only
    gradients cross the slower network between nodes."""
    if world_size == 1:
        return 1, "one process holds everything"
    if nodes == 1:
        return world_size, "one node: all processes hold one copy of weights and optimiser state together"
    own = world_size // nodes
    least = {**values, "graph": False, "shards": own, "micro_batch": 1, "recompute": "full", "loss_chunks": 1}
    found = predicted_memory(recipe, hardware, world_size, least)
    kept = found.weights + found.gradients + found.optimizer + found.companions
    usable = MEMORY_SHARE * hardware.memory_bytes
    sizes = f"{kept / 2**30:.1f} GiB of weights, gradients and optimiser state in {usable / 2**30:.1f} GiB"
    if kept <= OWN_COPY_SHARE * usable:
        gathers = "a copy in every node: weights are gathered inside it, and only gradients cross the network"
        return own, f"{gathers}; {sizes}"
    return world_size, f"one copy over all nodes: one in every node would put {sizes}"


def pcgrad_place(recipe: Recipe, plan: Plan) -> tuple[Literal["device", "host"], str]:
    """Where PCGrad keeps the gradients of all domains but one, and why."""
    assert recipe.rl is not None
    lora, model = recipe.lora, recipe.model
    learning = parameters(model).total if lora is None else adapter_parameters(model, lora)
    kept = 4 * learning * (len(recipe.rl.domains) - 1) // plan.shards
    free = int(MEMORY_SHARE * plan.hardware.memory_bytes) - plan.prediction.memory_bytes
    sizes = f"{kept / 2**30:.2f} GiB of gradients, {free / 2**30:.1f} GiB free by prediction"
    return ("device", f"they fit: {sizes}") if kept <= free else ("host", f"they do not fit: {sizes}")
