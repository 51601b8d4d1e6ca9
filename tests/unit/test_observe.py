"""Watched loops: what the instruments write is what happened, planted faults are named, and the cost is what
docs/api.md says."""

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import redline
from redline.config.recipe import ModelConfig
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.errors import ConfigError, StorageError
from redline.observe import facts, run, update
from redline.plan import arithmetic
from redline.plan.hardware import hardware_as
from redline.record.metrics import METRICS
from redline.record.observe import Observers

pytestmark = pytest.mark.usefixtures("clock")

ROOT = Path(__file__).parents[2]
READINGS_S = 1e-4
"""More than what a hundred readings of the tests' clock add to the time that was slept."""
MOST_COST_S = 50e-6
"""0.5% of an update of 10 ms."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on two cores that others use too wait for each other for most of a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, width), nn.Linear(width, 16))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def batch_of(rows: int = 4, length: int = 12, tokens: int = 12) -> dict[str, torch.Tensor]:
    mask = (torch.arange(length) < tokens).long().expand(rows, length)
    return {"input_ids": mask.clone(), "attention_mask": mask}


def slowly(batches: list[Any], wait_s: float) -> Iterator[Any]:
    for batch in batches:
        time.sleep(wait_s)
        yield batch


# ---- what is written ----


def test_times_are_those_of_the_loop(tmp_path: Path) -> None:
    """Sleeps of known length against what is written."""
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for _ in watched.batches(slowly([batch_of()] * 6, 0.02)):
            for _ in range(2):
                with watched.phase("forward"):
                    time.sleep(0.005)
            with watched.phase("backward"):
                time.sleep(0.015)
            time.sleep(0.01)
            watched.step()
    lines = lines_of(tmp_path / "run")
    slept_s = {"data_wait_s": 0.02, "forward_s": 0.01, "backward_s": 0.015, "step_s": 0.055, "issue_s": 0.035}
    for line in lines:
        assert {metric: line[metric] for metric in slept_s} == pytest.approx(slept_s, abs=READINGS_S)
    assert lines[-1]["elapsed_s"] == pytest.approx(6 * 0.055, abs=READINGS_S)
    assert not set(lines[0]) - set(METRICS), "only names that docs/metrics.md lists"
    assert [event["event"] for event in events_of(tmp_path / "run")] == ["start", "end"]


def test_tokens_and_padding_are_counted_in_the_batches(tmp_path: Path) -> None:
    updates = [[batch_of(tokens=3), batch_of(tokens=12)], [batch_of(tokens=6), batch_of(length=24, tokens=6)]]
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        batches = watched.batches([batch for update in updates for batch in update])
        for _ in updates:
            next(batches)
            next(batches)
            watched.step()
    first, second = lines_of(tmp_path / "run")
    assert (first["tokens"], second["tokens"]) == (60, 60 + 48)
    assert first["padding_share"] == pytest.approx(1 - 60 / 96)
    assert second["padding_share"] == pytest.approx(1 - 48 / 144)
    assert second["tokens_per_s"] == pytest.approx(48 / second["step_s"])
    observed = read(tmp_path / "run").facts
    assert (observed.micro_batch, observed.batch_size, observed.seq_len) == (4, 8, 12)


def test_an_update_whose_batches_are_empty_has_no_padding(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for _ in watched.batches(
            [batch_of(tokens=6), {name: t[:0] for name, t in batch_of(tokens=6).items()}]
        ):
            watched.step()
    assert ["padding_share" in line for line in lines_of(tmp_path / "run")] == [True, False]


def test_what_the_loop_says_overrules_what_the_batch_shows(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for _ in watched.batches([batch_of(tokens=6)]):
            watched.step(loss=2.5, tokens=torch.tensor(10), padding_share=0.125)
    (line,) = lines_of(tmp_path / "run")
    assert (line["loss"], line["tokens"], line["padding_share"]) == (2.5, 10, 0.125)


def test_a_loop_over_plain_tensors_gives_its_tokens(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=model_of(), tokens_per_step=256, quiet=True) as watched:
        for _ in watched.batches([(torch.zeros(8, 32), torch.zeros(8))] * 2):
            watched.step()
    assert [line["tokens"] for line in lines_of(tmp_path / "run")] == [256, 512]
    observed = read(tmp_path / "run").facts
    assert (observed.batch_size, observed.seq_len) == (8, 32)
    assert "padding_share" not in lines_of(tmp_path / "run")[0]


def test_a_loss_is_what_it_was_at_the_step(tmp_path: Path) -> None:
    """The loop may change the tensor afterwards; a loss that is not a number has no word in JSON."""
    loss = torch.zeros(1, requires_grad=True)
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for value in (1.5, float("nan"), 0.5):
            loss.data.fill_(value)
            watched.step(loss=loss)
        loss.data.fill_(99)
        with pytest.raises(ConfigError, match=r"one number per update, got a tensor of shape \(3,\)"):
            watched.step(loss=torch.zeros(3))
    assert [line["loss"] for line in lines_of(tmp_path / "run")[:3]] == [1.5, None, 0.5]


def test_numbers_of_numpy_are_numbers_and_texts_are_not(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        watched.step(loss=np.float32(1.5), tokens=np.int64(10), padding_share=np.float16(0.25))
        for wrong in ("x", "3", [1.0], np.zeros(3)):
            with pytest.raises(ConfigError, match="loss must be one number per update, got"):
                watched.step(loss=wrong)  # type: ignore[arg-type]
        watched.step(loss=torch.ones(1, 1))
    lines = lines_of(tmp_path / "run")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.5), (2, 1.0)]
    assert (lines[0]["tokens"], lines[0]["padding_share"]) == (10, 0.25)


def test_the_end_is_recorded_and_the_folder_let_go_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageError("the disk is full")

    def loop(folder: Path, error: Exception | None) -> None:
        with redline.watch(folder, model=model_of()) as watched:
            watched.step(loss=1.0)
            monkeypatch.setattr(watched._lines, "line", full)
            if error is not None:
                raise error

    for name, error, told in (
        ("a", None, "StorageError: the disk is full"),
        ("b", ZeroDivisionError("mine"), "ZeroDivisionError: mine"),
    ):
        with pytest.raises(Exception, match=told.partition(": ")[2]):
            loop(tmp_path / name, error)
        assert events_of(tmp_path / name)[-1]["error"] == told
        with redline.watch(tmp_path / name, model=model_of(), quiet=True):
            pass


def test_a_step_outside_the_block_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = redline.watch(tmp_path / "run", model=model_of())
    with pytest.raises(ConfigError, match=r"step\(\) outside the block"):
        watched.step()
    with watched:
        pass
    with pytest.raises(ConfigError, match=r"step\(\) outside the block"):
        watched.step()
    assert (
        capsys.readouterr().err
        == f"\nredline: no update is recorded in {tmp_path / 'run'}: call run.step() after each update\n"
    )
    assert read(tmp_path / "run").notes == (), "a loop has no recipe that could be missed"


def test_a_folder_in_use_or_used_is_left_alone_and_the_next_number_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(**options: Any) -> Any:
        return redline.watch(tmp_path / "run", model=model_of(), **options)

    with begin(quiet=True) as first, begin(quiet=True) as second:
        first.step(loss=1.0)
        second.step(loss=2.0)
    with begin() as third:
        third.step(loss=3.0)
    assert [run.path.name for run in (first, second, third)] == ["run", "run-2", "run-3"]
    assert [lines_of(run.path)[0]["loss"] for run in (first, second, third)] == [1.0, 2.0, 3.0]
    assert "run already holds a run; this one is recorded in" in capsys.readouterr().err.splitlines()[0]
    with begin(quiet=True, start_step=1) as resumed:
        resumed.step(loss=4.0)
    assert [line["loss"] for line in lines_of(tmp_path / "run-3")] == [3.0, 4.0], "the last goes on"


def test_a_loop_logs_whatever_it_likes(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        watched.log({"reward": 0.5, "loss": 3.0})
        watched.log({"kl": torch.tensor(0.25), "lr": 1e-3})
        watched.step()
        watched.step(loss=2.0)
        for name in ("step_s", "tokens", "memory_bytes", 3):
            with pytest.raises(ConfigError, match="names that Redline does not measure"):
                watched.log({name: 1.0})
        watched.log({"reward": "much"})
        with pytest.raises(ConfigError, match="reward must be one number per update, got 'much'"):
            watched.step()
    first, second = lines_of(tmp_path / "run")
    assert {name: first[name] for name in ("reward", "loss", "kl", "lr")} == {
        "reward": 0.5, "loss": 3.0, "kl": 0.25, "lr": 1e-3,
    }  # fmt: skip
    assert "reward" not in second


def test_observers_are_told_what_the_folder_holds(tmp_path: Path) -> None:
    class Kept(Observers):
        lines, kinds, closed = list[Any](), list[str](), 0

        def metrics(self, line: dict[str, Any]) -> None:
            self.lines.append(line)

        def event(self, kind: str, facts: dict[str, Any]) -> None:
            self.kinds.append(kind)

        def close(self) -> None:
            self.closed += 1

    kept = Kept()
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True, observers=[kept]) as watched:
        watched.step(loss=1.0)
    assert kept.lines == lines_of(tmp_path / "run")
    assert kept.kinds == [event["event"] for event in events_of(tmp_path / "run")] == ["start", "end"]
    assert kept.closed == 1


def test_numbers_are_copied_before_the_moment_behind_which_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a copy queued behind the update's last event may still be under way when that event has
    passed."""
    order: list[str] = []
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        now, taken = watched.clock.now, run.taken
        monkeypatch.setattr(watched.clock, "now", lambda: order.append("moment") or now())  # type: ignore[func-returns-value]
        monkeypatch.setattr(run, "taken", lambda numbers: order.append("copy") or taken(numbers))  # type: ignore[func-returns-value]
        watched.step(loss=1.0)
    assert order[:2] == ["copy", "moment"]


