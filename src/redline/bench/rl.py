"""`redline bench rl`: whole GRPO steps beside TRL's GRPOTrainer on the same model, prompts, group size and lengths;
and how well the update of a larger model uses the GPU. No torch here.

    path = bench_rl("full", facts, Path("benchmarks"))       # rl_<hardware>_<date>.{json,md}

Each side runs in its own process (rl_arms.py). A step is everything from the question to the changed weights. Tokens
count as verl counts them: prompt and answer of every answer. TRL runs as fast as it can without vLLM: bf16 weights, no
gradient checkpointing (its defaults are fp32 and checkpointing), SDPA attention. Rewards cost nothing on both sides.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from redline.bench.results import (
    SMOLLM2_360M,
    TINY,
    BenchRow,
    head,
    machine_title,
    rows_of,
    shape,
    spread,
    table,
    write,
)
from redline.config.recipe import ModelConfig
from redline.machine.facts import MachineFacts
from redline.record.units import format_bytes, format_duration, format_share

LABELS = {
    "trl": "TRL, `generate`",
    "trl-continuous": "TRL, transformers' continuous batching",
    "redline": "redline",
    "actor": "redline, update alone",
}
PHASES = {
    "generate_s": "generate",
    "reward_s": "reward",
    "weights_s": "weights into the engine",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimiser",
}
"""Of a step, as its line has them."""


@dataclass(frozen=True, kw_only=True)
class RlWork:
    model: ModelConfig
    prompt_tokens: int
    new_tokens: int
    group_size: int
    questions: tuple[int, ...]
    """Of a step; `trl-continuous`, which is slow, takes only the first, and is timed once."""
    pass_rows: int
    """Answers in one pass of TRL's update."""
    steps: int
    """Timed, after one that warms up."""
    actor: ModelConfig
    actor_rows: int
    actor_tokens: int
    """Answer tokens of a row of the actor's update."""


WORKS = {
    "full": RlWork(
        model=SMOLLM2_360M, prompt_tokens=96, new_tokens=256, group_size=8, questions=(16, 64), pass_rows=64, steps=2,
        actor=ModelConfig(
            vocab_size=32768, num_layers=24, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=5632,
            context_length=2048, tie_embeddings=False,
        ),
        actor_rows=64, actor_tokens=1024,
    ),
    "quick": RlWork(
        model=replace(TINY, init_std=0.2), prompt_tokens=6, new_tokens=8, group_size=4, questions=(2,), pass_rows=4,
        steps=2, actor=TINY, actor_rows=4, actor_tokens=16,
    ),
}  # fmt: skip


def bench_rl(
    name: str, facts: MachineFacts, out: Path, *, arms: Sequence[str], progress: Callable[[str], None]
) -> Path:
    """Run the arms and write the results; returns the path of the table."""
    work, rows = WORKS[name], list[BenchRow]()
    for arm in arms:
        function = arm.replace("-", "_")
        for row in rows_of(f"redline.bench.rl_arms:{function}", {"name": name}):
            rows.append(_summary({"row": arm, **row}))
            progress(_brief(rows[-1]))
    results = {"setting": {"name": name, **asdict(work)}, "rows": rows}
    return write(out, "rl" if name == "full" else f"rl-{name}", facts, results, page(facts, work, rows))


def _summary(row: BenchRow) -> BenchRow:
    """The row with what follows from it."""
    if "seconds" not in row:
        return row
    return row | spread([row["tokens"] / seconds for seconds in row["seconds"]], "tokens_per_s")


def _brief(row: BenchRow) -> str:
    if "failed" in row:
        return f"{LABELS[row['row']]}: failed: {row['failed']}"
    return f"{LABELS[row['row']]}, {row['rows']:,} answers: {row['tokens_per_s']:,.0f} tokens/s"


def page(facts: MachineFacts, work: RlWork, rows: Sequence[BenchRow]) -> list[str]:
    """Markdown: speeds, then what the time of our step goes to."""
    columns = (
        "arm", "answers a step", "tokens/s", "interval", "a step", "against TRL's `generate`", "peak memory",
        "first step",
    )  # fmt: skip
    with_vllm = importlib.util.find_spec("vllm") is not None
    return [
        *head("rl", f"Reinforcement learning on {machine_title(facts)}", facts, quick=work is WORKS["quick"]),
        f"GRPO, {shape(work.model)}; prompts of {work.prompt_tokens} tokens, groups of {work.group_size} answers of up"
        f" to {work.new_tokens} tokens. Tokens of prompts and answers over the whole step: drawing, scoring, update."
        " Median; interval: slowest to fastest. vLLM is"
        f" {'installed here, and TRL was not asked to use it' if with_vllm else 'not installed here'}.",
        "",
        *table(columns, [_cells(row, rows) for row in rows if row["row"] != "actor" or "failed" in row]),
        "",
        *(line for row in rows for line in _findings(row, work)),
    ]


def _cells(row: BenchRow, rows: Sequence[BenchRow]) -> list[str]:
    if "failed" in row:
        return [LABELS[row["row"]], str(row.get("rows", "")), "failed", row["failed"]]
    theirs = next(
        (
            r["tokens_per_s"]
            for r in rows
            if r["row"] == "trl" and r.get("rows") == row["rows"] and "low" in r
        ),
        None,
    )
    return [
        LABELS[row["row"]],
        f"{row['rows']:,}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['low']:,.0f} – {row['high']:,.0f}",
        format_duration(median(row["seconds"])),
        f"{row['tokens_per_s'] / theirs:.1f}x" if theirs else "–",
        format_bytes(row["memory_bytes"]) if row.get("memory_bytes") else "–",
        format_duration(row["first_step_s"]),
    ]


def _findings(row: BenchRow, work: RlWork) -> list[str]:
    """What a row says beside its speed."""
    if row["row"] == "redline" and "phases_s" in row:
        parts = ", ".join(f"{name} {format_duration(part)}" for name, part in row["phases_s"].items())
        return [f"A step of redline with {row['rows']:,} answers: {parts}.", ""]
    if row["row"] == "actor" and "seconds" in row:
        shares = ""
        if row["mfu_share"] is not None:
            verls = format_share(row["mfu_verl_share"])
            shares = f", {format_share(row['mfu_share'])} MFU (6N + 12LdT), {verls} as verl counts it"
        return [
            f"Update alone: {shape(work.actor)}; {row['rows']} rows of {work.prompt_tokens} + {work.actor_tokens}"
            f" tokens, packed: {row['tokens_per_s']:,.0f} tokens/s{shares}; peak memory"
            f" {format_bytes(row['memory_bytes']) if row.get('memory_bytes') else '–'}."
        ]
    return []
