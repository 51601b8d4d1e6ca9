"""Direct feedback alignment: the gradients that reach the weights are those of a slow computation that shares no
code with it; with the true gradients as feedback they are those of back-propagation; one block's activations are
alive at a time; and it learns."""

import math
import weakref
from contextvars import ContextVar, copy_context
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from precision import assert_close
from torch import Tensor

from redline.config.dfa import DfaConfig
from redline.config.recipe import IGNORED, LoraConfig, ModelConfig, TrainConfig
from redline.model.attention.packed import Packing
from redline.model.lora import add_lora
from redline.model.transformer import Block, Transformer, build_model
from redline.train.execution import COMPUTE_DTYPE, _convert_to_fp8
from redline.train.feedback import FeedbackAlignment, RandomFeedback
from redline.train.optimizer import make_optimizers
from redline.train.packed import Example, exact, pack, unpack
from redline.train.process import Process
from redline.train.step import BackPropagation, Learner, Lesson, Rule, update

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "num_layers": 3, "hidden_size": 16, "num_heads": 2, "ffn_size": 24, "context_length": 12,
}  # fmt: skip
LLAMA = ModelConfig(**SHAPE, num_kv_heads=1)
GPT = ModelConfig(
    **SHAPE, norm="layernorm", positions="learned", activation="gelu", bias=True, tie_embeddings=False
)
WAYS = [
    ("block", "hidden"),
    ("block", "logits"),
    ("block", "residual"),
    ("layer", "hidden"),
    ("layer", "logits"),
]
WEIGHT = 0.37
Gradients = dict[str, Tensor]


def batch(seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs_BT, targets_BT = (torch.randint(61, (4, 12), generator=generator) for _ in range(2))
    targets_BT[1, 5:] = IGNORED
    return inputs_BT, targets_BT


def packed_row() -> tuple[Tensor, Tensor, Packing]:
    examples = [Example((1, 2, 3), (4, 5)), Example((6,), (7, 8, 9)), Example((10, 11), (12,))]
    shape = exact(examples)
    return unpack(torch.from_numpy(pack(examples, shape)), shape)


def some_normal(shape: torch.Size, name: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) / 10


def random_feedback(config: ModelConfig, dfa: DfaConfig) -> RandomFeedback:
    return RandomFeedback(config, dfa, seed=7)


def learned(model: Transformer, rule: Rule, *work: Any, weight: float = WEIGHT) -> tuple[float, Gradients]:
    """Loss and gradients of one pass, and nothing left on the model."""
    model.zero_grad(set_to_none=True)
    loss = rule.learn(model, Lesson(*work)).run(weight, lambda phase: None)["loss"]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss), found


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(gradient, expected[name], what=name)