def test_copied_numbers_are_read_behind_the_end_of_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update may still be running when the block ends: its end is waited for first."""
    order: list[str] = []

    class Copy:
        def tolist(self) -> list[float]:
            order.append("read")
            return [2.5]

    monkeypatch.setattr(run, "taken", lambda numbers: (["loss"], Copy()))
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        seconds = watched.clock.seconds
        monkeypatch.setattr(
            watched.clock, "seconds", lambda begin, end: order.append("waited") or seconds(begin, end)
        )  # type: ignore[func-returns-value]
        watched.step(loss=1.0)
    assert order == ["waited", "read"]
    assert lines_of(tmp_path / "run")[0]["loss"] == 2.5


def test_lines_come_while_the_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the newest, of which more may become known; together, once a second or every 64 updates."""
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for step in range(1, 71):
            watched.step()
            if step in (64, 65):
                assert len(lines_of(tmp_path / "run")) == (0 if step == 64 else 64)
        monkeypatch.setattr(run, "WRITE_EVERY_S", 0.0)
        watched.step()
        assert len(lines_of(tmp_path / "run")) == 70
        watched.add(valid_loss=0.25)
    assert lines_of(tmp_path / "run")[-1]["valid_loss"] == 0.25


def test_batches_without_a_mask_have_tokens_and_no_padding(tmp_path: Path) -> None:
    square = torch.ones(2, 1, 5, 5)
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for _ in watched.batches(
            [{"input_ids": torch.zeros(2, 5)}, {"input_ids": torch.zeros(2, 5), "attention_mask": square}]
        ):
            watched.step()
    assert [line["tokens"] for line in lines_of(tmp_path / "run")] == [10, 20]
    assert not any("padding_share" in line for line in lines_of(tmp_path / "run"))


