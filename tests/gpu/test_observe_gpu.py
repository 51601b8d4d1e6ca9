"""Watched loops on a real GPU: nothing is read back in the loop, times are the GPU's, and a wait of the host
is found with its line."""

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import redline


def loop(
    folder: Path, *, updates: int = 40, wait_s: float = 0.0, read_back: bool = False, strict: bool = False
) -> list[dict[str, Any]]:
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(1024, 4096, device="cuda")

    def loader() -> Any:
        for _ in range(updates):
            time.sleep(wait_s)
            yield {"input_ids": batch, "attention_mask": torch.ones(8, 16, device="cuda")}

    with redline.watch(folder, model=model, quiet=True) as run:
        for step, _ in enumerate(run.batches(loader())):
            if strict and step > 5:  # after the one update that is searched for waits
                torch.cuda.set_sync_debug_mode("error")
            with run.phase("forward"):
                loss = model(batch).square().mean()
            with run.phase("backward"):
                loss.backward()
            with run.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            if read_back:
                loss.item()
            run.step(loss=loss)
        torch.cuda.set_sync_debug_mode("default")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def causes(folder: Path) -> dict[str, str]:
    from redline.diagnose.read import read
    from redline.diagnose.rules import diagnose

    return {finding.cause: finding.title for finding in diagnose(read(folder))}


def test_nothing_waits_in_the_loop(tmp_path: Path) -> None:
    lines = loop(tmp_path / "run", strict=True)
    assert all(line["loss"] is not None for line in lines)
    assert lines[-1]["tokens"] == 40 * 8 * 16
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["hardware"]["kind"] == "cuda"
    assert plan["precision"]["value"] in ("fp32", "tf32")
    assert "sync" not in causes(tmp_path / "run")


@pytest.mark.timing
def test_the_phases_fill_the_update(tmp_path: Path) -> None:
    late = loop(tmp_path / "run")[10:]
    step_s = median(line["step_s"] for line in late)
    phases_s = median(line["forward_s"] + line["backward_s"] + line["optimizer_s"] for line in late)
    assert 0.9 * step_s < phases_s <= 1.01 * step_s


@pytest.mark.timing
def test_only_what_the_gpu_stood_idle_for_is_a_wait(tmp_path: Path) -> None:
    """An update, 0.4 TFLOP in fp32, takes an H200 6 to 9 ms: a wait of 1 ms hides behind the update before,
    one of 50 does not."""
    hidden, felt = (
        median(line["data_wait_s"] for line in loop(tmp_path / str(wait_s), wait_s=wait_s)[10:])
        for wait_s in (0.001, 0.05)
    )
    assert hidden < 0.0005
    assert 0.02 < felt < 0.051


def test_a_loss_read_back_every_update_is_found_with_its_line(tmp_path: Path) -> None:
    loop(tmp_path / "run", read_back=True)
    assert "test_observe_gpu.py" in causes(tmp_path / "run")["sync"]


def test_a_missing_cache_is_found_without_waiting_for_the_gpu(tmp_path: Path) -> None:
    """Every prefix computed again, 24 times an update, in torch's mode that forbids waits."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]).cuda()
    texts = torch.randn(64, 88, 2048, device="cuda")
    with torch.no_grad(), redline.watch(tmp_path / "run", model=model, quiet=True) as run:
        for step in range(12):
            if step > 5:  # after the one update that is searched for waits
                torch.cuda.set_sync_debug_mode("error")
            with run.phase("generate"):
                for positions in range(64, 88):
                    model(texts[:, :positions])
            run.step(tokens=64 * 24)
        torch.cuda.set_sync_debug_mode("default")
    assert "uncached-generation" in causes(tmp_path / "run")
