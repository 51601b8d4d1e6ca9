"""The engine on a GPU: each kernel against its PyTorch reference, graphs against the CPU engine, seeds
against the batch."""

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from redline.config.recipe import ModelConfig
from redline.engine import reference
from redline.engine.forward import Forward
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.engine.state import Slots, make_slots
from redline.model import kernels as model_kernels
from redline.model.attention import cache
from redline.model.attention.cache import KeysAndValues
from redline.model.attention.softmax import rope_table
from redline.model.attention.state import Room, Rows
from redline.model.transformer import Norm, Transformer, build_model

# torch for CPUs comes without Triton
kernels = pytest.importorskip("redline.engine.kernels", exc_type=ImportError)
cache_kernels = pytest.importorskip("redline.model.attention.cache_kernels", exc_type=ImportError)

DEVICE = torch.device("cuda")
SMOL = ModelConfig(
    vocab_size=49152,
    num_layers=2,
    hidden_size=960,
    num_heads=15,
    num_kv_heads=5,
    ffn_size=2560,
    context_length=512,
)
ODD = ModelConfig(
    vocab_size=5003,
    num_layers=2,
    hidden_size=160,
    num_heads=2,
    head_dim=80,
    ffn_size=256,
    context_length=512,
    qk_norm=True,
    init_std=0.1,
)
GPT2 = ModelConfig(
    vocab_size=1000, num_layers=2, hidden_size=128, num_heads=4, ffn_size=256, context_length=512,
    init_std=0.1,
    positions="learned", norm="layernorm", activation="gelu", bias=True,
)  # fmt: skip
BANDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


ROOM = Room(slots=40, prompts=10, max_prompt_tokens=100, max_new_tokens=90)


def random_slots(config: ModelConfig) -> Slots:
    slots = make_slots(config, ROOM, DEVICE)
    n = len(slots.count)
    for tensor, low, high in (
        (slots.prompt, 0, 10),
        (slots.prompt_len, 1, 101),
        (slots.count, 1, 80),
        (slots.open, 0, 2),
    ):
        tensor.copy_(torch.randint(low, high, (n,)))
    slots.limit.fill_(80)
    slots.temperature.copy_(torch.rand(n) * 2 + 0.3)
    slots.temperature[::5] = 0
    slots.top_k.copy_(torch.where(torch.rand(n) < 0.5, torch.randint(1, 60, (n,)), config.vocab_size))
    slots.top_p.copy_(torch.where(torch.rand(n) < 0.5, torch.rand(n) * 0.9 + 0.05, 1.0))
    slots.uniform.uniform_()
    slots.stop_ids[:, 0] = torch.randint(0, config.vocab_size, (n,), device=DEVICE)
    return slots


def caches(config: ModelConfig, dtype: torch.dtype, rotated: bool) -> tuple[KeysAndValues, KeysAndValues]:
    """The same random keys and values in fp32 and in the dtype."""
    cos, sin = rope_table(config)
    rope = (cos.to(DEVICE), sin.to(DEVICE)) if rotated else None
    exact, rounded = (
        KeysAndValues(config, rope, ROOM, device=DEVICE, dtype=each) for each in (torch.float32, dtype)
    )
    for wide, narrow in ((exact.prompt_kv, rounded.prompt_kv), (exact.kv, rounded.kv)):
        wide.copy_(narrow.normal_())
    return exact, rounded


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    return float((got.double() - want.double()).norm() / want.double().norm()) < BANDS[dtype]