class Slow:
    """DFA written down: every activation of a plain forward, and for each part of the model the gradient of what
    it puts out times its signal, computed alone."""

    def __init__(self, model: Transformer, dfa: DfaConfig, tokens: Tensor, targets: Tensor) -> None:
        self.model, self.dfa = model, dfa
        self.found: Gradients = {}
        self.names = {id(p): name for name, p in model.named_parameters()}
        at = slice(tokens.shape[1])
        rope = None if model.positions is not None else (model.rope_cos[at], model.rope_sin[at])
        embedded = model.embedded(tokens, at)
        self.attend = model.variant.over(model.config, None, rope, embedded)
        top = model.config.num_layers - dfa.top_blocks
        inputs = [embedded.detach()]
        for block in model.blocks[:top]:
            inputs.append(block(inputs[-1], self.attend).detach())
        x = stream = inputs[-1].requires_grad_()
        for block in model.blocks[top:]:
            x = block(x, self.attend)
        hidden = model.norm(x)
        logits = F.linear(hidden, model.head.weight)
        loss = WEIGHT * F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        at_error = {"hidden": hidden, "logits": logits, "residual": stream}[dfa.error]
        (error,) = torch.autograd.grad(loss, at_error, retain_graph=True)
        above = [model.norm, *model.blocks[top:], model.head]
        self.add(loss, [p for part in above for p in part.parameters()])
        self.error, self.feedback = error.detach(), random_feedback(model.config, dfa)
        tables = [m for m in (model.embed, model.positions) if m is not None]
        self.add(embedded, [p for m in tables for p in m.parameters()], self.signal(0))
        for i, block in enumerate(model.blocks[:top]):
            (self.by_block if dfa.depth == "block" else self.by_layer)(block, inputs[i], self.signal(i + 1))

    def signal(self, place: int) -> Tensor:
        if self.dfa.error == "residual":
            return self.error
        first = 1 if self.dfa.depth == "layer" else 0
        place = min(place, first) if self.dfa.shared else place
        return self.error @ self.feedback.matrix(place, self.error)[:, : self.error.shape[-1]].T

    def by_block(self, block: Block, x: Tensor, signal: Tensor) -> None:
        self.add(block(x, self.attend), list(block.parameters()), signal)

    def by_layer(self, block: Block, x: Tensor, signals: Tensor) -> None:
        attn, ffn, D = block.attn, block.ffn, x.shape[-1]
        width, inner = attn.heads * attn.head_size, self.model.config.ffn_size
        qkv = attn.qkv(block.attn_norm(x)).unflatten(-1, (attn.heads + 2 * attn.kv_heads, attn.head_size))
        mixed = self.attend(attn, qkv)
        parts = [*block.attn_norm.parameters(), *attn.qkv.parameters()]
        self.add(mixed, parts, signals[..., :width])
        out = attn.out(mixed.detach())
        self.add(out, list(attn.out.parameters()), signals[..., width : width + D])
        up = ffn.up(block.ffn_norm((x + out).detach()))
        if ffn.activation == "swiglu":
            gate, up = up.chunk(2, dim=-1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(up, approximate="tanh")
        parts = [*block.ffn_norm.parameters(), *ffn.up.parameters()]
        self.add(h, parts, signals[..., width + D : width + D + inner])
        self.add(ffn.down(h.detach()), list(ffn.down.parameters()), signals[..., width + D + inner :])

    def add(self, output: Tensor, parameters: list[Tensor], signal: Tensor | None = None) -> None:
        kept = torch.autograd.grad(output, parameters, signal, retain_graph=True, allow_unused=True)
        for p, gradient in zip(parameters, kept, strict=True):
            if gradient is not None:
                name = self.names[id(p)]
                self.found[name] = self.found.get(name, 0) + gradient


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize(("depth", "error"), WAYS)
@pytest.mark.parametrize(("top_blocks", "shared"), [(0, False), (1, False), (0, True)])
def test_the_gradients_are_those_of_a_slow_computation(config, depth, error, top_blocks, shared):
    model = build_model(config, device="cpu", seed=0)
    dfa = DfaConfig(depth=depth, error=error, top_blocks=top_blocks, shared=shared)
    _, found = learned(model, FeedbackAlignment(dfa, random_feedback(config, dfa)), *batch())
    assert_same(found, Slow(model, dfa, *batch()).found)
    true = learned(model, BackPropagation(), *batch())[1]
    lowest = "blocks.0.ffn.up.weight"
    assert (
        error == "residual"
        or abs(float(F.cosine_similarity(found[lowest].flatten(), true[lowest].flatten(), dim=0))) < 0.5
    )


def true_signals(
    model: Transformer, tokens: Tensor, targets: Tensor, weight: float = WEIGHT, *, frozen: bool = False
) -> list[Tensor]:
    """The loss's gradient at the embedding's output and at every block's, by back-propagation."""
    seen: list[Tensor] = []

    def through(x: Tensor, attend: Any) -> Tensor:
        seen.append(x.requires_grad_() if frozen else x)
        for block in model.blocks:
            seen.append(block(seen[-1], attend))
        return model.norm(seen[-1])

    loss = weight * model(tokens, targets, through=through)
    return list(torch.autograd.grad(loss, seen))


class Told:
    """Feedback that is known beforehand."""

    def __init__(self, signals: list[Tensor]) -> None:
        self.signals = signals

    def source(self, place: int) -> int:
        return place

    def __call__(self, place: int, error: Tensor) -> Tensor:
        return self.signals[place]


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_true_gradients_as_feedback_are_back_propagation(config):
    """Fed with what the transposed Jacobians would bring, every block gets the gradient of back-propagation."""
    model = build_model(config, device="cpu", seed=0)
    signals = true_signals(model, *batch())
    rule = FeedbackAlignment(DfaConfig(), Told(signals))
    loss, found = learned(model, rule, *batch())
    expected_loss, expected = learned(model, BackPropagation(), *batch())
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert_same(found, expected)


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_past_a_block_that_does_nothing_the_residual_error_is_back_propagation():
    """A second block whose outputs are 0 passes gradients as they are, so the first one gets its own."""
    model = build_model(ModelConfig(**{**SHAPE, "num_layers": 2}), device="cpu", seed=0)
    with torch.no_grad():
        for last in (model.blocks[1].attn.out, model.blocks[1].ffn.down):
            last.weight.zero_()
    dfa = DfaConfig(error="residual")
    found = learned(model, FeedbackAlignment(dfa, random_feedback(model.config, dfa)), *batch())[1]
    true = learned(model, BackPropagation(), *batch())[1]
    embedding = found.pop("embed.weight"), true.pop("embed.weight")
    assert_same(found, true)
    assert not torch.equal(*embedding), "which lies below the first block"


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_in_another_thread_the_second_run_has_the_settings_of_the_first(monkeypatch):
    """On a GPU the backward runs in autograd's own thread, and torch 2.13 keeps its compiler's settings per context."""
    setting, seen = ContextVar("setting", default="lost"), []
    model, backward = build_model(LLAMA, device="cpu", seed=3), Tensor.backward
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(setting.get()))

    def in_a_thread(loss: Tensor) -> None:
        thread = Thread(target=backward, args=(loss,))
        thread.start()
        thread.join()

    monkeypatch.setattr(Tensor, "backward", in_a_thread)
    dfa, here = DfaConfig(), copy_context()
    here.run(setting.set, "kept")
    here.run(learned, model, FeedbackAlignment(dfa, random_feedback(LLAMA, dfa)), *batch())
    assert seen == ["kept", "kept"]


