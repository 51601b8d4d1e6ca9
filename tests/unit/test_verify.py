"""`redline verify` on a CPU: an honest plan passes, and every planted lie is found by the check that it is
about."""

import json
import shutil
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from trials import TUNED

from redline import pretrain
from redline.cli.main import main
from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.machine.facts import read_facts
from redline.model import transformer
from redline.model.attention.variants import VARIANTS
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.record.files import cache_folder
from redline.train import execution, loop
from redline.train.objective import Eager
from redline.train.step import BackPropagation, Lesson
from redline.tune import checks as room
from redline.tune import evidence
from redline.tune import verify as watching
from redline.tune.evidence import ATTENTION_KINDS, Check, Trace
from redline.tune.store import keep, tuning_folder
from redline.tune.verify import verify

TINY = [
    "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.ffn_size=64",
    "model.context_length=32", "data.seq_len=32",
    "train.batch_size=4", "model.vocab_size=512",
]  # fmt: skip
RECIPE = load_recipe("nano", TINY)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def plan_for(*pins: str) -> Plan:
    return make_plan(load_recipe("nano", [*TINY, *pins]), hardware_here(read_facts(), None))


def checks(plan: Plan, recipe: Recipe = RECIPE) -> dict[str, Check]:
    return {check.name: check for check in verify(recipe, plan, progress=lambda text: None)}


def failed(found: dict[str, Check]) -> set[str]:
    return {
        name
        for name, check in found.items()
        if check.status == "failed" and name != "loader ahead of the step"
    }


@pytest.mark.parametrize(
    "pins",
    [
        (),
        ("plan.precision=bf16", "plan.update=foreach"),
        ("plan.attention=math", "plan.update=loop", "plan.recompute=full"),
        ("plan.precision=fp8",),
        ("plan.cross_entropy=fp8", "plan.loss_chunks=2"),
        ("plan.cross_entropy=fp8", "plan.precision=bf16"),
        ("plan.precision=fp16",),
        ("plan.recompute=selective", "plan.loss_chunks=3", "plan.micro_batch=1"),
        ("train.optimizer=muon",),
        ("train.softmax_candidates=200", "plan.micro_batch=2"),
        ("model.attention=favor", "model.features=16", "plan.recompute=full"),
        pytest.param(("plan.compile=default",), marks=pytest.mark.slow),
        pytest.param(("plan.compile=default", "plan.recompute=full"), marks=pytest.mark.slow),
    ],
)
def test_an_honest_plan_passes(pins: tuple[str, ...]) -> None:
    found = checks(plan_for(*pins), load_recipe("nano", [*TINY, *pins]))
    assert failed(found) == set(), found
    assert found["FP8 products"].status == found["CUDA graphs of generation"].status == "not applicable"
    assert all(check.evidence for check in found.values())


DFA = load_recipe("nano", [*TINY, "train.rule=dfa"])


@pytest.mark.parametrize("pins", [("plan.precision=bf16",), ("dfa.depth=layer", "dfa.top_blocks=1")])
def test_an_honest_plan_of_feedback_alignment_passes(pins: tuple[str, ...]) -> None:
    recipe = load_recipe("nano", [*TINY, "train.rule=dfa", *pins])
    found = checks(plan_for("train.rule=dfa", *pins), recipe)
    assert failed(found) == set()
    assert found["learning rule"].status == "passed"


def test_back_propagation_instead_of_feedback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "rule_of", lambda recipe, model: BackPropagation())
    assert failed(checks(plan_for("train.rule=dfa"), DFA)) >= {"learning rule", "loss and gradients"}


def test_bf16_that_is_fp32_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(execution.COMPUTE_DTYPE, "bf16", torch.float32)
    found = checks(plan_for("plan.precision=bf16"))
    assert failed(found) == {"precision of matrix products"}
    assert "fp32 100.0%" in found["precision of matrix products"].evidence


def test_compiling_that_does_not_happen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer.Block, "compile", lambda *_, **__: None)
    assert failed(checks(plan_for("plan.compile=default"))) == {"compilation"}


def test_an_attention_kernel_that_was_not_asked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "in_force", lambda plan: nullcontext())
    found = checks(plan_for("plan.attention=math"))
    assert failed(found) == {"attention kernel"}
    assert "flash" in found["attention kernel"].evidence


