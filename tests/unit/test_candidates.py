"""A softmax over some tokens: who is a candidate, what the loss estimates, and that no split of an update changes it."""

import itertools
import math
from dataclasses import replace

import head_rounding
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import CLOSE_FP32, assert_close
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from redline.config.load import load_recipe
from redline.config.recipe import ModelConfig
from redline.data.candidates import MOST, draw
from redline.data.loader import Loader
from redline.data.shards import TokenDataset
from redline.errors import ConfigError
from redline.model.cross_entropy import Candidates, linear_cross_entropy
from redline.model.transformer import Transformer, build_model
from redline.plan.arithmetic import flops_per_token
from redline.plan.hardware import hardware_as
from redline.plan.planner import make_plan
from redline.plan.values import why_not
from redline.train.objective import Sequences, candidates_of
from redline.train.process import Process
from redline.train.step import Learner, update

H200, ALONE = hardware_as("h200-141g", 16), Process(0, 1, torch.device("cpu"))


def drawn(targets: Tensor, size: int, vocab_size: int, seed: int = 0) -> Candidates:
    words = draw(targets.numpy(), size=size, vocab_size=vocab_size, seed=seed)
    found = candidates_of(torch.from_numpy(words))
    assert found is not None
    return found


# ---- who is a candidate ----


@settings(max_examples=60)
@given(st.data(), st.integers(2, 200), st.integers(0, 2**40))
def test_all_targets_are_candidates_and_the_sample_stands_for_the_rest(
    data: st.DataObject, vocab_size: int, seed: int
) -> None:
    few = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=vocab_size - 1)
    targets = torch.tensor(data.draw(few))
    different = len(targets.unique())
    if different == vocab_size:
        return
    fewest = different + -(-(vocab_size - different) // MOST)
    size = data.draw(st.integers(fewest, vocab_size))
    found = drawn(targets, size, vocab_size, seed)
    assert len(found.tokens_K) == len(found.tokens_K.unique()) == size
    assert set(found.tokens_K[: int(found.targets)].tolist()) == set(targets.tolist())
    assert int(found.targets) == different
    stands_for = (vocab_size - different) / (size - different)
    assert float(found.sample(vocab_size)[1]) == pytest.approx(math.log(stands_for), rel=1e-6, abs=1e-7)
    assert torch.equal(found.tokens_K[found.places(targets, vocab_size)].long(), targets)


def test_the_draw_depends_on_targets_and_seed_alone() -> None:
    targets = torch.arange(8).repeat(3)
    first = drawn(targets, 16, 40, seed=1).tokens_K.tolist()
    assert first == drawn(targets, 16, 40, seed=1).tokens_K.tolist()
    assert first != drawn(targets, 16, 40, seed=2).tokens_K.tolist()
    assert first != drawn(targets.flip(0), 16, 40, seed=1).tokens_K.tolist()
    # Frozen: a change here would change the training of every run that is resumed.
    assert first[8:] == [9, 10, 11, 16, 20, 24, 27, 35]


def test_others_are_drawn_alike() -> None:
    """400 draws of 10 of 30: each other token 133 times on average, with a standard deviation of 9.4."""
    counts = torch.zeros(34)
    for seed in range(400):
        found = drawn(torch.arange(4), 14, 34, seed)
        counts[found.tokens_K[4:].long()] += 1
    assert not counts[:4].any()
    deviations = (counts[4:] - 400 / 3) / math.sqrt(400 * (1 / 3) * (2 / 3))
    # P(a normal variable beyond 5) is 6e-7, of thirty 2e-5; the seeds are fixed
    assert deviations.abs().max() < 5


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_process_has_the_candidates_of_the_whole_update(world_size: int) -> None:
    dataset = TokenDataset("test", [np.arange(400) % 97], vocab_size=97, bytes_of_text=400)

    def batches(rank: int, of: int, sequence: int = 0) -> list[tuple[Tensor, Tensor]]:
        loader = Loader(
            dataset, batch_size=4, seq_len=8, seed=3, rank=rank, world_size=of, position={"sequence": sequence},
            candidates=(64, 97),
        )  # fmt: skip
        try:
            taken = [loader.next() for _ in range(3)]
        finally:
            loader.close()
        assert all(one.inputs_BT.is_contiguous() and one.targets_BT.is_contiguous() for one in taken)
        assert all(torch.equal(one.inputs_BT[:, 1:], one.targets_BT[:, :-1]) for one in taken)
        return [(one.targets_BT, one.candidates) for one in taken if one.candidates is not None]

    whole = batches(0, 1)
    assert len({tuple(words.tolist()) for _, words in whole}) == 3, "another draw for each update"
    parts = [batches(rank, world_size) for rank in range(world_size)]
    for step, (targets, words) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), targets)
        assert all(torch.equal(part[step][1], words) for part in parts)
        assert torch.equal(words, torch.from_numpy(draw(targets.numpy(), size=64, vocab_size=97, seed=3)))
    assert torch.equal(batches(0, 1, sequence=4)[0][1], whole[1][1])


