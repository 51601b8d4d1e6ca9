"""Kernel attention on a GPU: the Triton kernels against double precision, forward and backward; a decode step and the
engine, whose steps are CUDA graphs, against the model; the memory that a pass takes."""

from dataclasses import replace

import pytest
import torch
from precision import assert_close
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.model.attention import favor, favor_kernels
from redline.model.attention.softmax import rope_table
from redline.model.attention.state import Room, Rows
from redline.model.transformer import build_model

DEVICE = torch.device("cuda")
CONFIG = ModelConfig(
    vocab_size=97, num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=2, ffn_size=256, context_length=600,
    init_std=0.05, attention="favor", features=128,
)  # fmt: skip
BF16 = 2**-6
"""Four roundings to 8 bits, of a query's and a key's feature, of their product and of the value, none of them averaged
out."""


def tensors(T: int, heads: int, kv_heads: int, C: int, M: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    qkv = torch.randn((2, T, heads + 2 * kv_heads, C), device=DEVICE, generator=generator).to(dtype)
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": C, "features": M}
    w = favor.draw(replace(CONFIG, **shape), 0).to(DEVICE).to(dtype)  # type: ignore[arg-type]
    return *qkv.split([heads, kv_heads, kv_heads], dim=2), w


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "C", "M"),
    [(200, 4, 2, 64, 256), (64, 6, 6, 32, 96), (300, 3, 1, 128, 128), (1025, 2, 2, 16, 32)],
)
def test_kernels_equal_double_precision(T: int, heads: int, kv_heads: int, C: int, M: int) -> None:
    """In bf16, as the model uses them: in fp32 a compilation alone takes minutes."""
    dtype = torch.bfloat16
    *qkv, w = tensors(T, heads, kv_heads, C, M, dtype)
    mine = [x.detach().requires_grad_() for x in qkv]
    exact = [x.detach().double().requires_grad_() for x in qkv]
    found, _ = favor_kernels.attend(*mine, w)
    q, k, v = exact
    expected, _ = favor.chunked(q, k, v, w.double())
    assert_close(found.flatten(2).double(), expected, close=BF16)
    grad = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(found.flatten(2), mine, grad.to(dtype)),
        torch.autograd.grad(expected, exact, grad.to(dtype).double()),
        strict=True,
    )
    for name, (ours, theirs) in zip("qkv", pairs, strict=True):
        assert_close(ours.double(), theirs, close=2 * BF16, what=f"gradient of {name}")


def test_a_single_token_reads_its_value_and_gives_query_and_key_no_gradient() -> None:
    """Both gradients are dy.v - dy.y, which is 0 but for the roundings of the weight and of y, 2^-8 each, times the
    features' share of the directions; BF16 is twice those two."""
    *qkv, w = tensors(1, 4, 2, 64, 64, torch.bfloat16)
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    y, _ = favor_kernels.attend(q, k, v, w)
    values = v.repeat_interleave(2, dim=2)
    assert_close(y.float(), values.float(), close=BF16)
    dy, scale = torch.randn_like(y), 64**-0.25
    dq, dk, dv = torch.autograd.grad(y, (q, k, v), dy)
    assert_close(dv.float(), dy.unflatten(2, (2, 2)).float().sum(3), close=BF16)
    off = BF16 * scale * float((dy * values).float().abs().sum(-1).max())
    assert float(dq.abs().max()) <= off * float(w.abs().max())
    assert float(dk.abs().max()) <= 2 * off * float(w.abs().max() + scale * k.detach().abs().max()), (
        "two queries"
    )


