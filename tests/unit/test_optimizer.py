"""Muon and AdamW against torch's own, the grouping of weight decay, and the live state that checkpoints are
made of."""

import copy
from dataclasses import replace

import pytest
import torch
from precision import assert_close
from torch import Tensor, nn

from redline.config.load import load_recipe
from redline.config.recipe import ModelConfig, TrainConfig, UpdateKernels
from redline.model.transformer import Transformer, build_model
from redline.train.optimizer import (
    NEWTON_SCHULZ,
    Muon,
    make_optimizers,
    orthogonalize,
    set_lr,
    state_tensors,
    warm_momentum,
)

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("double")]

CONFIG = ModelConfig(
    vocab_size=96, num_layers=2, hidden_size=32,
    num_heads=4, num_kv_heads=2, ffn_size=48, context_length=16, bias=True, tie_embeddings=False
)  # fmt: skip


def train(**changes) -> TrainConfig:
    return TrainConfig(
        **{
            "batch_size": 1,
            "steps": 10,
            "lr": 3e-3,
            "weight_decay": 0.1,
            "beta1": 0.8,
            "beta2": 0.9,
            "eps": 1e-6,
            **changes,
        }
    )


def give_gradients(models: list[nn.Module], step: int) -> None:
    """The same random gradient to the same parameter of each model."""
    for model in models:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)


# ---- Muon ----


def test_muon_equals_torchs_over_ten_steps():
    """Tall, wide, square and repeated shapes together."""
    torch.manual_seed(0)
    shapes = [(64, 32), (32, 64), (48, 48), (64, 32), (128, 8), (8, 96)]
    ours = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
    theirs = copy.deepcopy(ours)
    start = [p.detach().clone() for p in ours]
    muon = Muon(ours, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="original"
    )
    for step in range(10):
        give_gradients([ours, theirs], step)
        muon.step()
        reference.step()
    for p, expected, before in zip(ours, theirs, start, strict=True):
        assert (expected - before).norm() > 0.3, "the comparison must not hold because nothing moved"
        assert_close(p, expected, what=str(tuple(p.shape)))


