"""Direct feedback alignment (DFA): blocks learn from the error of the output, which fixed random matrices carry
to each of them, and no gradient travels from block to block.

    rule = rule_of(recipe, model)                          # by train.rule; here, train.rule = "dfa"
    rule.learn(model, Lesson(tokens_BT, targets_BT)).run(1 / targets, mark)

A pass runs the blocks without a graph, keeps what the first one reads, and computes the loss. Its backward gives
the error: the gradient at what the head reads, or at the logits. Then the blocks run a second time from the
bottom up; each is given the error times its own matrix as the gradient of its output, learns by
back-propagation inside itself, and is forgotten before the next. `dfa.error = "residual"` has no matrices: every
block gets the gradient at the top of the residual stream, which is what reaches it past the blocks above. So the activations of one block are alive at a
time, whatever the depth, and an update costs one more forward: the price of full recomputation, which still
keeps the input of every block.

The head and the last norm learn by their true gradient; so do the `top_blocks`, which keep an ordinary graph. The
embedding is given the error times a matrix like the blocks (and, tied, the head's gradient too). Matrices are
normal with variance 1 / (size of the error) and follow from the seed, so a checkpoint does not hold them. Left
out: blocks on several streams or processes at the same time, which nothing here prevents.

Shapes: B batch, T tokens, D hidden, V vocabulary, E size of the error, A positions whose loss is wanted.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.dfa import DfaConfig
from redline.config.recipe import IGNORED, ModelConfig, Recipe
from redline.model.attention.variants import Attend
from redline.model.transformer import Block, Transformer
from redline.plan.arithmetic import (
    FEEDBACK_LOGITS,
    FEEDBACK_PIECE_BYTES,
    feedback_blocks,
    feedback_error_size,
    feedback_source,
    feedback_widths,
)
from redline.train.step import BackPropagation, Lesson, Mark, Numbers, Pass, Rule


class Project(Protocol):
    """Carries the error down. Place 0 is the embedding, place i + 1 is block i."""

    def source(self, place: int) -> int:
        """The place whose signals these are: another one where places share them."""
        ...

    def __call__(self, place: int, error: Tensor) -> Tensor:
        """The error (..., E) as the signals of a place, side by side (..., sum of widths)."""
        ...


CHUNK = FEEDBACK_PIECE_BYTES // 4
"""Numbers of a random matrix that are drawn together."""
ALIGNED = 8
"""Errors of the logits are padded to a multiple of this: a product over GPT-2's 50,257 numbers in half precision has
rows that start at odd addresses, for which there are only slow kernels."""


def rule_of(recipe: Recipe, model: Transformer) -> Rule:
    if (dfa := recipe.feedback) is None:
        return BackPropagation()
    rule = FeedbackAlignment(dfa, RandomFeedback(model.config, dfa, seed=recipe.train.seed))
    rule.prepare(model)
    return rule


class RandomFeedback:
    """The fixed random matrices. Each piece has its own seed, so kept and generated feedback are the same."""

    def __init__(self, config: ModelConfig, dfa: DfaConfig, *, seed: int) -> None:
        self.config, self.dfa, self.seed = config, dfa, seed
        self.error_size = feedback_error_size(config, dfa)
        self.padding = -self.error_size % ALIGNED if dfa.error == "logits" else 0
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def source(self, place: int) -> int:
        return feedback_source(self.dfa, place)

    def __call__(self, place: int, error: Tensor) -> Tensor:
        if self.dfa.feedback == "dense":
            return F.linear(error, self.matrix(place, error))
        return torch.cat([F.linear(error, piece) for piece in self._pieces(place, error)], dim=-1)

    def matrix(self, place: int, like: Tensor) -> Tensor:
        """Signals x error (with its padding), kept from its first use on."""
        key = place, like.dtype
        if key not in self._kept:
            self._kept[key] = torch.cat(list(self._pieces(place, like)))
        return self._kept[key]

    def _pieces(self, place: int, like: Tensor) -> Iterator[Tensor]:
        rows, many = sum(feedback_widths(self.config, self.dfa, place)), max(1, CHUNK // self.error_size)
        for start in range(0, rows, many):
            name = zlib.crc32(f"{self.seed}/feedback/{place}/{start}".encode())
            generator = torch.Generator(like.device).manual_seed(name)
            piece = torch.empty(min(many, rows - start), self.error_size, device=like.device)
            piece.normal_(0.0, self.error_size**-0.5, generator=generator)
            yield F.pad(piece.to(like.dtype), (0, self.padding))


class FeedbackAlignment:
    def __init__(self, dfa: DfaConfig, project: Project) -> None:
        self.dfa, self.project = dfa, project

    def below(self, model: Transformer) -> list[Block]:
        """The blocks that learn from feedback."""
        return list(model.blocks)[: feedback_blocks(model.config, self.dfa)]

    def prepare(self, model: Transformer) -> None:
        for block in self.below(model):
            block.recompute = "none"  # the second run of a block is its recomputation already
            # Otherwise FSDP gathers the block that ran before this one, as back-propagation would need it next.
            if (prefetch := getattr(block, "set_modules_to_backward_prefetch", None)) is not None:
                prefetch([block])

    def learn(self, model: Transformer, lesson: Lesson) -> Pass:
        assert lesson.candidates is None, (
            "config/rules.py refuses them: the error fed back is that of all logits"
        )

        def run(weight: float | Tensor, mark: Mark) -> Numbers:
            sweep = _Sweep(self, model, lesson, weight)
            loss = model(lesson.tokens, lesson.targets, packing=lesson.packing, through=sweep.through)
            mark("forward_s")
            (loss * weight).backward()
            mark("backward_s")
            return {"loss": loss.detach()}

        return Pass(run)


class _Sweep:
    """One pass through the blocks, and the second run of those that learn from feedback."""

    def __init__(
        self, rule: FeedbackAlignment, model: Transformer, lesson: Lesson, weight: float | Tensor
    ) -> None:
        self.rule, self.model, self.weight = rule, model, weight
        self.targets_N = lesson.targets.flatten()
        self.read_A = lesson.packing.read_A if lesson.packing is not None else None
        self.below = rule.below(model)
        self.rows_at_a_time = max(1, FEEDBACK_LOGITS // model.config.vocab_size)
        self.padding = -model.config.vocab_size % ALIGNED
        self.hidden_BTD: Tensor | None = None
        self.error: Tensor | None = None
        """The error; only at the read positions if it is the error of the logits."""
        self.last: tuple[int, Tensor] | None = None
        """The signals of the place before, with their source."""

    def through(self, x_BTD: Tensor, attend: Attend) -> Tensor:
        if self.below:
            # A frozen embedding asks for no gradient, but the second run depends on that of its output.
            x_BTD = x_BTD if x_BTD.requires_grad else x_BTD.detach().requires_grad_()
            x_BTD = _Below.apply(self, attend, x_BTD)
        for block in self.model.blocks[len(self.below) :]:
            x_BTD = block(x_BTD, attend)
        hidden_BTD = self.model.norm(x_BTD)
        if self.rule.dfa.error == "hidden":
            hidden_BTD.register_hook(self._keep)
        elif self.rule.dfa.error == "logits":
            self.hidden_BTD = hidden_BTD.detach()
        return hidden_BTD

    def _keep(self, gradient: Tensor) -> None:
        self.error = gradient.detach()

    @torch.enable_grad()
    def run_below(self, x_BTD: Tensor, attend: Attend, above_BTD: Tensor) -> Tensor:
        """Run every block again, with a graph that lives only for its backward. Given the gradient of what the blocks
        put out, returns the embedding's signal."""
        if self.rule.dfa.error == "residual":
            self.error = above_BTD
        signal_BTD = self._signals(0, x_BTD)[0]
        for place, block in enumerate(self.below, 1):
            *inside, at_output = self._signals(place, x_BTD)
            # It asks for a gradient that nobody reads: FSDP reduces a block's when its input's is there.
            x_BTD = x_BTD.detach().requires_grad_()
            with _cut(block, inside):
                y_BTD = block(x_BTD, attend)
            torch.autograd.backward(y_BTD, at_output)
            x_BTD = y_BTD.detach()
            del y_BTD
        return signal_BTD

    def _signals(self, place: int, x_BTD: Tensor) -> tuple[Tensor, ...]:
        if self.rule.dfa.error == "residual":
            assert self.error is not None
            return (self.error,)
        source = self.rule.project.source(place)
        if self.last is None or self.last[0] != source:
            self.last = None  # freed before the next are made
            self.last = source, self._projected(source, x_BTD)
        return self.last[1].split(feedback_widths(self.model.config, self.rule.dfa, place), dim=-1)

    @torch.no_grad()
    def _projected(self, place: int, x_BTD: Tensor) -> Tensor:
        project, dfa = self.rule.project, self.rule.dfa
        if dfa.error == "hidden":
            assert self.error is not None
            return project(place, self.error)
        if dfa.shared:  # the only use of the error, which then need not be kept
            return self._spread(torch.cat([project(place, piece) for piece in self._logits_errors()]), x_BTD)
        if self.error is None:
            self.error = x_BTD.new_empty(len(self.targets_N), self.model.config.vocab_size + self.padding)
            for part_NV, piece_NV in zip(
                self.error.split(self.rows_at_a_time), self._logits_errors(), strict=True
            ):
                part_NV.copy_(piece_NV)
        return self._spread(project(place, self.error), x_BTD)

    def _spread(self, signals: Tensor, x_BTD: Tensor) -> Tensor:
        """Spread signals from the positions whose loss is wanted to all positions."""
        batch, length, _ = x_BTD.shape
        if self.read_A is None:
            return signals.view(batch, length, -1)
        everywhere = signals.new_zeros(1, length, signals.shape[-1])
        return everywhere.index_add_(1, self.read_A, signals[None])

    def _logits_errors(self) -> Iterator[Tensor]:
        """The gradient of the loss at the logits, some rows at a time: softmax minus one-hot, computed again
        because the kernels of the loss do not hand theirs out."""
        hidden_BTD = self.hidden_BTD
        assert hidden_BTD is not None
        if self.read_A is not None:
            hidden_BTD = hidden_BTD.index_select(1, self.read_A)
        vocab_size = self.model.config.vocab_size
        head_VD = F.pad(self.model.head.weight.to(hidden_BTD.dtype), (0, 0, 0, self.padding))
        rows = (t.split(self.rows_at_a_time) for t in (hidden_BTD.flatten(0, 1), self.targets_N))
        for hidden_ND, targets_N in zip(*rows, strict=True):
            softmax_NV = F.linear(hidden_ND, head_VD).float()
            softmax_NV[:, vocab_size:] = -torch.inf
            softmax_NV = softmax_NV.softmax(-1)
            counted_N1, targets_N1 = (targets_N != IGNORED)[:, None], targets_N.clamp(min=0)[:, None]
            softmax_NV.scatter_add_(1, targets_N1, -torch.ones_like(softmax_NV[:, :1]))
            yield softmax_NV.mul_(counted_N1 * self.weight).to(hidden_ND.dtype)


