"""What can go wrong in a command, made to happen at a chosen moment. Called in the command's own process before it starts."""

import os
import resource
import signal
from typing import Any


def kill_at(call: int) -> None:
    """SIGKILL at the n-th call that makes something durable (fsync, rename, replace): in the middle of a commit, at every place."""
    calls = 0

    def counting(real: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        return counted

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, counting(getattr(os, name)))


def small_files(size_bytes: int) -> None:
    """No file may grow beyond this: the operating system refuses a write in the middle of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


def out_of_memory(above: int, only_rank: int | None = None) -> None:
    """Running out of memory in the forward pass of a micro-batch with more than `above` sequences."""
    import torch

    from redline.model.transformer import Transformer

    if only_rank is not None and os.environ.get("RANK") != str(only_rank):
        return
    forward = Transformer.forward

    def limited(model: Transformer, tokens_BT: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        if len(tokens_BT) > above and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("injected")
        return forward(model, tokens_BT, *given, **named)

    Transformer.forward = limited  # type: ignore[method-assign]


def not_a_number(step: int, what: str) -> None:
    """A loss or a gradient that is not a number, in one update."""
    import torch

    from redline.train import step as steps

    clip, updates = steps.clip, 0

    def broken(learner: Any, scale: float) -> torch.Tensor:
        nonlocal updates
        updates += 1
        norm = clip(learner, scale)
        if updates == step and what == "gradient":
            for parameter in learner.model.parameters():
                parameter.grad.fill_(float("nan"))
            return norm * float("nan")
        return norm

    steps.clip = broken