def test_softmax_attention_in_a_model_of_kernel_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "favor", VARIANTS["softmax"])
    pins = ("model.attention=favor", "model.features=16")
    found = checks(plan_for(*pins), load_recipe("nano", [*TINY, *pins]))
    assert failed(found) == {"attention kernel"}
    assert "ran 0 times, softmax attention" in found["attention kernel"].evidence


@pytest.mark.parametrize("explicit", [1, 2])
def test_blocks_that_do_not_use_the_planned_kernel_are_found(
    monkeypatch: pytest.MonkeyPatch, explicit: int
) -> None:
    build = pretrain.build

    def partly(*given: Any) -> Any:
        model = build(*given)
        for block in list(model.blocks)[:explicit]:
            block.parts = sdpa_kernel(SDPBackend.MATH)(block.parts)
        return model

    monkeypatch.setattr(pretrain, "build", partly)
    found = checks(plan_for())
    assert failed(found) == {"attention kernel"}
    assert f"math {explicit} times" in found["attention kernel"].evidence


CUDNN, FLASH, EFFICIENT = (ATTENTION_KINDS[kernel][0] for kernel in ("cudnn", "flash", "efficient"))


@pytest.mark.parametrize(
    ("plan", "seen", "kernels", "status"),
    [
        ("cudnn default", {CUDNN: 2}, "sdpa_sm90_flash_fprop", "passed"),  # as an H200 showed it
        ("cudnn default", {CUDNN: 1}, "sdpa_sm90_flash_fprop", "failed"),
        ("auto default", {CUDNN: 1}, "sdpa_sm90_flash_fprop", "failed"),
        ("auto default", {CUDNN: 1, FLASH: 1}, "", "passed"),
        ("cudnn default", {CUDNN: 2, FLASH: 2}, "", "failed"),
        ("flash off", {room.ATTENTION: 2, FLASH: 1, EFFICIENT: 1}, "", "failed"),
        ("cudnn default", {}, "sdpa_sm90_flash_fprop", "not checked"),
        ("cudnn default", {}, "triton_softmax", "failed"),
        ("math default", {}, "triton_softmax", "passed"),
        ("flash off", {room.ATTENTION: 2}, "", "not checked"),
        ("flash off", {room.ATTENTION: 2, FLASH: 1}, "", "not checked"),
        ("flash off", {room.ATTENTION: 2, FLASH: 1, room.EXPLICIT_ATTENTION: 1}, "", "failed"),
        ("flash off", {room.ATTENTION: 1, FLASH: 1}, "", "failed"),
        # a block is not computed again, or not by torch
        ("flash off", {room.ATTENTION: 3, FLASH: 3}, "", "failed"),
        ("flash off", {room.ATTENTION: 4, FLASH: 4}, "", "passed"),
    ],
)
def test_attention_on_a_gpu_is_that_of_every_block(
    plan: str, seen: dict[str, int], kernels: str, status: str
) -> None:
    """On paper: what is in the trace of two blocks."""
    wanted, _, compiled = plan.partition(" ")
    case: Any = SimpleNamespace(
        plan=SimpleNamespace(attention=wanted, compile=compiled, precision="bf16"), blocks=2, packed=False, mixing="softmax", rule=None,
        cuda=True,
        in_pass=Trace(operations=Counter(seen), kernels=Counter([kernels] if kernels else ())),
    )  # fmt: skip
    assert room._attention(case).status == status


def test_passes_of_another_size_are_found() -> None:
    """On paper: as many as planned, of other sequences."""
    plan = plan_for("plan.micro_batch=2")
    rows = [Lesson(torch.zeros(1, 32), torch.zeros(1, 32))] * 2
    trainer = SimpleNamespace(plan=plan)
    case: Any = SimpleNamespace(plan=plan, rows=rows, packed=False, trainer=trainer, tables=1)
    for embedded, status in (
        ([(2, 32)] * 2, "passed"),
        ([(1, 32)] * 2, "failed"),
        ([(2, 32), (1, 32)], "failed"),
        ([(2, 16)] * 2, "failed"),
    ):
        case.in_update = Trace(embedded=embedded)
        assert room._passes(case).status == status


