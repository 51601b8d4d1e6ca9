"""Optimisers (fused AdamW, and Muon for the matrices inside the blocks) and the schedule of their learning rate.

    optimizers = make_optimizers(model, recipe.train)     # with their state, so a first update needs no more memory
    set_lr(optimizers, factor)
    state_tensors(model, optimizers)                      # flat name -> tensor, for checkpoints

Muon works on stacks of equal matrices: one batched product instead of hundreds of small ones. Queries, keys and values,
which one layer computes, are three matrices to it, and the two halves of SwiGLU are two. On each it equals
`torch.optim.Muon` (held by a test). Sharded matrices are gathered, orthogonalised on every process and cut again.

A schedule is a factor on the peak rate, from how far the run has come: the larger of steps/steps and hours/max_hours, so
a run bounded by the clock decays to its end whatever its speed.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from redline.config.recipe import ModelConfig, TrainConfig, UpdateKernels
from redline.model.flat import joined, zeros_like
from redline.model.transformer import Transformer, part_of
from redline.plan.arithmetic import MUON_STACK
from redline.train.process import full, is_spread

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, chosen by Muon's author for a steep slope at zero."""
ROUNDS = 5
MOMENTUM = (0.85, 0.95)
"""Muon's at the first update and after its warm-up."""


class _Uncompiled(torch.optim.Optimizer):
    """Drops the wrappers by which torch keeps its compiler out of these methods: their first call imports the compiler,
    1.0 s of a start on the host of an H200, even if nothing is compiled."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(_Uncompiled, torch.optim.AdamW):
    """torch's AdamW. Parameters in one piece of memory, with gradients in another, are updated as one tensor: the fused kernel
    takes 65,536 elements per block, so many small tensors leave most of a GPU idle."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists: parameters, gradients, two moments, a third that stays empty, counts of updates."""
        found: bool = super()._init_group(group, *lists)
        params, gradients, *_, steps = lists
        filled = [tensors for tensors in lists if tensors]
        if len(params) > 1 and joined(gradients) is not None:
            whole = [flat for tensors in filled if (flat := joined(tensors)) is not None]
            if len(whole) == len(filled):
                torch._foreach_add_([whole[-1][1:]], 1)  # torch counts in the first
                for tensors, flat in zip(filled, whole, strict=True):
                    tensors[:] = [flat[0] if tensors is steps else flat]
        return found


