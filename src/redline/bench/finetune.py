"""`redline bench finetune`: LoRA fine-tuning beside Hugging Face's Trainer with PEFT, same rows, order and
adapters. No torch here.

    path = bench_finetune("full", facts, out=Path("benchmarks"))      # writes
                                                                      finetune_<hardware>_<date>.{json,md}

All arms run one after the other in one process of their own (finetune_arms.py) that prints a line of JSON for
each, so what was measured before a crash stays. Rows are random tokens with lengths like those of the
unit-conversion task: speed and loss curve depend on lengths and not on meaning. Left out: accuracy, which is
`redline rft test`'s.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from redline.config.recipe import ModelConfig
from redline.machine.facts import MachineFacts
from redline.plan.arithmetic import parameters
from redline.record.files import write_atomic
from redline.record.units import format_bytes, format_duration

LABELS = {
    "hf-seeds": "HF Trainer + PEFT, fp32, checkpointing",
    "hf-best": "HF Trainer + PEFT, bf16, no checkpointing, fused AdamW",
    "graph": "redline",
    "compiled": "redline, blocks compiled",
    "fp32": "redline in fp32",
}
"""The arms in the order in which they run; the last is there for its losses, beside those of the first."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The model and the work."""

    model: ModelConfig
    rows: int
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    """Shortest and longest; every length between them is as likely."""
    padded_to: int
    """Tokens of a row for Hugging Face's Trainer."""
    batch_size: int
    rank: int
    alpha: int
    lr: float
    updates: dict[str, int]
    """Of each arm; fewer for the slow ones."""


SETTINGS = {
    "full": Setting(
        model=ModelConfig(
            vocab_size=49152, num_layers=32, hidden_size=960, num_heads=15, num_kv_heads=5, ffn_size=2560,
            context_length=2048,
            rope_theta=100_000.0,
        ),
        rows=1000, prompt_tokens=(18, 36), answer_tokens=(10, 26), padded_to=128, batch_size=32, rank=16,
        alpha=64, lr=2e-4,
        updates={"hf-seeds": 16, "hf-best": 64, "graph": 96, "compiled": 96, "fp32": 16},
    ),
    "quick": Setting(
        model=ModelConfig(vocab_size=320, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=64, context_length=64),
        rows=44, prompt_tokens=(3, 12), answer_tokens=(2, 9), padded_to=32, batch_size=8, rank=4, alpha=16,
        lr=2e-3,
        updates={"hf-seeds": 6, "hf-best": 6, "graph": 18, "fp32": 6},
    ),
}  # fmt: skip
"""SmolLM2-360M's shape with random weights, the seeds' 1,000 rows and batch of 32; and one that a CPU shows
in seconds."""


def bench_finetune(
    name: str, facts: MachineFacts, out: Path, *, arms: Sequence[str], progress: Callable[[str], None]
) -> Path:
    """Run the arms and write the results; returns the path of the table."""
    setting = SETTINGS[name]
    rows: list[dict[str, Any]] = []
    for row in _run(name, [arm for arm in arms if arm in setting.updates]):
        rows.append(_summary(row))
        progress(f"{LABELS[row['row']]}: {_brief(rows[-1])}")
    for row in rows:
        row["loss_differences"] = _differences(row, rows)
    title = facts.gpus[0].name if facts.gpus else f"{facts.cpu_name}, {facts.cpu_cores} cores"
    results = {"machine": asdict(facts), "setting": {"name": name, **asdict(setting)}, "rows": rows}
    what = "finetune" if name == "full" else f"finetune-{name}"
    base = out / f"{what}_{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}_{time.strftime('%Y%m%d')}"
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(base.with_suffix(".json"), json.dumps(results, indent=1) + "\n")
    write_atomic(base.with_suffix(".md"), table(title, facts, setting, rows))
    return base.with_suffix(".md")


