"""The time that an update waits for other processes: taken out of the phases around it, told by the
diagnosis, shown by both views."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import lines, write_run
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from redline.cli.diagnose import print_answer
from redline.config.load import load_recipe
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Facts, Observed, Step
from redline.diagnose.read import read as read_log
from redline.diagnose.rules.plans import communication
from redline.plan.hardware import hardware_as
from redline.plan.planner import make_plan
from redline.record.read import read_run
from redline.report.figures import time_parts
from redline.train import clock
from redline.train.instruments import Instruments, Work
from redline.train.process import time_waits, waiting
from redline.train.step import Update


class Time:
    """A clock that is moved by hand."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s


def test_a_wait_is_taken_out_of_the_phase_that_it_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(clock, "time", time)
    instruments = Instruments(torch.device("cpu"), lambda facts, step_s: {})

    def wait(elapsed_s: float) -> None:
        with waiting(instruments.mark):
            time.passes(elapsed_s)

    wait(100.0)  # of a validation: no update has begun
    instruments.restart()
    instruments.begin()
    for _ in range(2):
        wait(1.0)
        time.passes(2.0)
        wait(3.0)
        wait(4.0)
        time.passes(5.0)
        instruments.mark("forward_s")
        time.passes(6.0)
        wait(7.0)
        instruments.mark("backward_s")
    time.passes(8.0)
    instruments.mark("optimizer_s")
    wait(9.0)  # for the loss
    instruments.push({"step": 1}, Update({"loss": torch.zeros(())}), Work(1, 1))
    (line,) = instruments.ready()
    phases = {name: line[name] for name in ("forward_s", "backward_s", "optimizer_s", "communication_s")}
    assert phases == {"forward_s": 14.0, "backward_s": 12.0, "optimizer_s": 8.0, "communication_s": 39.0}
    assert sum(phases.values()) == line["step_s"] == 73.0


