"""GPU tests run wherever a CUDA device is (`make gpu-test`); CI has none and skips them."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    """Each test builds models of its own; together their shapes would pass torch's limit of
    recompilations."""
    torch._dynamo.reset()
