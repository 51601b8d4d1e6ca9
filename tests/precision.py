"""How far two ways to compute the same thing may differ, and how to compute in double precision.

    @pytest.mark.usefixtures("double")
    ...
    assert_close(found, expected)

A sum of n terms depends on their order, and the order on the CPU's instructions, by n roundings. From the tokens to
the loss or a gradient fewer than 2^10 terms are added one after the other in these tests. In fp32 that is
2^10 · 2^-24 = 6e-5 of the largest term, and updates enlarge it by what nobody can derive. In double precision it is
2^10 · 2^-53 = 1e-13: ten thousand times that is still less than any mistake that one could make.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

CLOSE = 1e-9
"""In double precision."""
CLOSE_FP32 = 2**10 * 2**-24
"""In fp32, where no update lies between."""


def assert_close(found: Tensor, expected: Tensor, *, close: float = CLOSE, what: str = "") -> None:
    """Relative to the largest element; a gradient that is zero but for rounding is compared with 1e-3."""
    atol = close * max(1e-3, float(expected.detach().abs().max()))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=atol, msg=lambda text: f"{what}: {text}")


@contextmanager
def in_double() -> Iterator[None]:
    """Whatever asks torch for fp32, and Muon's bf16, gets double precision."""
    double, before = torch.float64, torch.get_default_dtype()
    with (
        patch.object(torch, "float32", double),
        patch.object(torch, "float", double),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(torch.Tensor, "bfloat16", torch.Tensor.double),
        patch.dict("redline.train.execution.COMPUTE_DTYPE", fp32=double),
    ):
        torch.set_default_dtype(double)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
