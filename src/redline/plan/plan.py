"""The Plan: how a recipe is executed on one kind of hardware. Values, the reason and source of each, and what they
should give.

    plan = make_plan(recipe, hardware)         # planner.py
    plan.micro_batch                           # 64
    plan.why["micro_batch"]                    # Why(reason="65,536 tokens per pass, ...", source="rule")
    save(plan, path); load(path)               # plan.json, read strictly

A plan never changes the training: micro_batch x accumulation x world_size is the recipe's batch, exactly.
"""

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from redline.config.load import build
from redline.config.recipe import (
    Attention,
    Compile,
    CrossEntropy,
    Precision,
    Recipe,
    Recompute,
    UpdateKernels,
)
from redline.errors import ConfigError
from redline.record.files import read_json, write_atomic
from redline.record.units import counted

Source = Literal["rule", "measurement", "recipe", "user", "environment", "profile"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the planner needs to know about one device: a GPU, or a CPU with its memory."""

    title: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    compute_capability: tuple[int, ...]
    """Empty for a CPU."""
    cores: int
    peak_tflops: dict[str, float]
    """Dense datasheet peak by dtype; a missing dtype is not supported."""
    measured_tflops: dict[str, float]
    """Best matrix product measured on this machine by dtype; empty if nothing was measured."""
    bandwidth_bytes_per_s: float | None
    launch_latency_s: float | None = None
    """Host time to launch one tiny kernel; None for a CPU, or if nothing was measured."""
    link_bytes_per_s: float | None = None
    """To the other GPUs of the node, each direction; None for a CPU or a GPU without a datasheet entry."""
    network_bytes_per_s: float | None = None
    """Out of the node, each direction."""
    node_gpus: int = 8
    source: str
    """Where the figures come from, in words."""

    def rate_tflops(self, precision: str) -> float | None:
        """The rate that matrix products can reach: the measured rate, else 75% of the datasheet's (H200: 72 to 78%)."""
        if precision in self.measured_tflops:
            return self.measured_tflops[precision]
        peak = self.peak_tflops.get(precision)
        return None if peak is None else 0.75 * peak


@dataclass(frozen=True, kw_only=True)
class Why:
    reason: str
    source: Source


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the plan should give; arithmetic, not a measurement."""

    parameters: int
    flops_per_token: int
    memory_parts_bytes: dict[str, int]
    memory_bytes: int
    ceiling_tokens_per_s: float | None
    """Tokens/s if the GPU did nothing but the model's matrix products at its best rate."""
    attainable_tokens_per_s: float | None
    """Tokens/s by the roofline: products, attention, memory traffic and the update, in passes of the plan's size."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`work` says what it is a plan for: any recipe whose update does the same work."""

    recipe: str
    work: str
    hardware: Hardware
    world_size: int
    precision: Precision
    micro_batch: int
    """Sequences or examples in one pass on one process."""
    accumulation: int
    compile: Compile
    graph: bool
    """The whole update as one CUDA graph."""
    recompute: Recompute
    attention: Attention
    cross_entropy: CrossEntropy
    update: UpdateKernels
    loss_chunks: int
    loader_threads: int
    prefetch: int
    allocator: str
    shards: int
    """Processes that together hold one copy of weights, gradients and optimiser state; others hold further copies."""
    slots: int
    """Sequences generated together; 0 if the workload generates none."""
    prediction: Prediction
    why: dict[str, Why]

    @property
    def coarsest(self) -> Precision:
        """The coarsest precision that it multiplies in: what the GPU must have, and the band that its numbers must keep."""
        return "fp8" if self.cross_entropy == "fp8" else self.precision


PLANNED = tuple(
    f.name
    for f in fields(Plan)
    if f.name not in ("recipe", "work", "hardware", "world_size", "prediction", "why")
)
"""The names of the execution values, each with an entry in `why`."""


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan with every value beside its reason, as it is saved and printed."""
    table = asdict(plan)
    why = table.pop("why")
    for name in PLANNED:
        table[name] = {"value": table[name], **why[name]}
    return table


def save(plan: Plan, path: Path) -> None:
    write_atomic(path, json.dumps(to_json(plan), indent=2) + "\n")


def load(path: Path) -> Plan:
    """Read a saved plan; anything unknown, missing or of the wrong type is an error."""
    if not os.path.exists(path):
        raise ConfigError(f"no plan at {path}: make one with `redline plan RECIPE --save {path}`")
    return from_json(read_json(path, dict, error=ConfigError), where=str(path))


def from_json(table: Any, where: str) -> Plan:
    """The plan that `to_json` wrote."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: not a plan: a table is needed, got {type(table).__name__}")
    values, why = dict(table), {}
    for name in PLANNED:
        entry = table.get(name)
        if not isinstance(entry, dict) or set(entry) != {"value", "reason", "source"}:
            raise ConfigError(f"{where}: {name} must hold value, reason and source, got {entry!r:.80}")
        values[name] = entry["value"]
        why[name] = {"reason": entry["reason"], "source": entry["source"]}
        if type(entry["value"]) is int and entry["value"] < (0 if name == "slots" else 1):
            raise ConfigError(f"{where}: {name} must be greater than 0, got {entry['value']}")
    return build(Plan, {**values, "why": why}, where=where)


def load_for(path: Path, recipe: Recipe, world_size: int, *, typed: Collection[str]) -> Plan:
    """A saved plan for this recipe. Of the pins the user typed, only the micro-batch applies (recovery from running
    out of memory sets it); others are refused."""
    plan = load(path)
    if other := sorted(set(typed) - {"micro_batch"}):
        raise ConfigError(f"--set plan.{other[0]} has no effect beside --plan {path}: change that file")
    if (micro_batch := recipe.plan.micro_batch) is not None and "micro_batch" in typed:
        accumulation = recipe.rows_per_update // (micro_batch * world_size)
        why = {**plan.why, "micro_batch": Why(reason="--set plan.micro_batch", source="user")}
        plan = replace(plan, micro_batch=micro_batch, accumulation=accumulation, why=why)
    check_fit(plan, recipe, world_size)
    return plan


def check_fit(plan: Plan, recipe: Recipe, world_size: int) -> None:
    """A plan that was loaded must be for this recipe and this number of processes."""
    if plan.work != recipe.work:
        raise ConfigError(
            f"the plan was made for another workload (recipe {plan.recipe}, work {plan.work}) than {recipe.name}"
            f" ({recipe.work}): give the same --set values as to `redline plan`, or make it again"
        )
    if plan.world_size != world_size:
        raise ConfigError(
            f"the plan is for {counted(plan.world_size, 'process')}, but this run has {world_size}: make it again"
        )
    share = plan.micro_batch * plan.accumulation
    if share * plan.world_size != recipe.rows_per_update:
        rows = "train.batch_size" if recipe.rl is None else "the answers of an update"
        raise ConfigError(
            f"micro_batch {plan.micro_batch} x accumulation {plan.accumulation} x {plan.world_size} processes"
            f" must be {rows}, {recipe.rows_per_update}: a plan never changes the batch"
        )