def test_adapters_learn_from_feedback_too():
    """With true gradients as feedback, adapters get those of back-propagation, and what is frozen gets none."""
    model = build_model(LLAMA, device="cpu", seed=0)
    add_lora(model, LoraConfig(rank=2, alpha=4), seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:  # B begins at 0, and A would have no gradient
                p.copy_(some_normal(p.shape, name))
    # The embedding is frozen, so its output has to be asked for a gradient.
    signals = true_signals(model, *batch(), frozen=True)
    found = learned(model, FeedbackAlignment(DfaConfig(), Told(signals)), *batch())[1]
    assert_same(found, learned(model, BackPropagation(), *batch())[1])
    assert all("lora" in name for name in found)


@pytest.mark.parametrize(("precision", "unit"), [("bf16", 2**-8), ("fp16", 2**-11), ("fp8", 2**-4)])
@pytest.mark.parametrize("error", ["hidden", "logits", "residual"])
def test_in_few_bits_it_is_the_same_rule(precision, unit, error):
    """Numbers are rounded fewer than 16 times, one after the other, on the way to a gradient; off by 16 units all in
    one direction, its cosine with that of fp32 is 1 - (16 units)^2 / 2. The loss scale of fp16 divides out."""
    if precision == "fp8":
        pytest.importorskip("torchao")
    config = ModelConfig(**{**SHAPE, "ffn_size": 32})
    dfa, scale = DfaConfig(error=error), 1024.0 if precision == "fp16" else 1.0
    rule = FeedbackAlignment(dfa, random_feedback(config, dfa))
    model = build_model(config, device="cpu", seed=0)
    expected = learned(model, rule, *batch())[1]
    if precision == "fp8":
        _convert_to_fp8(model, SimpleNamespace(hardware=SimpleNamespace(kind="cpu")))
    model.compute_dtype = COMPUTE_DTYPE[precision]
    found = learned(model, rule, *batch(), weight=WEIGHT * scale)[1]
    ours, theirs = (torch.cat([g[name].flatten() for name in expected]) for g in (found, expected))
    assert float(ours.norm() / scale / theirs.norm()) == pytest.approx(1, rel=16 * unit)
    assert float(F.cosine_similarity(ours, theirs, dim=0)) > 1 - (16 * unit) ** 2 / 2


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("top_blocks", [3, 9])
def test_all_blocks_on_top_are_back_propagation(top_blocks):
    model = build_model(LLAMA, device="cpu", seed=0)
    dfa = DfaConfig(top_blocks=top_blocks)
    found = learned(model, FeedbackAlignment(dfa, random_feedback(LLAMA, dfa)), *batch())[1]
    assert_same(found, learned(model, BackPropagation(), *batch())[1])


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("depth", "error"), WAYS)
def test_a_packed_row_learns_as_its_examples_do_alone(depth, error):
    model, dfa = build_model(LLAMA, device="cpu", seed=0), DfaConfig(depth=depth, error=error)
    rule = FeedbackAlignment(dfa, random_feedback(LLAMA, dfa))
    found = learned(model, rule, *packed_row())[1]
    alone: list[Gradients] = []
    for prompt, answer in (((1, 2, 3), (4, 5)), ((6,), (7, 8, 9)), ((10, 11), (12,))):
        tokens = torch.tensor([[*prompt, *answer[:-1]]])
        targets = torch.tensor([[*[IGNORED] * (len(prompt) - 1), *answer]])
        alone.append(learned(model, rule, tokens, targets)[1])
    assert_same(found, {name: sum(one[name] for one in alone) for name in found})


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("changes", [{"error": "hidden"}, {}, {"shared": True}])
def test_pieces_of_batch_and_loss_change_nothing(monkeypatch, changes):
    model, (tokens, targets) = build_model(GPT, device="cpu", seed=0), batch()
    dfa = DfaConfig(**changes)
    rule = FeedbackAlignment(dfa, random_feedback(GPT, dfa))
    expected = learned(model, rule, tokens, targets)[1]
    model.loss_chunks = 3
    monkeypatch.setattr("redline.train.feedback.FEEDBACK_LOGITS", 61 * 5)  # 5 rows, not a divisor of 24
    halves = [learned(model, rule, tokens[half], targets[half])[1] for half in (slice(2), slice(2, 4))]
    assert_same({name: halves[0][name] + halves[1][name] for name in expected}, expected)


