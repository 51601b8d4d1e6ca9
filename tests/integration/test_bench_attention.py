"""`redline bench attention` really runs, on a CPU with tiny heads; and where two lines cross."""

import json
from pathlib import Path

import pytest
import torch

from redline.bench import attention
from redline.bench.attention import LABELS, WORK, bench_attention, crossing
from redline.machine.facts import read_facts
from redline.measure.child import named


def test_every_arm_is_measured_at_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has torch already."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention, "rows_of", lambda function, setting: list(named(function)(setting)))
    path = bench_attention(
        "quick", read_facts(), tmp_path, arms=("flash", "favor"), progress=lambda line: None
    )
    assert path.name.startswith("attention-quick_"), "or it would replace the full results of that day"
    results = json.loads(path.with_suffix(".json").read_text())
    lengths = list(WORK["quick"].lengths)
    found = {
        (what, arm): [row["seq_len"] for row in results["rows"] if (row["what"], row["arm"]) == (what, arm)]
        for what, arm in {(row["what"], row["arm"]) for row in results["rows"]}
    }
    assert found == {
        ("training", "flash"): lengths, ("training", "favor"): lengths,
        ("generation", "softmax"): lengths, ("generation", "favor"): lengths,
    }  # fmt: skip
    assert results["crossing_tokens"].keys() == {"training against flash", "generation against softmax"}
    kept = {
        row["memory_bytes"] for row in results["rows"] if (row["what"], row["arm"]) == ("generation", "favor")
    }
    assert len(kept) == 1, "whatever the length"
    assert LABELS["favor"] in path.read_text()


def test_two_powers_cross_where_they_are_equal() -> None:
    quadratic, linear = ({n: f(n) for n in (1024, 2048, 4096)} for f in (lambda n: n * n / 3000, float))
    assert crossing(quadratic, linear) == pytest.approx(3000)
    assert crossing(linear, quadratic) is None
    assert crossing({n: 2.0 * n for n in linear}, linear) == 1024
