"""Counting without torch against the real model: parameters and matrix products on the meta device, FLOPs by
torch's own counter."""

import weakref
from dataclasses import replace

import pytest
import torch
from generated import models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from redline.config.dfa import DfaConfig
from redline.config.load import load_recipe, shipped
from redline.config.recipe import ModelConfig
from redline.model.attention.state import Room
from redline.model.attention.variants import VARIANTS
from redline.model.transformer import Transformer, build_model
from redline.plan.arithmetic import (
    FAVOR_CHUNK,
    MUON_STACK_BYTES,
    Memory,
    attention_flops,
    feedback_blocks,
    flops_per_token,
    memory,
    muon_bytes,
    parameters,
    slot_bytes,
)
from redline.train.feedback import ALIGNED, FeedbackAlignment, RandomFeedback
from redline.train.optimizer import make_optimizers
from redline.train.step import Lesson

PRETRAINING = [name for name in shipped() if load_recipe(name).workload == "pretrain"]


def on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def check_parameters(config: ModelConfig) -> None:
    model, counted = on_meta(config), parameters(config)
    assert counted.total == sum(p.numel() for p in model.parameters())
    linear = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)}
    assert counted.matmul == sum(linear.values())
    inside = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    assert counted.hidden == sum(p.numel() for p in inside)


@pytest.mark.parametrize("name", PRETRAINING)
def test_parameters_of_every_shipped_recipe_equal_the_model(name):
    check_parameters(load_recipe(name).model)


@settings(max_examples=40)
@given(models())
def test_parameters_of_any_config_equal_the_model(config):
    check_parameters(config)


