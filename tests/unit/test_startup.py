"""Where the time before the first update went, on a clock of the test's; and what a start need not import."""

import contextvars
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import pytest
import torch
from torch.profiler import profile

from redline.config.load import load_recipe
from redline.machine import wake
from redline.machine.facts import read_facts
from redline.model.transformer import Transformer, build_model
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.record import startup
from redline.train import execution
from redline.train.execution import equip, in_force, keep_kernels
from redline.train.process import hash_triton


def test_parts_add_up_and_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_age_s", lambda: 2.0)
    monkeypatch.setattr(startup.time, "monotonic", iter((10.0, 11.0, 14.0, 20.0)).__next__)
    with startup.watched():
        startup.mark("plan")
        startup.mark("first_update")
        assert startup.taken() == {"python_s": 2.0, "plan_s": 1.0, "first_update_s": 3.0, "total_s": 6.0}
        assert not startup.underway(), "it is told once"
    with pytest.raises(KeyError), startup.watched():
        raise KeyError
    assert not startup.underway(), "a command that failed leaves nothing to the next run of the process"


def test_the_collector_is_off_during_imports_and_then_as_before() -> None:
    with startup.importing():
        assert not gc.isenabled()
        with startup.importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


TRAIN = """
import sys
from redline.cli.main import main
code = main(["train", "nano", "--steps", "1", "--set", "plan.compile=off", "--run", sys.argv[1]])
slow = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "redline.model.attention.favor"}
sys.exit(f"imported: {slow & set(sys.modules)}" if slow & set(sys.modules) else code)
"""


def test_a_run_on_one_process_imports_neither_the_compiler_nor_sharding(tmp_path: Path) -> None:
    """Each of them takes up to a second."""
    on_cpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TRAIN, tmp_path]
    done = subprocess.run(command, env=on_cpu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_compiled_is_kept_in_our_cache_unless_the_user_says_where(tmp_path: Path) -> None:
    kept = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with patch.dict(os.environ, REDLINE_CACHE=str(tmp_path)):
        for name in kept:
            os.environ.pop(name, None)
        keep_kernels()
        assert all(Path(os.environ[name]).is_relative_to(tmp_path) for name in kept)
        for name in kept:
            del os.environ[name]
        with patch("tempfile.TemporaryFile", side_effect=PermissionError("read-only")):
            keep_kernels()
        assert not os.environ.keys() & kept, "Triton would fail where its own folder would do"
    theirs = dict.fromkeys(kept, "/somewhere/else")
    with patch.dict(os.environ, theirs, REDLINE_CACHE=str(tmp_path)):
        keep_kernels()
        assert {name: os.environ[name] for name in kept} == theirs


def compiled_plan(attention: str) -> Plan:
    nano = load_recipe("nano", ["model.num_layers=1", "plan.compile=default"])
    return replace(make_plan(nano, hardware_here(read_facts(), None)), attention=attention)


def equipped(plan: Plan) -> Transformer:
    model = build_model(load_recipe(plan.recipe, ["model.num_layers=1"]).model, device="cpu", seed=0)
    equip(model, plan)
    return model


@torch.no_grad()
def runs_flash(model: Transformer) -> bool:
    tokens = torch.zeros(1, model.config.context_length, dtype=torch.int64)
    model(tokens)  # compiles
    with profile() as profiler:
        model(tokens)
    return any("flash_attention" in event.name for event in profiler.events())


@pytest.mark.parametrize("between", ["models of one process", "processes"])
def test_compiled_code_is_that_of_the_plans_attention(
    between: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other code of the same model is there already: in this process, or in the cache on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ran = []
    for attention in ("math", "flash", "math"):
        plan = compiled_plan(attention)
        model = equipped(plan)
        if between == "processes":
            torch._dynamo.reset()
            monkeypatch.setattr(execution, "_compiled_for", None)
        with in_force(plan):
            ran.append(runs_flash(model))
    assert ran == [False, True, False]


def test_another_attention_in_between_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plan, other = compiled_plan("flash"), compiled_plan("math")
    model = equipped(plan)
    with in_force(plan):
        with in_force(other):
            assert not runs_flash(model)
        assert runs_flash(model)


def test_a_plan_can_end_in_another_context_than_it_began_in() -> None:
    """As in a notebook, whose cells each have their own."""
    before = torch.compiler.config.cache_key_tag
    force = in_force(compiled_plan("flash"))
    contextvars.copy_context().run(force.__enter__)
    force.__exit__(None, None, None)
    assert torch.compiler.config.cache_key_tag == before


def test_compiled_code_has_the_backward_of_this_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's cache on disk knows an operation of ours by its name, and keeps the backward that it had before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(execution, "_TRACED", tmp_path)
    source, found = tmp_path / "operation.py", []

    @torch.library.custom_op("redline_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    scaled.register_fake(torch.empty_like)
    scaled.register_autograd(lambda ctx, gradient: gradient * float(source.read_text()))
    for factor in ("2", "5"):
        source.write_text(factor)
        torch._dynamo.reset()
        x = torch.ones(4, requires_grad=True)
        with in_force(compiled_plan("auto")):
            torch.compile(lambda x: scaled(x).sum(), fullgraph=True)(x).backward()
        assert x.grad is not None
        found.append(x.grad[0].item())
    assert found == [2.0, 5.0]


def test_triton_hashes_itself_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SimpleNamespace(triton_key=Mock())
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache)
    hash_triton()
    assert cache.triton_key.call_count == 1
    cache.triton_key.side_effect = PermissionError("its library")
    hash_triton()  # nothing is printed from a thread: the first kernel fails the same way
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace())
    hash_triton()


def test_a_gpu_that_does_not_wake_up_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    driver = Mock(**{"cuInit.return_value": 0, "cuDeviceGet.return_value": 0})
    monkeypatch.setattr(wake.ctypes, "CDLL", lambda name: driver)
    wake.wake_gpu(1).join()
    assert driver.cuInit.mock_calls == [call(0)]
    assert driver.cuDeviceGet.call_args.args[1] == 1
    assert driver.cuDevicePrimaryCtxRetain.call_count == 1
    driver.cuDeviceGet.return_value = 101  # no such device
    wake.wake_gpu(9).join()
    assert driver.cuDevicePrimaryCtxRetain.call_count == 1
    monkeypatch.setattr(wake.ctypes, "CDLL", Mock(side_effect=OSError("no such file")))
    wake.wake_gpu(0).join()
