"""How far an FP8 head may lie from an exact one, for the tests on CPUs and on GPUs: derived, not found by trial.

Rounding changes a number by at most 2^-4 of it in e4m3, which has three bits after the first, and 2^-3 in e5m2, which has
two. The error is as good as uniform, so its root mean square is at most 1/sqrt(3) of that: just above a power of two, and
half as much just below the next one. Independent errors add in quadrature."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.config.recipe import IGNORED
from redline.data.candidates import draw
from redline.model.cross_entropy import GRADIENT_SCALE, Candidates, Reduction, linear_cross_entropy
from redline.train.objective import candidates_of

E4M3, E5M2 = 2**-4 / math.sqrt(3), 2**-3 / math.sqrt(3)


@dataclass
class Work:
    """A head's inputs, exact in bf16."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    factors: Tensor
    candidates: int = 0
    """Tokens of the softmax, if not all."""

    def fp8(self, device: str, dtype: torch.dtype, *, reduction: Reduction) -> list[Tensor]:
        """Losses and both gradients, in float64."""
        x = self.x.to(device, dtype).requires_grad_()
        weight = self.weight.to(device, torch.float32).requires_grad_()
        targets, factors = self.targets.to(device), self.factors.to(device, torch.float32)
        some = self.some(device)
        how = linear_cross_entropy(x, weight, targets, how="fp8", reduction=reduction, candidates=some)
        (how * (factors if reduction == "none" else factors[0])).sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [how.detach().cpu().double(), x.grad.cpu().double(), weight.grad.cpu().double()]

    def some(self, device: str = "cpu") -> Candidates | None:
        if not self.candidates:
            return None
        counted = self.targets[self.targets != IGNORED].numpy()
        words = draw(counted, size=self.candidates, vocab_size=len(self.weight), seed=0)
        return candidates_of(torch.from_numpy(words).to(device))

    def losses(self, logits: Tensor) -> Tensor:
        """As they are defined: a sampled token counts as often as there are tokens for which it stands."""
        counts, some = torch.ones(logits.shape[-1]).double(), self.some()
        if some is not None:
            others = (len(counts) - int(some.targets)) / (len(some.tokens_K) - int(some.targets))
            counts = torch.zeros_like(counts)
            counts[some.tokens_K.long()] = others
            counts[some.tokens_K[: int(some.targets)].long()] = 1.0
        sums = (logits + counts.log()).logsumexp(-1)
        of_targets = logits.gather(1, self.targets.clamp_min(0)[:, None])[:, 0]
        return (sums - of_targets) * (self.targets != IGNORED)

    def gradient(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of each loss by the logits."""
        logits = (x @ weight.T).requires_grad_()
        self.losses(logits).sum().backward()
        assert logits.grad is not None
        return logits.grad


def work(tokens: int = 200, hidden: int = 64, vocab: int = 512, candidates: int = 0) -> Work:
    made = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, hidden, generator=made).bfloat16().double() for n in (tokens, vocab))
    targets = torch.randint(0, vocab, (tokens,), generator=made)
    targets[::7] = IGNORED
    factors = torch.randn(tokens, generator=made).double()
    return Work(x, (0.25 * weight), targets, factors, candidates)


def rounded(x: Tensor) -> Tensor:
    """As e4m3, scaled by a power of two."""
    scale = 2.0 ** (8 - math.frexp(float(x.abs().max()))[1])
    return (x * scale).to(torch.float8_e4m3fn).double() / scale


def check_losses(device: str, dtype: torch.dtype, candidates: int = 0) -> None:
    """A loss changes by its gradient times the errors of what is multiplied, to first order."""
    its = work(candidates=candidates)
    found = its.fp8(device, dtype, reduction="none")[0]
    exact = its.losses(its.x @ its.weight.T)
    assert not found[its.targets == IGNORED].any()
    g = its.gradient(its.x, its.weight)
    of_x = ((g @ its.weight) * its.x).square().sum(-1)
    of_weight = (g.square() @ its.weight.square() * its.x.square()).sum(-1)
    bound = E4M3 * (of_x + of_weight).mean().sqrt()
    assert bound / 2 < (found - exact).square().mean().sqrt() < bound


def check_gradients(device: str, dtype: torch.dtype, reduction: Reduction, candidates: int = 0) -> None:
    """Against exact products with the gradient at the rounded logits: what is left is e5m2's error and one of e4m3's."""
    its = work(candidates=candidates)
    _, dx, dweight = its.fp8(device, dtype, reduction=reduction)
    factors = its.factors[:, None] if reduction == "none" else its.factors[0]
    g = its.gradient(rounded(its.x), rounded(its.weight)) * factors
    each = math.hypot(E4M3, E5M2)
    for found, left, right in ((dx, g, its.weight), (dweight, g.T, its.x)):
        bound = each * (left.square() @ right.square()).sum().sqrt()
        assert (found - left @ right).norm() < bound
    assert not dx[its.targets == IGNORED].any()


def check_every_entry(device: str, dtype: torch.dtype) -> None:
    """With the identity as weights the gradient of the inputs is the logits': each within half a step of e5m2, and one of
    its numbers; from 2^-30 on it is seen."""
    made = torch.Generator().manual_seed(0)
    x = 2.0 * torch.randint(-8, 8, (64, 64), generator=made).double()
    its = Work(
        x, torch.eye(64).double(), torch.randint(0, 64, (64,), generator=made), torch.ones(64).double()
    )
    found, exact = its.fp8(device, dtype, reduction="sum")[1], its.gradient(x, its.weight)
    # fp32's own error of the exponential decides at a tie
    assert ((found - exact).abs() <= (2**-3 + 1e-5) * exact.abs() + 2**-31).all()
    assert torch.equal(found, (found * GRADIENT_SCALE).to(torch.float8_e5m2).double() / GRADIENT_SCALE)
    assert (found != 0)[exact.abs() >= 2**-30].all()
    assert (found == 0).any(), "nothing here is too small to be seen"
