"""What a recipe should do on many GPUs, by arithmetic: memory, bytes between the GPUs, time of a step, GPU-hours, and where
more GPUs stop paying. No torch.

    rows = capacity(recipe, hardware, 64)       # for 1, 8, 16, 32 and 64 GPUs
    where_it_stops(recipe, rows)                # one sentence

A collective takes its bytes over the bandwidth that is reached, and a latency for every hop of its ring. We assume that
FSDP hides communication behind compute as long as there is compute, except for the gather before the first block and the
reduction after the last; the bounds assume that all of it is hidden and that none is. In RL every prompt and answer has
its full length. Left out: congestion, slow GPUs, validations, checkpoints, the time of a scorer.
"""

from dataclasses import dataclass, field
from math import ceil

from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError
from redline.plan import arithmetic
from redline.plan.arithmetic import BYTES, Traffic
from redline.plan.bounds import Outside
from redline.plan.plan import PLANNED, Hardware, Plan
from redline.plan.planner import make_plan
from redline.plan.predict import longest_row
from redline.plan.roofline import COPY_SHARE, attainable_tokens_per_s, generation_floor_s

LINK_SHARE = 0.8
"""Share of a link's datasheet rate that large collectives reach: NCCL itself reckons with 235 of an A100's 300 GB/s."""
BASE_S, NVLINK_HOP_S, PCIE_HOP_S, NETWORK_HOP_S = 8.4e-6, 3.4e-6, 5.7e-6, 14e-6
"""Latency of a ring and of each of its hops, as NCCL's cost model has them (src/graph/tuning.cc, ring, simple)."""
FASTEST_PCIE = 64e9
DECODE_LAYER_S = 45e-6
"""Extra time of a decode step per layer: 1.43 ms for 32 layers on an H200 (benchmarks/generate)."""
EAGER_SHARE = 0.75
"""Share of the roofline that uncompiled updates reach: in RL on an H200 0.68 at 360M and 0.83 at 1.3B
(benchmarks/rl, rl-update)."""
PAYS = 0.5
"""Below this efficiency half of every GPU-hour is lost."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The communication of one update: what a GPU receives, and the time it takes if nothing hides it."""

    traffic: Traffic
    elapsed_s: float
    exposed_s: float
    """The part that no compute can hide."""

    def step_s(self, compute_s: float) -> float:
        return self.exposed_s + max(compute_s, self.elapsed_s - self.exposed_s)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    gpus: int
    problem: str = ""
    """Why it cannot run on so many GPUs; then nothing else is known."""
    layout: str = ""
    memory_bytes: int = 0
    compute_s: float = 0.0
    """Compute time of the update."""
    communication_s: float = 0.0
    received_bytes: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)
    """The step, part by part, in their order."""
    bounds_s: tuple[float, float] = (0.0, 0.0)
    """The step if all communication were hidden, and if none were."""
    tokens: int = 0
    """Tokens of a step, over all GPUs."""
    actor_mfu: float | None = None

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    def gpu_hours(self, steps: int) -> float:
        return self.gpus * self.step_s * steps / 3600


def capacity(recipe: Recipe, hardware: Hardware, gpus: int, outside: Outside | None = None) -> list[Capacity]:
    """One row for each of 1 GPU, a node, two nodes, four and so on, up to the number asked for."""
    doubled = (hardware.node_gpus << n for n in range(gpus.bit_length()))
    rows = []
    for count in sorted({1, gpus, *(count for count in doubled if count < gpus)}):
        nodes = nodes_of(count, hardware.node_gpus)
        try:
            plan = make_plan(recipe, hardware, world_size=count, nodes=nodes, outside=outside)
            rows.append(on(recipe, plan))
        except (ConfigError, MachineError) as error:
            rows.append(Capacity(gpus=count, problem=str(error)))
    return rows


def nodes_of(gpus: int, node_gpus: int) -> int:
    """The number of full nodes; GPUs that do not fill nodes evenly count as one node with one copy of the weights."""
    return gpus // node_gpus if gpus % node_gpus == 0 else 1