def test_a_pause_is_no_part_of_an_update(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for step in range(1, 13):
            time.sleep(0.004)
            watched.step()
            if step % 4 == 0:
                with watched.pause("validation"):
                    time.sleep(0.03)
    lines = lines_of(tmp_path / "run")
    assert [line["step_s"] for line in lines] == pytest.approx([0.004] * 12, abs=READINGS_S)
    pauses = [event for event in events_of(tmp_path / "run") if event["event"] == "validation"]
    assert [event["step"] for event in pauses] == [4, 8, 12]
    assert [event["stalled_s"] for event in pauses] == pytest.approx([0.03] * 3, abs=READINGS_S)
    top = watched.findings()[0]
    assert top.cause == "validation-pause"
    assert "plan." not in top.fix
    assert "train." not in top.fix


def test_a_pause_in_the_middle_of_an_update_is_taken_out_of_it(tmp_path: Path) -> None:
    """The batch is there, then comes a validation, then the work: the wait stays the update's, and the host's
    time is that of the work."""
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for _ in watched.batches(slowly([batch_of()] * 5, 0.03)):
            with watched.pause("validation"):
                for _ in watched.batches(slowly([batch_of()] * 2, 0.02)):
                    pass
            with watched.phase("forward"):
                time.sleep(0.005)
            watched.step()
    expected_s = {"data_wait_s": 0.03, "step_s": 0.035, "issue_s": 0.005}
    for line in lines_of(tmp_path / "run"):
        assert {name: line[name] for name in expected_s} == pytest.approx(expected_s, abs=READINGS_S)
        assert "paused_s" not in line
    assert lines_of(tmp_path / "run")[-1]["tokens"] == 5 * 48, "the validation's tokens are not trained on"
    stalled_s = [
        event["stalled_s"] for event in events_of(tmp_path / "run") if event["event"] == "validation"
    ]
    assert stalled_s == pytest.approx([0.04] * 5, abs=READINGS_S)


def test_a_restart_forgets_the_wait_before_it(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for _ in watched.batches(slowly([batch_of()] * 4, 0.03)):
            watched.restart()
            time.sleep(0.005)
            watched.step()
    for line in lines_of(tmp_path / "run"):
        assert (line["issue_s"], line["step_s"]) == pytest.approx((0.005, 0.005), abs=READINGS_S)
        assert "data_wait_s" not in line


@pytest.mark.parametrize("model", [[nn.Linear(1, 1), nn.Linear(1, 1)], None, "gpt2", nn.Linear])
def test_what_is_watched_is_one_model(tmp_path: Path, model: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=(r"^model must be a torch.nn.Module, got (list|NoneType|str|type): give the trained one$"),
    ):
        redline.watch(tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    def loop(updates: int, **options: Any) -> None:
        with redline.watch(
            tmp_path / "run", model=model_of(), tokens_per_step=10, quiet=True, **options
        ) as watched:
            for _ in range(updates):
                watched.step()

    loop(5)
    elapsed_s = lines_of(tmp_path / "run")[2]["elapsed_s"]
    loop(2, start_step=3)
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["tokens"] for line in lines] == [10, 20, 30, 40, 50]
    assert lines[3]["elapsed_s"] > elapsed_s
    assert [event["event"] for event in events_of(tmp_path / "run")] == ["start", "end", "resume", "end"]


def test_an_error_of_the_loop_stays_the_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loop() -> None:
        with redline.watch(tmp_path / "run", model=model_of()) as watched:
            watched.step(loss=1.0)
            raise ZeroDivisionError("the loop's own")

    with pytest.raises(ZeroDivisionError, match="the loop's own"):
        loop()
    assert events_of(tmp_path / "run")[-1]["error"] == "ZeroDivisionError: the loop's own"
    assert [line["loss"] for line in lines_of(tmp_path / "run")] == [1.0], "the newest line is not lost"
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=r"one of generate, copy, forward.*did you mean 'forward'"):
        redline.watch(tmp_path / "other", model=model_of()).phase("foward")


def test_of_several_processes_the_first_writes_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (1, 0):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        with redline.watch(tmp_path / "run", model=model_of(), tokens_per_step=10, quiet=True) as watched:
            for _ in watched.batches([torch.zeros(2)] * 3):
                watched.step()
        assert (tmp_path / "run").exists() == (rank == 0)
        assert watched.findings() == []
    assert lines_of(tmp_path / "run")[-1]["tokens"] == 3 * 4 * 10
    assert read(tmp_path / "run").facts.batch_size == 8


# ---- what the model and the machine say ----


def test_autocast_is_seen_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = model_of()
    described = facts.Described(model, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 2, dtype=torch.long))
    assert described.precision()[0] == "bf16"
    assert not model._forward_pre_hooks
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        assert facts.Described(model_of().to(dtype), torch.device("cpu")).precision()[0] == name
    assert facts.Described(torch.compile(model_of()), torch.device("cpu")).compiled()[0] == "on"