@pytest.mark.parametrize("dtype", BANDS, ids=str)
@pytest.mark.parametrize("config", [SMOL, ODD], ids=["smol", "odd"])
@pytest.mark.parametrize("rotated", [True, False])
def test_attention_and_the_caches(config, dtype, rotated):
    torch.manual_seed(0)
    slots, heads = random_slots(config), config.num_heads + 2 * config.kv_heads
    exact, rounded = caches(config, dtype, rotated)
    slot_B = torch.randperm(ROOM.slots, device=DEVICE)[:33].int()
    rows = Rows(slot_B, slots.prompt, slots.prompt_len, slots.count)
    qkv = torch.randn(33, heads, config.head_size, device=DEVICE, dtype=dtype)
    assert close(
        cache_kernels.attend(rounded, 1, qkv, rows), cache.attend(exact, 1, qkv.float(), rows), dtype
    )
    assert close(rounded.kv, exact.kv, dtype)
    qkv = torch.randn(7, 50, heads, config.head_size, device=DEVICE, dtype=dtype)
    prompts = torch.randperm(10, device=DEVICE)[:7].int()
    lengths = torch.full((7,), 50, dtype=torch.int32, device=DEVICE)
    gots = cache_kernels.store_prompt(rounded, 1, qkv, prompts, lengths)
    wants = cache.store_prompt(exact, 1, qkv.float(), prompts, lengths)
    assert all(close(got, want, dtype) for got, want in zip(gots, wants, strict=True))
    assert close(rounded.prompt_kv, exact.prompt_kv, dtype)


@pytest.mark.parametrize("config", [SMOL, ODD], ids=["smol", "odd"])
def test_the_choice_of_tokens(config):
    torch.manual_seed(0)
    slots, rows = random_slots(config), torch.randperm(ROOM.slots, device=DEVICE)[:33].int()
    logits = 3 * torch.randn(33, config.vocab_size, device=DEVICE)
    want, got = reference.cutoff(logits, slots, rows), kernels.cutoff(logits, slots, rows)
    of = rows.long()
    filtered = (slots.temperature[of] > 0) & ((slots.top_k[of] < config.vocab_size) | (slots.top_p[of] < 1))
    assert filtered.sum() > 10
    assert torch.equal((logits >= got[:, None]).sum(1)[filtered], (logits >= want[:, None]).sum(1)[filtered])
    for cutoff in (None, want):
        a, b = deepcopy(slots), deepcopy(slots)
        reference.pick(logits, a, rows, cutoff)
        kernels.pick(logits, b, rows, cutoff)
        assert torch.equal(a.tokens, b.tokens)
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("open", "count", "last"))
        assert torch.allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.count.sum() > slots.count.sum()


