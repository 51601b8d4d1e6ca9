"""PCGrad (Yu et al., 2020), exact on any number of processes: if the gradients of two groups point against each other,
each loses its part along the other. Off unless a recipe asks for it.

    learner.combine = PCGrad(learner, groups=("maths", "code"), mode="global", seed=0, updates_done=lambda: step)

Every projected gradient is a weighted sum of the groups' gradients g_k, so the method is a function of their K x K inner
products. Each process adds up those of its shard, in fp64; one all-reduce of a few kilobytes completes them; the weights
w_k are computed on the host. Inner products of one shard alone see conflicts that are not there.

All passes have the same weight, so the g_k add up to the gradient of the mixed batch. Under FSDP a pass adds up what all
processes computed in it, so pass t must belong to the same group on all of them: `groups` gives the order, and a process
with fewer passes of a group runs passes that count for nothing.

After every group but the last the sum of the gradients so far is kept: the gradient on the parameters is never touched
while passes run, and an update without a conflict is that of `Sum` to the last bit. That takes 4 bytes x parameters x
(K - 1) / processes, on the device or on the host (`place`).
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from redline.train.process import is_spread
from redline.train.step import Learner, Numbers

Mode = Literal["watch", "global", "tensor"]
"""`watch` reports conflicts and leaves the gradient as it is; `tensor` decides for every weight tensor separately."""
Place = Literal["device", "host"]
CHUNK = 1 << 20
"""Elements of each group whose inner products are taken together: 8 bytes x K x this on the device."""
PARTS = 256
"""Parts of a chunk multiplied side by side: one long product would use a single multiprocessor."""


def projection_weights(gram_KK: NDArray[np.float64], order: np.random.Generator) -> NDArray[np.float64]:
    """The weights of the groups' gradients in their PCGrad sum, from their inner products."""
    groups = range(len(gram_KK))
    mixed_KK = np.eye(len(gram_KK))  # row i: the projected gradient of group i in terms of all
    for i in groups:
        for j in order.permutation([other for other in groups if other != i]):
            inner = mixed_KK[i] @ gram_KK[:, j]
            if inner < 0 < gram_KK[j, j]:
                mixed_KK[i, j] -= inner / gram_KK[j, j]
    return np.asarray(mixed_KK.sum(axis=0))


