"""`redline bench rl` really learns, on a CPU with a tiny model: our arms, TRL's where it is installed, and the page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

from redline.bench import results, rl, theirs
from redline.bench.rl import WORKS
from redline.config.recipe import Recipe
from redline.machine.facts import read_facts
from redline.measure.child import named

QUICK = WORKS["quick"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_our_side_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL stands in for itself."""
    stands_in = {
        "rows": 8,
        "tokens": 112.0,
        "first_step_s": 2.0,
        "seconds": [56.0, 56.0],
        "memory_bytes": None,
    }

    def rows_of(function: str, setting: dict[str, Any]) -> Any:
        if function.endswith(":trl_continuous"):
            return [{"failed": "no such engine", "outcome": "error"}]
        return [stands_in] if function.endswith(":trl") else named(function)(setting)

    monkeypatch.setattr(results, "rows_of", rows_of)
    told: list[str] = []
    arms = [arm for arm in rl.LABELS if arm != "redline_compiled"]  # compiling takes a minute here
    path = rl.bench_rl("quick", read_facts(), tmp_path, arms=arms, progress=told.append)
    rows = {row["row"]: row for row in json.loads(path.with_suffix(".json").read_text())["rows"]}
    ours, actor = rows["redline"], rows["actor"]
    assert ours["rows"] == QUICK.questions[0] * QUICK.group_size
    assert 0 < ours["tokens"] <= ours["rows"] * (QUICK.prompt_tokens + QUICK.new_tokens)
    assert len(ours["seconds"]) == QUICK.steps
    assert set(ours["phases_s"]) == set(rl.PHASES.values()), "it generated, scored and learnt"
    assert actor["tokens"] == pytest.approx(QUICK.actor_rows * (QUICK.prompt_tokens + QUICK.actor_tokens - 1))
    text = path.read_text()
    assert f"| redline | 8 | {ours['tokens_per_s']:,.0f} |" in text
    assert (rows["trl"]["tokens_per_s"], rows["trl"]["low"], rows["trl"]["high"]) == (2.0, 2.0, 2.0)
    assert f"{ours['tokens_per_s'] / 2:.1f}x" in text, "against the two tokens a second above"
    assert "| TRL, transformers' continuous batching | – | failed | no such engine |" in text
    assert "A step of redline with 8 answers: generate " in text
    assert f"| redline, update alone | {QUICK.actor_rows} | {actor['tokens_per_s']:,.0f} |" in text
    assert len(told) == 4


def test_what_is_finished_is_kept_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"rows": 8, "tokens": 112.0, "first_step_s": 2.0, "seconds": [56.0], "memory_bytes": None}

    def rows_of(function: str, _setting: dict[str, Any]) -> Any:
        if function.endswith(":redline"):
            raise KeyboardInterrupt
        return [row]

    monkeypatch.setattr(results, "rows_of", rows_of)
    with pytest.raises(KeyboardInterrupt):
        rl.bench_rl("quick", read_facts(), tmp_path, arms=("trl", "redline"), progress=lambda _: None)
    (written,) = tmp_path.glob("*.json")
    assert [row["row"] for row in json.loads(written.read_text())["rows"]] == ["trl"]


def test_the_compiled_arm_is_compiled_and_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(rl, "Trainer", lambda job, _process: asked.append(job.recipe))
    monkeypatch.setattr(rl, "_steps", lambda *_: ({"step_tokens": 1.0}, [1.0, 1.0]))
    for arm in (rl.redline, rl.redline_compiled):
        assert list(arm({"name": "quick"}))
    plain, compiled = asked
    assert (plain.plan.compile, compiled.plan.compile) == ("off", "default"), (
        "whatever the planner would choose"
    )
    assert rl._plan(compiled).compile == "default"
    assert replace(compiled, plan=plain.plan) == replace(plain, model=compiled.model), (
        "only the folder differs"
    )


def test_the_clock_of_a_peer_gives_every_step(clock: Any) -> None:
    """As TRL's trainer calls it: the first step, which warms up, and each after it."""
    watch = theirs.clock(warm_up=1, per_block=1)
    for step, seconds in enumerate((8, 1, 2, 4), start=1):
        clock.sleep(seconds)
        watch.on_step_end(None, TrainerState(global_step=step), None)
    assert [watch.first_step_s, *watch.blocks_s] == pytest.approx([8, 1, 2, 4], abs=1e-4)


def test_trl_does_the_same_work() -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'redline[bench]'")
    for row in (*rl.trl({"name": "quick"}), *rl.trl_continuous({"name": "quick"})):
        assert row["rows"] == QUICK.questions[0] * QUICK.group_size
        # an answer that hits the end token by chance is shorter
        whole = row["rows"] * (QUICK.prompt_tokens + QUICK.new_tokens)
        assert 0.7 * whole < row["tokens"] <= whole
        assert len(row["seconds"]) >= 1