class Muon(_Uncompiled):
    """Momentum whose update is made orthogonal (Newton-Schulz in bf16), with decoupled weight decay. A group's `rows`
    are the row counts of the matrices that each of its parameters holds one below the other; each matrix is made
    orthogonal separately."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = MOMENTUM[1],
        normalize: bool = False,
    ) -> None:
        given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {**given, "normalize": normalize, "rows": ()})
        for group in self.param_groups:
            for stack in _stacks(group["params"]):
                first = stack[0]
                like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
                whole = None if is_spread(first) else torch.zeros(len(stack), *first.shape, **like)
                slots = {"momentum_buffer": [torch.zeros_like(p) for p in stack] if whole is None else whole}
                if normalize:
                    slots["row_mean_square"] = torch.zeros(len(stack), len(first), **like)
                for p, *values in zip(stack, *slots.values(), strict=True):
                    self.state[p].update(zip(slots, values, strict=True))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for stack in _stacks([p for p in group["params"] if p.grad is not None]):
                self._update(stack, group)

    def _update(self, stack: list[Tensor], group: dict[str, Any]) -> None:
        """Learning rate and momentum may be tensors, which a captured update reads again at each replay; at a rate of 0 and
        a momentum of 1 nothing changes."""
        lr, momentum, rows = group["lr"], group["momentum"], group["rows"] or stack[0].shape[:1]
        update, scale_PR = _orthogonal(self._ahead(stack, momentum), rows)
        scale_PR = scale_PR.to(stack[0].dtype)
        if group["normalize"]:
            seen = self._slots("row_mean_square", stack)
            lengths_PR = torch.linalg.vector_norm(update, dim=-1, dtype=scale_PR.dtype)
            square_PR = (lengths_PR * scale_PR).square()
            _average(seen, list(square_PR / update.shape[-1]), momentum)
            parts = zip(*(whole.split(rows, dim=1) for whole in (square_PR, torch.stack(seen))), strict=True)
            scale_PR = scale_PR * torch.cat([_even(*part) for part in parts], dim=1)
        update = update * (scale_PR * -lr)[..., None]
        torch._foreach_mul_(stack, 1 - lr * group["weight_decay"])
        torch._foreach_add_(stack, [part_of(u, p) for u, p in zip(update, stack, strict=True)])

    def _ahead(self, stack: list[Tensor], momentum: float | Tensor) -> Tensor:
        """Add the gradients to the momentum and return Nesterov's momentum as whole matrices. A method of its own, so that
        its memory is free when they are made orthogonal."""
        fresh = [p.grad for p in stack if p.grad is not None]
        buffers, fresh = _average(self._slots("momentum_buffer", stack), fresh, momentum)
        # a spread one is cast first: half the bytes to gather
        ahead = (g.lerp(buffer, momentum).bfloat16() for g, buffer in zip(fresh, buffers, strict=True))
        whole = [full(t) if is_spread(t) else t for t in ahead]
        return whole[0] if whole[0].ndim == 3 else torch.stack(whole)

    def _slots(self, name: str, stack: list[Tensor]) -> list[Tensor]:
        return [self.state[p][name] for p in stack]


def _average(
    averages: list[Tensor], new: list[Tensor], momentum: float | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Average in new values. Returns both lists; tensors in one piece of memory as one stack, because few large kernels are
    quicker than many small ones."""
    if (flat := joined(averages)) is not None:
        new = [torch.stack(new)]
        averages = [flat.view_as(new[0])]
    for average, one in zip(averages, new, strict=True):
        average.lerp_(one, 1 - momentum)
    return averages, new


