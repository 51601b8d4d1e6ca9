"""Tensors that lie one after the other in one piece of memory, and that piece as one tensor.

    flat = joined(tensors)                # None if they lie apart
    views = pieces(flat, tensors)         # shaped like the tensors, in flat's memory

Small kernels on hundreds of small tensors leave a GPU idle; one on the whole does not. Whether tensors lie together is
looked up and never remembered: a copy of a model, or one moved to another device, has its tensors apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The flat tensor that these are, in this order; None if they lie apart, or are spread over processes."""
    first, total = tensors[0] if tensors else None, 0
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or first is None or tensor is None:
            return None
        together = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        follows = tensor.storage_offset() == first.storage_offset() + total
        if not (together and follows and tensor.is_contiguous() and tensor.dtype == first.dtype):
            return None
        total += tensor.numel()
    return None if first is None else first.detach().as_strided((total,), (1,), first.storage_offset())


def pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for each, which lie in one piece if the tensors do."""
    flat = joined(tensors)
    if flat is None:
        return [torch.zeros_like(tensor) for tensor in tensors]
    return pieces(torch.zeros_like(flat), tensors)


def as_one(parameters: list[nn.Parameter]) -> Sequence[Tensor]:
    """The parameters; if they lie in one piece and their gradients do, that piece with its gradient."""
    gradient = joined([p.grad for p in parameters])
    flat = None if gradient is None else joined(parameters)
    if flat is None:
        return parameters
    flat.grad = gradient
    return [flat]