def test_flops_are_those_of_the_arithmetic() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = ModelConfig(
        vocab_size=100, num_layers=3, hidden_size=32, num_heads=4, ffn_size=128, context_length=64,
        activation="gelu", positions="learned", bias=True, norm="layernorm", tie_embeddings=True,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_layer=3, n_embd=32, n_head=4, n_positions=64))
    assert facts.flops_per_token(model, 64)[0] == arithmetic.flops_per_token(shape, 64)
    for parameter in model.transformer.h.parameters():
        parameter.requires_grad = False  # as LoRA does: two thirds of the work of a frozen weight are left
    frozen = arithmetic.parameters(shape).hidden
    assert facts.flops_per_token(model, 64)[0] == arithmetic.flops_per_token(shape, 64) - 2 * frozen


def test_attention_may_be_wider_than_the_model() -> None:
    """Qwen3 and Gemma give their heads a size of their own. Torch counts the forward pass, a third of training."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=100, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, intermediate_size=48, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, dtype=torch.int64))
    rotation = 2 * 12 * 64  # the angles: half of a head for every position
    assert 64 * facts.flops_per_token(model, 64)[0] == 3 * (counter.get_total_flops() - rotation)


def test_a_gpu_gives_an_mfu_and_a_slow_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On paper: an H200 does 67 TFLOP/s in fp32 and 989 in bf16. The layer is 6 x 512 x 512 operations a
    token."""
    monkeypatch.setattr(facts, "hardware_of", lambda device: hardware_as("h200-141g", 16))
    folder = tmp_path / "run"
    with redline.watch(
        folder, model=nn.Linear(512, 512, bias=False), tokens_per_step=1e6, quiet=True
    ) as watched:
        for _ in watched.batches([torch.zeros(4, 8)] * 20):
            time.sleep(0.003)
            watched.step()
    line = lines_of(folder)[-1]
    assert line["mfu"] == pytest.approx(6 * 512 * 512 * 1e6 / line["step_s"] / 67e12)
    plan = json.loads((folder / "plan.json").read_text())
    plan["hardware"]["title"] = "NVIDIA H200"  # as NVML names it
    (folder / "plan.json").write_text(json.dumps(plan))
    # 1.57 TFLOP take 31 ms in fp32 at three quarters of the peak, and 2.1 in bf16: more than an update of 3
    # ms takes.
    top = watched.findings()[0]
    assert top.cause == "slow-precision"
    assert "autocast" in top.fix


