"""Packed rows: the loss and gradients of right-padded batches, whatever shape the row is filled up to."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from precision import assert_close

from redline.config.recipe import IGNORED, ModelConfig
from redline.errors import DataError
from redline.model.attention import packed, short, softmax
from redline.model.attention.variants import VARIANTS
from redline.model.lora import LoraConfig, adapters, add_lora
from redline.model.transformer import Transformer, build_model
from redline.train.packed import (
    TOKENS_STEP,
    Example,
    Shape,
    batches,
    check_examples,
    exact,
    fingerprint,
    pack,
    pack_once,
    static_shapes,
    unpack,
)

LLAMA = ModelConfig(
    vocab_size=96, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=40, context_length=96
)
CONFIGS = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=12),
    "gpt2": dataclasses.replace(
        LLAMA, norm="layernorm", positions="learned", activation="gelu", bias=True, num_kv_heads=None
    ),
}


def examples(count: int, seed: int = 0, longest: int = 40) -> list[Example]:
    rng = random.Random(seed)
    draw = lambda most: tuple(rng.randrange(96) for _ in range(rng.randint(1, most)))  # noqa: E731
    return [Example(draw(longest), draw(longest)) for _ in range(count)]


def padded_loss(model: Transformer, batch: list[Example], **how: Any) -> torch.Tensor:
    """The truth: every example in a row of its own, padded at the right, the loss on its answer."""
    longest = max(example.length for example in batch)
    tokens_BT = torch.full((len(batch), longest), 7)
    targets_BT = torch.full((len(batch), longest), IGNORED)
    for i, example in enumerate(batch):
        whole = torch.tensor((*example.prompt, *example.answer))
        tokens_BT[i, : example.length] = whole[:-1]
        targets_BT[i, len(example.prompt) - 1 : example.length] = whole[len(example.prompt) :]
    losses: torch.Tensor = model(tokens_BT, targets_BT, **how)
    return losses[targets_BT != IGNORED] if losses.ndim else losses


def packed_loss(model: Transformer, batch: list[Example], shape: Shape, **how: Any) -> torch.Tensor:
    tokens_1T, targets_1A, packing = unpack(torch.from_numpy(pack(batch, shape)), shape)
    losses: torch.Tensor = model(tokens_1T, targets_1A, packing=packing, **how)
    return losses[targets_1A != IGNORED] if losses.ndim else losses


def gradients(model: Transformer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(learning, torch.autograd.grad(loss, list(learning.values())), strict=True))


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("filled", [False, True], ids=["exact", "filled"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_packed_row_has_the_loss_and_gradients_of_a_padded_batch(
    family: str, filled: bool, lora: bool
) -> None:
    model, batch = build_model(CONFIGS[family], device="cpu", seed=0), examples(7)
    if lora:
        add_lora(model, LoraConfig(rank=4), seed=0)
        for name, p in adapters(model).items():
            if name.endswith("lora_a"):
                p.data.mul_(3.0)
    shape = exact(batch)
    if filled:
        shape = Shape(shape.tokens + 101, shape.answers + 5, shape.sequences + 4, shape.longest)
    packed, padded = packed_loss(model, batch, shape), padded_loss(model, batch)
    assert_close(packed, padded)
    each = (packed_loss(model, batch, shape, reduction="none"), padded_loss(model, batch, reduction="none"))
    assert_close(*each)
    found, truth = gradients(model, packed), gradients(model, padded)
    for name, gradient in truth.items():
        assert_close(found[name], gradient, what=name)


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", [*CONFIGS, "favor"])
def test_prompts_held_once_give_the_loss_and_gradients_of_prompts_held_by_every_answer(family: str) -> None:
    config = (
        CONFIGS[family] if family in CONFIGS else dataclasses.replace(LLAMA, attention="favor", features=16)
    )
    model, (first, second, third, *_) = build_model(config, device="cpu", seed=0), examples(5)
    batch = [first, second, Example(first.prompt, third.answer), third, Example(first.prompt, (5,))]
    tokens_1T, targets_1A, packing = pack_once(batch, torch.device("cpu"))
    assert tokens_1T.shape[1] == exact(batch).tokens - 2 * len(first.prompt)
    assert torch.equal(
        packing.positions_T[packing.copies.spread_E][packing.copies.kept_T], packing.positions_T
    )
    once, apart = model(tokens_1T, targets_1A, packing=packing), packed_loss(model, batch, exact(batch))
    assert_close(once, apart)
    found, truth = gradients(model, once), gradients(model, apart)
    for name, gradient in truth.items():
        assert_close(found[name], gradient, what=name)


def test_a_bound_that_no_sequence_reaches_changes_nothing() -> None:
    """Compiled blocks take one bound for all rows."""
    model, batch = build_model(LLAMA, device="cpu", seed=0), examples(3)
    own = packed_loss(model, batch, exact(batch))
    model.longest = 2 * exact(batch).longest
    assert_close(packed_loss(model, batch, exact(batch)), own)


def test_sequences_of_a_row_do_not_see_each_other() -> None:
    model, batch = build_model(LLAMA, device="cpu", seed=0), examples(3)
    other = [batch[0], Example(batch[1].prompt[::-1], batch[1].answer[::-1]), batch[2]]
    for first, second in zip(batch, other, strict=True):
        rows = [unpack(torch.from_numpy(pack(row, exact(row))), exact(row)) for row in (batch, other)]
        logits = [model(tokens_1T, packing=packing)[0] for tokens_1T, _, packing in rows]
        start = sum(len(example.answer) for example in batch[: batch.index(first)])
        same = torch.equal(*(each[start : start + len(first.answer)] for each in logits))
        assert same == (first == second)


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_all_positions_are_read_where_none_are_named() -> None:
    model, batch = build_model(LLAMA, device="cpu", seed=0), examples(2)
    tokens_1T, _, packing = unpack(torch.from_numpy(pack(batch, exact(batch))), exact(batch))
    logits = model(tokens_1T, packing=packing._replace(read_A=None))
    assert logits.shape == (1, exact(batch).tokens, 96)
    alone = model(tokens_1T[:, : batch[0].length])
    assert_close(logits[:, : batch[0].length], alone)


def test_a_row_by_hand() -> None:
    batch = [Example((10, 11), (12, 13)), Example((20,), (21,))]
    shape = Shape(tokens=7, answers=4, sequences=5, longest=3)
    tokens_1T, targets_1A, packing = unpack(torch.from_numpy(pack(batch, shape)), shape)
    assert tokens_1T.tolist() == [[10, 11, 12, 20, 0, 0, 0]]
    assert packing.positions_T.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert packing.bounds_S.tolist() == [0, 3, 4, 7, 7, 7]
    assert packing.read_A.tolist() == [1, 2, 3, 0]
    assert targets_1A.tolist() == [[12, 13, 21, IGNORED]]


def test_every_epoch_has_every_example_once_in_its_own_order() -> None:
    made = list(batches(10, batch_size=4, epochs=3, seed=5))
    assert [len(batch) for batch in made] == [4, 4, 2] * 3
    orders = [[i for batch in made[start : start + 3] for i in batch] for start in (0, 3, 6)]
    for epoch, order in enumerate(orders):
        assert order == torch.randperm(10, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_static_shapes_are_few_and_hold_every_row(single: bool, passes: int) -> None:
    everything = examples(300, longest=40)
    updates = []
    for batch in batches(300, batch_size=16, epochs=2, seed=0):
        rows = [
            [everything[i] for i in batch[start : start + 16 // passes]]
            for start in range(0, 16, 16 // passes)
        ]
        updates.append(rows)
    shapes = static_shapes(
        [[exact(row) for row in rows] for rows in updates], context_length=96, single=single
    )
    assert len(set(shapes)) == (1 if single else len({shape.tokens for shape in shapes}))
    assert len(set(shapes)) <= 3
    for rows, shape in zip(updates, shapes, strict=True):
        assert shape.tokens % TOKENS_STEP == 0
        for row in rows:
            _, targets_1A, packing = unpack(torch.from_numpy(pack(row, shape)), shape)
            lengths = packing.bounds_S.diff()
            assert int(lengths.max()) <= shape.longest <= 96
            assert int(packing.positions_T.max()) < shape.longest
            assert packing.bounds_S[-1] == shape.tokens
            assert int((targets_1A != IGNORED).sum()) == sum(len(example.answer) for example in row)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example((), (1,)), "at least one token, got 0, 1"),
        (Example((1,), ()), "at least one token, got 1, 0"),
        (Example((1,) * 90, (2,) * 8), "97 tokens, more than the context of 96"),
        (Example((1,), (96,)), "vocabulary of 96, got 1 to 96"),
        (Example((-1,), (5,)), "vocabulary of 96, got -1 to 5"),
    ],
)
def test_an_example_that_cannot_be_learnt_from_is_refused(example: Example, message: str) -> None:
    with pytest.raises(DataError, match=f"example 1.*{message}"):
        check_examples([Example((1,), (2,)), example], context_length=96, vocab_size=96)


def test_the_longest_example_that_fits_is_taken_and_none_is_refused() -> None:
    check_examples([Example((1,) * 90, (2,) * 7)], context_length=96, vocab_size=96)
    with pytest.raises(DataError, match="at least one example"):
        check_examples([], context_length=96, vocab_size=96)


def test_the_fingerprint_tells_prompts_from_answers_and_sees_the_order() -> None:
    kinds = (
        [Example((1, 2), (3,))],
        [Example((1,), (2, 3))],
        [Example((1,), (2,)), Example((3,), (4,))],
        [Example((3,), (4,)), Example((1,), (2,))],
    )
    assert len({fingerprint(kind) for kind in kinds}) == 4


@pytest.mark.parametrize("longest", [64, 2048])
@pytest.mark.parametrize("fits", [True, False])
def test_gpus_before_ampere_take_the_grid_whatever_the_length(
    longest: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention, which torch's kernel for packed rows is, refuses them: fine-tuning in fp16 died there."""
    monkeypatch.setattr(short, "fits", lambda *_, **__: fits)
    monkeypatch.setattr(packed, "varlen_kernel", lambda: None)
    row = packed.Packing(torch.zeros(4, dtype=torch.int64), torch.tensor([0, 4], dtype=torch.int32), longest)
    rope = torch.ones(4, 8), torch.zeros(4, 8)
    half = SimpleNamespace(is_cuda=True, dtype=torch.float16, device="cuda")

    def way(capability: tuple[int, int]) -> Any:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return VARIANTS["softmax"]().over(LLAMA, packing, rope, half)  # type: ignore[arg-type]

    packing: packed.Packing | None = row
    for old in ((7, 0), (7, 5)):
        assert (way(old).func, way(old).keywords["mix"]) == (packed.on_grid, packed._copied_heads)
    assert way((8, 0)).func is (packed.with_short_kernel if fits else packed.with_varlen_kernel)
    packing = None  # a batch
    assert way((7, 0)).keywords["copied"]
    assert "copied" not in way((8, 0)).keywords


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_copied_keys_and_values_are_those_of_the_right_heads() -> None:
    q, k, v = (
        torch.randn(2, 7, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 2)
    )
    found = softmax.causal(q, k, v, copied=True)
    assert_close(found, softmax.causal(q, k, v))
    head = softmax.causal(q[:, :, 4:5], k[:, :, 1:], v[:, :, 1:])  # the fifth of six has the second pair
    assert_close(found[..., 4 * 8 : 5 * 8], head)
