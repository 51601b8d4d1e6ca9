"""A limit that was measured too low: the run that beats it says so, drops it, and the report says it beside the
number."""

from dataclasses import replace
from pathlib import Path

import pytest
from ceilings import save_ceilings

from redline.cli.main import main
from redline.data.read import SHIPPED
from redline.machine.facts import read_facts
from redline.machine.store import cached, save

TINY = [
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.ffn_size=64", "model.vocab_size=512",
    "model.context_length=32", "data.seq_len=32", "train.batch_size=4", "train.steps=16", "train.warmup_steps=0",
    "data.valid_fraction=0.2",
]  # fmt: skip
WRONG = "(so the limit is too low)"


def test_a_run_that_beats_its_ceiling_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    save_ceilings(tmp_path / "cache")
    facts, run = read_facts(), str(tmp_path / "run")
    honest = cached(facts)
    assert honest
    save(facts, replace(honest, cpu_matmul_gflops=1e-3, cpu_copy_bytes_per_s=1e6))  # no machine is so slow
    few = tmp_path / "few.txt"  # tokenised in no time
    few.write_text(SHIPPED["tinyshakespeare"].read_text()[:60_000])
    pins = [*TINY, f"data.source={few}"]
    assert main(["train", "nano", "--run", run, *(part for pin in pins for part in ("--set", pin))]) == 0
    said = capsys.readouterr().err
    assert "that rate was measured too low: it will be measured again" in " ".join(said.split())
    assert cached(facts) is None
    assert main(["report", run]) == 0
    # wherever a share of the limit is shown: two places always, and in a finding that only a busy machine gives
    assert " ".join(capsys.readouterr().out.split()).count(WRONG) >= 2
    # at least the tile of the ceiling, and the roofline
    assert (Path(run) / "report.html").read_text().count(WRONG) >= 2
