"""The model's forward pass as generation needs it: whole prompts into the pool, or one new token for each row.

    forward = Forward(model, slots, room)
    forward.prefill(tokens_MT, prompts_M, lengths_M)        # the state and the last logits of M prompts
    logits_BV = forward.decode(rows_B)                      # in fp32; nothing here waits for the device

The blocks are the trainer's own definition, with attention from the variant's state behind the seam and without
adapters, which must be merged. They compute with the trainer's own weights where these are in the compute dtype (a
frozen bf16 base under LoRA); fp32 weights under bf16 are cast once into a copy that `refresh` renews. Activations
are in the compute dtype, logits in fp32: a bf16 logit of 20 is wrong by up to 0.06, which a log-probability would
show.

Shapes: M prompts, T tokens, B rows, D hidden, V vocabulary.
"""

import functools
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.engine.state import Slots
from redline.model.attention.state import Room, Rows
from redline.model.transformer import Norm, Transformer

_TABLES = ("embed.weight", "positions.weight")
"""Read a row at a time, in their own dtype."""


class Forward:
    def __init__(self, model: Transformer, slots: Slots, room: Room) -> None:
        self.slots, self.device = slots, slots.count.device
        self.model, self._weights = _for_generation(model)
        self.one_row = _one_row(self.model)
        rope = (model.rope_cos, model.rope_sin) if model.positions is None else None
        self.state = model.variant.state(
            model.config, rope, room, device=self.device, dtype=model.compute_dtype
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the current weights; the addresses do not change."""
        for trained, own in self.copies():
            own.copy_(trained)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Weights that had to be cast, each beside its copy; none where the trainer's own are used."""
        return [pair for pair in self._weights if pair[0].data_ptr() != pair[1].data_ptr()]

    @torch.no_grad()
    def prefill(self, tokens_MT: Tensor, prompts_M: Tensor, lengths_M: Tensor) -> None:
        """Read prompts, padded on the right."""
        M, T = tokens_MT.shape
        x, y = self.model.embedded(tokens_MT, slice(T)), None
        for layer, block in enumerate(self.model.blocks):
            attend = functools.partial(self.state.read, layer, prompts_M=prompts_M, lengths_M=lengths_M)
            x, y = block.parts(x, y, attend)
        assert y is not None
        last = torch.arange(M, device=self.device), lengths_M.long() - 1
        self.slots.prompt_logits_PV[prompts_M.long()] = self._logits(x[last], y[last])

    @torch.no_grad()
    def decode(self, rows_B: Tensor) -> Tensor:
        at, slots = rows_B.long(), self.slots
        rows = Rows(rows_B, slots.prompt, slots.prompt_len, slots.count)
        if self.one_row is not None and len(rows_B) == 1:
            logits_1V: Tensor = self.one_row.decode(self.model, self.state, slots.last, rows)
            return logits_1V
        learned = self.model.positions is not None
        position = (slots.prompt_len[at] + slots.count[at] - 1).long() if learned else None
        tokens = slots.last[at].long()
        x, y = self.model.embedded(tokens, position), None
        for layer, block in enumerate(self.model.blocks):
            attend = functools.partial(self.state.step, layer, rows=rows)
            x, y = block.parts(x, y, attend)
        return self._logits(x, y)

    def _logits(self, x_BD: Tensor, y_BD: Tensor | None) -> Tensor:
        _, h_BD = self.model.norm.add(x_BD, y_BD)
        weight = self.model.head.weight
        if weight.is_cuda and weight.dtype != torch.float32:
            return torch.mm(h_BD, weight.t(), out_dtype=torch.float32)
        return F.linear(h_BD, weight).float()


def _one_row(model: Transformer) -> ModuleType | None:
    """The kernels for a step of one row, if they compute this model."""
    if not model.embed.weight.is_cuda:
        return None
    from redline.engine import one_row  # Triton exists only where CUDA does

    return one_row if one_row.computes(model) else None


def _for_generation(model: Transformer) -> tuple[Transformer, list[tuple[Tensor, Tensor]]]:
    """A model of the same weights without adapters, with kernels that need no backward; and each trained weight
    beside the tensor that is computed with, which is the same where the dtype is."""
    with torch.device("meta"):
        own = Transformer(model.config)
    own.compute_dtype = model.compute_dtype
    own.rope_cos, own.rope_sin = model.rope_cos, model.rope_sin
    trained = model.state_dict()
    weights = {
        name: trained[name] if name in _TABLES else trained[name].to(model.compute_dtype)
        for name in own.state_dict()
    }
    own.requires_grad_(False).load_state_dict(weights, assign=True)
    for module in own.modules():
        if isinstance(module, Norm):
            module.fused = model.embed.weight.is_cuda
    return own, [(trained[name], weight) for name, weight in weights.items()]