@pytest.mark.parametrize("dtype", BANDS, ids=str)
def test_norm_and_activation(dtype):
    x, y = torch.randn(2, 33, 960, device=DEVICE, dtype=dtype).unbind()
    norm = Norm(960, SMOL).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    found = []
    for fused in (False, True):
        norm.fused = fused
        with torch.no_grad():
            found.append([norm.add(x.clone(), other) for other in (None, y)])
    for want, got in zip(*found, strict=True):
        assert torch.equal(got[0], want[0])
        assert close(got[1], want[1], dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert close(model_kernels.swiglu(x), F.silu(gate) * up, dtype)


def test_a_step_of_one_row_gives_the_logits_of_a_batch():
    """In bf16, whose products round differently: the band of two roundings in each of two layers."""
    model = build_model(SMOL, device=DEVICE, seed=0).eval()
    model.compute_dtype = torch.bfloat16
    slots = make_slots(SMOL, ROOM, DEVICE)
    forward = Forward(model, slots, ROOM)
    prompt = torch.randint(0, SMOL.vocab_size, (1, 50), device=DEVICE)
    at = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    forward.prefill(prompt, at, at + 50)
    slots.prompt_len.fill_(50)
    assert forward.one_row is not None
    alone, together = forward.decode(at), forward.decode(at.repeat(8))[:1]
    assert float((alone - together).norm() / together.norm()) < 8 * BANDS[torch.bfloat16]


class Count:
    """No text: the number of tokens."""

    def decode(self, ids: list[int]) -> str:
        return str(len(ids))

    def decode_batch(self, texts: list[list[int]]) -> list[str]:
        return [self.decode(ids) for ids in texts]


COUNT: Any = Count()


def requests(
    vocab: int, *, temperature: float, prompts: int = 20, samples: int = 3, new: int = 48
) -> list[Request]:
    draw = random.Random(0)
    return [
        Request(
            prompt=tuple(draw.randrange(vocab) for _ in range(draw.randrange(1, 60))),
            sampling=Sampling(
                temperature=temperature,
                max_new_tokens=draw.randrange(1, new + 1),
                top_p=0.9 if i % 3 == 0 else 1.0,
            ),
            samples=samples,
            seed=i,
            tag=i,
        )
        for i in range(prompts)
    ]


def generated(
    model: Transformer, asked: list[Request], slots: int, *, goes_on: bool = True, **options
) -> dict[tuple[int, int], tuple[int, ...]]:
    with LocalEngine(model, COUNT, slots=slots, max_prompt_tokens=60, max_new_tokens=48, **options) as engine:
        engine.decoder.goes_on &= goes_on
        return {(c.request.tag, c.sample): c.tokens for c in engine.run(asked)}


@pytest.mark.parametrize("config", [ODD, GPT2], ids=["rope", "learned"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_give_what_the_cpu_gives_in_fp32(config, temperature):
    asked = requests(config.vocab_size, temperature=temperature)
    cpu = generated(build_model(config, device="cpu", seed=0), asked, 64)
    on_gpu = build_model(config, device=DEVICE, seed=0)
    # each device draws its own random weights
    on_gpu.load_state_dict(build_model(config, device="cpu", seed=0).state_dict())
    gpu = generated(on_gpu, asked, 16)
    assert cpu.keys() == gpu.keys()
    equal = sum(cpu[key] == gpu[key] for key in cpu)
    assert equal >= 0.95 * len(cpu), f"{equal} of {len(cpu)}: a near tie may fall the other way, rarely"


def test_a_request_gives_the_same_text_whatever_shares_the_batch():
    model = build_model(SMOL, device=DEVICE, seed=0)
    model.compute_dtype = torch.bfloat16
    asked = requests(SMOL.vocab_size, temperature=1.0, prompts=30, samples=5)
    together = generated(model, asked, 64, reproducible=True)
    for part in (asked[3:4], asked[::-1], asked[10:25]):
        assert all(
            together[key] == tokens for key, tokens in generated(model, part, 64, reproducible=True).items()
        )
    waiting = generated(model, asked, 64, reproducible=True, goes_on=False)
    assert together == waiting, "no step while the host looks at a round"


def test_weights_that_change_while_a_step_is_under_way_are_those_of_the_next_run():
    """An iteration that is broken off leaves its steps to the GPU, which must be through when weights and slots change."""
    model, other = (build_model(SMOL, device=DEVICE, seed=seed) for seed in (0, 1))
    model.compute_dtype = other.compute_dtype = torch.bfloat16
    asked = requests(SMOL.vocab_size, temperature=1.0, prompts=30, samples=5)
    want = generated(other, asked, 64, reproducible=True)
    with LocalEngine(
        model, COUNT, slots=64, max_prompt_tokens=60, max_new_tokens=48, reproducible=True
    ) as engine:
        for _ in zip(engine.run(asked), range(8), strict=False):
            pass
        model.load_state_dict(other.state_dict())
        engine.refresh()
        assert {(c.request.tag, c.sample): c.tokens for c in engine.run(asked)} == want


def test_log_probabilities_in_bf16_are_those_of_the_training_forward():
    """The stated tolerance: 0.02 nats on average, 0.2 at most, for a model of this depth."""
    model = build_model(SMOL, device=DEVICE, seed=0)
    model.compute_dtype = torch.bfloat16
    with LocalEngine(model, COUNT, slots=64, max_prompt_tokens=60, max_new_tokens=48) as engine:
        gaps = []
        for c in engine.run(requests(SMOL.vocab_size, temperature=1.0)):
            ids = torch.tensor([[*c.request.prompt, *c.tokens]], device=DEVICE)
            with torch.no_grad():
                logs = model(ids[:, :-1])[0, len(c.request.prompt) - 1 :].float().log_softmax(-1)
            gaps.append(
                (
                    logs.gather(1, ids[0, len(c.request.prompt) :, None])[:, 0].cpu()
                    - torch.tensor(c.logprobs)
                ).abs()
            )
    gap = torch.cat(gaps)
    assert float(gap.mean()) < 0.02
    assert float(gap.max()) < 0.2
