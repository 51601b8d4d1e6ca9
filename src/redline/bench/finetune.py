"""`redline bench finetune`: LoRA fine-tuning beside Hugging Face's Trainer with PEFT, same rows, order and
adapters. No torch here.

    path = bench_finetune("full", facts, Path("benchmarks"), ...)          # finetune_<hardware>_<date>.{json,md}

Each arm runs in its own process (finetune_arms.py). Rows are random tokens with lengths like those of the
unit-conversion task: speed and loss curve depend on lengths and not on meaning. Left out: accuracy (`redline rft
test`).
"""

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
from redline.config.recipe import DataConfig, LoraConfig, ModelConfig, Recipe, TrainConfig
from redline.machine.facts import MachineFacts
from redline.measure.trial import ANSWER_SHARE, PROMPT_SHARE, RANDOM_ROWS, RANDOM_WEIGHTS
from redline.record.units import format_bytes, format_duration

LABELS = {
    "hf-seeds": "HF Trainer + PEFT, fp32, checkpointing",
    "hf-best": "HF Trainer + PEFT, bf16, no checkpointing, fused AdamW",
    "graph": "redline",
    "compiled": "redline, blocks compiled",
    "fp32": "redline in fp32",
}
"""The arms in the order they run; the last is there for its losses, to compare with the first's."""
COLUMNS = (
    "arm", "rows/s", "interval", "tokens/s", "update", "against HF's best", "peak memory", "first update",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FinetuningWork:
    model: ModelConfig
    padded_to: int
    """Tokens of a row for Hugging Face's Trainer; random rows have shares of that."""
    batch_size: int
    lora: LoraConfig
    lr: float
    updates: dict[str, int]
    """Of each arm; fewer for the slow ones."""

    @property
    def recipe(self) -> Recipe:
        train = TrainConfig(
            batch_size=self.batch_size,
            lr=self.lr,
            epochs=1,
            schedule="constant",
            weight_decay=0.0,
            beta2=0.999,
        )
        data = DataConfig(source=RANDOM_WEIGHTS, seq_len=self.padded_to)
        return Recipe(
            name="bench", workload="finetune", model=self.model, data=data, train=train, lora=self.lora
        )


WORKS = {
    "full": FinetuningWork(
        model=replace(SMOLLM2_360M, init_from=RANDOM_WEIGHTS), padded_to=128, batch_size=32,
        lora=LoraConfig(rank=16, alpha=64), lr=2e-4,
        updates={"hf-seeds": 16, "hf-best": 64, "graph": 96, "compiled": 96, "fp32": 16},
    ),
    "quick": FinetuningWork(
        model=replace(TINY, init_from=RANDOM_WEIGHTS), padded_to=32, batch_size=8,
        lora=LoraConfig(rank=4, alpha=16), lr=2e-3,
        updates={"hf-seeds": 6, "hf-best": 6, "graph": 18, "fp32": 6},
    ),
}  # fmt: skip
"""The thousand rows and the batch of 32 of tuning guide 003 (docs/claims.md); and one that a CPU runs in seconds."""


def bench_finetune(
    name: str, facts: MachineFacts, out: Path, *, arms: Sequence[str], progress: Callable[[str], None]
) -> Path:
    """Run the arms and write the results; returns the path of the page."""
    work, rows = WORKS[name], list[BenchRow]()
    for arm in (arm for arm in arms if arm in work.updates):
        for row in rows_of("redline.bench.finetune_arms:arm", {"name": name, "arm": arm}):
            rows.append(_summary({"row": arm, **row}))
            progress(f"{LABELS[arm]}: {_brief(rows[-1])}")
    for row in rows:
        row["loss_differences"] = _differences(row, rows)
    what = "finetune" if name == "full" else f"finetune-{name}"
    results = {"setting": {"name": name, **asdict(work)}, "rows": rows}
    return write(out, what, facts, results, page(facts, work, rows))


def _summary(row: BenchRow) -> BenchRow:
    """The row with its speeds: the median of the timed blocks, the slowest and the fastest."""
    if "failed" in row:
        return row
    rates = spread([block["examples"] / block["seconds"] for block in row["blocks"]], "rows_per_s")
    tokens = median(block["tokens"] / block["seconds"] for block in row["blocks"])
    update_ms = median(1e3 * block["seconds"] / block["updates"] for block in row["blocks"])
    return row | rates | {"tokens_per_s": tokens, "update_ms": update_ms}


def _differences(row: BenchRow, rows: Sequence[BenchRow]) -> dict[str, float]:
    """The largest difference of an arm's losses from each of Hugging Face's, over the updates that both made."""
    if row["row"].startswith("hf") or "losses" not in row:
        return {}
    theirs = [other for other in rows if other["row"].startswith("hf") and "losses" in other]
    return {
        other["row"]: max(abs(a - b) for a, b in zip(row["losses"], other["losses"], strict=False))
        for other in theirs
    }


def _brief(row: BenchRow) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    first = f"first after {row['first_update_s']:.1f} s"
    return f"{row['rows_per_s']:,.0f} rows/s, {row['update_ms']:.1f} ms an update, {first}"


def page(facts: MachineFacts, work: FinetuningWork, rows: Sequence[BenchRow]) -> list[str]:
    shortest, longest = (
        sum(round(share[end] * work.padded_to) for share in (PROMPT_SHARE, ANSWER_SHARE)) for end in (0, 1)
    )
    best = next((row["rows_per_s"] for row in rows if row["row"] == "hf-best" and "rows_per_s" in row), None)
    return [
        *head("finetune", f"LoRA fine-tuning on {machine_title(facts)}", facts, quick=work is WORKS["quick"]),
        f"{shape(work.model)}; LoRA of rank {work.lora.rank} on all linear layers, batch {work.batch_size}, loss on"
        f" the answers. {RANDOM_ROWS:,} rows of random tokens, {shortest} to {longest} long, in the same order for all"
        f" arms; Hugging Face's are padded to {work.padded_to}, ours packed.",
        "Median over blocks of updates, interval from the slowest to the fastest; tokens are those of the rows,"
        " padding not counted. The first update's time is from the start of the training: compilation and graphs"
        " included, the model's loading not.",
        "",
        *table(COLUMNS, [_cells(row, best) for row in rows]),
        "",
        "Largest difference of the losses over the updates that two arms both made:",
        "",
        *_findings(rows),
    ]


def _cells(row: BenchRow, best: float | None) -> list[str]:
    if "failed" in row:
        return [LABELS[row["row"]], "failed", row["failed"]]
    return [
        LABELS[row["row"]],
        f"{row['rows_per_s']:,.0f}",
        f"{row['low']:,.0f} – {row['high']:,.0f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['update_ms']:.1f} ms",
        f"{row['rows_per_s'] / best:.1f}x" if best else "–",
        format_bytes(row["memory_bytes"]) if row["memory_bytes"] else "–",
        format_duration(row["first_update_s"]),
    ]


def _findings(rows: Sequence[BenchRow]) -> list[str]:
    made, found = {row["row"]: len(row.get("losses", ())) for row in rows}, []
    for row in rows:
        for other, difference in row["loss_differences"].items():
            updates = min(made[row["row"]], made[other])
            first, last = row["losses"][0], row["losses"][updates - 1]
            found.append(
                f"- {LABELS[row['row']]} and {LABELS[other]}: {difference:.2g} over {updates} updates, in which the"
                f" loss went from {first:.3f} to {last:.3f}."
            )
    return found