def test_a_sample_that_stands_for_too_many_is_refused() -> None:
    drawn(torch.arange(5), 8, 53)  # 3 for 48
    for size, left in ((7, 2), (5, 0), (3, 0)):
        with pytest.raises(
            ConfigError, match=rf"with 5 different targets: {left} would stand for 48 other.*--fork"
        ):
            drawn(torch.arange(5), size, 53)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["train.softmax_candidates=1024"], r"\(1024\) must be below model.vocab_size \(1024\)"),
        (["train.softmax_candidates=512", "train.rule=dfa"], "got pretrain and dfa: leave it out"),
        (["train.softmax_candidates=-1"], "must not be negative"),
    ],
)
def test_a_recipe_that_cannot_have_them(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe("nano", sets)


# ---- the loss ----


def test_the_sum_of_exponentials_is_that_of_the_vocabulary_on_average() -> None:
    """Over every sample of 2 of 5 others there is."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4).double(), torch.randn(6, 4).double()
    logit = x @ weight[1]
    sums = []
    for others in itertools.combinations([0, 2, 3, 4, 5], 2):
        some = Candidates(torch.tensor([1, *others]), torch.tensor(1))
        losses = linear_cross_entropy(
            x, weight, torch.ones(3).long(), how="torch", reduction="none", candidates=some
        )
        sums.append((losses + logit).exp())
    assert len(sums) == 10
    assert_close(torch.stack(sums).mean(0), (x @ weight.T).exp().sum(-1), close=CLOSE_FP32)


@pytest.mark.numerics
@pytest.mark.parametrize("size", [300, 512])
def test_values_and_gradients_are_those_of_the_estimate(size: int) -> None:
    """In float64, as head_rounding defines it; of 512 tokens all are candidates, and it is the whole softmax. FP8: there."""
    its = head_rounding.work(candidates=size)
    x, weight = its.x.clone().requires_grad_(), its.weight.clone().requires_grad_()
    losses = linear_cross_entropy(
        x, weight, its.targets, how="torch", reduction="none", candidates=its.some()
    )
    losses.backward(its.factors.float())
    x64, w64 = its.x.clone().requires_grad_(), its.weight.clone().requires_grad_()
    reference = its.losses(x64 @ w64.T)
    reference.backward(its.factors)
    whole = replace(its, candidates=0).losses(x64 @ w64.T)
    assert torch.equal(reference, whole) == (size == 512)
    for ours, theirs in ((losses, reference), (x.grad, x64.grad), (weight.grad, w64.grad)):
        assert ours is not None
        assert theirs is not None
        assert_close(ours.double(), theirs, close=CLOSE_FP32)
    some = its.some()
    assert some is not None
    left_out = torch.ones(512, dtype=torch.bool)
    left_out[some.tokens_K.long()] = False
    assert weight.grad is not None
    assert not weight.grad[left_out].any()


# ---- an update ----

CONFIG = ModelConfig(
    vocab_size=61, num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, context_length=12
)  # fmt: skip


@pytest.mark.numerics
@pytest.mark.parametrize("tied", [True, False])
def test_no_split_of_an_update_changes_it(tied: bool) -> None:
    """In passes, and with the head in pieces: the same loss and gradients, because the draw is the update's."""
    dataset = TokenDataset("test", [np.arange(500) * 7 % 61], vocab_size=61, bytes_of_text=500)
    loader = Loader(dataset, batch_size=4, seq_len=6, seed=0, candidates=(40, 61))
    batch = loader.next()
    loader.close()

    def defined(model: Transformer) -> Tensor:
        """The loss as head_rounding has it, of the model's own logits."""
        targets = batch.targets_BT.flatten()
        its = head_rounding.Work(*[torch.empty(61)] * 2, targets, torch.empty(0), candidates=40)
        return its.losses(model(batch.inputs_BT).flatten(0, 1).double()).mean().float()

    found = []
    for pass_size, chunks in ((4, 1), (1, 1), (2, 3)):
        model = build_model(replace(CONFIG, tie_embeddings=tied), device="cpu", seed=3)
        model.loss_chunks = chunks
        gradients: dict[str, Tensor] = {}

        def keep(model=model, gradients=gradients) -> None:
            gradients.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

        learner = Learner(model, [], ALONE, 0.0, before_update=keep)
        passes = Sequences(pass_size=pass_size, share=4).passes(learner, batch)
        told = update(learner, passes, targets=float(batch.targets))
        found.append((told.numbers["loss"], gradients))
        assert_close(told.numbers["loss"], defined(model), close=CLOSE_FP32)
    for loss, gradients in found[1:]:
        assert_close(loss, found[0][0], close=CLOSE_FP32)
        for name, gradient in found[0][1].items():
            assert_close(gradients[name], gradient, close=CLOSE_FP32, what=name)


# ---- the plan ----


def test_only_the_rows_of_candidates_are_counted() -> None:
    """Against torch's counter over a real forward and backward."""
    with torch.device("meta"):
        model, tokens = Transformer(CONFIG), torch.zeros(2, 12, dtype=torch.int64)
        some = Candidates(torch.zeros(40, dtype=torch.int32), torch.zeros(()))
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens, candidates=some).backward()
    assert counter.get_total_flops() == flops_per_token(CONFIG, 12, candidates=40) * 24


def test_a_plan_predicts_less_time_and_memory() -> None:
    recipe = load_recipe("speedrun/45s", ["plan.cross_entropy=fp8", "train.softmax_candidates=none"])
    some = load_recipe("speedrun/45s", ["plan.cross_entropy=fp8"])
    whole, fewer = make_plan(recipe, H200).prediction, make_plan(some, H200).prediction
    assert fewer.flops_per_token == whole.flops_per_token - 6 * (50304 - 16384) * 512
    assert fewer.memory_parts_bytes["logits"] < whole.memory_parts_bytes["logits"] / 2
    assert (fewer.attainable_tokens_per_s or 0) > (whole.attainable_tokens_per_s or 1)
    odd = load_recipe("speedrun/45s", ["train.softmax_candidates=16385"])
    assert "softmax_candidates 16385" in str(
        why_not("cross_entropy", "fp8", odd, H200, {"precision": "bf16"})
    )