def test_a_layer_in_another_precision_is_found() -> None:
    """On paper: what is not in the plan's dtype may be rounding, not layers."""
    case: Any = SimpleNamespace(plan=SimpleNamespace(precision="bf16", coarsest="bf16"), cuda=True)
    for share, status in ((1.0, "passed"), (0.995, "passed"), (0.9, "failed"), (0.6, "failed")):
        case.in_pass = Trace(products={"bf16": share, "fp32": 1 - share})
        assert room._precision(case).status == status


def test_another_optimiser_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loop.make_optimizers
    monkeypatch.setattr(
        loop, "make_optimizers", lambda model, train, _, **how: made(model, train, "loop", **how)
    )
    assert failed(checks(plan_for())) == {"optimiser kernels"}


def test_a_number_read_inside_the_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformer.FeedForward.forward

    def reading(self: Any, x: torch.Tensor) -> torch.Tensor:
        float(x.detach().sum())
        return forward(self, x)

    monkeypatch.setattr(transformer.FeedForward, "forward", reading)
    found = checks(plan_for())
    assert failed(found) == {"no hidden sync"}
    # a block each, and one that the loop reads
    assert found["no hidden sync"].evidence.startswith("3 numbers")


def test_a_number_read_by_the_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the pass and of the update: a line that a loop grew."""
    take = Eager.take

    def reading(executor: Any, *given: Any, **more: Any) -> Any:
        update = take(executor, *given, **more)
        float(update.numbers["loss"])
        return update

    monkeypatch.setattr(Eager, "take", reading)
    found = checks(plan_for())
    assert failed(found) == {"no hidden sync"}
    assert found["no hidden sync"].evidence.startswith("2 numbers read by the host in one update, 1 expected")


@pytest.mark.parametrize(
    ("pins", "runs_with", "name", "words"),
    [
        (("plan.recompute=full",), {"recompute": "none"}, "recomputation", "called 2 times"),
        (("plan.recompute=none",), {"recompute": "full"}, "recomputation", "called 4 times"),
        (("plan.recompute=full", "plan.attention=math"), {"recompute": "none"}, "recomputation", "called 2 times"),
        (("plan.recompute=selective",), {"recompute": "full"}, "recomputation", "its operation ran 4 times"),
        (("plan.recompute=full",), {"recompute": "selective"}, "recomputation", "its operation ran 6 times"),
        (("plan.loss_chunks=4",), {"loss_chunks": 1}, "pieces of the loss", "1 times, 8 expected"),
        (("plan.loss_chunks=1",), {"loss_chunks": 2}, "pieces of the loss", "4 times, 1 expected"),
        (("plan.micro_batch=2",), {"micro_batch": 1}, "passes of an update", "2 of 2 sequences; one update had 4 of 1 x 32 tokens"),
        (("plan.micro_batch=1",), {"micro_batch": 2}, "passes of an update", "4 of 1 sequences, of which 2 were asked for here; one"),
        pytest.param(
            ("plan.recompute=full", "plan.compile=default"), {"recompute": "none"}, "recomputation", "ran 2 times", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_a_plan_that_the_training_does_not_follow_is_found(
    monkeypatch: pytest.MonkeyPatch, pins: tuple[str, ...], runs_with: dict[str, Any], name: str, words: str
) -> None:
    _follows(monkeypatch, runs_with)
    found = checks(plan_for(*pins))
    assert failed(found) == {name}
    assert words in found[name].evidence


def test_a_loss_that_is_not_the_fused_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _follows(monkeypatch, {"cross_entropy": "torch"})
    found = checks(replace(plan_for(), cross_entropy="fused"))
    assert failed(found) == {"cross entropy"}
    assert "plan says fused; in one pass ran torch 1 times" in found["cross entropy"].evidence


def _follows(monkeypatch: pytest.MonkeyPatch, runs_with: dict[str, Any]) -> None:
    """Let the training run with other values than the plan has."""

    class Otherwise(watching.TrainingSubject):
        def __init__(self, setting: dict[str, Any]) -> None:
            for key, value in runs_with.items():
                setting["plan"][key]["value"] = value
            super().__init__(setting)

    monkeypatch.setattr(watching, "TrainingSubject", Otherwise)


@pytest.mark.parametrize(
    ("plan", "seen", "status"),
    [
        ("full default", {CUDNN: 2}, "not checked"),
        ("full default", {CUDNN: 3}, "not checked"),
        ("full default", {CUDNN: 4}, "passed"),
        ("none default", {CUDNN: 4}, "failed"),
        ("none default", {CUDNN: 2}, "passed"),
        ("none default", {CUDNN: 1}, "not checked"),
        ("none default", {}, "not checked"),
        ("selective default", {CUDNN: 2}, "not checked"),
        ("none off", {}, "not checked"),
        ("selective off", {room.ATTENTION: 4, FLASH: 4}, "not checked"),
        ("full off", {room.ATTENTION: 4, FLASH: 4}, "passed"),
    ],
)
def test_recomputation_on_a_gpu_is_not_called_failed_where_it_cannot_be_seen(
    plan: str, seen: dict[str, int], status: str
) -> None:
    """On paper: what is in the trace of two blocks."""
    recompute, _, compiled = plan.partition(" ")
    case: Any = SimpleNamespace(
        plan=SimpleNamespace(recompute=recompute, compile=compiled), blocks=2, cuda=True, mixing="softmax", rule=None,
        in_pass=Trace(operations=Counter(seen))
    )  # fmt: skip
    assert room._recompute(case).status == status


def test_a_loss_that_the_profiler_does_not_know_is_not_checked() -> None:
    case: Any = SimpleNamespace(plan=plan_for(), head_rows=128, in_pass=Trace())
    assert {room._loss_chunks(case).status, room._cross_entropy(case).status} == {"not checked"}


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's own path loses a block's gradient; the reference, in one sequence at a time, does not."""
    forward = transformer.FeedForward.forward

    def without(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x.detach() if len(x) > 1 else x)

    monkeypatch.setattr(transformer.FeedForward, "forward", without)
    found = checks(plan_for())
    assert failed(found) == {"loss and gradients"}
    assert "cosine" in found["loss and gradients"].evidence


