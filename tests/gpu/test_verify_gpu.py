"""`redline verify` on a GPU: kernels, dtypes, graphs and syncs that only CUDA has; honest plans pass and
planted lies are found."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from redline.config.load import load_recipe
from redline.machine.facts import read_facts
from redline.model import transformer
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.train import execution
from redline.train.objective import Eager
from redline.train.restore import with_shape
from redline.tune.evidence import Check
from redline.tune.verify import verify

SHAPE = ["model.num_layers=2", "model.hidden_size=256", "model.num_heads=4", "model.ffn_size=512", "model.context_length=256",
         "data.seq_len=256", "train.batch_size=8", "model.vocab_size=1024", "plan.graph=false"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def checks(*pins: str) -> dict[str, Check]:
    recipe = load_recipe("nano", [*SHAPE, *pins])
    plan = make_plan(recipe, hardware_here(read_facts(), None))
    torch._dynamo.reset()
    found = {check.name: check for check in verify(recipe, plan, progress=lambda text: None)}
    found.pop("loader ahead of the step")  # steps of microseconds: no loader could be
    found.pop("allocator")  # set before torch is imported, by the command
    return found


def failed(found: dict[str, Check]) -> dict[str, str]:
    return {name: check.evidence for name, check in found.items() if check.status == "failed"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pins",
    [
        ("plan.precision=bf16", "plan.compile=off"),
        ("plan.precision=bf16", "plan.compile=default", "plan.attention=cudnn"),
        ("plan.precision=bf16", "plan.compile=off", "plan.attention=flash", "plan.update=foreach"),
        (
            "plan.precision=tf32",
            "plan.compile=off",
            "plan.attention=math",
            "plan.update=loop",
            "plan.recompute=full",
        ),
        ("plan.precision=fp16", "plan.compile=off"),
        (
            "plan.precision=bf16",
            "plan.compile=off",
            "plan.recompute=selective",
            "plan.loss_chunks=4",
            "plan.micro_batch=4",
        ),
        ("plan.precision=bf16", "plan.compile=default", "plan.recompute=full", "plan.cross_entropy=torch"),
        ("plan.precision=bf16", "plan.compile=off", "plan.cross_entropy=fp8"),
    ],
)
def test_an_honest_plan_passes(pins: tuple[str, ...]) -> None:
    found = checks(*pins)
    assert failed(found) == {}
    assert found["CUDA graphs of generation"].status == "passed"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["off", "default"])
def test_an_honest_captured_update_passes(mode: str) -> None:
    found = checks("plan.precision=bf16", f"plan.compile={mode}", "plan.graph=true")
    assert failed(found) == {}
    assert found["CUDA graph of the update"].status == found["loss and gradients"].status == "passed"


@pytest.mark.gpu
def test_fp8_products_are_counted() -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    found = checks("plan.precision=fp8", "plan.compile=default")
    assert failed(found) == {}
    assert found["FP8 products"].status == "passed"


@pytest.mark.gpu
def test_a_sync_in_the_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformer.FeedForward.forward

    def reading(self: Any, x: torch.Tensor) -> torch.Tensor:
        float(x.detach().sum())
        return forward(self, x)

    monkeypatch.setattr(transformer.FeedForward, "forward", reading)
    found = set(failed(checks("plan.precision=bf16", "plan.compile=off")))
    assert found == {"no hidden sync", "CUDA graphs of generation"}, "generation runs the same block"


@pytest.mark.gpu
def test_a_sync_in_the_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Eager.take

    def reading(*given: Any, **more: Any) -> Any:
        update = take(*given, **more)
        float(update.numbers["loss"])
        return update

    monkeypatch.setattr(Eager, "take", reading)
    assert set(failed(checks("plan.precision=bf16", "plan.compile=off"))) == {"no hidden sync"}


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_honest_fine_tuning_passes(method: str) -> None:
    recipe = with_shape(load_recipe("rft/demo", ["lora=none"] if method == "full" else []))
    plan = make_plan(recipe, hardware_here(read_facts(), None))
    found = {check.name: check for check in verify(recipe, plan, progress=lambda text: None)}
    assert failed(found) == {}
    assert found["CUDA graph of the update"].status == found["CUDA graphs of generation"].status == "passed"


@pytest.mark.gpu
def test_another_kernel_and_another_dtype_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "in_force", lambda plan: nullcontext())
    monkeypatch.setitem(execution.COMPUTE_DTYPE, "bf16", torch.float32)
    found = failed(
        checks("plan.precision=bf16", "plan.compile=off", "plan.attention=flash", "plan.cross_entropy=torch")
    )
    assert set(found) == {"precision of matrix products", "attention kernel"}  # flash takes no fp32