class PCGrad:
    def __init__(
        self,
        learner: Learner,
        *,
        groups: Sequence[str],
        mode: Mode,
        seed: int,
        updates_done: Callable[[], int],
        place: Place = "device",
    ) -> None:
        """`groups`: all that may come, in their order. Projections are ordered by the seed and `updates_done`."""
        self.learner, self.groups, self.mode, self.place = learner, tuple(groups), mode, place
        self.seed, self.updates_done = seed, updates_done
        self.restart()

    def restart(self) -> None:
        self._parameters: list[tuple[torch.nn.Parameter, list[Tensor | None]]] = [
            (parameter, []) for parameter in self.learner.model.parameters() if parameter.requires_grad
        ]
        self._seen = 0

    def keep(self, group: str) -> None:
        place = self.groups.index(group)
        assert place >= self._seen, f"group {group} came after one that follows it in {self.groups}"
        for parameter, sums in self._parameters:
            before = sums[-1] if sums else None
            sums.extend([before] * (place - self._seen))  # for groups that this update lacks
            if place < len(self.groups) - 1:
                sums.append(self._copy(parameter))
        self._seen = place + 1
        self.learner.mark("combine_s")

    def finish(self) -> Numbers:
        for _, sums in self._parameters:  # groups that did not come add nothing
            sums.extend([sums[-1] if sums else None] * (len(self.groups) - 1 - len(sums)))
        gram_NKK = self._inner_products()
        if self.mode == "global":
            weights = self._weights(gram_NKK.sum(axis=0))
            self._project([weights] * len(gram_NKK))
        elif self.mode == "tensor":
            self._project([self._weights(gram_KK, n) for n, gram_KK in enumerate(gram_NKK)])
        self.restart()
        numbers = self._conflicts(gram_NKK)
        self.learner.mark("combine_s")
        return numbers

    def _copy(self, parameter: torch.nn.Parameter) -> Tensor | None:
        if parameter.grad is None:
            return None
        gradient = _local(parameter.grad)
        if self.place == "device":
            return gradient.clone()
        pinned = gradient.device.type == "cuda"
        on_host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=pinned)
        return on_host.copy_(gradient, non_blocking=pinned)

    def _inner_products(self) -> NDArray[np.float64]:
        """Inner products of the gradients of all groups, for every parameter."""
        K, process = len(self.groups), self.learner.process
        gram_NKK = torch.zeros(len(self._parameters), K, K, dtype=torch.float64, device=process.device)
        for gram_KK, (parameter, sums) in zip(gram_NKK, self._parameters, strict=True):
            if parameter.grad is None:
                continue
            gradient = _local(parameter.grad)
            flat = [None if kept is None else kept.reshape(-1) for kept in [*sums, gradient]]
            for start in range(0, gradient.numel(), CHUNK):
                size = min(CHUNK, gradient.numel() - start)
                rows_KC = torch.zeros(
                    K, -(-size // PARTS) * PARTS, dtype=torch.float64, device=process.device
                )
                for row_C, kept in zip(rows_KC, flat, strict=True):
                    if kept is not None:
                        row_C[:size].copy_(kept[start : start + size], non_blocking=True)
                rows_KC[1:] -= rows_KC[:-1].clone()  # in fp64: a group that adds nothing gets exact zeros
                rows_PKE = rows_KC.view(K, PARTS, -1).transpose(0, 1)
                gram_KK += (rows_PKE @ rows_PKE.transpose(1, 2)).sum(dim=0)
            # every process has the whole of it, or every replica
            gram_KK /= process.replicas if is_spread(parameter.grad) else process.world_size
        on_host = gram_NKK.cpu()
        if process.world_size > 1:
            with self.learner.waiting():
                dist.all_reduce(on_host)
        return np.asarray(on_host.numpy())

    def _weights(self, gram_KK: NDArray[np.float64], *tensor: int) -> NDArray[np.float64] | None:
        """None where no pair is in conflict: then nothing would be projected."""
        if not (gram_KK < 0).any():
            return None
        return projection_weights(gram_KK, np.random.default_rng([self.seed, self.updates_done(), *tensor]))

    def _project(self, weights_NK: Sequence[NDArray[np.float64] | None]) -> None:
        """Leave the sum of w_k g_k on the parameters: with S_k = g_1 + ... + g_k, the sum of (w_k - w_k+1) S_k."""
        for weights_K, (parameter, sums) in zip(weights_NK, self._parameters, strict=True):
            if weights_K is None or parameter.grad is None:
                continue
            gradient = _local(parameter.grad)
            gradient.mul_(float(weights_K[-1]))
            for kept, factor in zip(sums, weights_K[:-1] - weights_K[1:], strict=True):
                if kept is not None:
                    gradient.add_(kept.to(gradient.device, non_blocking=True), alpha=float(factor))

    def _conflicts(self, gram_NKK: NDArray[np.float64]) -> Numbers:
        """For every pair: the cosine of its gradients (0 without one), and the share of tensors where it is
        negative."""
        whole_KK = gram_NKK.sum(axis=0)
        values: dict[str, float] = {}
        for i, j in combinations(range(len(self.groups)), 2):
            pair = f"{self.groups[i]}.{self.groups[j]}"
            norms = float(np.sqrt(whole_KK[i, i] * whole_KK[j, j]))
            values[f"cosine.{pair}"] = float(whole_KK[i, j]) / norms if 0 < norms < np.inf else 0.0
            values[f"conflict.{pair}"] = float((gram_NKK[:, i, j] < 0).mean())
        on_device = torch.tensor(list(values.values()), device=self.learner.process.device)
        return dict(zip(values, on_device.unbind(), strict=True))


def _local(gradient: Tensor) -> Tensor:
    """This process's part, in the same memory."""
    return gradient.to_local() if is_spread(gradient) else gradient