@pytest.mark.parametrize("rope", [True, False])
def test_a_decode_step_equals_its_form_in_pytorch(rope: bool) -> None:
    table = tuple(part.to(DEVICE) for part in rope_table(CONFIG)) if rope else None
    room = Room(slots=5, prompts=1, max_prompt_tokens=8, max_new_tokens=8)
    mine, theirs = (
        favor.Features(CONFIG, table, room, device=DEVICE, dtype=torch.bfloat16)  # type: ignore[arg-type]
        for _ in range(2)
    )
    for ours, reference in zip(mine.slots, theirs.slots, strict=True):
        ours.copy_(torch.rand_like(ours) + 1)
        reference.copy_(ours)
    integers = torch.tensor(
        [[0] * 6, [3, 1, 4, 1, 5, 1], [1, 1, 2, 1, 3, 1]], dtype=torch.int32, device=DEVICE
    )
    rows = Rows(torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE), *integers)
    attn = build_model(CONFIG, device=DEVICE, seed=0).blocks[0].attn
    qkv = torch.randn((3, 8, 64), device=DEVICE).bfloat16()
    found = mine.step(1, attn, qkv, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(favor_kernels, "fits", lambda *_: False)
        expected = theirs.step(1, attn, qkv, rows)
    assert_close(found.float(), expected.float(), close=BF16)
    for ours, reference in zip(mine.slots, theirs.slots, strict=True):
        assert_close(ours, reference, close=BF16)


class Numbers:
    def decode_batch(self, texts: list[list[int]]) -> list[str]:
        return ["" for _ in texts]


def test_the_engine_generates_what_the_model_predicts() -> None:
    """In bf16 both round as often, so against fp32, of the same rounded weights, both are equally far off."""
    model = build_model(CONFIG, device=DEVICE, seed=0)
    for weights in (*model.parameters(), *(block.attn.projection for block in model.blocks)):
        weights.data = weights.data.bfloat16().float()  # type: ignore[union-attr]
    model.compute_dtype = torch.bfloat16
    sampling = Sampling(temperature=1.0, max_new_tokens=40)
    prompts = [tuple(range(1, n)) for n in (4, 90, 30)]
    requests = [Request(prompt=p, samples=6, sampling=sampling, seed=i) for i, p in enumerate(prompts)]
    with LocalEngine(model, Numbers(), slots=8, max_prompt_tokens=96, max_new_tokens=40) as engine:  # type: ignore[arg-type]
        found = list(engine.run(requests))
    assert sum(len(c.tokens) for c in found) == 3 * 6 * 40
    engines, models = [], []
    for c in found:
        ids = torch.tensor([[*c.request.prompt, *c.tokens]], device=DEVICE)
        losses = {}
        for model.compute_dtype in (torch.float32, torch.bfloat16):
            with torch.no_grad():
                predicted = model(ids[:, :-1], ids[:, 1:], reduction="none")
            losses[model.compute_dtype] = predicted[0, len(c.request.prompt) - 1 :]
        exact = losses[torch.float32]
        engines.append((exact + torch.tensor(c.logprobs, device=DEVICE)).abs())
        models.append((exact - losses[torch.bfloat16]).abs())
    assert float(torch.cat(engines).mean()) < 2 * float(torch.cat(models).mean())


def test_a_pass_takes_memory_linear_in_the_length_and_keeps_what_flash_attention_keeps() -> None:
    def peak_bytes(T: int) -> int:
        *qkv, w = tensors(T, 4, 4, 64, 256, torch.bfloat16)
        qkv = [x.detach().requires_grad_() for x in qkv]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, _ = favor_kernels.attend(*qkv, w)
        kept = torch.cuda.memory_allocated() - before
        assert kept <= 1.01 * (y.nbytes + 2 * 4 * T * 4) + 2**20
        y.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak_bytes(16384) < 2.1 * peak_bytes(8192)


def test_compiled_blocks_take_the_kernels_as_they_are() -> None:
    tokens = torch.arange(80, device=DEVICE)[None]
    model = build_model(CONFIG, device=DEVICE, seed=0)
    model.compute_dtype = torch.bfloat16
    eager = model(tokens, tokens).detach()
    for block in model.blocks:
        block.recompute = "selective"
        block.compile(fullgraph=True, dynamic=False)
    compiled = model(tokens, tokens)
    compiled.backward()
    assert abs(float(compiled.detach() / eager) - 1) < BF16