def on(recipe: Recipe, plan: Plan) -> Capacity:
    hardware, exchange = plan.hardware, exchanged(recipe, plan)
    values = {name: getattr(plan, name) for name in PLANNED}
    speed = attainable_tokens_per_s(recipe, hardware, plan.world_size, values)
    if speed is None:
        raise MachineError(f"no rate is known for {hardware.title}: run `redline machine` to measure it")
    updates = recipe.rl.updates_per_rollout if recipe.rl else 1
    tokens = recipe.rows_per_update * longest_row(recipe)
    eager = hardware.kind == "cuda" and plan.compile == "off"
    compute_s = tokens / speed / (EAGER_SHARE if eager else 1.0)
    update_s = updates * exchange.step_s(compute_s)
    parts = _step_of_rl(recipe, plan, update_s) if recipe.rl else {"update": update_s}
    around_s = sum(parts.values()) - update_s
    hidden, exposed = max(compute_s, exchange.elapsed_s), compute_s + exchange.elapsed_s
    peak = hardware.peak_tflops.get(plan.precision if plan.precision != "fp8" else "bf16")
    flops = updates * tokens * plan.prediction.flops_per_token / plan.world_size
    return Capacity(
        gpus=plan.world_size,
        layout=layout(plan),
        memory_bytes=plan.prediction.memory_bytes,
        compute_s=updates * compute_s,
        communication_s=updates * exchange.elapsed_s,
        received_bytes=updates * exchange.traffic.total,
        parts_s=parts,
        bounds_s=(around_s + updates * hidden, around_s + updates * exposed),
        tokens=updates * tokens,
        actor_mfu=flops / update_s / (peak * 1e12) if peak else None,
    )


def layout(plan: Plan) -> str:
    """How the weights are placed: whole on every GPU, or spread over the shards, once or several times."""
    shards, replicas = plan.shards, plan.world_size // plan.shards
    if replicas == 1:
        return "FSDP" if shards > 1 else "one GPU"
    return "data parallel" if shards == 1 else f"HSDP {replicas}x{shards}"


# ---- communication ----


def exchanged(recipe: Recipe, plan: Plan) -> Exchange:
    """What an update of this plan exchanges."""
    model, S, R = recipe.model, plan.shards, plan.world_size // plan.shards
    how = {"precision": plan.precision, "accumulation": plan.accumulation, "shards": S, "replicas": R}
    found = arithmetic.traffic(model, recipe.lora, **how)  # type: ignore[arg-type]
    if plan.world_size == 1:
        return Exchange(traffic=found, elapsed_s=0.0, exposed_s=0.0)
    among_shards, hop_s = _ring(plan.hardware, S, ceil(S / plan.hardware.node_gpus), rings=1)
    nodes = min(R, ceil(plan.world_size / plan.hardware.node_gpus))
    among_replicas, far_s = _ring(plan.hardware, R, nodes, rings=min(S, plan.hardware.node_gpus))
    sharded = (found.gathered + found.scattered) / among_shards + (found.gathers + found.scatters) * hop_s
    elapsed_s = sharded + found.reduced / among_replicas + found.reductions * (2 * far_s - BASE_S)
    count = arithmetic.parameters(model)
    # Embedding, last norm and head: gathered before the first block and reduced after it.
    outer = plan.accumulation * 4 * (count.total - count.blocks)
    exposed_s = 2 * outer * (S - 1) / S / among_shards + 2 * outer * (R - 1) / (R * S) / among_replicas
    return Exchange(traffic=found, elapsed_s=elapsed_s, exposed_s=min(exposed_s, elapsed_s))


def _ring(hardware: Hardware, ranks: int, nodes: int, *, rings: int) -> tuple[float, float]:
    """Bytes per second that a GPU receives in a ring through so many GPUs and nodes, and the latency of one round.
    Every ring crosses from node to node once and has its share of the node's network cards; `rings` run side by side."""
    link, network = hardware.link_bytes_per_s, hardware.network_bytes_per_s
    if link is None or network is None:
        raise MachineError(f"no bandwidth between GPUs is known for {hardware.title}: name one with --as")
    rate = link if nodes == 1 else min(link, hardware.node_gpus * network / rings)
    hop_s = NVLINK_HOP_S if link > FASTEST_PCIE else PCIE_HOP_S
    return LINK_SHARE * rate, BASE_S + (ranks - nodes) * hop_s + (nodes - 1) * NETWORK_HOP_S


# ---- a step of reinforcement learning ----


def _step_of_rl(recipe: Recipe, plan: Plan, update_s: float) -> dict[str, float]:
    """Where the time of a step goes. Rewards are computed during generation; a forward pass is a third of an update."""
    assert recipe.rl is not None
    parts = {
        "weights to the engine": _weights_s(recipe, plan),
        "generate": _generate_s(recipe, plan),
        "reward": 0.0,
    }
    if recipe.rl.kl > 0:
        parts["reference"] = update_s / 3
    if recipe.rl.algorithm == "ppo":
        parts["critic"] = update_s * 4 / 3
    return parts | {"update": update_s}