def _run(name: str, arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows as they come; where the process dies, a last one that says so."""
    left = list(arms)
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "redline.bench.finetune_arms", name, *arms]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"row"'):  # libraries print too
                    row = json.loads(line)
                    left.remove(row["row"])
                    yield row
        if process.returncode != 0 and left:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()]
            yield {"row": left[0], "failed": said[-1][:300] if said else f"exit code {process.returncode}"}


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its speeds: the median over the timed blocks, and the slowest and fastest of them."""
    if "failed" in row:
        return row
    rates = [block["examples"] / block["seconds"] for block in row["blocks"]]
    tokens = [block["tokens"] / block["seconds"] for block in row["blocks"]]
    updates = [1e3 * block["seconds"] / block["updates"] for block in row["blocks"]]
    speeds = {"rows_per_s": median(rates), "low": min(rates), "high": max(rates)}
    return row | speeds | {"tokens_per_s": median(tokens), "update_ms": median(updates)}


def _differences(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of an arm of ours: the largest difference of the losses from each of Hugging Face's, over the updates
    that both made."""
    found: dict[str, float] = {}
    if row["row"].startswith("hf") or "losses" not in row:
        return found
    for other in rows:
        if other["row"].startswith("hf") and "losses" in other:
            pairs = zip(row["losses"], other["losses"], strict=False)
            found[other["row"]] = max(abs(ours - theirs) for ours, theirs in pairs)
    return found


def _brief(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    return (
        f"{row['rows_per_s']:,.0f} rows/s, {row['update_ms']:.1f} ms an update, first after"
        f" {row['first_update_s']:.1f} s"
    )


def table(title: str, facts: MachineFacts, setting: Setting, rows: Sequence[dict[str, Any]]) -> str:
    model = setting.model
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    shortest, longest = (setting.prompt_tokens[i] + setting.answer_tokens[i] for i in (0, 1))
    reference = next(
        (row["rows_per_s"] for row in rows if row["row"] == "hf-best" and "rows_per_s" in row), None
    )
    lines = [
        f"# LoRA fine-tuning on {title}",
        "",
        (
            f"Made by `redline bench finetune` on {time.strftime('%Y-%m-%d')}; {versions}; Python"
            f" {facts.python}."
        ),
        *(
            ["A tiny model, to see that everything runs: **its speeds mean nothing.**"]
            if setting is SETTINGS["quick"]
            else []
        ),
        (
            f"{parameters(model).total:,} parameters ({model.num_layers} layers, width {model.hidden_size},"
            f" {model.num_heads} heads, {model.kv_heads} key/value heads, vocabulary {model.vocab_size:,}),"
            f" random weights; LoRA of rank {setting.rank} on all linear layers, batch {setting.batch_size},"
            f" loss on the answers. {setting.rows:,} rows of random tokens, {shortest} to {longest} long, in"
            f" the same order for all arms; Hugging Face's are padded to {setting.padded_to}, ours packed."
        ),
        (
            "Median over blocks of updates, interval from the slowest to the fastest; tokens are those of the"
            " rows, padding not counted. The first update's time is from the start of the training:"
            " compilation and graphs included, the model's loading not."
        ),
        "",
        "| arm | rows/s | interval | tokens/s | update | against HF's best | peak memory | first update |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(row, reference) for row in rows),
        "",
        "Largest difference of the losses over the updates that two arms both made:",
        "",
        *_findings(rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any], reference: float | None) -> str:
    if "failed" in row:
        return f"| {LABELS[row['row']]} | failed | {row['failed']} | | | | | |"
    cells = [
        LABELS[row["row"]],
        f"{row['rows_per_s']:,.0f}",
        f"{row['low']:,.0f} – {row['high']:,.0f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['update_ms']:.1f} ms",
        f"{row['rows_per_s'] / reference:.1f}x" if reference else "–",
        format_bytes(row["memory_bytes"]) if row["memory_bytes"] else "–",
        format_duration(row["first_update_s"]),
    ]
    return f"| {' | '.join(cells)} |"


def _findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        for other, difference in row.get("loss_differences", {}).items():
            updates = min(
                len(row["losses"]), next(len(each["losses"]) for each in rows if each["row"] == other)
            )
            first, last = row["losses"][0], row["losses"][updates - 1]
            found.append(
                f"- {LABELS[row['row']]} and {LABELS[other]}: {difference:.2g} over {updates} updates, in"
                f" which the loss went from {first:.3f} to {last:.3f}."
            )
    return found
