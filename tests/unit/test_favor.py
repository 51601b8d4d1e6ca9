"""Kernel attention: features against the softmax kernel, the chunked and the recurrent form against the definition in
double precision, the engine against the model, runs that resume."""

import math
from dataclasses import replace

import pytest
import torch
from precision import CLOSE_FP32, assert_close, in_double
from torch import Tensor

from redline.config.load import load_recipe
from redline.config.recipe import ModelConfig, Recompute
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.errors import ConfigError
from redline.model.attention import favor
from redline.model.attention.packed import Packing
from redline.model.attention.state import Room
from redline.model.attention.variants import VARIANTS
from redline.model.huggingface_out import to_huggingface
from redline.model.transformer import build_model, redraw, weights_of
from redline.model.weights import load_weights

CONFIG = ModelConfig(
    vocab_size=37, num_layers=2, hidden_size=24, num_heads=6, num_kv_heads=2, ffn_size=32, context_length=60,
    init_std=0.3, attention="favor", features=10,
)  # fmt: skip
LEARNED = replace(CONFIG, positions="learned", num_heads=3, num_kv_heads=None)


def directions(M: int, *, K: int = 1, C: int = 8, seed: int = 0) -> Tensor:
    shape = {"hidden_size": K * C, "num_heads": K, "num_kv_heads": None}
    return favor.draw(replace(CONFIG, **shape, features=M), seed)  # type: ignore[arg-type]


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, w_KMC: Tensor) -> Tensor:
    """The definition, feature by feature with nothing taken out, in double precision."""
    group, C = q_BTHC.shape[2] // k_BTKC.shape[2], q_BTHC.shape[3]
    k, v, w = k_BTKC.repeat_interleave(group, 2), v_BTKC.repeat_interleave(group, 2), w_KMC.double()
    w = w.repeat_interleave(group, 0)

    def phi(x: Tensor) -> Tensor:
        x = x / C**0.25
        return torch.exp(torch.einsum("bthc,hmc->bthm", x, w) - x.square().sum(-1, keepdim=True) / 2)

    weights = torch.einsum("bthm,bshm->bhts", phi(q_BTHC), phi(k)).tril()
    return torch.einsum("bhts,bshc->bthc", weights / weights.sum(-1, keepdim=True), v).flatten(2)


# ---- features ----


def test_directions_are_orthogonal_in_groups_and_as_long_as_gaussian_vectors() -> None:
    C, w = 8, directions(20, K=3).double()
    for start in (0, 8, 16):
        rows = w[:, start : min(start + C, 20)]
        gram = rows @ rows.mT
        assert_close(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), close=CLOSE_FP32)
    # |g|^2 has mean C and variance 2 C: over n vectors the mean is within 5 of its standard deviations.
    n = 100 * 64
    squares = directions(n).double().square().sum(-1)
    assert abs(squares.mean() - C) < 5 * math.sqrt(2 * C / n)
    assert abs(squares.var() - 2 * C) < 5 * 2 * C * math.sqrt((2 + 12 / C) / n)
    assert torch.equal(directions(20, seed=3), directions(20, seed=3))
    assert not torch.equal(directions(20, seed=3), directions(20, seed=4))


def kernel_estimates(q: Tensor, k: Tensor, draws: int, M: int) -> Tensor:
    """exp(q.k / sqrt(C)) as estimated by M features, once for each draw."""
    w = directions(M, K=draws).double()
    shift = favor.key_exponents(q[None], w) + favor.key_exponents(k[None], w)
    return shift.exp().mean(-1).squeeze(1)


def test_features_estimate_the_softmax_kernel_without_bias_and_their_error_falls_as_the_root_of_their_number() -> (
    None
):
    q, k = some(2, 1, 8).unbind()
    exact, draws = math.exp(float((q * k).sum()) / math.sqrt(8)), 4000
    # E[estimate^2] of one feature, exp(|q' + k'|^2) x exact^2, bounds the variance; orthogonal ones have no more.
    total = (q + k).square().sum() / math.sqrt(8)
    one = exact * math.sqrt(math.exp(float(total)) - 1)
    errors = {}
    for M in (8, 128):
        found = kernel_estimates(q, k, draws, M)
        errors[M] = float((found - exact).square().mean().sqrt())
        assert abs(found.mean() - exact) < 5 * one / math.sqrt(draws * M)
        assert errors[M] < 1.1 * one / math.sqrt(M)
    # 16 independent groups of 8 directions: exactly a quarter, up to what 4000 draws of a skewed square show.
    assert 0.15 < errors[128] / errors[8] < 0.4


