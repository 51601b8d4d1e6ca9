"""Kernel attention: softmax attention estimated from positive random features (FAVOR+), linear in the length.

    w_KMC = draw(config, seed)                              # random directions of a layer
    y_BTD = causal(q_BTHC, k_BTKC, v_BTKC, w_KMC)           # every query sees itself and what came before

exp(q.k / sqrt(C)) is the mean over w ~ N(0, 1) of exp(w.q' - |q'|^2/2) exp(w.k' - |k'|^2/2), where x' = x / C^(1/4)
(Choromanski et al., arXiv:2009.14794). The M directions of a key/value head are orthogonal in groups of C, which
lowers the variance, and have the lengths of Gaussian vectors, which keeps the estimate unbiased. All that a query
needs of the keys before it is then two sums over them, M x C and M numbers, whatever their number.

Features are exponentials, and no constant may be added to keep them from 0: it would be a bias. Each is stored
relative to `top`, the largest exponent of that feature among the keys so far, so a stored feature is at most 1, and
a sum over the past is at least 1. A query's exponents take `top` back and are shifted by their maximum; the shift
and |q'|^2/2 divide out. So the denominator is at least 1 in the recurrent form. In the chunked form `top` is that of
a whole chunk, whose later keys change no value but its rounding; FLOOR keeps the denominator above 0.

The functions here are plain PyTorch, for CPUs and as the reference of the Triton kernels in
`favor_kernels` and `favor_step`.

Shapes: B batch, T tokens, H query heads, K key/value heads, G = H / K, C head width, M features, N chunks of L
tokens.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.attention import favor_kernels
from redline.model.attention.packed import Packing, grid_of, on_grid
from redline.model.attention.softmax import Rope, rotate
from redline.model.attention.state import Room, Rows
from redline.plan.arithmetic import FAVOR_CHUNK

if TYPE_CHECKING:
    from redline.model.transformer import Attention

FLOOR = -80.0
"""Least exponent of a key's feature relative to the largest in its chunk: e^-80 is still a normal number in fp32."""


class Sums(NamedTuple):
    """What queries need from the keys and values so far, relative to e^top for each feature."""

    mix: Tensor
    """(..., K, M, C): features x values."""
    total: Tensor
    """(..., K, M): features."""
    top: Tensor
    """(..., K, M): the largest exponent so far."""