class _Below(torch.autograd.Function):
    """The blocks that learn from feedback, as one operation: the graph does not see into it."""

    @staticmethod
    def forward(ctx: Any, sweep: _Sweep, attend: Attend, x_BTD: Tensor) -> Tensor:
        ctx.sweep, ctx.attend = sweep, attend
        # The backward runs in autograd's own thread on a GPU, where torch 2.13 forgets its compiler's settings.
        ctx.context = copy_context()
        ctx.save_for_backward(x_BTD)
        for block in sweep.below:
            x_BTD = block(x_BTD, attend)
        return x_BTD

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.context.run(ctx.sweep.run_below, *ctx.saved_tensors, ctx.attend, *above)


@contextmanager
def _cut(block: Block, signals: list[Tensor]) -> Iterator[None]:
    """While the block runs, cut it between its layers; none where there are no signals."""
    if not signals:
        yield
        return
    mixed, attended, inner = signals
    hooks = [
        block.attn.out.register_forward_pre_hook(lambda _, args: (_Given.apply(args[0], mixed),)),
        block.attn.out.register_forward_hook(lambda _, _args, y: _Given.apply(y, attended)),
        block.ffn.down.register_forward_pre_hook(lambda _, args: (_Given.apply(args[0], inner),)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Given(torch.autograd.Function):
    """Passes values through unchanged; the given gradient goes down instead of the one from above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_from_above: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient, None