def _orthogonal(x_PRC: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Each matrix of a stack made orthogonal, those below each other one by one; and the factor by which Muon's author
    scales each row."""
    done, scales, at, columns = [], [], 0, x_PRC.shape[-1]
    for size, same in groupby(rows):
        end = at + size * len(list(same))
        each = orthogonalize(x_PRC[:, at:end].reshape(-1, size, columns))
        done.append(each.reshape(len(x_PRC), -1, columns))
        scales.append(x_PRC.new_full((1, end - at), max(1.0, size / columns) ** 0.5, dtype=torch.float32))
        at = end
    return torch.cat(done, dim=1), torch.cat(scales, dim=1)


def _even(square_PR: Tensor, mean_square_PR: Tensor) -> Tensor:
    """Factors that make rows with these square sums even, by their mean squares so far, and keep the length of the whole
    (NorMuon, arXiv 2510.05491)."""
    over_PR = 1 / mean_square_PR.sqrt().clamp(min=1e-8)
    before, after = (t.sum(-1, keepdim=True).sqrt() for t in (square_PR, square_PR * over_PR.square()))
    return over_PR * (before / after.clamp(min=1e-8))


def orthogonalize(x: Tensor) -> Tensor:
    """Push the singular values of each matrix of a stack towards one."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _stacks(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group them by shape, in pieces of at most MUON_STACK elements."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for p in params:
        by_shape[p.shape].append(p)
    stacks = []
    for shape, group in by_shape.items():
        size = max(1, MUON_STACK // shape.numel())
        stacks += [group[i : i + size] for i in range(0, len(group), size)]
    return stacks


def _rows(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Row counts of the matrices that a block's parameter holds one below the other; empty if it is a single one."""
    if name.endswith("attn.qkv.weight"):
        return tuple(
            heads * config.head_size for heads in (config.num_heads, config.kv_heads, config.kv_heads)
        )
    return (config.ffn_size,) * 2 if name.endswith("ffn.up.weight") and config.activation == "swiglu" else ()


def make_optimizers(
    model: Transformer, train: TrainConfig, kernels: UpdateKernels = "fused", *, captured: bool = False
) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the blocks' matrices and AdamW for the rest. Norms and biases do not decay. `captured`: a CUDA
    graph will change the weights, and with them the counts of updates."""
    matrices, vectors = [], []
    hidden: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim < 2:
            vectors.append(p)
        elif train.optimizer == "muon" and name.startswith("blocks."):
            hidden[_rows(name, model.config)].append(p)
        else:
            matrices.append(p)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:  # adapters under Muon leave none: all of them are matrices inside the blocks
        optimizers.append(_adamw(groups, train, kernels, captured))
    if hidden:
        parts = [{"params": params, "rows": rows} for rows, params in hidden.items()]
        decay, normalize = train.weight_decay, train.muon_normalize
        optimizers.append(Muon(parts, lr=train.muon_lr, weight_decay=decay, normalize=normalize))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _adamw(groups: list[dict[str, Any]], train: TrainConfig, kernels: UpdateKernels, captured: bool) -> AdamW:
    """AdamW with its state."""
    chosen: dict[str, Any] = {"fused": kernels == "fused", "foreach": kernels == "foreach"}
    adamw = AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, **chosen)
    for group in groups:
        params = group["params"]
        # Only the fused kernel and a graph count on the device; the others would wait for the GPU to read the count,
        # tensor by tensor.
        device = params[0].device if kernels == "fused" or captured else "cpu"
        steps = torch.zeros(len(params), dtype=torch.float32, device=device).unbind()
        for p, *slots in zip(params, steps, zeros_like(params), zeros_like(params), strict=True):
            adamw.state[p] = dict(zip(("step", "exp_avg", "exp_avg_sq"), slots, strict=True))
    return adamw


def warm_momentum(optimizers: Sequence[torch.optim.Optimizer], train: TrainConfig, step: int) -> None:
    """Muon's momentum for update `step` (1 is the first)."""
    if train.optimizer == "muon" and train.muon_warmup_steps:
        low, high = MOMENTUM
        share = min(1.0, step / train.muon_warmup_steps)
        for group in optimizers[-1].param_groups:
            group["momentum"] = low + share * (high - low)


def set_lr(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def state_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Learning weights as `model.<name>`, state as `optimizer.<slot>.<name>`; the tensors, not copies."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for p, name in names.items()}
    # Random features are not parameters, but a model without them would compute something else.
    tensors |= {f"model.{name}": b for name, b in model.named_buffers() if name.endswith(".projection")}
    for optimizer in optimizers:
        for p, slots in optimizer.state.items():
            tensors |= {f"optimizer.{slot}.{names[p]}": value for slot, value in slots.items()}
    return tensors


# ---- the schedule ----


def fixed(train: TrainConfig, steps: int) -> TrainConfig:
    """The settings for a run of this many updates: epochs and shares become numbers of updates."""
    warmup = train.warmup_steps or round(train.warmup_fraction * steps)
    return replace(train, steps=steps, epochs=0, warmup_steps=min(warmup, steps), warmup_fraction=0.0)


def progress(train: TrainConfig, step: int, elapsed_s: float) -> float:
    """The share of the run that is done before update `step` (1 is the first), between 0 and 1."""
    by_steps = (step - 1) / train.steps
    by_clock = elapsed_s / (train.max_hours * 3600) if train.max_hours is not None else 0.0
    return min(1.0, max(by_steps, by_clock))


def lr_factor(train: TrainConfig, step: int, elapsed_s: float = 0.0) -> float:
    """Warm-up, then the schedule's shape down to `min_lr_ratio`; the lower of the two if the clock runs out early."""
    ramp = min(1.0, step / train.warmup_steps) if train.warmup_steps else 1.0
    warm, now = train.warmup_steps / train.steps, progress(train, step, elapsed_s)
    behind = max(0.0, (now - warm) / (1.0 - warm)) if warm < 1.0 else float(now == 1.0)
    return min(ramp, train.min_lr_ratio + (1.0 - train.min_lr_ratio) * _shape(train, behind))


def _shape(train: TrainConfig, behind: float) -> float:
    match train.schedule:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * behind))
        case "linear":
            return 1.0 - behind
        case "wsd":
            return min(1.0, (1.0 - behind) / train.decay_fraction) if train.decay_fraction > 0 else 1.0
        case "constant":
            return 1.0
