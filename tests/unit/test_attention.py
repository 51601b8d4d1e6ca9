"""The seam of attention: another variant, with a recurrent state of constant size, is one class and one function."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from precision import CLOSE_FP32, assert_close
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.model.attention.state import Room, Rows
from redline.model.attention.variants import Variant
from redline.model.transformer import Attention, Transformer, build_model

CONFIG = ModelConfig(
    vocab_size=37, num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_size=32, context_length=60,
    init_std=0.3, positions="learned",
)  # fmt: skip


def features(attn: Attention, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positive queries and keys, and values; a key/value head is repeated for each of its query heads."""
    q, k, v = attn.split(qkv)
    group = attn.heads // attn.kv_heads
    return F.elu(q) + 1, (F.elu(k) + 1).repeat_interleave(group, -2), v.repeat_interleave(group, -2)


def parallel(attn: Attention, qkv_BTHC: Tensor) -> Tensor:
    """Linear attention by its definition: every query against every key before it."""
    q, k, v = features(attn, qkv_BTHC)
    weights_BHTS = torch.einsum("bthc,bshc->bhts", q, k).tril()
    return torch.einsum("bhts,bshc->bthc", weights_BHTS / weights_BHTS.sum(-1, keepdim=True), v).flatten(2)


class Sums:
    """The same as a recurrence: the sum of key x value, and the sum of keys."""

    def __init__(self, config: ModelConfig, rope: Any, room: Room, *, device: Any, dtype: Any) -> None:
        C = config.head_size
        shape = (config.num_layers, config.num_heads, C, C + 1)
        self.pool, self.slots = (torch.zeros(n, *shape, dtype=dtype) for n in (room.prompts, room.slots))

    @staticmethod
    def sequence_bytes(config: ModelConfig, room: Room, dtype: torch.dtype) -> int:
        C = config.head_size
        return 2 * config.num_layers * config.num_heads * C * (C + 1) * dtype.itemsize

    def read(
        self, layer: int, attn: Attention, qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor
    ) -> Tensor:
        _, k, v = features(attn, qkv_MTHC)
        counted = (torch.arange(k.shape[1]) < lengths_M[:, None])[..., None, None] * k
        self.pool[prompts_M.long(), layer] = torch.einsum(
            "mthc,mthd->mhcd", counted, F.pad(v, (0, 1), value=1.0)
        )
        return parallel(attn, qkv_MTHC)

    def start(self, slots_B: Tensor, prompts_B: Tensor) -> None:
        self.slots[slots_B] = self.pool[prompts_B]

    def step(self, layer: int, attn: Attention, qkv_BHC: Tensor, rows: Rows) -> Tensor:
        q, k, v = features(attn, qkv_BHC)
        at = rows.slot_B.long()
        self.slots[at, layer] += torch.einsum("bhc,bhd->bhcd", k, F.pad(v, (0, 1), value=1.0))
        y = torch.einsum("bhc,bhcd->bhd", q, self.slots[at, layer])
        return (y[..., :-1] / y[..., -1:]).flatten(1)


LINEAR = Variant(over=lambda config, packing, rope, x: parallel, state=Sums)


class Numbers:
    def decode_batch(self, texts: list[list[int]]) -> list[str]:
        return ["" for _ in texts]


def linear_model() -> Transformer:
    model = build_model(CONFIG, device="cpu", seed=0)
    model.variant = LINEAR
    return model


@pytest.mark.numerics
def test_a_recurrent_state_generates_what_the_parallel_form_predicts() -> None:
    model, prompts = linear_model(), [(3, 1, 4), (1,), (5, 9, 2, 6, 5, 3, 5)]
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    requests = [Request(prompt=p, samples=3, sampling=sampling, seed=i) for i, p in enumerate(prompts)]
    with LocalEngine(model, Numbers(), slots=4, max_prompt_tokens=8, max_new_tokens=12) as engine:  # type: ignore[arg-type]
        found = list(engine.run(requests))
    assert len({c.tokens for c in found}) == 9, "samples of one prompt each have a state"
    for c in found:
        ids = torch.tensor([[*c.request.prompt, *c.tokens]])
        with torch.no_grad():
            losses = model(ids[:, :-1], ids[:, 1:], reduction="none")[0]
        assert_close(-torch.tensor(c.logprobs), losses[len(c.request.prompt) - 1 :], close=CLOSE_FP32)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_block_compiles_as_one_graph_with_any_variant(recompute: Any) -> None:
    """No part of the seam may break the graph; the eager backend traces and does not generate code."""
    torch._dynamo.reset()
    tokens = torch.arange(20).view(2, 10)
    for variant in (LINEAR, build_model(CONFIG, device="cpu", seed=0).variant):
        model = build_model(CONFIG, device="cpu", seed=0)
        model.variant = variant
        expected = model(tokens, tokens)
        for block in model.blocks:
            block.recompute = recompute
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        assert torch.equal(model(tokens, tokens), expected)
