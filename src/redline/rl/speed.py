"""How fast a step was: the work of its update counted row by row, in our convention and in verl's, and the metrics
that follow from it once the times are known.

    facts = work_of(recipe, rows, shared=0)            # TFLOP of the rows, counted with their own lengths
    derived = make_derived(plan)               # line -> update_s, actor_mfu, perf/throughput, ...

verl counts as its current version does: the embedding as a matrix product besides the head, attention causal
(6 s^2), adapters as if all weights learnt. So its MFU is higher than ours for small models and with LoRA.
"""

from collections.abc import Callable, Sequence
from typing import Any

from redline.config.recipe import ModelConfig, Recipe
from redline.plan.arithmetic import flops_per_token
from redline.plan.plan import Plan
from redline.rl.algorithm import Row

UPDATE = ("copy_s", "forward_s", "backward_s", "combine_s", "optimizer_s", "communication_s")
CRITIC_WORK = 4 / 3
"""The critic's work relative to an update's: it also reads every row once beforehand, to say what it expects."""


def work_of(recipe: Recipe, rows: Sequence[Row], *, shared: int) -> dict[str, float]:
    """`shared` tokens of prompts were read with another row's: only attention computed them again. verl has no such
    thing, so its count covers all tokens."""
    lengths = [row.example.length for row in rows]
    whole = sum(n * flops_per_token(recipe.model, n, recipe.lora) for n in lengths)
    return {
        "actor_tflop": (whole - shared * flops_per_token(recipe.model, 0, recipe.lora)) / 1e12,
        "actor_tflop_verl": sum(verl_flops(recipe.model, n) for n in lengths) / 1e12,
    }


def verl_flops(model: ModelConfig, length: int) -> int:
    """Training FLOPs of one row as verl's counter has them (utils/flops_counter.py, 2026)."""
    head = model.head_size
    attention = model.hidden_size * (2 * model.num_heads + 2 * model.kv_heads) * head
    layer = 3 * model.hidden_size * model.ffn_size + attention
    weights = model.num_layers * layer + 2 * model.vocab_size * model.hidden_size
    return 6 * weights * length + 6 * length**2 * head * model.num_heads * model.num_layers


def make_derived(plan: Plan) -> Callable[[dict[str, Any]], dict[str, Any]]:
    peak_tflops = plan.hardware.peak_tflops.get(plan.precision)

    def share(tflop: float | None, seconds: float | None) -> float | None:
        if not tflop or not seconds or not peak_tflops:
            return None
        return tflop / plan.world_size / seconds / peak_tflops

    def derived(line: dict[str, Any]) -> dict[str, Any]:
        update_s = sum(line.get(name, 0.0) for name in UPDATE)
        work, as_verl, critic_s = line["actor_tflop"], line["actor_tflop_verl"], line.get("critic_s")
        found = {
            "update_s": update_s,
            "actor_mfu": share(work, update_s),
            "training/global_step": line["step"],
            "perf/throughput": line["tokens_per_s"] / plan.world_size,
            "perf/mfu/actor": share(as_verl, update_s),
        }
        critic = {"perf/mfu/critic": share(CRITIC_WORK * as_verl, critic_s)} if critic_s else {}
        return found | critic

    return derived