def test_matrices_that_one_parameter_holds_are_updated_one_by_one():
    """Queries, two heads of keys and values, and the halves of SwiGLU: as torch's Muon would, had each its own parameter."""
    torch.manual_seed(0)
    together = nn.ParameterList(nn.Parameter(torch.randn(64, 32)) for _ in range(3))
    rows = [(32, 16, 16), (32, 16, 16), (32, 32)]
    apart = [
        nn.Parameter(m.detach().clone()) for p, r in zip(together, rows, strict=True) for m in p.split(r)
    ]
    groups = [{"params": together[:2], "rows": rows[0]}, {"params": together[2:], "rows": rows[2]}]
    muon = Muon(groups, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(apart, lr=0.02, weight_decay=0.1, adjust_lr_fn="original")
    for step in range(3):
        give_gradients([together], step)
        gradients = [m for p, r in zip(together, rows, strict=True) for m in p.grad.split(r)]
        for p, gradient in zip(apart, gradients, strict=True):
            p.grad = gradient.clone()
        muon.step()
        reference.step()
    ours = [m for p, r in zip(together, rows, strict=True) for m in p.split(r)]
    for matrix, expected in zip(ours, apart, strict=True):
        assert_close(matrix, expected)


def test_normalised_matrices_of_one_parameter_keep_their_own_lengths():
    """The first is of rank 1, so that evening it out changes its length most; the others' must not pay for it."""
    torch.manual_seed(0)
    rows = (32, 16, 16)
    whole = nn.Parameter(torch.randn(64, 32))
    apart = [nn.Parameter(m.detach().clone()) for m in whole.split(rows)]
    muons = [
        Muon([{"params": [whole], "rows": rows}], lr=0.02, weight_decay=0.1, normalize=True),
        Muon(apart, lr=0.02, weight_decay=0.1, normalize=True),
    ]
    for _ in range(3):
        gradient = torch.cat([torch.randn(32, 1) @ torch.randn(1, 32), torch.randn(32, 32)])
        whole.grad = gradient
        for p, part in zip(apart, gradient.split(rows), strict=True):
            p.grad = part.clone()
        for muon in muons:
            muon.step()
    for matrix, expected in zip(whole.split(rows), apart, strict=True):
        assert_close(matrix, expected)


def test_normalised_updates_have_rows_of_one_size_and_the_length_they_had():
    """NorMuon, written out for one matrix: each row over the root of its mean square so far, then as long as before."""
    torch.manual_seed(0)
    plain, p = (nn.Parameter(torch.zeros(48, 16)) for _ in range(2))
    muons = [Muon([q], lr=1.0, weight_decay=0.0, normalize=q is p) for q in (plain, p)]
    seen = torch.zeros(48)
    for step in range(4):
        gradient = torch.randn(48, 16) * torch.logspace(-2, 0, 48)[:, None]
        for q, muon in zip((plain, p), muons, strict=True):
            q.detach().zero_()
            q.grad = gradient.clone()
            muon.step()
        update = plain.detach()
        seen = 0.95 * seen + 0.05 * update.square().mean(1)
        assert_close(muons[1].state[p]["row_mean_square"], seen)
        expected = update / seen.sqrt()[:, None]
        expected *= update.norm() / expected.norm()
        assert_close(p, expected)
        if step == 0:
            sizes = [q.detach().norm(dim=1) for q in (plain, p)]
            assert sizes[0].max() > 1.5 * sizes[0].min(), "there must be something to even out"
            assert_close(sizes[1], torch.full((48,), float(update.norm()) / 48**0.5))


def test_muon_leaves_a_matrix_without_a_gradient_alone():
    torch.manual_seed(0)
    params = nn.ParameterList(nn.Parameter(torch.randn(16, 8)) for _ in range(3))
    alone = nn.ParameterList(copy.deepcopy(params[i]) for i in (0, 2))
    for p, q in zip((params[0], params[2]), alone, strict=True):
        p.grad, q.grad = (g := torch.randn(16, 8)), g.clone()
    before = params[1].detach().clone()
    for each in (params, alone):
        Muon(each, lr=0.02, weight_decay=0.1, normalize=True).step()
    assert torch.equal(params[1], before)
    for p, q in zip((params[0], params[2]), alone, strict=True):
        assert_close(p, q)


def test_muon_stacks_in_pieces_change_nothing(monkeypatch):
    torch.manual_seed(0)
    whole = nn.ParameterList(nn.Parameter(torch.randn(16, 8)) for _ in range(5))
    pieces = copy.deepcopy(whole)
    give_gradients([whole, pieces], 0)
    Muon(whole, lr=0.02, weight_decay=0.0).step()
    monkeypatch.setattr("redline.train.optimizer.MUON_STACK", 2 * 16 * 8)
    Muon(pieces, lr=0.02, weight_decay=0.0).step()
    for a, b in zip(whole, pieces, strict=True):
        assert_close(a, b)


def test_muon_takes_rates_from_tensors_and_at_rest_changes_nothing():
    """A captured update reads them where they lie; its warm-up runs with a learning rate of 0 and a momentum of 1."""
    torch.manual_seed(0)
    numbers = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in [(16, 8), (8, 16), (16, 8)])
    tensors = copy.deepcopy(numbers)
    plain, read = (Muon(params, lr=0.0, weight_decay=0.1, normalize=True) for params in (numbers, tensors))
    for group in read.param_groups:
        group["lr"], group["momentum"] = torch.zeros(()), torch.ones(())
    for step, (lr, momentum) in enumerate([(0.02, 0.85), (0.01, 0.9), (0.03, 0.95)]):
        give_gradients([numbers, tensors], step)
        before = [t.detach().clone() for p in tensors for t in (p, *read.state[p].values())]
        read.step()
        after = [t for p in tensors for t in (p, *read.state[p].values())]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        plain.param_groups[0].update(lr=lr, momentum=momentum)
        read.param_groups[0]["lr"].fill_(lr)
        read.param_groups[0]["momentum"].fill_(momentum)
        plain.step()
        read.step()
        read.param_groups[0]["lr"].fill_(0.0)
        read.param_groups[0]["momentum"].fill_(1.0)
    for a, b in zip(numbers, tensors, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("shape", [(3, 64, 32), (3, 32, 64), (2, 48, 48), (1, 16, 256)])
def test_orthogonalize_pushes_singular_values_towards_one(shape):
    """Each singular value goes through the polynomial, whatever the matrix."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.svdvals(x) / x.norm(dim=(-2, -1))[:, None]
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        expected = a * expected + b * expected**3 + c * expected**5
    result = orthogonalize(x)
    assert result.shape == x.shape
    assert_close(torch.linalg.svdvals(result), expected.abs().sort(descending=True).values)
    assert 0.5 < expected.min() < expected.max() < 1.25


def test_orthogonalize_keeps_the_directions_and_forgives_zero():
    """U S V becomes U S' V: the factor U V of the polar decomposition is what the result lies nearest to."""
    x = torch.randn(1, 24, 24, generator=torch.Generator().manual_seed(3)) + 6 * torch.eye(24)
    u, _, v = torch.linalg.svd(x)
    result = orthogonalize(x)
    in_their_bases = u.mT @ result @ v.mT
    assert_close(in_their_bases, torch.diag_embed(torch.diagonal(in_their_bases, dim1=-2, dim2=-1)))
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))