def test_the_error_of_attention_falls_as_the_root_of_the_number_of_features() -> None:
    # Of length 1, so that one feature is off by less than sqrt(exp(4 / sqrt(8)) - 1) = 1.8 of what it estimates, and
    # 64 of them by less than a quarter: few enough for the bias of a quotient, the square of that, not to show.
    q, k, v = torch.nn.functional.normalize(some(3, 1, 64, 2, 8), dim=-1).unbind()
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    exact = exact.transpose(1, 2).flatten(2)

    def error(M: int) -> float:
        squares = [
            (favor.causal(q, k, v, directions(M, K=2, seed=s)) - exact).square().mean() for s in range(8)
        ]
        return float(torch.stack(squares).mean().sqrt())

    few, many = error(64), error(4096)
    assert few / many == pytest.approx(8, rel=0.25), "64 times the features, an eighth of the error"


# ---- forms ----


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_chunks_and_gradients_equal_the_definition(heads: int, kv_heads: int, chunk: int) -> None:
    q, k, v = (some(2, 33, n, 8, seed=n).requires_grad_() for n in (heads, kv_heads, kv_heads))
    w, grad = directions(20, K=kv_heads), some(2, 33, heads * 8)
    found, _ = favor.chunked(q, k, v, w, chunk=chunk)
    expected = naive(q, k, v, w)
    assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad),
        strict=True,
    ):
        assert_close(mine, theirs)


def test_the_recurrence_equals_the_chunks_and_goes_on_from_them() -> None:
    q, k, v = (some(2, 21, n, 8, seed=n) for n in (6, 2, 2))
    w, lengths = directions(20, K=2), torch.tensor([9, 4])
    whole = naive(q, k, v, w)
    _, sums = favor.chunked(q[:, :9], k[:, :9], v[:, :9], w, lengths, chunk=3)
    for row, length in enumerate(lengths.tolist()):
        here = favor.Sums(*(part[row : row + 1] for part in sums))
        for t in range(length, 21):
            y, here = favor.recurrent(q[row : row + 1, t], k[row : row + 1, t], v[row : row + 1, t], w, here)
            assert_close(y, whole[row : row + 1, t])
            assert float(here.total.min()) >= 1, "the largest feature of the past counts 1"


@pytest.mark.parametrize("size", [1.0, 4.0])
def test_keys_of_any_size_leave_fp32_numbers_that_are_right(size: float) -> None:
    """Exponents of hundreds: without a shift for each feature these are 0 / 0 or infinite."""
    q, k, v = (size * some(1, 40, 2, 8, seed=s) for s in (1, 2, 3))
    w = directions(16, K=2)
    found = favor.chunked(q.float(), k.float(), v.float(), w, chunk=8)[0]
    expected = favor.chunked(q, k, v, w, chunk=1)[0]
    # An exponent of size^2 x 2^5 is rounded by 2^-24 of itself.
    assert_close(found, expected.float(), close=CLOSE_FP32 * max(1.0, size**2))


def test_keys_too_far_apart_for_fp32_still_give_a_mean_of_the_values() -> None:
    q, k, v = (some(1, 40, 2, 8, seed=s).float() for s in (1, 2, 3))
    y, _ = favor.chunked(30 * q, 30 * k, v, directions(16, K=2), chunk=8)
    assert bool((y.abs() <= v.abs().amax()).all()), "nan is not"


def test_no_query_sees_what_comes_after_it() -> None:
    q, k, v = (some(1, 20, 2, 8, seed=s).requires_grad_() for s in (1, 2, 3))
    w = directions(16, K=2)
    y, _ = favor.chunked(q, k, v, w, chunk=8)
    for gradient in torch.autograd.grad(y[:, :11].sum(), (k, v), retain_graph=True):
        assert not gradient[:, 11:].any(), "exactly 0, in the chunk of the query and in those after it"
        assert gradient[:, :11].any()
    other = k.detach().clone()
    other[:, 11:] += 3
    assert_close(favor.chunked(q, other, v, w, chunk=8)[0][:, :11], y[:, :11])