# ---- planted faults ----


def planted(folder: Path, batches: Any, work_s: float = 0.004) -> list[str]:
    with redline.watch(folder, model=model_of(), quiet=True) as watched:
        for _ in watched.batches(batches):
            time.sleep(work_s)
            watched.step(loss=1.0)
    return [finding.cause for finding in watched.findings()]


def test_a_loader_that_sleeps_is_the_first_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planted(tmp_path / "run", slowly([batch_of()] * 30, 0.01))[0] == "slow-loader"
    found = diagnose(read(tmp_path / "run"))[0]
    assert found.gain is not None
    assert found.gain.low < 14 / 4 < found.gain.high * 1.01
    assert "plan." not in found.fix, "a loop that has no plan is not told to change it"


def test_rows_three_times_as_long_as_their_text_are_the_first_finding(tmp_path: Path) -> None:
    assert planted(tmp_path / "run", [batch_of(length=36, tokens=12)] * 30)[0] == "padding"


def test_a_loop_without_a_fault_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planted(tmp_path / "run", [batch_of()] * 30) == []


def test_the_end_of_the_block_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with redline.watch(tmp_path / "run", model=model_of()) as watched:
        for _ in watched.batches(slowly([batch_of(length=36)] * 20, 0.01)):
            time.sleep(0.0025)
            watched.step()
    shown = capsys.readouterr().err
    assert "redline: 20 updates" in shown
    assert "1. The step waits for data 80% of its time" in shown
    assert "2. 67% of the positions computed are padding" in shown
    assert f"redline report {tmp_path / 'run'}" in shown
    assert shown.count("\n") <= 9