def _weights_s(recipe: Recipe, plan: Plan) -> float:
    """Every process gathers the weights in fp32, tensor by tensor, and casts them for its engine."""
    count, bandwidth = arithmetic.parameters(recipe.model).total, plan.hardware.bandwidth_bytes_per_s
    assert bandwidth is not None  # or there would be no speed
    if plan.world_size == 1 and (recipe.lora is not None or BYTES[plan.precision] == 4):
        return 0.0
    cast_s = (4 + BYTES[plan.precision]) * count / (COPY_SHARE[plan.hardware.kind] * bandwidth)
    if plan.shards == 1:
        return cast_s
    rate, _ = _ring(plan.hardware, plan.shards, ceil(plan.shards / plan.hardware.node_gpus), rings=1)
    return cast_s + 4 * count * (plan.shards - 1) / plan.shards / rate


def _generate_s(recipe: Recipe, plan: Plan) -> float:
    """The questions of one process: bytes and products at their rates, and what a decode step takes besides them."""
    rl, hardware, model = recipe.rl, plan.hardware, recipe.model
    rate, bandwidth = hardware.rate_tflops(plan.precision), hardware.bandwidth_bytes_per_s
    assert rl is not None
    assert rate is not None
    assert bandwidth is not None
    questions = ceil(recipe.train.batch_size / plan.world_size)
    answers = questions * rl.group_size
    floor_s = generation_floor_s(
        model, prompts=questions, prompt_tokens=rl.max_prompt_tokens, new_tokens=[rl.max_new_tokens] * answers,
        slots=plan.slots, bytes_per_value=BYTES[plan.precision], bytes_per_s=bandwidth, flops_per_s=rate * 1e12,
        shared=False,
    )  # fmt: skip
    steps = rl.max_new_tokens * ceil(answers / plan.slots)
    return floor_s + steps * model.num_layers * DECODE_LAYER_S


# ---- where it stops ----


def efficiency(rows: list[Capacity]) -> dict[int, float]:
    """Tokens/s per GPU, relative to the best on any of these numbers of GPUs."""
    speeds = {row.gpus: row.tokens_per_s / row.gpus for row in rows if not row.problem}
    return {gpus: speed / max(speeds.values()) for gpus, speed in speeds.items()}


def where_it_stops(recipe: Recipe, rows: list[Capacity]) -> str:
    """The first number of GPUs that does not pay, and why."""
    shares, running = efficiency(rows), [row for row in rows if not row.problem]
    if not running:
        return f"It does not run on any of these numbers of GPUs: {rows[-1].problem}."
    best = max(shares, key=lambda gpus: shares[gpus])
    low = next((row for row in running if row.gpus > best and shares[row.gpus] < PAYS), None)
    if low is not None:
        before = [row.gpus for row in running if row.gpus < low.gpus][-1]
        lost = f"on {low.gpus:,} each delivers {shares[low.gpus]:.0%} of its speed on {best:,}"
        return f"Scaling stops paying after {before:,} GPUs: {lost}, because {_why(recipe, low)}."
    last = running[-1]
    if len(running) == 1 and last is rows[-1]:
        return f"It runs on {last.gpus:,} GPUs and on none of the smaller numbers."
    if last is not rows[-1]:
        refused = next(row for row in rows if row.gpus > last.gpus)
        return f"Scaling ends at {last.gpus:,} GPUs: {refused.problem}."
    return f"It still scales on {last.gpus:,} GPUs: each delivers {shares[last.gpus]:.0%} of its speed on {best:,}."


def _why(recipe: Recipe, row: Capacity) -> str:
    part = max(row.parts_s, key=lambda name: row.parts_s[name])
    if part == "generate":
        return (
            f"generation takes {row.parts_s[part] / row.step_s:.0%} of the step, and"
            f" {recipe.rows_per_step / row.gpus:,.0f} answers per GPU need as many decode steps as a full engine"
        )
    if row.communication_s > row.compute_s:
        return "communication takes longer than the compute that could hide it"
    return (
        f"the batch leaves {row.tokens / row.gpus:,.0f} tokens to each GPU, too few to fill its passes:"
        " a larger train.batch_size would change the training"
    )