def test_a_packed_row_computes_what_its_sequences_do() -> None:
    with in_double():
        model = build_model(CONFIG, device="cpu", seed=0)
        model.compute_dtype = torch.float64
        first, second = torch.arange(1, 8), torch.arange(11, 30)
        bounds = torch.tensor([0, 7, 26], dtype=torch.int32)
        positions = torch.cat([torch.arange(7), torch.arange(19)])
        packing = Packing(positions_T=positions, bounds_S=bounds, longest=19)
        row = model(torch.cat([first, second])[None], packing=packing)[0]
        for part, alone in ((row[:7], first), (row[7:], second)):
            assert_close(part, model(alone[None])[0])


# ---- the model ----


def test_features_are_kept_with_the_weights_and_drawn_from_the_seed() -> None:
    model, other = (build_model(CONFIG, device="cpu", seed=s) for s in (0, 1))
    tokens = torch.arange(20)[None]
    load_weights(other, {name: weight.detach().clone() for name, weight in weights_of(model).items()})
    assert torch.equal(other(tokens), model(tokens))
    before = model.blocks[0].attn.projection
    assert before is not None
    kept = before.clone()
    redraw(model, 0, 1)
    assert model.blocks[0].attn.projection is before, "in place: graphs and copies keep their address"
    assert not torch.equal(before, kept)
    redraw(model, 0, 0)
    assert torch.equal(before, kept)
    assert not any(torch.equal(before, block.attn.projection) for block in model.blocks[1:])  # type: ignore[arg-type]


def test_it_learns_a_text_by_heart() -> None:
    model = build_model(replace(CONFIG, init_std=0.05), device="cpu", seed=0)
    tokens = torch.randint(37, (4, 33), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        loss = model(tokens[:, :-1], tokens[:, 1:]) / 128
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            assert abs(float(loss.detach()) - math.log(37)) < 0.1, "it knows nothing yet"
    assert float(loss.detach()) < math.log(37) / 2


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_block_compiles_as_one_graph_with_any_variant(recompute: Recompute) -> None:
    """No part of the seam may break the graph; the eager backend traces and does not generate code."""
    torch._dynamo.reset()
    tokens = torch.arange(20).view(2, 10)
    for attention in VARIANTS:
        model = build_model(replace(CONFIG, attention=attention), device="cpu", seed=0)  # type: ignore[arg-type]
        expected = model(tokens, tokens)
        for block in model.blocks:
            block.recompute = recompute
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        assert torch.equal(model(tokens, tokens), expected)


class Numbers:
    def decode_batch(self, texts: list[list[int]]) -> list[str]:
        return ["" for _ in texts]


@pytest.mark.numerics
@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rope", "learned"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_generates_what_the_model_predicts(config: ModelConfig, temperature: float) -> None:
    model = build_model(config, device="cpu", seed=0)
    prompts = [(3, 1, 4), (1,), (5, 9, 2, 6, 5, 3, 5)]
    sampling = Sampling(temperature=temperature, max_new_tokens=12)
    requests = [Request(prompt=p, samples=2, sampling=sampling, seed=i) for i, p in enumerate(prompts)]
    with LocalEngine(model, Numbers(), slots=3, max_prompt_tokens=8, max_new_tokens=12) as engine:  # type: ignore[arg-type]
        found = list(engine.run(requests))
    assert len(found) == 6
    for c in found:
        ids = torch.tensor([[*c.request.prompt, *c.tokens]])
        with torch.no_grad():
            scores = model(ids[:, :-1])[0, len(c.request.prompt) - 1 :].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
        assert_close(torch.tensor(c.logprobs), chosen, close=CLOSE_FP32)
        if temperature == 0:
            assert_close(chosen, scores.amax(-1), close=CLOSE_FP32)


def test_a_sequence_takes_the_same_memory_whatever_its_length() -> None:
    sizes = {
        favor.Features.sequence_bytes(
            CONFIG, Room(slots=1, prompts=1, max_prompt_tokens=n, max_new_tokens=n), torch.bfloat16
        )
        for n in (1, 1000)
    }
    assert sizes == {2 * 4 * CONFIG.num_layers * 2 * 10 * (CONFIG.head_size + 2)}


def test_what_cannot_hold_kernel_attention_says_so() -> None:
    with pytest.raises(ConfigError, match=r"favor has no equivalent in transformers"):
        to_huggingface(CONFIG, {})
    with pytest.raises(ConfigError, match=r"plan.attention flash needs model.attention softmax"):
        load_recipe("nano", ["model.attention=favor", "plan.attention=flash"])
