"""`redline verify` of an RFT recipe on a CPU: an honest engine and update pass, and every planted lie is
found by its check."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rft_model import letters_recipe, planned, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.cli.main import main
from redline.engine.local import LocalEngine
from redline.engine.request import Completion
from redline.model.attention import packed, softmax
from redline.plan.values import VALUES
from redline.train import execution
from redline.train.graph import Captured
from redline.tune import checks as room
from redline.tune.evidence import Check, Trace
from redline.tune.verify import verify


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rft")
    return letters_recipe(folder, tiny_model(folder / "model"))


def checks(recipe: Path, *overrides: str, **environment: str) -> dict[str, Check]:
    given, plan, _ = planned(recipe, ["sample.max_new_tokens=8", *overrides], **environment)
    return {check.name: check for check in verify(given, plan, progress=lambda text: None)}


def failed(found: dict[str, Check]) -> set[str]:
    return {name for name, check in found.items() if check.status == "failed"}


@pytest.mark.parametrize(
    ("overrides", "environment"), [((), {}), (("lora=none",), {}), ((), {"A100_BATCH_SIZE": "2"})]
)
def test_an_honest_recipe_passes(
    recipe: Path, overrides: tuple[str, ...], environment: dict[str, str]
) -> None:
    found = checks(recipe, *overrides, **environment)
    assert failed(found) == set(), found
    assert (
        found["CUDA graph of the update"].status
        == found["CUDA graphs of generation"].status
        == "not applicable"
    )
    assert f"{2 if environment else 8} examples one by one" in found["loss and gradients"].evidence


def test_sequences_of_a_row_that_see_each_other_are_found(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_one(attn: Any, qkv_1THC: Any, *, rope: Any, grid: Any) -> Any:
        return softmax.attend(attn, qkv_1THC, rope=rope)

    monkeypatch.setattr(packed, "on_grid", as_one)
    assert failed(checks(recipe)) == {"loss and gradients"}


def test_a_precision_that_is_not_the_plans_is_found(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(execution.COMPUTE_DTYPE, "bf16", torch.float32)
    found = checks(recipe, "plan.precision=bf16")
    assert failed(found) == {"precision of matrix products"}
    assert (
        "plan says bf16; multiplications by input dtype: fp32 100.0%"
        in found["precision of matrix products"].evidence
    )


def test_explicit_attention_is_found(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "in_force", lambda plan: sdpa_kernel(SDPBackend.MATH))
    assert failed(checks(recipe)) == {"attention kernel"}


def test_log_probabilities_of_another_distribution_are_found(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalEngine.run

    def colder(engine: LocalEngine, requests: Any) -> Iterator[Completion]:
        return (replace(c, logprobs=tuple(p * 0.9 for p in c.logprobs)) for c in run(engine, requests))

    monkeypatch.setattr(LocalEngine, "run", colder)
    assert failed(checks(recipe)) == {"log-probabilities of the engine"}


@pytest.mark.parametrize(
    ("captured", "launches", "kernels", "status"),
    [
        (3, 1, 1, "passed"),
        (3, 1, 0, "passed"),
        (3, 0, 900, "failed"),
        (0, 0, 900, "failed"),
        (0, 0, 0, "failed"),
        (3, 0, 0, "not checked"),
    ],
)
def test_the_graph_of_an_update_is_captured_and_launched_once(
    captured: int, launches: int, kernels: int, status: str
) -> None:
    """On paper."""
    seen = Trace(
        operations=Counter(cudaGraphLaunch=launches),
        kernels=Counter(kernel=kernels) if kernels else Counter(),
    )
    executor = object.__new__(Captured)
    executor.graphs = dict.fromkeys(range(captured))  # type: ignore[arg-type]
    plan = SimpleNamespace(graph=True)
    trainer = SimpleNamespace(executor=executor)
    case: Any = SimpleNamespace(cuda=True, in_update=seen, plan=plan, trainer=trainer)
    assert room._update_graph(case).status == status


@pytest.mark.parametrize(
    ("precision", "seen", "status"),
    [
        ("bf16", {"_ShortAttention": 2}, "passed"),
        ("bf16", {"torch_attn::_varlen_attn": 2}, "passed"),
        ("bf16", {"torch_attn::_varlen_attn": 1, "aten::scaled_dot_product_attention": 1}, "failed"),
        ("bf16", {"aten::scaled_dot_product_attention": 2}, "failed"),
        ("fp32", {"aten::scaled_dot_product_attention": 2}, "not checked"),
        ("bf16", {}, "not checked"),
    ],
)
def test_packed_attention_on_a_gpu(precision: str, seen: dict[str, int], status: str) -> None:
    """On paper: what is in the trace of two blocks."""
    plan = SimpleNamespace(attention="auto", compile="off", precision=precision)
    case: Any = SimpleNamespace(
        mixing="softmax",
        rule=None,
        cuda=True,
        plan=plan,
        blocks=2,
        packed=True,
        in_pass=Trace(operations=Counter(seen)),
    )
    assert room._attention(case).status == status


@pytest.mark.parametrize(
    ("recompute", "ran", "status"),
    [("none", 2, "passed"), ("none", 4, "failed"), ("full", 4, "passed"), ("full", 2, "failed")],
)
def test_recomputation_of_packed_attention_on_a_gpu(recompute: str, ran: int, status: str) -> None:
    """On paper: the trace of two blocks whose kernel is called directly."""
    plan = SimpleNamespace(recompute=recompute, compile="off")
    seen = Trace(operations=Counter({"_ShortAttention": ran}))
    case: Any = SimpleNamespace(plan=plan, blocks=2, cuda=True, in_pass=seen, mixing="softmax", rule=None)
    assert room._recompute(case).status == status


def test_every_plan_value_is_proved_by_a_check_that_exists(recipe: Path) -> None:
    proofs = {name for value in VALUES.values() for name in value.proof}
    assert proofs <= set(checks(recipe))


def test_the_command_takes_either_kind_of_recipe(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(recipe), "--set", "sample.max_new_tokens=4", "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} == {"passed", "not applicable"}