def test_tf32_left_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    in_force = execution.in_force
    monkeypatch.setattr(execution, "in_force", lambda plan: in_force(replace(plan, precision="tf32")))
    assert failed(checks(plan_for())) == {"TF32 state"}


def switches() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled())
    return torch.get_float32_matmul_precision(), cuda.math_sdp_enabled(), *kernels


def test_what_a_plan_switches_for_the_whole_process_ends_with_its_run() -> None:
    """cuDNN alone left no kernel for the fp32 reference of whatever was verified next."""
    before = switches()
    assert before == ("highest", True, True, True, True)
    with execution.in_force(replace(plan_for(), precision="tf32", attention="cudnn")):
        assert switches() == ("high", False, False, False, True)
        with pytest.raises(RuntimeError, match="backend"), torch.no_grad():
            F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 8, 8))
    assert switches() == before
    assert failed(checks(plan_for("plan.attention=math"))) == set()
    assert switches() == before


@pytest.mark.usefixtures("clock")
def test_a_slow_loader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from redline.data.loader import Loader

    take = Loader.next

    def slow(self: Any) -> Any:
        time.sleep(0.3)
        self.waited_s += 0.3
        return take(self)

    monkeypatch.setattr(Loader, "next", slow)
    assert checks(plan_for())["loader ahead of the step"].status == "failed"


def test_evidence_weighs_products_by_their_size() -> None:
    small, large = torch.ones(8, 8), torch.ones(64, 64, dtype=torch.bfloat16)
    with evidence.profiled() as seen:
        small @ small
        large @ large
    assert seen.operations["aten::mm"] == 2
    assert seen.products == pytest.approx({"fp32": 8**3 / (8**3 + 64**3), "bf16": 64**3 / (8**3 + 64**3)})