def draw(config: ModelConfig, seed: int) -> Tensor:
    """Directions for the key/value heads of one layer, (K, M, C) in fp32: rows of random rotations, each with the
    length of a Gaussian vector. Drawn on the host, so that every device gets the same."""
    K, M, C = config.kv_heads, config.features, config.head_size
    generator = torch.Generator().manual_seed(seed)
    shape = (2, K, -(-M // C), C, C)
    gaussian, lengths = torch.randn(shape, dtype=torch.float64, generator=generator)
    rotations, upper = torch.linalg.qr(gaussian)
    # QR leaves the signs to the algorithm; with a positive diagonal the rotation is uniform.
    rotations = rotations * upper.diagonal(dim1=-2, dim2=-1).sgn()[..., None, :]
    rows = rotations * lengths.norm(dim=-1, keepdim=True)
    return rows.flatten(1, 2)[:, :M].float().contiguous()


def attention(
    config: ModelConfig, packing: Packing | None, rope: Rope | None, x: Tensor
) -> Callable[["Attention", Tensor], Tensor]:
    """The seam's function for a batch or a packed row."""
    if packing is not None:
        return functools.partial(on_grid, rope=rope, grid=grid_of(packing), mix=_mix)
    return functools.partial(attend, rope=rope)


def attend(attn: "Attention", qkv_BTHC: Tensor, *, rope: Rope | None) -> Tensor:
    q, k, v = attn.split(qkv_BTHC)
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    return _mix(attn, q, k, v)


def _mix(attn: "Attention", q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    assert attn.projection is not None
    return causal(q_BTHC, k_BTKC, v_BTKC, attn.projection)


def causal(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, w_KMC: Tensor) -> Tensor:
    """Each row attends to itself and to what came before; (B, T, H * C)."""
    if favor_kernels.fits(q_BTHC, w_KMC):
        y_BTHC, _ = favor_kernels.attend(q_BTHC, k_BTKC, v_BTKC, w_KMC.to(q_BTHC.dtype))
        return y_BTHC.flatten(2)
    return chunked(q_BTHC, k_BTKC, v_BTKC, w_KMC)[0]


def exponents(x: Tensor, w_KMC: Tensor) -> Tensor:
    """w.x' of every feature, (..., K, n, M) for x (..., K, n, C). The directions are rounded to the dtype in which
    the model computes, so that a copy of them in that dtype computes the same."""
    return x * x.shape[-1] ** -0.25 @ w_KMC.mT


def key_exponents(k: Tensor, w_KMC: Tensor) -> Tensor:
    """w.k' - |k'|^2/2."""
    return exponents(k, w_KMC) - 0.5 * k.shape[-1] ** -0.5 * k.square().sum(-1, keepdim=True)


def chunked(
    q_BTHC: Tensor,
    k_BTKC: Tensor,
    v_BTKC: Tensor,
    w_KMC: Tensor,
    lengths_B: Tensor | None = None,
    *,
    chunk: int = FAVOR_CHUNK,
) -> tuple[Tensor, Sums]:
    """The attention, and the sums after the last token of each row (rows may be shorter than T). Quadratic within a
    chunk, recurrent from chunk to chunk; computes in fp32 at least."""
    (B, T, H, C), K = q_BTHC.shape, k_BTKC.shape[2]
    L = min(chunk, T)
    wide = torch.promote_types(q_BTHC.dtype, torch.float32)
    w = w_KMC.to(q_BTHC.dtype).to(wide)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -T % L)).to(wide) for x in (q_BTHC, k_BTKC, v_BTKC))
    k, v = (x.unflatten(1, (-1, L)).permute(0, 1, 3, 2, 4) for x in (k, v))  # (B, N, K, L, C)
    q = q.unflatten(1, (-1, L)).unflatten(3, (K, -1)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)  # G x L rows
    a = key_exponents(k, w)
    if lengths_B is not None or T % L:
        ends = T if lengths_B is None else lengths_B[:, None, None]
        at_NL = torch.arange(a.shape[1] * L, device=a.device).view(-1, L)
        a = a.masked_fill((at_NL >= ends)[..., None, :, None], -torch.inf)
    top = a.detach().amax(3).cummax(1).values  # (B, N, K, M)
    # Padding leaves e^-80, which no sum notices.
    phi_k = (a - top[:, :, :, None]).clamp(min=FLOOR).exp()
    before, after = _scan(Sums(phi_k.mT @ v, phi_k.sum(3), top))
    b = exponents(q, w) + top[:, :, :, None]
    phi_q = (b - b.detach().amax(-1, keepdim=True)).exp()
    scores = (phi_q @ phi_k.mT).unflatten(3, (-1, L)).tril().flatten(3, 4)
    total = scores.sum(-1) + (phi_q * before.total[:, :, :, None]).sum(-1)
    y = (scores @ v + phi_q @ before.mix) / total[..., None]  # (B, N, K, G x L, C)
    y = y.unflatten(3, (-1, L)).permute(0, 1, 4, 2, 3, 5).reshape(B, -1, H * C)
    return y[:, :T].to(q_BTHC.dtype), after


def _scan(own: Sums) -> tuple[Sums, Sums]:
    """From the sums of each chunk, (B, N, ...), those before each chunk relative to that chunk's `top`, and those
    after the last."""
    fades = (own.top[:, :-1] - own.top[:, 1:]).exp().unbind(1)
    mixes, totals = own.mix.unbind(1), own.total.unbind(1)
    before = [(torch.zeros_like(mixes[0]), torch.zeros_like(totals[0]))]
    mix, total = mixes[0], totals[0]
    for fade, more, count in zip(fades, mixes[1:], totals[1:], strict=True):
        before.append((mix * fade[..., None], total * fade))
        mix, total = before[-1][0] + more, before[-1][1] + count
    stacked = [torch.stack(parts, dim=1) for parts in zip(*before, strict=True)]
    return Sums(stacked[0], stacked[1], own.top), Sums(mix, total, own.top[:, -1])


