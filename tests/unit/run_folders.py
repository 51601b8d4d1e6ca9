"""Run folders with known numbers, written by hand: what the tests of the report read.

A run of 40 updates of 1,000 tokens. Update 1 takes 4 s (compilation), 2 to 5 take 1 s, the others 0.5 s;
every update waits 0.05 s for data. One validation of 2 s and one checkpoint of 0.25 s come at the end: 25.5 +
2 + 0.25 = 27.75 s.
"""

import json
from pathlib import Path
from typing import Any

UPDATES = 40
RECIPE = """name = "small"
about = "{about}"

[model]
vocab_size = 1024
num_layers = 2
hidden_size = 64
num_heads = 2
ffn_size = 128
context_length = 128

[data]
source = "tinyshakespeare"
seq_len = 100

[train]
batch_size = 10
lr = 1e-3
steps = {steps}
"""
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>&\"'"


def plan(**changes: Any) -> dict[str, Any]:
    reason = {"reason": "because", "source": "rule"}
    return {
        "recipe": "small",
        "work": "0123456789abcdef",
        "hardware": {
            "title": "NVIDIA H200",
            "kind": "cuda",
            "memory_bytes": 8 * 2**30,
            "peak_tflops": {"bf16": 989.0},
            "measured_tflops": {"bf16": 680.0},
            "source": "datasheet",
        },
        "world_size": 1,
        "precision": {"value": "bf16", **reason},
        "micro_batch": {"value": 10, **reason},
        "prediction": {
            "parameters": 1_000_000,
            "flops_per_token": 6_000_000,
            "memory_parts_bytes": {"weights": 2**30, "activations": 2**31, "gradients": 0},
            "memory_bytes": 3 * 2**30,
            "ceiling_tokens_per_s": 4000.0,
            "attainable_tokens_per_s": 2500.0,
        },
        **changes,
    }


def lines(updates: int = UPDATES, *, faster: float = 1.0) -> list[dict[str, Any]]:
    found, elapsed_s = [], 0.0
    for step in range(1, updates + 1):
        step_s = (4.0 if step == 1 else 1.0 if step <= 5 else 0.5) / faster
        elapsed_s += step_s
        found.append(
            {
                "step": step,
                "loss": 5.0 - step / 20,
                "grad_norm": 1.0,
                "lr": 1e-3,
                "step_s": step_s,
                "tokens_per_s": 1000 / step_s,
                "mfu": 0.4,
                "ceiling_share": 0.6,
                "tokens": 1000 * step,
                "data_wait_s": 0.05,
                "elapsed_s": elapsed_s,
                "memory_bytes": 2 * 2**30,
            }
        )
    found[-1] |= {"valid_loss": 3.25, "valid_perplexity": 25.79, "valid_bits_per_byte": 1.2}
    return found


EVENTS: list[dict[str, Any]] = [
    {"at": 1_700_000_000.0, "event": "start", "step": 0, "recipe": "small"},
    {"at": 1_700_000_026.0, "event": "validation", "step": 40, "valid_loss": 3.25, "best": True},
    {"at": 1_700_000_027.0, "event": "checkpoint", "step": 40, "stalled_s": 0.25},
    {"at": 1_700_000_028.0, "event": "end", "step": 40, "why": "finished", "elapsed_s": 27.75},
]


def write_rft(folder: Path, *, correct: int = 10, sample: str = "") -> Path:
    """An RFT run: 10 s of sampling in two attempts, 27.75 s of fine-tuning, tests of 1 and 2 s."""
    (folder / "train-samples").mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        f'name = "units"\nworkload = "rft"\n[model]\ninit_from = "demo"\n[task]\nname = "units"\n[train]\nbatch_size = 8\n'
        f"lr = 1e-3\nepochs = 1\n[sample]\n{sample}[test]\nrows = 100\n"
    )
    found = {"why": "finished", "questions": 40, "solved": 40, "samples": 500, "correct": correct}
    jsonl(
        folder / "events.jsonl",
        [
            {"at": 1.0, "event": "sampling_end", "elapsed_s": 4.0, **found},
            {"at": 2.0, "event": "sampling_end", "elapsed_s": 6.0, **found},
            {"at": 3.0, "event": "training_on_samples", "why": "finished", "elapsed_s": 27.75},
        ],
    )
    jsonl(
        folder / "evaluations.jsonl",
        [
            line | {"at": 4.0, "elapsed_s": spent_s}
            for line, spent_s in zip(EVALUATIONS, (1.0, 2.0), strict=True)
        ],
    )
    jsonl(folder / "train-samples" / "metrics.jsonl", lines())
    return folder


def jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(
    folder: Path,
    *,
    metrics: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    plan_changes: dict[str, Any] | None = None,
    about: str = "a run",
    steps: int = UPDATES,
    recipe: str | None = None,
) -> Path:
    folder.mkdir(parents=True)
    about = json.dumps(about)[1:-1]  # escaped as a TOML string
    (folder / "recipe.toml").write_text(recipe or RECIPE.format(about=about, steps=steps))
    (folder / "plan.json").write_text(json.dumps(plan(**(plan_changes or {}))))
    jsonl(folder / "metrics.jsonl", lines() if metrics is None else metrics)
    jsonl(folder / "events.jsonl", EVENTS if events is None else events)
    return folder


ABLATION = [
    {
        "name": "compile",
        "claimed": [1.5, 2.0],
        "measured_ratio": 4.0,
        "low": 2.0,
        "high": 8.0,
        "verdict": "kept",
        "memory_bytes": 2**30,
        "numerics": "rounding",
    },
    {
        "name": "fp8",
        "claimed": None,
        "measured_ratio": 0.5,
        "low": None,
        "high": None,
        "verdict": "slower",
        "numerics": None,
    },
]
EVALUATIONS = [
    {
        "weights": w,
        "split": "valid",
        "n": 100,
        "accuracy": a,
        "accuracy_low": a - 0.05,
        "accuracy_high": a + 0.1,
        "answer_rate": 0.9,
    }
    for w, a in (("base", 0.06), ("samples", 0.63))
]