def test_the_command_says_so_in_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [part for text in TINY for part in ("--set", text)]
    monkeypatch.setattr("redline.tune.checks.DATA_SHARE", 1.0)
    assert main(["verify", "nano", *sets, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in rows} == {"passed", "not applicable"}
    monkeypatch.setattr("redline.tune.checks.DATA_SHARE", -1.0)
    assert main(["verify", "nano", *sets]) == 1
    said = " ".join(capsys.readouterr().out.split())
    passed = sum(row["status"] == "passed" for row in rows) - 1  # the loader's, which now fails
    assert f": {passed} checks passed, 1 failed," in said
    assert main(["verify", "nano", "--plan", str(tmp_path / "none.json")]) == 2


def test_the_tuned_plan_is_verified_and_the_corpus_tokenised_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("a few words of no meaning, many times over. " * 2000)
    sets = [*TINY, "model.vocab_size=300", f"data.source={tmp_path / 'corpus.txt'}"]
    sets += ["data.valid_fraction=0", "train.eval_every=0"]
    command = ["verify", "nano", *(part for text in sets for part in ("--set", text)), "--plan", "auto"]
    asked: list[Plan] = []

    def found(recipe: Recipe, plan: Plan, **_: Any) -> list[Check]:
        assert any((cache_folder() / "data").iterdir()), "else it would be a part of what is looked at"
        asked.append(plan)
        return []

    monkeypatch.setattr(watching, "verify", found)
    said: list[str] = []
    monkeypatch.setattr("redline.cli.verify.status", said.append)
    facts, recipe = read_facts(), load_recipe("nano", sets)
    rules = make_plan(recipe, hardware_here(facts, None))
    assert main(command) == 0
    assert [line for line in said if "has not been tuned on this machine" in line]
    folder = tuning_folder(facts, rules)
    folder.mkdir(parents=True)
    keep(folder, replace(rules, micro_batch=1, accumulation=4), TUNED)
    shutil.rmtree(cache_folder() / "data")
    assert main(command) == 0
    assert [line for line in said if "tuned 2026-01-01 00:00:00 UTC, 1.50x the rules' plan" in line]
    assert [plan.micro_batch for plan in asked] == [rules.micro_batch, 1]


@pytest.mark.parametrize(
    ("launches", "kernels", "status"),
    [(4, 20, "passed"), (0, 20, "failed"), (3, 20, "failed"), (0, 0, "not checked"), (4, 0, "passed")],
)
def test_graphs_are_not_checked_where_the_profiler_sees_no_gpu(
    monkeypatch: pytest.MonkeyPatch, launches: int, kernels: int, status: str
) -> None:
    """On paper: without CUPTI the profiler's trace holds neither kernels nor launches."""

    @contextmanager
    def profiled() -> Any:
        yield Trace(
            operations=Counter(cudaGraphLaunch=launches),
            kernels=Counter(kernel=kernels) if kernels else Counter(),
        )

    decoder = MagicMock(describe=lambda **_: (None, None))
    monkeypatch.setattr(room, "Decoder", lambda *_, **__: decoder)
    monkeypatch.setattr(room, "profiled", profiled)
    monkeypatch.setattr(room, "lora_layers", lambda model: {})
    model: Any = SimpleNamespace(embed=SimpleNamespace(weight=SimpleNamespace(is_cuda=True)))
    check = room.generation_graphs(model)
    assert check.status == status
    assert ("CUPTI" in check.evidence) == (status == "not checked")


def test_what_was_not_checked_is_said_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Check(name="CUDA graphs of generation", status="not checked", evidence="no CUPTI")]
    monkeypatch.setattr(watching, "verify", lambda *_, **__: found)
    assert main(["verify", "nano"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ": 0 checks passed, 0 failed, 1 not checked" in said
    assert "not checked no CUPTI" in said


@pytest.mark.parametrize(("waits", "status"), [(0, "passed"), (1, "failed")])
def test_the_detectors_own_notice_is_no_sync(
    monkeypatch: pytest.MonkeyPatch, waits: int, status: str
) -> None:
    """On paper: torch says once, when its detector is switched on, that it is a prototype that misses some
    synchronizing operations."""
    notice = (
        "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing"
        " operations"
    )
    modes: list[str] = []

    def switch(mode: str) -> None:
        modes.append(mode)
        warnings.warn(notice, UserWarning, stacklevel=1)

    def step() -> None:
        for _i in range(waits):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    plan = SimpleNamespace(precision="bf16", update="fused")
    case: Any = SimpleNamespace(cuda=True, trainer=SimpleNamespace(turn=step), plan=plan)
    assert room._sync(case).status == status
    assert modes == ["warn", "default"]