# ---- AdamW ----


@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
def test_adamw_equals_torchs_plain_one_over_ten_steps(kernels):
    ours = build_model(CONFIG, device="cpu", seed=0)
    theirs = copy.deepcopy(ours)
    (adamw,) = make_optimizers(ours, train(), kernels)
    assert [adamw.defaults["fused"], adamw.defaults["foreach"]] == [kernels == "fused", kernels == "foreach"]
    decay = [p for p in theirs.parameters() if p.ndim >= 2]
    no_decay = [p for p in theirs.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.8, 0.9), eps=1e-6, foreach=True, fused=False,
    )  # fmt: skip
    for step in range(10):
        give_gradients([ours, theirs], step)
        adamw.step()
        reference.step()
    for (name, p), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(p, expected, what=name)


def test_only_matrices_decay():
    model = build_model(CONFIG, device="cpu", seed=0)
    (adamw,) = make_optimizers(model, train())
    decays = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        vector = "norm" in name or name.endswith("bias")
        assert decays[id(p)] == (0.0 if vector else 0.1), name


def test_muons_momentum_warms_up() -> None:
    given = train(optimizer="muon", muon_warmup_steps=10)
    optimizers, momenta = make_optimizers(build_model(CONFIG, device="cpu", seed=0), given), []
    for step in (1, 5, 10, 50):
        warm_momentum(optimizers, given, step)
        momenta.append(optimizers[-1].param_groups[0]["momentum"])
    assert momenta == pytest.approx([0.86, 0.90, 0.95, 0.95])


def test_a_model_that_starts_at_zero_passes_its_embeddings_on_and_learns_all_the_same() -> None:
    model = build_model(replace(CONFIG, zero_init=True, bias=False), device="cpu", seed=0)
    tokens = torch.arange(12).view(2, 6)
    assert_close(model.hidden(tokens), model.norm(model.embed(tokens)))
    model(tokens, tokens.roll(-1, 1)).backward()
    written = [
        p.grad
        for name, p in model.named_parameters()
        if name.endswith(("attn.out.weight", "ffn.down.weight"))
    ]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in written)


def test_muon_takes_the_matrices_inside_the_blocks_and_adamw_the_rest():
    model = build_model(CONFIG, device="cpu", seed=0)
    adamw, muon = make_optimizers(model, train(optimizer="muon", muon_lr=0.05))
    names = {id(p): name for name, p in model.named_parameters()}
    taken = [{names[id(p)] for group in o.param_groups for p in group["params"]} for o in (adamw, muon)]
    assert taken[0] | taken[1] == set(names.values())
    assert not taken[0] & taken[1]
    assert taken[1] == {
        f"blocks.{i}.{part}.weight"
        for i in range(2)
        for part in ("attn.qkv", "attn.out", "ffn.up", "ffn.down")
    }
    rows = {names[id(p)]: group["rows"] for group in muon.param_groups for p in group["params"]}
    assert rows["blocks.1.attn.qkv.weight"] == (32, 16, 16)
    assert rows["blocks.0.ffn.up.weight"] == (48, 48)
    assert rows["blocks.0.attn.out.weight"] == rows["blocks.1.ffn.down.weight"] == ()
    assert {group["lr"] for group in muon.param_groups} == {0.05}
    assert {group["lr"] for group in adamw.param_groups} == {3e-3}


