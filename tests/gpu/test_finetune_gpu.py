"""Fine-tuning on a real GPU: graph, eager and compiled updates agree, as do both kinds of attention, and
merging is exact."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from redline.config.recipe import DEFAULTS, LoraConfig, ModelConfig, Recipe, TrainConfig
from redline.finetune import job_of, train
from redline.machine.facts import read_facts
from redline.model import kernels
from redline.model.attention import packed, short
from redline.model.lora import adapters, add_lora, fp32_product, lora_layers, merged
from redline.model.transformer import Attention, Transformer, build_model
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.record.run import RunFolder
from redline.train.open_run import OpenRun
from redline.train.packed import Example, exact, pack, unpack
from redline.train.process import Process
from redline.train.step import Learner
from redline.train.workspace import Workspace, workspace_of

CONFIG = ModelConfig(
    vocab_size=2048,
    num_layers=4,
    hidden_size=192,
    num_heads=6,
    num_kv_heads=2,
    ffn_size=512,
    context_length=256,
)


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    words = lambda kinds, least, most: tuple(rng.randrange(kinds) for _ in range(rng.randint(least, most)))  # noqa: E731
    return [Example(words(2048, 10, 30), words(16, 5, 40)) for _ in range(count)]


def model_of(method: str, dtype: torch.dtype) -> Transformer:
    model = build_model(CONFIG, device="cuda", seed=0)
    model.compute_dtype = dtype
    if method == "lora":
        add_lora(model, LoraConfig(rank=8, alpha=32), seed=0)
    return model


class Seen:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.events: list[str] = []

    def metrics(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        self.events.append(kind)

    def close(self) -> None: ...


def finetune(
    model: Transformer,
    data: list[Example],
    *,
    checkpoint_every: int = 0,
    folder: RunFolder | None = None,
    observers: list[Any],
    **how: Any,
) -> None:
    """Two epochs through the real job and loop; `how` are values of the plan."""
    given = {"epochs": 2, "batch_size": 16, "lr": 2e-3, "checkpoint_every": checkpoint_every}
    config = TrainConfig(**DEFAULTS["finetune"]["train"] | given)
    lora = next((layer.config for layer in lora_layers(model).values()), None)
    recipe = Recipe(name="test", workload="finetune", model=CONFIG, train=config, lora=lora)
    device = model.embed.weight.device
    plan = make_plan(
        recipe, hardware_here(read_facts() if device.type == "cuda" else replace(read_facts(), gpus=()), None)
    )
    half = model.compute_dtype == torch.bfloat16
    plan = replace(
        plan, precision="bf16" if half else "fp32", cross_entropy="fused" if half else "torch", **how
    )
    process, run = Process(0, 1, device), folder.path if folder else None
    opened = OpenRun(run, folder, observers)
    train(job_of(model, data, recipe, plan, process, opened=opened), process)


def losses(method: str, dtype: torch.dtype, **how: Any) -> tuple[list[float], Seen, Transformer]:
    seen, model = Seen(), model_of(method, dtype)
    finetune(model, examples(75), observers=[seen], **how)
    return [line["loss"] for line in seen.lines], seen, model


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_graph_computes_what_the_eager_update_does(method: str, dtype: torch.dtype) -> None:
    eager, _, _ = losses(method, dtype, graph=False)
    used: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> Any:
        """Not a mock: that would keep the tensors of the warm-up, with their autograd graph, and break the capture."""
        real = getattr(owner, name)

        def call(*args: Any) -> Any:
            used[name] += 1
            return real(*args)

        return patch.object(owner, name, call)

    with counted(Workspace, "take_gradients"), counted(kernels, "sum_rms_norm"):
        graph, seen, _ = losses(method, dtype)
    assert "captured" in seen.events
    assert (used["take_gradients"] > 0) == (method == "lora")
    assert (used["sum_rms_norm"] > 0) == (dtype == torch.bfloat16)
    band = 1e-4 if dtype == torch.float32 else 2e-3
    assert graph == pytest.approx(eager, rel=band)
    assert eager[-1] < eager[0] - 0.5


@pytest.mark.parametrize(
    "how",
    [
        {"compile": "default"},
        {"micro_batch": 6},
        {"compile": "default", "graph": False},
        {"update": "foreach"},
    ],
    ids=str,
)
def test_other_ways_to_compute_it_change_only_rounding(how: dict[str, Any]) -> None:
    eager, _, _ = losses("lora", torch.bfloat16, graph=False)
    other, seen, model = losses("lora", torch.bfloat16, **how)
    assert other == pytest.approx(eager, rel=3e-3)
    assert all(block._compiled_call_impl is None for block in model.blocks)
    assert all(0 <= line["padding_share"] < 1 for line in seen.lines)


def test_bf16_stays_in_the_band_of_fp32_on_the_cpu() -> None:
    graph, _, _ = losses("lora", torch.bfloat16)
    seen, model = Seen(), build_model(CONFIG, device="cpu", seed=0)
    on_gpu = build_model(CONFIG, device="cuda", seed=0)
    model.load_state_dict(on_gpu.state_dict())
    add_lora(model, LoraConfig(rank=8, alpha=32), seed=0)
    reference = model_of("lora", torch.float32)
    for name, p in adapters(reference).items():
        adapters(model)[name].data.copy_(p)
    finetune(model, examples(75), observers=[seen])
    assert graph == pytest.approx([line["loss"] for line in seen.lines], rel=1e-2)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4)], ids=["grouped", "plain"])
@pytest.mark.parametrize("kernel", ["short", "varlen", "varlen, qk_norm"])
def test_the_kinds_of_attention_agree_and_so_do_their_gradients(heads: tuple[int, int], kernel: str) -> None:
    """Both kernels against the padded grid in float64, with and without rotation; queries and keys also normalised."""
    kernel, _, normed = kernel.partition(", ")
    config = replace(CONFIG, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, qk_norm=bool(normed))
    attn, batch = Attention(config).cuda(), examples(9)
    for norm in (attn.q_norm, attn.k_norm):
        if norm is not None:
            norm.weight.data.copy_(0.5 + torch.arange(64) / 128)
    shape = exact(batch)
    _, _, packing = unpack(torch.from_numpy(pack(batch, shape)).cuda(), shape)
    torch.manual_seed(0)
    qkv = torch.randn(1, shape.tokens, heads[0] + 2 * heads[1], 64, device="cuda", dtype=torch.bfloat16)
    out = torch.randn(1, shape.tokens, heads[0] * 64, device="cuda", dtype=torch.bfloat16)
    angles = torch.outer(packing.positions_T.float(), torch.rand(32, device="cuda")).repeat(1, 2)
    rope = angles.cos(), angles.sin()
    assert short.fits(qkv.device, longest=packing.longest, head_size=64)
    for turn in (rope,) if kernel == "short" else (rope, None):
        ways: dict[str, Any] = {"short": packed.with_short_kernel, "varlen": packed.with_varlen_kernel}
        extra = {"varlen": packed.varlen_kernel()} if kernel == "varlen" else {}
        grid = packed.grid_of(packing)
        results = []
        for attend, dtype in (
            (partial(ways[kernel], rope=turn, packing=packing, **extra), torch.bfloat16),
            (partial(packed.on_grid, rope=turn, grid=grid), torch.float64),
        ):
            x = qkv.to(dtype).requires_grad_()
            y = attend(attn, x)
            results.append((y, *torch.autograd.grad(y, x, out.to(dtype))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_swiglu_and_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 2 * 1100, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate, up = x.float().chunk(2, dim=-1)
    want, got = torch.nn.functional.silu(gate) * up, kernels.swiglu(x)
    out = torch.randn_like(want)
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        torch.autograd.grad(got, x, out.bfloat16())[0],
        torch.autograd.grad(want, x, out)[0],
        rtol=3e-2,
        atol=3e-2,
    )


def test_a_norm_that_adds_and_its_gradient() -> None:
    torch.manual_seed(0)
    x, y, *out = (torch.randn(33, 960, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    weight = torch.randn(960, device="cuda", dtype=torch.bfloat16)
    total = (x + y).double().requires_grad_()
    want = (total, torch.nn.functional.rms_norm(total, weight.shape, weight.double(), 1e-5))
    got = kernels.sum_rms_norm(x.requires_grad_(), y.requires_grad_(), weight, 1e-5)
    assert torch.equal(got[0].double(), total)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-2, atol=1e-2)
    for used in (slice(2), slice(1, 2)):  # both results, and the normalised one alone
        (expected,) = torch.autograd.grad(
            want[used], total, [one.double() for one in out[used]], retain_graph=True
        )
        for gradient in torch.autograd.grad(got[used], [x, y], out[used], retain_graph=True):
            torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-2)


def test_gradients_on_the_second_stream_are_those_of_autograd() -> None:
    """Again and again: one that is read before it is written, or whose input is overwritten, would differ."""
    model, batch = model_of("lora", torch.bfloat16), examples(60)
    for p in adapters(model).values():
        torch.nn.init.normal_(p, std=0.05)
    tokens_1T, targets_1A, packing = unpack(torch.from_numpy(pack(batch, exact(batch))).cuda(), exact(batch))
    loss = model(tokens_1T, targets_1A, packing=packing)
    expected = torch.autograd.grad(loss, list(adapters(model).values()))
    workspace = workspace_of(Learner(model, [], Process(0, 1, torch.device("cuda")), 1.0))
    assert workspace is not None
    for _ in range(30):
        workspace.gradient.fill_(torch.nan)
        with workspace.in_use():
            model(tokens_1T, targets_1A, packing=packing).backward()
            workspace.take_gradients()
        for (name, p), gradient in zip(adapters(model).items(), expected, strict=True):
            assert p.grad is not None
            assert (p.grad - gradient).norm() < 0.05 * gradient.norm(), name
        model.zero_grad(set_to_none=True)


def test_empty_sequences_at_the_end_of_a_row_are_harmless() -> None:
    batch = examples(5)
    shape = exact(batch)
    longer = type(shape)(512, shape.answers + 8, shape.sequences + 30, shape.longest)
    model = model_of("lora", torch.bfloat16)
    found = []
    for each in (shape, longer):
        tokens_1T, targets_1A, packing = unpack(torch.from_numpy(pack(batch, each)).cuda(), each)
        loss = model(tokens_1T, targets_1A, packing=packing)
        found.append((loss, *torch.autograd.grad(loss, list(adapters(model).values()))))
    for one, other in zip(*found, strict=True):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_merging_and_unmerging_is_exact_and_stays_where_it_is() -> None:
    _, _, model = losses("lora", torch.bfloat16)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with merged(model):
        assert any(
            not torch.equal(layer.weight, before[f"{name}.weight"][1])
            for name, layer in lora_layers(model).items()
        )
    assert all(
        p.data_ptr() == before[name][0] and torch.equal(p, before[name][1])
        for name, p in model.named_parameters()
    )


def test_memory_that_runs_out_halves_the_passes() -> None:
    whole, _, _ = losses("lora", torch.bfloat16)
    forward = Transformer.forward

    def limited(self: Transformer, *given: Any, **named: Any) -> torch.Tensor:
        if given[0].shape[1] > 600:
            raise torch.OutOfMemoryError("injected")
        return forward(self, *given, **named)

    Transformer.forward = limited  # type: ignore[method-assign]
    try:
        split, seen, _ = losses("lora", torch.bfloat16)
    finally:
        Transformer.forward = forward  # type: ignore[method-assign]
    assert "out_of_memory" in seen.events
    assert split == pytest.approx(whole, rel=3e-3)


def test_memory_that_runs_out_in_a_capture_halves_the_passes_too() -> None:
    """The second stream comes back to the first, or the capture would end with another error."""
    whole, _, _ = losses("lora", torch.bfloat16)
    captured: list[int] = []

    def limited(*given: Any, **named: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            captured.append(len(captured))
            if len(captured) == 5:
                raise torch.OutOfMemoryError("injected")
        return fp32_product(*given, **named)

    with patch("redline.train.workspace.fp32_product", limited):
        split, seen, _ = losses("lora", torch.bfloat16)
    assert len(captured) == 5
    assert "out_of_memory" in seen.events
    assert split == pytest.approx(whole, rel=3e-3)


def test_a_run_resumes(tmp_path: Any) -> None:
    unbroken, first, second = Seen(), Seen(), Seen()
    finetune(model_of("lora", torch.bfloat16), examples(75), checkpoint_every=2, observers=[unbroken])

    def interrupt(line: dict[str, Any]) -> None:
        if line["step"] == 5:
            raise KeyboardInterrupt

    first.metrics = interrupt  # type: ignore[method-assign]
    with RunFolder(tmp_path) as folder:
        with pytest.raises(KeyboardInterrupt):
            finetune(
                model_of("lora", torch.bfloat16),
                examples(75),
                checkpoint_every=2,
                folder=folder,
                observers=[first],
            )
        finetune(
            model_of("lora", torch.bfloat16),
            examples(75),
            checkpoint_every=2,
            folder=folder,
            observers=[second],
        )
    assert second.lines[0]["step"] in (5, 7)
    by_step = {line["step"]: line["loss"] for line in unbroken.lines}
    assert [line["loss"] for line in second.lines] == pytest.approx(
        [by_step[line["step"]] for line in second.lines], rel=3e-3
    )