def recurrent(q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, w_KMC: Tensor, sums: Sums) -> tuple[Tensor, Sums]:
    """One token more for each row: (B, H * C), and the sums with it."""
    wide = sums.mix.dtype
    w = w_KMC.to(q_BHC.dtype).to(wide)
    q, k, v = (x.to(wide) for x in (q_BHC, k_BKC, v_BKC))
    a = key_exponents(k[:, :, None], w).squeeze(2)
    top = torch.maximum(sums.top, a)
    fade, phi_k = (sums.top - top).exp(), (a - top).exp()
    total = sums.total * fade + phi_k
    mix = sums.mix * fade[..., None] + phi_k[..., None] * v[:, :, None]
    b = exponents(q.unflatten(1, (w.shape[0], -1)), w) + top[:, :, None]
    phi_q = (b - b.amax(-1, keepdim=True)).exp()
    y = (phi_q @ mix) / (phi_q @ total[..., None])  # (B, K, G, C)
    return y.flatten(1).to(q_BHC.dtype), Sums(mix, total, top)


class Features:
    """Generation with kernel attention: the sums of each sequence, of the same size whatever its length."""

    def __init__(
        self, config: ModelConfig, rope: Rope | None, room: Room, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.rope = rope
        wide = torch.promote_types(dtype, torch.float32)

        def empty(number: int) -> Sums:
            shape = (config.num_layers, number, config.kv_heads, config.features)
            mix, total, top = (
                torch.zeros(size, device=device, dtype=wide)
                for size in ((*shape, config.head_size), shape, shape)
            )
            return Sums(mix, total, top)

        self.pool, self.slots = empty(room.prompts), empty(room.slots + 1)

    @staticmethod
    def sequence_bytes(config: ModelConfig, room: Room, dtype: torch.dtype) -> int:
        numbers = config.num_layers * config.kv_heads * config.features * (config.head_size + 2)
        return 2 * numbers * torch.promote_types(dtype, torch.float32).itemsize

    def read(
        self, layer: int, attn: "Attention", qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor
    ) -> Tensor:
        q, k, v = attn.split(qkv_MTHC)
        if self.rope is not None:
            at = self.rope[0][: q.shape[1]], self.rope[1][: q.shape[1]]
            q, k = rotate(q, at), rotate(k, at)
        assert attn.projection is not None
        y, sums = chunked(q, k, v, attn.projection, lengths_M)
        for pool, found in zip(self.pool, sums, strict=True):
            pool[layer, prompts_M.long()] = found
        return y

    def start(self, slots_B: Tensor, prompts_B: Tensor) -> None:
        for slots, pool in zip(self.slots, self.pool, strict=True):
            slots[:, slots_B] = pool[:, prompts_B]

    def step(self, layer: int, attn: "Attention", qkv_BHC: Tensor, rows: Rows) -> Tensor:
        assert attn.projection is not None
        if favor_kernels.fits(qkv_BHC, attn.projection):
            from redline.model.attention import favor_step  # Triton exists only where CUDA does

            normed = qkv_BHC if attn.q_norm is None else torch.cat(attn.split(qkv_BHC), dim=-2)
            return favor_step.step(self, layer, attn.projection.to(qkv_BHC.dtype), normed, rows)
        at = rows.slot_B.long()
        q, k, v = attn.split(qkv_BHC)
        if self.rope is not None:
            position = (rows.prompt_len_N[at] + rows.count_N[at] - 1).long()
            angles = self.rope[0][position], self.rope[1][position]
            q, k = rotate(q, angles), rotate(k, angles)
        y, sums = recurrent(q, k, v, attn.projection, Sums(*(part[layer, at] for part in self.slots)))
        for slots, found in zip(self.slots, sums, strict=True):
            slots[layer, at] = found
        return y