def test_a_wait_that_fails_ends_as_one() -> None:
    """Recovery from running out of memory goes on after it: what follows is no wait."""
    marks: list[str] = []
    with pytest.raises(RuntimeError), waiting(marks.append):
        raise RuntimeError("out of memory")
    assert marks == ["", "communication_s"]


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    """A model of two blocks under FSDP, in a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, model = (
            init_device_mesh("cpu", (1,)),
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)),
        )
        for block in model[:2]:
            fully_shard(block, mesh=mesh)
        yield fully_shard(model, mesh=mesh)
    finally:
        dist.destroy_process_group()


def test_every_wait_of_fsdp_is_marked_and_the_numbers_stay(sharded: nn.Module) -> None:
    x, marks = torch.randn(2, 4), list[str]()
    sharded(x).sum().backward()
    before = [p.grad.full_tensor() for p in sharded.parameters()]
    sharded.zero_grad()
    assert time_waits(sharded, marks.append)
    sharded(x).sum().backward()
    # Each gathers in the forward, and the blocks again in the backward; each reduces; the root waits at the
    # end. Two marks each.
    assert marks == ["", "communication_s"] * (len(marks) // 2)
    assert len(marks) // 2 >= 3 * 2 + 2 * 2 + 3 + 1
    for p, gradient in zip(sharded.parameters(), before, strict=True):
        assert torch.equal(p.grad.full_tensor(), gradient)


@pytest.mark.parametrize("lost", ["wait_for_unshard", "post_backward", "finalize_backward"])
def test_a_torch_that_waits_elsewhere_is_left_as_it_is(
    sharded: nn.Module, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [module._get_fsdp_state()._fsdp_param_group for module in (sharded, *sharded[:2])]
    monkeypatch.delattr(type(groups[0]), lost)
    assert not time_waits(sharded, lambda name: None)
    assert not any("unshard" in vars(group) for group in groups)


def observed(*overrides: str, share: float | None, world_size: int = 8) -> Observed:
    """Updates of a second on H200s, a part of which waits."""
    recipe = load_recipe("gpt2-124m", list(overrides))
    times: dict[str, Any] = {"forward_s": 0.3, "backward_s": 0.6, "optimizer_s": 0.05}
    if share is not None:
        times = {name: value * (1 - share) for name, value in times.items()} | {"communication_s": share}
    return Observed(
        source="a run",
        format="run",
        steps=tuple(Step(step=i, step_s=1.0, **times) for i in range(1, 31)),
        recipe=recipe,
        plan=make_plan(recipe, hardware_as("h200-141g", 16), world_size=world_size),
    )


def found(of: Observed) -> Finding:
    (finding,) = communication(of)
    assert finding.gain is not None
    return finding


def test_a_tenth_of_the_update_is_told_and_less_is_not() -> None:
    assert communication(observed(share=0.09)) == []
    assert communication(observed(share=None)) == []
    assert communication(observed(share=0.11)) != []


def test_a_wait_is_worth_half_of_it_to_all_of_it() -> None:
    """A link of twice the speed, or one that is hidden. 124M parameters, fp32 in the reductions: see the
    sum."""
    finding = found(observed(share=0.4))
    assert finding.gain is not None
    assert (finding.gain.low, finding.gain.high) == pytest.approx((1 / 0.8, 1 / 0.6))
    evidence = {item.name: item.value for item in finding.evidence}
    # GPT-2 small: twelve blocks; embedding, positions, last norm
    blocks, rest = 12 * 7_087_872, 50_304 * 768 + 1024 * 768 + 2 * 768
    whole = 2 * 2 * blocks + 4 * rest + 4 * (blocks + rest)
    assert evidence["received"] == pytest.approx(whole * 7 / 8 / 2**20, rel=0.02)
    assert evidence["bandwidth"] == pytest.approx(whole * 7 / 8 / 0.4 / 1e9, rel=0.02)


def test_passes_that_need_not_be_are_the_first_fix() -> None:
    """Sixteen passes an update where one fits: fifteen sixteenths of the waits, or all."""
    finding = found(observed("plan.micro_batch=4", share=0.5))
    assert finding.gain is not None
    assert "1 passes an update instead of 16" in finding.fix
    assert "plan.micro_batch=64" in finding.fix
    assert (finding.gain.low, finding.gain.high) == pytest.approx((1 / (1 - 0.5 * 15 / 16), 2.0))


def test_a_process_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    """They wait 0.3 s of the 0.5 s of every update for process 1, of which 0.4 s is a wait for others."""
    late = {"slowest_rank": 1, "slowest_s": 0.4, "others_s": 0.1, "communication_s": 0.4}
    start = {"at": 1.0, "event": "start", "step": 0, "world_size": 2, "hosts": {"a": 1, "b": 1}}
    folder = write_run(tmp_path / "run", metrics=[line | late for line in lines()], events=[start])
    finding = found(read_log(folder))
    assert finding.fix.startswith("find out why process 1 on b is slow")
    assert ("waited for", "process 1 on b") in [(item.name, item.value) for item in finding.evidence]
    assert finding.gain is not None
    assert (finding.gain.low, finding.gain.high) == pytest.approx((1 / (1 - 0.6), 1 / (1 - 0.8)))
    even = folder / "metrics.jsonl"
    even.write_text(even.read_text().replace('"slowest_s": 0.4', '"slowest_s": 0.12'))
    assert found(read_log(folder)).fix.startswith("a faster link")


def test_the_split_shows_it_and_says_where_it_is_when_it_was_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for of, words, others in (
        (observed(share=0.4), "communication 40%", "part of forward"),
        (observed(share=None), "communication is part of forward and backward", "communication 0%"),
        (observed(share=None, world_size=1), "(means)", "communication"),
        (
            Observed(source="a loop", format="run", steps=observed(share=None).steps, facts=Facts(gpus=8)),
            "part of forward",
            "(means)",
        ),
    ):
        print_answer(of, [])
        printed = " ".join(capsys.readouterr().out.split())
        assert words in printed
        assert others not in printed


def test_the_report_has_it_as_a_part_of_its_own(tmp_path: Path) -> None:
    made = [
        line | {"forward_s": 0.05, "backward_s": 0.1, "optimizer_s": 0.05, "communication_s": 0.1}
        for line in lines()
    ]
    parts = {
        part.name: part.elapsed_s for part in time_parts(read_run(write_run(tmp_path / "a", metrics=made)))
    }
    assert parts["communication"] == pytest.approx(parts["backward"])
    assert sum(parts.values()) == pytest.approx(27.75)