def counted_flops(config: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of one sequence by torch's counter, three times over (the backward is two more products
    for each). Blocks are alike, so those beyond the second are counted as the second is: meta tensors take
    seconds for a deep model."""
    tokens = torch.zeros((1, seq_len), dtype=torch.int64, device="meta")
    totals = []
    for num_layers in (1, 2):
        with FlopCounterMode(display=False) as counter:
            on_meta(replace(config, num_layers=num_layers))(tokens)
        totals.append(counter.get_total_flops())
    return 3 * (totals[0] + (config.num_layers - 1) * (totals[1] - totals[0]))


@pytest.mark.parametrize("name", PRETRAINING)
def test_flops_of_every_shipped_recipe_equal_torchs_count(name):
    recipe = load_recipe(name)
    seq_len = recipe.data.seq_len
    assert flops_per_token(recipe.model, seq_len) * seq_len == counted_flops(recipe.model, seq_len)


@settings(max_examples=15)
@given(models())
def test_flops_of_any_config_equal_torchs_count(config):
    seq_len = config.context_length
    assert flops_per_token(config, seq_len) * seq_len == counted_flops(config, seq_len)


def test_the_backward_is_counted_as_two_forwards():
    """3 x forward is exact: counted over a real forward and backward, attention included."""
    config = ModelConfig(
        vocab_size=64, num_layers=2, hidden_size=32, num_heads=4, ffn_size=48, context_length=32
    )
    tokens = torch.zeros((2, 32), dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        on_meta(config)(tokens, tokens).backward()
    assert counter.get_total_flops() == flops_per_token(config, 32) * tokens.numel()


def test_gpt2_with_its_padded_vocabulary_takes_854_7_mflop_a_token():
    """The number that nanoGPT's convention gives: 6 x 123.59M matmul weights + 12 x 12 layers x 768 x
    1024."""
    config = load_recipe("gpt2-124m").model
    assert flops_per_token(config, 1024) == 6 * (12 * 12 * 768 * 768 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert round(flops_per_token(config, 1024) / 1e6, 1) == 854.7
    assert parameters(config).total == 124_475_904


@settings(max_examples=15)
@given(models(), st.integers(1, 40), st.sampled_from([5, FAVOR_CHUNK, 3 * FAVOR_CHUNK]))
def test_kernel_attention_is_counted_as_torch_counts_it(config, features, seq_len):
    """Of sequences shorter than a chunk, and of whole chunks."""
    config = replace(config, attention="favor", features=features, context_length=seq_len)
    check_parameters(config)
    assert flops_per_token(config, seq_len) * seq_len == counted_flops(config, seq_len)


@pytest.mark.parametrize("attention", ["softmax", "favor"])
def test_a_sequence_takes_what_the_engine_allocates_for_it(attention):
    config = ModelConfig(
        vocab_size=64, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, context_length=32,
        attention=attention, features=12,
    )  # fmt: skip
    room = Room(slots=1, prompts=1, max_prompt_tokens=10, max_new_tokens=22)
    kept = VARIANTS[attention]().state.sequence_bytes(config, room, torch.bfloat16)
    assert slot_bytes(config, tokens=32, precision="bf16") == kept + 2 * 64 * 4


@pytest.mark.parametrize(
    "changes", [{}, {"shared": True}, {"depth": "layer"}, {"error": "hidden", "top_blocks": 1}]
)
def test_the_products_of_feedback_alignment_equal_torchs_count(changes):
    """Beside what is counted: the second forward of the blocks, and the logits computed again for their error.
    (On a CPU torch's counter leaves attention out; a vocabulary that needs no padding has none to be counted.)"""
    config = ModelConfig(
        vocab_size=2 * ALIGNED, num_layers=3, hidden_size=32, num_heads=4, ffn_size=48, context_length=16
    )
    dfa, tokens = DfaConfig(**changes), torch.zeros((2, 16), dtype=torch.int64)
    model = build_model(config, device="cpu", seed=0)
    rule = FeedbackAlignment(dfa, RandomFeedback(config, dfa, seed=0))
    with FlopCounterMode(display=False) as counter:
        rule.learn(model, Lesson(tokens, tokens)).run(1.0, lambda phase: None)
    counted = flops_per_token(config, 16, dfa=dfa) - attention_flops(config, 16)
    again = 2 * parameters(config).hidden * feedback_blocks(config, dfa) // config.num_layers
    again += 2 * config.vocab_size * config.hidden_size if dfa.error == "logits" else 0
    assert counter.get_total_flops() == tokens.numel() * (counted + again)


def test_feedback_alignment_holds_the_activations_of_one_block():
    """Twice the depth adds weights, and no activations; under back-propagation it doubles them."""

    def bytes_of(layers: int, dfa: DfaConfig | None) -> Memory:
        recipe = load_recipe("gpt2-124m", [f"model.num_layers={layers}"])
        if dfa is not None:
            recipe = replace(recipe, dfa=dfa, train=replace(recipe.train, rule="dfa"))
        values = {
            "precision": "bf16",
            "recompute": "none",
            "loss_chunks": 1,
            "shards": 1,
            "cross_entropy": "fused",
        }
        return memory(recipe, values, tokens=16 * 1024, accumulation=2, fused=True)

    shared = DfaConfig(shared=True)
    deep, shallow = bytes_of(24, shared), bytes_of(12, shared)
    assert deep.activations == shallow.activations
    assert deep.workspace == shallow.workspace
    plain = bytes_of(24, None)
    assert plain.activations == 2 * bytes_of(12, None).activations
    assert deep.total < plain.total / 2


class Allocated(TorchDispatchMode):
    """The most bytes that tensors which operations return take together; those of `before` are there already."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.before = {t.untyped_storage()._cdata for t in before}
        self.returned: list[weakref.ref[Tensor]] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        self.returned = [ref for ref in self.returned if ref() is not None]
        self.returned += [weakref.ref(t) for t in tree_leaves((found,)) if isinstance(t, Tensor)]
        storages = [t.untyped_storage() for ref in self.returned if (t := ref()) is not None]
        sizes = {one._cdata: one.nbytes() for one in storages if one._cdata not in self.before}
        self.peak_bytes = max(self.peak_bytes, sum(sizes.values()))
        return found


@pytest.mark.parametrize("normalize", ["false", "true"])
@pytest.mark.parametrize("name", ["gpt-1.3b", "llama-124m-muon", "speedrun/45s"])
def test_muons_update_fits_what_is_predicted_for_passes_of_one_sequence(name, normalize):
    recipe = load_recipe(name, ["train.optimizer=muon", f"train.muon_normalize={normalize}"])
    model = on_meta(recipe.model)
    _, muon = make_optimizers(model, recipe.train)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    held = {p: [p, p.grad, *muon.state[p].values()] for p in model.parameters() if p in muon.state}
    with Allocated([t for tensors in held.values() for t in tensors]) as update:
        muon.step()
    one_copy_less = (1 - 4 / MUON_STACK_BYTES) * muon_bytes(recipe.model)
    assert one_copy_less < update.peak_bytes <= muon_bytes(recipe.model)
    values = {
        "precision": "bf16",
        "recompute": "full",
        "loss_chunks": 8,
        "shards": 1,
        "cross_entropy": "fused",
    }
    for accumulation in (1, 2):
        found = memory(recipe, values, tokens=1024, accumulation=accumulation, fused=True)
        changing = 4 * parameters(recipe.model).total + update.peak_bytes
        assert found.weights + found.optimizer + changing < found.total
