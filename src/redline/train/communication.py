"""The time for which an update waits for the other processes, separate from the phases it happens in.

    if time_waits(model, instruments.mark):      # once, after `shard`: FSDP's waits are marked from then on
        learner.waiting = lambda: waiting(instruments.mark)

Only exposed waits are marked: on a GPU, when the computing stream stands still until a gather or a reduction is there,
and unpacks or packs it. A wait begins with a mark without a name and ends as `communication_s`; the phase around it
goes on afterwards. FSDP has no public place for this, so a few methods of its parameter groups are wrapped, on this
model's objects alone (docs/decisions.md).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

INTERRUPTED, COMMUNICATION = "", "communication_s"
"""The two marks around a wait."""
WAITS = {
    "cuda": ("wait_for_unshard", "post_backward"),
    "cpu": ("unshard", "wait_for_unshard", "post_backward"),
}
"""Where the computing process waits: for gathered weights, and for the reduction before its own."""
LAST_WAIT = "finalize_backward"
"""The root's waits for its own reduction, which stands behind all others in their stream."""

Mark = Callable[[str], None]


@contextmanager
def waiting(mark: Mark) -> Iterator[None]:
    """What is done inside waits for the other processes."""
    mark(INTERRUPTED)
    try:
        yield
    finally:
        mark(COMMUNICATION)


def time_waits(model: nn.Module, mark: Mark) -> bool:
    """Mark every wait of a sharded model. False, with nothing changed, if this torch waits elsewhere."""
    device = next(model.parameters()).device.type
    found = [
        (_group(module), module is model) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    methods = [
        (group, name)
        for group, is_root in found
        for name in (*WAITS[device], *([LAST_WAIT] if is_root else []))
    ]
    if not all(callable(getattr(group, name, None)) for group, name in methods):
        return False
    for group, name in methods:
        setattr(group, name, _marked(getattr(group, name), mark))
    return True


def _group(module: FSDPModule) -> Any:
    """What FSDP keeps of the parameters of one module."""
    try:
        return module._get_fsdp_state()._fsdp_param_group
    except AttributeError:
        return None


def _marked(method: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    @wraps(method)
    def marked(*given: Any, **named: Any) -> Any:
        with waiting(mark):
            return method(*given, **named)

    return marked
