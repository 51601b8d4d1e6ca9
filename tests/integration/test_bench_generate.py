"""`redline bench generate` really generates, on a CPU with a tiny model: every row, its table, and a floor
counted by hand."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.bench import generate, results
from redline.bench.generate import WORKS
from redline.cli.main import main
from redline.config.recipe import ModelConfig
from redline.machine.facts import read_facts
from redline.machine.store import cached
from redline.measure.child import named
from redline.plan.arithmetic import parameters
from redline.plan.roofline import generation_floor_s

QUICK = WORKS["quick"]


Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_our_side_and_its_table(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has torch already."""
    monkeypatch.setenv("REDLINE_CACHE", str(cache))
    monkeypatch.setattr(results, "rows_of", lambda function, setting: named(function)(setting))
    facts, told = read_facts(), []
    ceilings = cached(facts)
    assert ceilings is not None
    generate.bench_generate(
        "quick", facts, tmp_path, ceilings=ceilings, arms=["redline"], progress=told.append
    )
    [path] = tmp_path.glob("generate-quick_*.json")
    found = json.loads(path.read_text())
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        assert "failed" not in row
        rows.setdefault(row["row"], []).append(row)
    assert [(row["prompts"], row["sequences"]) for row in rows["redline"]] == [(1, 1), (2, 4), (4, 4)]
    for row in rows["redline"]:
        assert row["tokens"] == row["sequences"] * QUICK.new_tokens
        assert 0 < row["low"] <= row["tokens_per_s"] <= row["high"]
        assert 0 < row["share_of_floor_shared"] <= row["share_of_floor"] < 1
    [mixed] = rows["redline_mixed"]
    assert 0.3 < mixed["occupancy"] <= mixed["row_occupancy"] <= 1
    assert mixed["occupancy"] <= mixed["most_occupancy"] < 1
    table = path.with_suffix(".md").read_text()
    assert told == [results.brief(generate.BENCH.columns, row) for row in found["rows"]]
    for row, line in zip(found["rows"], told, strict=True):
        assert f" | {row['sequences']} | {row['tokens_per_s']:,.0f} | {row['low']:,.0f} – " in table
        assert f"sequences {row['sequences']}, tokens/s {row['tokens_per_s']:,.0f}, interval " in line
    assert f"slot occupancy {mixed['occupancy']:.1%}" in table


def test_the_other_side_runs_the_same_work() -> None:
    rows = list(generate.transformers({"name": "quick"}))
    assert [(row["row"], row["prompts"], row["samples"]) for row in rows] == [
        ("generate", 1, 2),
        ("generate", 2, 2),
        ("continuous", 2, 2),
    ]
    for row in rows:
        assert row["tokens"] == row["sequences"] * QUICK.new_tokens
        assert row["seconds"]


def test_a_peer_that_fails_is_a_row_that_says_what_it_was() -> None:
    def run(new_tokens: int) -> None:
        if new_tokens == QUICK.new_tokens:  # after its warm-up
            raise RuntimeError("no room\nfor it")

    row = generate._measured(generate._row("continuous", QUICK, 2, 2, 4), QUICK, run)
    assert "seconds" not in row
    line = results.brief(generate.BENCH.columns, row)
    assert line == "transformers continuous batching: failed: RuntimeError: no room"
    [table_row] = results.table(generate.BENCH.columns, [row], generate.BENCH.reference)[2:]
    assert table_row.startswith(
        "| transformers continuous batching | 2 | 2 | 4 | failed | RuntimeError: no room |"
    )


def test_rows_are_compared_with_the_headline_batch() -> None:
    def row(name: str, prompts: int, rate: float) -> results.BenchRow:
        return {"row": name, "prompts": prompts, "samples": 30, "tokens_per_s": rate}

    rows = [row("generate", 8, 50.0), row("generate", 32, 200.0), row("redline", 8, 400.0)]
    titles, _, *lines = results.table(generate.BENCH.columns, rows, generate.BENCH.reference)
    at = titles.split(" | ").index("against `generate`")
    assert [line.split(" | ")[at] for line in lines] == ["1.00x", "4.00x", "8.00x"]
    assert generate.BENCH.findings(rows, WORKS["full"]) == [
        "Best of redline: 2.0 times the tokens/s of the best of transformers."
    ]


def test_an_arm_that_dies_keeps_its_rows_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = "import sys; sys.stdin.readline(); print('{\"row\": {\"row\": 1}}', flush=True); sys.exit('boom')"
    monkeypatch.setattr("redline.measure.process.COMMAND", (sys.executable, "-c", dying))
    rows = list(results.rows_of("redline.bench.generate:redline", {"name": "quick"}))
    assert rows == [{"row": 1}, {"failed": "exit code 1: boom", "outcome": "crashed"}]


def test_the_full_benchmark_on_a_cpu_is_refused_and_so_is_an_unknown_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    facts = replace(read_facts(), gpus=())
    monkeypatch.setattr("redline.cli.bench.read_facts", lambda: facts)
    assert main(["bench", "generate"]) == 6
    assert main(["bench", "generate", "--arm", "vllm"]) == 2
    full, arm = capsys.readouterr().err.splitlines()
    assert "needs a GPU" in full
    assert "transformers, redline" in arm


def test_the_floor_counted_by_hand() -> None:
    """One layer: 32 + 16 + 64 + 32 weights in the block, 40 in the head; 8 bytes of keys and values a
    token."""
    model = ModelConfig(
        vocab_size=10, num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, ffn_size=8, context_length=16
    )
    work = {"prompts": 2, "prompt_tokens": 3, "new_tokens": [3, 3, 3, 3], "slots": 4}

    def seconds(*, bytes_per_s: float = 1e30, flops_per_s: float = 1e30, shared: bool = False) -> float:
        return generation_floor_s(
            model, **work, bytes_per_value=2, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, shared=shared
        )

    # Two steps; each of the four sequences reads 3 + 1, then 3 + 2 tokens. Shared: the two prompts once a
    # step, and each its own.
    assert seconds(bytes_per_s=1.0) == pytest.approx(2 * 184 * 2 + 8 * 4 * (4 + 5))
    assert seconds(bytes_per_s=1.0, shared=True) == pytest.approx(2 * 184 * 2 + 8 * (2 * 2 * 3 + 4 * (1 + 2)))
    # Both prompts through the block and their last tokens through the head; 8 decoded tokens through all; 16
    # per attended pair.
    assert seconds(flops_per_s=1.0) == pytest.approx(
        2 * 2 * (144 * 3 + 40) + 2 * 184 * 8 + 16 * (36 + 2 * (1 + 2 + 3))
    )


def test_the_floor_of_mixed_lengths_fills_every_slot() -> None:
    model = QUICK.model
    even, uneven = [5] * 8, [2, 8] * 4
    options = {
        "prompts": 8,
        "prompt_tokens": 4,
        "slots": 4,
        "bytes_per_value": 4,
        "bytes_per_s": 1.0,
        "flops_per_s": 1e30,
        "shared": False,
    }
    weights = parameters(model).matmul * 4
    kv = 4 * 2 * model.num_layers * model.kv_heads * model.head_size
    assert generation_floor_s(model, new_tokens=even, **options) == pytest.approx(
        8 * weights + kv * (32 * 4 + 8 * 10)
    )
    assert generation_floor_s(model, new_tokens=uneven, **options) == pytest.approx(
        8 * weights + kv * (32 * 4 + 4 * (1 + 28))
    )