def test_generated_feedback_is_the_dense_one_and_keeps_nothing(monkeypatch):
    monkeypatch.setattr("redline.train.feedback.CHUNK", 100)  # 6 rows of 16, and not a divisor of 16
    dense = random_feedback(LLAMA, DfaConfig(error="hidden"))
    generated = random_feedback(LLAMA, DfaConfig(error="hidden", feedback="generated"))
    error = torch.randn(3, 5, 16)
    for place in (0, 1, 3):
        assert_close(generated(place, error), dense(place, error), close=1e-6)
    assert not generated._kept
    assert not torch.equal(dense.matrix(0, error), dense.matrix(1, error))


def test_feedback_has_the_variance_of_one_over_the_errors_size():
    """16 x 61 x 4 places x 2 = 7,808 normal numbers: their mean square is within 5 standard errors,
    5 x sqrt(2 / n) = 8%."""
    feedback = random_feedback(LLAMA, DfaConfig(error="logits"))
    like = torch.zeros(1)
    drawn = torch.cat([feedback.matrix(place, like)[:, :61].flatten() for place in range(8)])
    assert len(drawn) == 7808
    assert float(drawn.square().mean()) == pytest.approx(1 / 61, rel=0.08)


class Alive:
    """Bytes that graphs hold for their backward, weights not counted."""

    def __init__(self, model: Transformer) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> list[Tensor]:
        held = Holder([tensor])
        if tensor.untyped_storage().data_ptr() not in self.weights:
            size = tensor.numel() * tensor.element_size()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(held, self.free, size)
        return held

    def free(self, size: int) -> None:
        self.now -= size

    def peak_of(self, model: Transformer, rule: Rule) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda held: held[0]):
            learned(model, rule, *batch())
        assert self.now == 0
        return self.peak


class Holder(list[Tensor]):
    """A list that can be referred to weakly."""


def peak_bytes(layers: int, rule: str, depth: str = "block") -> int:
    config = ModelConfig(**{**SHAPE, "num_layers": layers})
    model, dfa = build_model(config, device="cpu", seed=0), DfaConfig(depth=depth)
    chosen = BackPropagation() if rule == "backprop" else FeedbackAlignment(dfa, random_feedback(config, dfa))
    return Alive(model).peak_of(model, chosen)


@pytest.mark.parametrize("depth", ["block", "layer"])
def test_the_activations_of_one_block_are_alive_at_a_time(depth):
    """However deep the model; back-propagation holds one block more for each layer."""
    shallow, deep = peak_bytes(2, "dfa", depth), peak_bytes(8, "dfa", depth)
    assert shallow == deep
    one_block = (peak_bytes(8, "backprop") - peak_bytes(2, "backprop")) / 6
    head = peak_bytes(2, "backprop") - 2 * one_block
    at_most = head + one_block * (1 if depth == "block" else 2)  # layer by layer it holds the signals too
    assert deep <= at_most + 4 * 12 * 16 * 4  # and what the first block reads


@pytest.mark.parametrize("how", ["backprop", "block", "layer"])
def test_each_rule_learns(how):
    """The next token is a fixed permutation of this one, and every token is as frequent as another: a model that
    learns nothing stays at the entropy of guessing, log 61, on average. Guesses near it scatter by less than a nat, so
    five standard errors of the mean of the last 20 updates are the most that chance takes off."""
    generator = torch.Generator().manual_seed(0)
    model, rule = build_model(LLAMA, device="cpu", seed=0), BackPropagation()
    if how != "backprop":
        dfa = DfaConfig(error="logits", depth=how)
        rule = FeedbackAlignment(dfa, random_feedback(LLAMA, dfa))
    train = TrainConfig(batch_size=8, steps=150, lr=3e-3, weight_decay=0.0)
    alone = Process(0, 1, torch.device("cpu"))
    learner = Learner(model, make_optimizers(model, train), alone, 1.0, rule=rule)
    successor, losses = torch.randperm(61, generator=generator), []
    for _ in range(150):
        tokens_BT = torch.randint(61, (8, 12), generator=generator)
        one = rule.learn(model, Lesson(tokens_BT, successor[tokens_BT]))
        losses.append(float(update(learner, [one], targets=96).numbers["loss"]))
    assert sum(losses[-20:]) / 20 < math.log(61) - 5 / math.sqrt(20 * 96)