def test_set_lr_is_a_factor_on_each_peak():
    optimizers = make_optimizers(
        build_model(CONFIG, device="cpu", seed=0), train(optimizer="muon", muon_lr=0.05)
    )
    for factor in (0.5, 0.25):
        set_lr(optimizers, factor)
        assert [g["lr"] for o in optimizers for g in o.param_groups] == pytest.approx(
            [3e-3 * factor] * 2 + [0.05 * factor] * 3
        )


def test_a_factor_of_zero_moves_nothing():
    model = build_model(CONFIG, device="cpu", seed=0)
    before = copy.deepcopy(model.state_dict())
    optimizers = make_optimizers(model, train(optimizer="muon"))
    give_gradients([model], 0)
    set_lr(optimizers, 0.0)
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- state ----


def _step(model: Transformer, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    give_gradients([model], seed)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_tensors_cover_every_parameter_and_slot_and_are_the_live_ones(kind):
    model = build_model(CONFIG, device="cpu", seed=0)
    optimizers = make_optimizers(model, train(optimizer=kind, muon_normalize=True))
    tensors = state_tensors(model, optimizers)
    expected = {f"model.{name}" for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        muon = kind == "muon" and name.startswith("blocks.") and p.ndim == 2
        expected |= {
            f"optimizer.{slot}.{name}"
            for slot in (
                ["momentum_buffer", "row_mean_square"] if muon else ["step", "exp_avg", "exp_avg_sq"]
            )
        }
    assert set(tensors) == expected
    pointers: dict[str, int] = {name: t.data_ptr() for name, t in tensors.items()}
    assert len(set(pointers.values())) == len(pointers), "no two names share memory"
    before: dict[str, Tensor] = {name: t.clone() for name, t in tensors.items()}
    _step(model, optimizers, 0)
    assert all(not torch.equal(tensors[name], before[name]) for name in tensors), (
        "an update must show in every tensor"
    )
    assert {name: t.data_ptr() for name, t in state_tensors(model, optimizers).items()} == pointers, (
        "and replace none of them"
    )


@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
def test_a_captured_update_counts_on_the_device(kernels: UpdateKernels) -> None:
    """From the beginning: counts that moved there later would not be those that checkpoints hold."""
    with torch.device("meta"):
        model = Transformer(CONFIG)

    def places(**how: bool) -> set[str]:
        tensors = state_tensors(model, make_optimizers(model, train(), kernels, **how))
        return {tensor.device.type for name, tensor in tensors.items() if name.startswith("optimizer.step.")}

    assert places(captured=True) == {"meta"}
    assert places() == {"meta" if kernels == "fused" else "cpu"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_model_restored_through_its_state_tensors_goes_on_to_the_same_bits(kind):
    first = build_model(CONFIG, device="cpu", seed=0)
    optimizers = make_optimizers(first, train(optimizer=kind))
    for step in range(3):
        _step(first, optimizers, step)
    second = build_model(CONFIG, device="cpu", seed=1)
    again = make_optimizers(second, train(optimizer=kind))
    target = state_tensors(second, again)
    for name, tensor in state_tensors(first, optimizers).items():
        target[name].copy_(tensor)
    for step in range(3, 6):
        _step(first, optimizers, step)
        _step(second, again, step)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_no_position_of_the_speedrun_s_model_sees_a_later_one() -> None:
    model = build_model(replace(load_recipe("speedrun/nano").model, zero_init=False), device="cpu", seed=0)
    tokens = torch.arange(24).view(1, 24)
    changed = tokens.clone()
    changed[:, 12:] += 100
    assert_close(model(tokens)[:, :12], model(changed)[:, :12])
    assert not torch.equal(model(tokens)[:, 12:], model(changed)[:, 12:])
