"""What a captured update of one pass keeps for all adapters together: one tensor in place of hundreds of small ones.

    workspace = workspace_of(learner)                # None where it does not fit; then every layer is on its own
    with workspace.in_use():                         # casts the adapters: one kernel
        ...forward and backward...                   # layers write their gradients into one piece of memory
        workspace.take_gradients()                   # and there they are, scaled: one kernel; clipping and AdamW follow

An update on some 1,500 tokens is bound by the number of its kernels and by how few of a GPU's multiprocessors each of them
fills. So a second stream computes the adapters' gradients, which nothing needs before clipping, during the backward
through the blocks. It also computes the gradient between A and B, alongside the frozen weight's product.

Nothing here outlives an update: everything else (validation, merging, several passes) reads the parameters themselves.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from redline.model.flat import joined, pieces
from redline.model.lora import LoraLinear, adapters, fp32_product, lora_layers
from redline.model.transformer import Transformer
from redline.train.step import BackPropagation, Learner

HELD = 8
"""Layers whose gradients may be on their way while their inputs are kept: two blocks of some forty."""


def workspace_of(learner: Learner) -> "Workspace | None":
    """For adapters in one piece of memory, in blocks that run as they are written, each backward exactly once."""
    model, learned = learner.model, list(adapters(learner.model).values())
    plain = all(block.recompute == "none" and block._compiled_call_impl is None for block in model.blocks)
    flat = joined(learned)
    if flat is None or not plain or type(learner.rule) is not BackPropagation:
        return None
    return Workspace(model, learned, flat)


@dataclass
class _Place:
    a_RD: Tensor
    b_OR: Tensor
    da_RD: Tensor
    db_OR: Tensor
    workspace: "Workspace"
    ready: torch.cuda.Event | None = None
    """When dh is there."""

    def learn(self, x_ND: Tensor, dy_NO: Tensor, h_NR: Tensor) -> Tensor:
        dh_NR = dy_NO.new_empty(len(dy_NO), len(self.a_RD))
        with self.workspace.beside(dh_NR, x_ND, dy_NO, h_NR):
            torch.mm(dy_NO, self.b_OR, out=dh_NR)
            if dh_NR.is_cuda:
                self.ready = torch.cuda.current_stream().record_event()
            fp32_product(dh_NR.T, x_ND, out=self.da_RD)
            fp32_product(dy_NO.T, h_NR, out=self.db_OR)
        return dh_NR

    def wait(self) -> None:
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)


class Workspace:
    def __init__(self, model: Transformer, learned: Sequence[nn.Parameter], flat: Tensor) -> None:
        self.learned, self.flat = learned, flat
        self.layers: list[LoraLinear] = list(lora_layers(model).values())
        scales = [t for layer in self.layers for t in (torch.ones_like(layer.lora_a), layer.scale_b)]
        self.scale = torch.cat([scale.detach().flatten() for scale in scales])
        self.cast = torch.empty_like(flat, dtype=model.compute_dtype)
        self.gradient = torch.zeros_like(flat)
        self.stream = torch.cuda.Stream(flat.device) if flat.is_cuda else None
        self.read: list[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = []
        """What the second stream reads, and when it has: the memory must not be given away before."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        torch.mul(self.flat, self.scale, out=self.cast)
        cast, gradients = (pieces(whole, self.learned) for whole in (self.cast, self.gradient))
        parts = zip(cast[::2], cast[1::2], gradients[::2], gradients[1::2], strict=True)
        for layer, part in zip(self.layers, parts, strict=True):
            layer.place = _Place(*part, self)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.place = None
            self.join()  # after an error too: a capture that ends without joining would raise that and hide the cause

    @contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        """Inside, kernels are launched on the second stream, after what this one has launched so far."""
        if self.stream is None:
            yield
            return
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            # detached: what an update kept of autograd's graph would be met by the next one, on another stream
            self.read.append((self.stream.record_event(), tuple(tensor.detach() for tensor in read)))
        if len(self.read) == HELD:
            here.wait_event(self.read[HELD // 2 - 1][0])
            del self.read[: HELD // 2]

    def join(self) -> None:
        """Wait for the second stream, if anything was launched on it."""
        if self.read:
            torch.cuda.current_stream().wait_event(self.read[-1][0])
        self.read.clear()

    def take_gradients(self) -> None:
        """Give every parameter its gradient, when the second stream has them."""
        self.join()
        self.gradient.mul_(self.scale)
        for p, gradient in zip(self.learned, pieces(self.gradient, self.learned), strict=True):
            assert p.grad is None, "a gradient came another way too"
            p.grad = gradient