def test_waits_for_the_gpu_are_given_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """On paper: torch's detector warns where it is on. A CPU has no such waits; the real thing is in
    tests/gpu."""
    mode = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    watching = update.SyncWatch()
    assert mode[-1] == "warn"
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
    warnings.warn(
        "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing"
        " operations",
        stacklevel=1,
    )
    warnings.warn("somebody else's", UserWarning, stacklevel=1)
    found = watching.stop()
    assert [str(warning.message) for warning in recwarn] == ["somebody else's"], "given on"
    assert [place.split(":")[0] for place in found] == ["test_observe.py"]
    assert mode[-1] == "default"
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        for _ in range(6):
            time.sleep(0.002)
            watched.step()
        watched.event("waits_for_gpu", times=1, where="train.py:42")
    (finding,) = [f for f in watched.findings() if f.cause == "sync"]
    assert "train.py:42" in finding.title
    assert finding.gain is None, "without phases nobody knows what it costs"


def test_a_wait_costs_what_the_host_does_behind_it(tmp_path: Path) -> None:
    """20 ms of phases and 20 ms of nothing: it is the wait's, and not told twice."""
    for waits in (False, True):
        with redline.watch(tmp_path / str(waits), model=model_of(), quiet=True) as watched:
            for _ in range(8):
                for phase, seconds in (("forward", 0.008), ("backward", 0.008), ("optimizer", 0.004)):
                    with watched.phase(phase):
                        time.sleep(seconds)
                time.sleep(0.02)
                watched.step()
            if waits:
                watched.event("waits_for_gpu", times=1, where="train.py:42")
        top = watched.findings()[0]
        assert top.cause == ("sync" if waits else "host-gap")
        assert {"sync", "host-gap"} & {f.cause for f in watched.findings()} == {top.cause}
        assert top.gain is not None
        assert 1.4 < top.gain.middle < 2.5


def test_attention_is_not_counted_for_the_reason_that_is_given() -> None:
    model = nn.Linear(8, 8)
    assert "row's length is not known" in facts.flops_per_token(model, None)[1]
    assert "no layers and width" in facts.flops_per_token(model, 32)[1]


# ---- what it costs, and what it does not load ----


@pytest.mark.timing
def test_it_costs_less_than_half_a_percent_of_ten_milliseconds(tmp_path: Path) -> None:
    """Three phases, a tensor for a loss and a batch of 4 x 128 with a mask; what all threads compute."""
    batch, loss, costs_s = batch_of(length=128), torch.tensor(1.0), []
    with redline.watch(tmp_path / "run", model=model_of(), quiet=True) as watched:
        batches = watched.batches([batch] * 4001)
        next(batches)
        watched.step(loss=loss)
        for _ in range(20):
            began_s = time.process_time()
            for _ in range(200):
                next(batches)
                for phase in ("forward", "backward", "optimizer"):
                    with watched.phase(phase):
                        pass
                watched.step(loss=loss)
            costs_s.append((time.process_time() - began_s) / 200)
    assert median(costs_s) < MOST_COST_S


