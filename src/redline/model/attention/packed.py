"""Causal softmax attention within each sequence of a packed row.

Three ways to the same numbers. In half precision on a GPU, short sequences take our own kernel, which also
rotates (`short`), and longer ones torch's kernel for sequences of several lengths. Everything else, GPUs older than
Ampere among it, spreads the sequences over a padded grid, one line each.

Shapes: T tokens of the row, S sequences, L the longest of them, A positions whose loss is wanted, H query
heads, K key/value heads, C head width. The row has a batch dimension of 1 before T.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.attention import short
from redline.model.attention.softmax import Rope, by_kernel, causal, older, rotate

if TYPE_CHECKING:
    from redline.model.transformer import Attention


class Copies(NamedTuple):
    """If sequences share a beginning, the row holds its tokens once. Attention is over a longer row in which each
    sequence has its own copy."""

    spread_E: Tensor
    """The position of the row in each place of the longer one."""
    kept_T: Tensor
    """The place in the longer row whose output each position takes: that of any one of several equal copies."""


class Packing(NamedTuple):
    """How one row holds several sequences: each attends to itself alone, and its positions count from 0."""

    positions_T: Tensor
    bounds_S: Tensor
    """int32: the start of each sequence, then the end of the last. They cover the row; some may be empty."""
    longest: int
    """No sequence is longer."""
    read_A: Tensor | None = None
    """Positions that a target follows; None: all."""
    copies: Copies | None = None
    """If there are any, the bounds are those of the longer row."""


class Grid(NamedTuple):
    """A packed row spread out, one sequence per line."""

    index_SL: Tensor
    """The position of the row in each place."""
    places_T: Tensor
    """Where in the flattened grid each position of the row stands."""


def attention(
    config: ModelConfig, packing: Packing, rope: Rope | None, x: Tensor
) -> Callable[["Attention", Tensor], Tensor]:
    """The seam's function for this row, for activations like x."""
    if older(x):  # torch's kernel refuses them, and ours needs more shared memory there than these GPUs have
        return functools.partial(on_grid, rope=rope, grid=grid_of(packing), mix=_copied_heads)
    if not x.is_cuda or x.dtype == torch.float32:
        return functools.partial(on_grid, rope=rope, grid=grid_of(packing))
    fits = short.fits(x.device, longest=packing.longest, head_size=config.head_size)
    if rope is not None and not config.qk_norm and fits:
        return functools.partial(with_short_kernel, rope=rope, packing=packing)
    return functools.partial(with_varlen_kernel, rope=rope, packing=packing, varlen=varlen_kernel())


def over_copies(
    over: Callable[..., Callable[["Attention", Tensor], Tensor]],
    config: ModelConfig,
    packing: Packing,
    rope: Rope | None,
    x: Tensor,
) -> Callable[["Attention", Tensor], Tensor]:
    """A variant's attention over the longer row of a packing with copies."""
    copies = packing.copies
    assert copies is not None
    longer = packing._replace(positions_T=packing.positions_T[copies.spread_E], copies=None)
    if rope is not None:
        rope = rope[0][copies.spread_E], rope[1][copies.spread_E]
    return functools.partial(_copied, attend=over(config, longer, rope, x), copies=copies)


def _copied(
    attn: "Attention", qkv_1THC: Tensor, *, attend: Callable[["Attention", Tensor], Tensor], copies: Copies
) -> Tensor:
    return attend(attn, qkv_1THC.index_select(1, copies.spread_E)).index_select(1, copies.kept_T)


def with_short_kernel(attn: "Attention", qkv_1THC: Tensor, *, rope: Rope, packing: Packing) -> Tensor:
    # Not [0], whose backward fills a tensor with zeros first.
    qkv_THC, bounds = qkv_1THC.flatten(0, 1), packing.bounds_S
    return short.attend(qkv_THC, *rope, bounds, q_heads=attn.heads, longest=packing.longest)[None]


def with_varlen_kernel(
    attn: "Attention", qkv_1THC: Tensor, *, rope: Rope | None, packing: Packing, varlen: Callable[..., Any]
) -> Tensor:
    bounds, longest = packing.bounds_S, packing.longest
    qkv = by_kernel(attn, qkv_1THC.flatten(0, 1), rope) or _rotated(attn, qkv_1THC, rope)
    y_THC = varlen(*qkv, bounds, bounds, longest, longest)
    assert isinstance(y_THC, Tensor)
    return y_THC.flatten(1)[None]


@functools.cache
def varlen_kernel() -> Callable[..., Any]:
    """torch's kernel. Importing it takes a second, which only packed rows on a GPU should pay."""
    from torch.nn.attention.varlen import varlen_attn

    # Before torch 2.13 there is no such argument, and fewer key/value heads are taken as they are.
    takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if takes_gqa else {}
    return functools.partial(varlen_attn, window_size=(-1, 0), **grouped)


def _softmax(attn: "Attention", q_SLHC: Tensor, k_SLKC: Tensor, v_SLKC: Tensor) -> Tensor:
    return causal(q_SLHC, k_SLKC, v_SLKC)


def _copied_heads(attn: "Attention", q_SLHC: Tensor, k_SLKC: Tensor, v_SLKC: Tensor) -> Tensor:
    return causal(q_SLHC, k_SLKC, v_SLKC, copied=True)


def on_grid(
    attn: "Attention",
    qkv_1THC: Tensor,
    *,
    rope: Rope | None,
    grid: Grid,
    mix: Callable[["Attention", Tensor, Tensor, Tensor], Tensor] = _softmax,
) -> Tensor:
    q, k, v = (
        x_THC.index_select(0, grid.index_SL.flatten()).unflatten(0, grid.index_SL.shape)
        for x_THC in _rotated(attn, qkv_1THC, rope)
    )
    return mix(attn, q, k, v).flatten(0, 1).index_select(0, grid.places_T)[None]


def grid_of(packing: Packing) -> Grid:
    starts_S, ends_S = packing.bounds_S[:-1], packing.bounds_S[1:]
    T, device = len(packing.positions_T), packing.bounds_S.device
    # Places beyond the end of a sequence read what comes next in the row: no query of the sequence looks so
    # far ahead.
    index_SL = (starts_S[:, None] + torch.arange(packing.longest, device=device)).clamp(max=T - 1)
    sequence_T = torch.searchsorted(ends_S, torch.arange(T, device=device, dtype=ends_S.dtype), right=True)
    return Grid(index_SL, sequence_T * packing.longest + packing.positions_T)


def _rotated(attn: "Attention", qkv_1THC: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the row, each (T, heads, C)."""
    if rope is not None and attn.q_norm is None:
        # Both in one rotation: without a compiler that halves its dozen small kernels.
        qk, v = qkv_1THC.split([attn.heads + attn.kv_heads, attn.kv_heads], dim=2)
        q, k = rotate(qk, rope).split([attn.heads, attn.kv_heads], dim=2)
    else:
        q, k, v = attn.split(qkv_1THC)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
