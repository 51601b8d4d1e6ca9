"""How a watched loop is executed, from its model and machine, as the plan.json that report and diagnosis read.

    described = Described(model, device)        # before the first update: looks at the first forward pass
    described.plan(batch, world_size, told={})  # after it: each value with its reason

It holds only what was seen, under the names of plan/plan.py; `redline train` cannot execute it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.machine.facts import read_facts
from redline.machine.store import cached
from redline.observe.update import Seen
from redline.plan.hardware import hardware_here
from redline.plan.plan import Hardware

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
Told = Mapping[str, tuple[Any, str]]
"""Values that were stated, each with where."""


def hardware_of(device: torch.device) -> Hardware:
    """The GPU that the model is on, or the CPU, with the ceilings that were measured here."""
    facts = read_facts()
    ceilings = cached(facts)
    mine = facts.gpus[device.index or 0 : (device.index or 0) + 1] if device.type == "cuda" else ()
    return hardware_here(replace(facts, gpus=mine), ceilings)


class Described:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        # DDP's wrapper holds the model under this name
        self.model: nn.Module = getattr(model, "module", model)
        self.device = device
        self._autocast: torch.dtype | None = None
        # A hook on a model compiled in place would be traced into its graph, and removing it would recompile.
        if getattr(model, "_compiled_call_impl", None) is None:
            self._hook = model.register_forward_pre_hook(self._look)

    def _look(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_autocast_enabled(self.device.type):
            self._autocast = torch.get_autocast_dtype(self.device.type)
        self._hook.remove()

    def plan(self, seen: Seen, tokens_per_step: float | None, world_size: int, told: Told) -> dict[str, Any]:
        hardware, batches = hardware_of(self.device), max(1, seen.batches)
        told_len = int(tokens_per_step / (seen.rows * batches)) if tokens_per_step and seen.rows else None
        seq_len = seen.seq_len or told_len
        length = "positions of a row in the first update"
        values: dict[str, tuple[Any, str]] = {
            "precision": self.precision(),
            "micro_batch": (seen.rows or None, "rows of the first batch"),
            "accumulation": (batches, "batches in the first update"),
            "seq_len": (seq_len, length if seen.seq_len else "tokens_per_step over rows and batches"),
            "recompute": self.recompute(),
            "compile": self.compiled(),
            "flops_per_token": flops_per_token(self.model, seq_len),
        }
        plan: dict[str, Any] = {"hardware": asdict(hardware), "world_size": world_size}
        for found, source in ((values, "observed"), (told, "user")):
            for name, (value, reason) in found.items():
                plan[name] = {"value": value, "reason": reason, "source": source}
        return plan | {"prediction": {"parameters": sum(p.numel() for p in self.model.parameters())}}

    def precision(self) -> tuple[str, str]:
        """What the matrix products are computed in."""
        if self._autocast is not None:
            return NAMES.get(self._autocast, str(self._autocast)), "autocast in the first forward pass"
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self.model.parameters():
            sizes[parameter.dtype] += parameter.numel()
        dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
        tf32 = self.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
        if dtype == torch.float32 and tf32:
            return "tf32", "fp32 parameters, no autocast, and torch allows TF32"
        return NAMES.get(dtype, str(dtype)), "dtype of most parameters; no autocast in the first forward pass"

    def recompute(self) -> tuple[str | None, str]:
        """Known only for Hugging Face models: torch.utils.checkpoint leaves no trace."""
        known = getattr(self.model, "is_gradient_checkpointing", None)
        value = ("full" if known else "none") if isinstance(known, bool) else None
        return value, "the model's is_gradient_checkpointing"

    def compiled(self) -> tuple[str, str]:
        parts = [getattr(module, "_compiled_call_impl", None) for module in self.model.modules()]
        on = type(self.model).__name__ == "OptimizedModule" or any(part is not None for part in parts)
        return "on" if on else "off", "whether torch.compile wraps the model or a part of it"


def flops_per_token(model: nn.Module, seq_len: int | None) -> tuple[int, str]:
    """Training FLOPs of a token: 6 per weight of a matrix product, 4 per frozen one (no gradient of the weight), and
    12 L d T for attention if the model's config gives layers and width. All experts of a mixture are counted."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(p) for module in embeddings for p in module.parameters(recurse=False)}
    weights: dict[int, Tensor] = {}
    for module in model.modules():
        shared = isinstance(module, nn.Linear)  # a head that shares the embedding's table is a matrix product
        for p in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            if p.ndim >= 2 and (shared or id(p) not in tables):
                weights[id(p)] = p
    total = sum((6 if p.requires_grad else 4) * p.numel() for p in weights.values())
    config = getattr(model, "config", None)
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim")
    layers, width, heads, head_size = (getattr(config, name, None) for name in shape)
    if isinstance(heads, int) and isinstance(head_size, int):
        width = heads * head_size  # in some models more than the residual stream
    each = "6 per weight of a matrix product (4 if frozen)"
    if not seq_len:
        return total, f"{each}; attention not counted: a row's length is not known (run.batches shows it)"
    if not (isinstance(layers, int) and isinstance(width, int)):
        return total, f"{each}; attention not counted: no layers and width in model.config"
    return total + 12 * layers * width * seq_len, f"{each} + 12 L d T for attention"