def test_redline_itself_loads_no_torch() -> None:
    check = (
        "import sys, redline; assert 'torch' not in sys.modules",
        "redline.watch; assert 'torch' in sys.modules; assert 'transformers' not in sys.modules",
    )
    done = subprocess.run(
        [sys.executable, "-c", "; ".join(check)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="wacth"):
        _ = redline.wacth


@pytest.mark.parametrize("name", ["own_loop.py", "hf_trainer.py"])
def test_the_page_shows_the_examples_as_they_are(name: str) -> None:
    assert f"```python\n{(ROOT / 'examples' / name).read_text()}```" in (ROOT / "docs" / "api.md").read_text()


# ---- Hugging Face's Trainer ----


FORWARD_S = 0.01
"""What a pass of the small GPT-2 takes by the tests' clock."""


class Rows(torch.utils.data.Dataset):
    def __init__(self, *, wait_s: float = 0.0, length: int = 16, tokens: int = 16) -> None:
        self.wait_s, self.length, self.tokens = wait_s, length, tokens

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.wait_s:
            time.sleep(self.wait_s)
        mask = (torch.arange(self.length) < self.tokens).long()
        return {
            "input_ids": mask * (index % 30),
            "attention_mask": mask,
            "labels": torch.where(mask == 1, mask, -100),
        }


def trainer_of(
    folder: Path, rows: Rows, *, tested: Rows | None = None, others: tuple[Any, ...] = (), **arguments: Any
) -> Any:
    """The Trainer of a small GPT-2 for 24 updates of 4 rows, with our callback as `ours`."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from redline.observe import RedlineCallback

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    model.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S) if torch.is_grad_enabled() else None)
    callback = RedlineCallback(folder / "run", quiet=True)
    settings = {
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 24,
    }
    args = TrainingArguments(str(folder / "out"), **{**settings, **arguments})
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=tested, callbacks=[callback, *others])
    trainer.ours = callback
    return trainer


def trained(folder: Path, rows: Rows, *, tested: Rows | None = None, **arguments: Any) -> Any:
    """The callback after training, and the trainer's loader as `loader`."""
    trainer = trainer_of(folder, rows, tested=tested, **arguments)
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    trainer.ours.loader = trainer.callback_handler.train_dataloader
    return trainer.ours


def breaks(step: int) -> Any:
    """A callback of somebody else that fails in the middle of an update; it looks at a batch of its own
    before."""
    from transformers import TrainerCallback

    class Breaks(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
        ) -> None:
            if state.global_step == step // 2:
                next(iter(train_dataloader))
            if state.global_step == step:
                raise ZeroDivisionError("planted")

    return Breaks()


def logs_slowly(each_s: float) -> Any:
    """A callback of somebody else that waits for a service in every log."""
    from transformers import TrainerCallback

    class Slow(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(each_s)

    return Slow()


class TestTrainer:
    def test_tokens_losses_and_the_loader_afterwards(self, tmp_path: Path) -> None:
        callback = trained(
            tmp_path, Rows(tokens=10), gradient_accumulation_steps=2, logging_steps=3, max_steps=12
        )
        lines = lines_of(tmp_path / "run")
        assert [line["step"] for line in lines] == list(range(1, 13))
        assert lines[-1]["tokens"] == 12 * 2 * 4 * 10
        assert lines[-1]["padding_share"] == pytest.approx(6 / 16)
        assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12]
        plan = json.loads((tmp_path / "run" / "plan.json").read_text())
        assert (
            plan["accumulation"]["value"],
            plan["loader_workers"]["value"],
            plan["recompute"]["value"],
        ) == (2, 0, "none")
        assert plan["optimizer"]["value"] == "adamw_torch_fused"
        assert read(tmp_path / "run").trainer.options["recompute"] == "gradient_checkpointing=False", (
            "findings name TrainingArguments"
        )
        assert callback.loader.__iter__.__qualname__.startswith("DataLoaderShard"), "the loader is as it was"

    def test_a_dataset_that_sleeps_is_the_first_finding(self, tmp_path: Path) -> None:
        assert trained(tmp_path, Rows(wait_s=0.01)).findings()[0].cause == "slow-loader"

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_logging_that_takes_half_of_the_run_is_the_first_finding(
        self, ours_first: bool, tmp_path: Path
    ) -> None:
        """Whichever callback comes first: behind ours it is timed to the next batch."""
        trainer = trainer_of(tmp_path, Rows(), others=(logs_slowly(0.04),), logging_steps=1)
        if not ours_first:
            trainer.add_callback(trainer.pop_callback(trainer.ours))
        trainer.train()
        found = trainer.ours.findings()[0]
        assert (found.cause, found.optimisation) == ("host-gap", "logging-cadence")
        assert found.title.startswith("Logging takes")
        assert "logging_steps" in found.fix
        logged = next(event for event in events_of(tmp_path / "run") if event["event"] == "logging")
        assert logged["stalled_s"] == pytest.approx(24 * 0.04, abs=READINGS_S)
        assert found.gain is not None
        assert found.gain.high > 1.3

    def test_slow_logs_every_n_updates_are_told_once(self, tmp_path: Path) -> None:
        trainer = trainer_of(tmp_path, Rows(), others=(logs_slowly(0.2),), logging_steps=4, max_steps=36)
        trainer.train()
        causes = [found.cause for found in trainer.ours.findings()]
        assert causes[0] == "host-gap"
        assert "stall" not in causes

    def test_logging_that_takes_nothing_is_not_told(self, tmp_path: Path) -> None:
        assert not [f for f in trained(tmp_path, Rows(), logging_steps=1).findings() if f.cause == "host-gap"]

    def test_the_wait_for_a_gpu_before_a_log_is_no_logging(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The Trainer reads the loss before it logs; on a GPU the callback waits for it first."""
        waits: list[int] = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
        trainer = trainer_of(tmp_path, Rows(), logging_steps=8)
        trainer.ours.on_step_begin = lambda *_, **__: setattr(trainer.ours._run.clock, "is_gpu", True)
        trainer.train()
        assert len(waits) == 3

    def test_evaluations_and_checkpoints_are_told_apart(self, tmp_path: Path) -> None:
        often = {
            "eval_strategy": "steps",
            "eval_steps": 6,
            "save_strategy": "steps",
            "save_steps": 12,
            "save_only_model": True,
        }
        callback = trained(tmp_path, Rows(), tested=Rows(wait_s=0.004), **often)
        events = events_of(tmp_path / "run")
        assert [event["step"] for event in events if event["event"] == "validation"] == [6, 12, 18, 24]
        assert [event["step"] for event in events if event["event"] == "checkpoint"] == [12, 24]
        lines = lines_of(tmp_path / "run")
        saved = json.loads((tmp_path / "out" / "checkpoint-24" / "trainer_state.json").read_text())[
            "log_history"
        ]
        theirs = {entry["step"]: entry["eval_loss"] for entry in saved if "eval_loss" in entry}
        assert {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line} == theirs
        # an evaluation reads 96 rows of four milliseconds, and none of that is an update's
        assert [line["step_s"] for line in lines] == pytest.approx([FORWARD_S] * 24, abs=READINGS_S)
        assert callback.findings()[0].cause == "validation-pause"

    def test_an_epoch_that_is_resumed_is_timed_without_its_loader(self, tmp_path: Path) -> None:
        """The Trainer then makes a loader that no callback is shown: the gap before the update is the
        wait."""
        trained(tmp_path, Rows(), max_steps=6, save_strategy="steps", save_steps=6)
        checkpoint = str(tmp_path / "out" / "checkpoint-6")
        trained(tmp_path, Rows(wait_s=0.01), max_steps=12, resume_from_checkpoint=checkpoint)
        lines = lines_of(tmp_path / "run")
        assert [line["step"] for line in lines] == list(range(1, 13))
        waits_s = [line["data_wait_s"] for line in lines[6:]]
        # it reads one batch ahead, so two before the first update
        assert waits_s == pytest.approx([0.08] + [0.04] * 5, abs=READINGS_S)

    def test_an_error_is_recorded_when_the_callback_goes_and_no_line_is_lost(self, tmp_path: Path) -> None:
        """The Trainer calls nobody when an error ends it."""
        trainer = trainer_of(tmp_path, Rows(), others=(breaks(10),))
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        loader = trainer.callback_handler.train_dataloader
        trainer.ours._leave()
        end = events_of(tmp_path / "run")[-1]
        assert (end["event"], end["step"]) == ("failed", 10)
        assert [line["step"] for line in lines_of(tmp_path / "run")] == list(range(1, 11))
        assert loader.__iter__.__qualname__.startswith("DataLoaderShard"), "the loader is as it was"
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        trainer.ours._leave()
        assert len(lines_of(tmp_path / "run-2")) == 10, "a second training has its own record"

    def test_an_error_that_is_kept_is_recorded_when_training_begins_again(self, tmp_path: Path) -> None:
        other = breaks(0)
        trainer = trainer_of(tmp_path, Rows(), others=(other,))
        try:
            trainer.train()
        except ZeroDivisionError:
            assert [event["event"] for event in events_of(tmp_path / "run")] == ["start"]
            trainer.remove_callback(other)
            trainer.train()
        told = [
            (event["event"], event.get("error", event.get("why"))) for event in events_of(tmp_path / "run")
        ]
        assert told == [
            ("start", None),
            ("failed", "ZeroDivisionError: planted"),
            ("start", None),
            ("end", "finished"),
        ]

    @pytest.mark.slow
    def test_an_error_that_ends_the_process_is_recorded_by_its_name(self, tmp_path: Path) -> None:
        program = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from pathlib import Path\nfrom test_observe import Rows, breaks, trainer_of\n"
            f"trainer_of(Path({str(tmp_path)!r}), Rows(), others=(breaks(7),)).train()\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "ZeroDivisionError: planted" in done.stderr
        end = events_of(tmp_path / "run")[-1]
        assert (end["event"], end["step"], end["error"]) == ("failed", 7, "ZeroDivisionError: planted")
        assert len(lines_of(tmp_path / "run")) == 7
