"""Batches: order, slices and resumption against the definition; the stream against the shards; errors and
threads."""

import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.config.recipe import IGNORED, DataConfig
from redline.data import shards as shards_module
from redline.data.build import build
from redline.data.loader import Loader, valid_batches
from redline.data.read import SHIPPED
from redline.data.shards import TokenDataset
from redline.data.stream import TokenStream
from redline.data.tokenizer import load_tokenizer
from redline.errors import ConfigError, DataError


def counting(tokens: int, shards: int = 3) -> TokenDataset:
    """A split whose n-th token is n, so that a row tells which window it is."""
    return TokenDataset(
        "test", np.array_split(np.arange(tokens), shards), vocab_size=tokens, bytes_of_text=tokens
    )


def take(
    source: TokenDataset | TokenStream, steps: int, **options: object
) -> list[tuple[list[list[int]], dict[str, int]]]:
    loader = Loader(source, **{"seed": 0, **options})
    try:
        batches = [loader.next() for _ in range(steps)]
    finally:
        loader.close()
    for batch in batches:
        assert batch.inputs_BT.dtype == batch.targets_BT.dtype == torch.int64
        assert torch.equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])
        assert batch.inputs_BT.is_contiguous()
        assert batch.targets_BT.is_contiguous()
    return [
        (torch.cat([b.inputs_BT, b.targets_BT[:, -1:]], dim=1).tolist(), json.loads(json.dumps(b.position)))
        for b in batches
    ]


@settings(max_examples=40)
@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 2**40),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_each_epoch_reads_every_window_once(
    windows: int, seq_len: int, batch_size: int, seed: int, threads: int, prefetch: int
) -> None:
    dataset = counting(windows * seq_len + 1)
    steps = -(-3 * windows // batch_size)
    batches = take(
        dataset, steps, batch_size=batch_size, seq_len=seq_len, seed=seed, threads=threads, prefetch=prefetch
    )
    rows = [row for batch, _ in batches for row in batch]
    assert all(row == list(range(row[0], row[0] + seq_len + 1)) for row in rows)
    for epoch in range(3):
        seen = [row[0] for row in rows[epoch * windows : (epoch + 1) * windows]]
        assert sorted(seen) == [i * seq_len for i in range(windows)]
    assert [position for _, position in batches] == [{"sequence": (i + 1) * batch_size} for i in range(steps)]


def test_the_order_is_shuffled_by_seed_and_epoch() -> None:
    def order(seed: int) -> list[int]:
        return [
            row[0]
            for batch, _ in take(counting(201), 2, batch_size=100, seq_len=2, seed=seed)
            for row in batch
        ]

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    assert first[:100] != first[100:]
    assert first[:100] != sorted(first[:100])
    # Frozen: a change here would change the data of every run that is resumed.
    assert first[:8] == [186, 122, 150, 18, 72, 78, 170, 110]


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(5, 40), st.integers(0, 5), st.data())
def test_ranks_join_to_the_batch_and_any_position_resumes(
    world_size: int, share: int, windows: int, resumed_at: int, data: st.DataObject
) -> None:
    options = {"batch_size": world_size * share, "seq_len": 3, "seed": 7}
    dataset = counting(windows * 3 + 2)
    unbroken = take(dataset, 8, **options)
    ranks = [take(dataset, 8, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for step, (batch, position) in enumerate(unbroken):
        assert [row for rank in ranks for row in rank[step][0]] == batch
        assert all(rank[step][1] == position for rank in ranks)
    position = unbroken[resumed_at - 1][1] if resumed_at else None
    assert take(dataset, 8 - resumed_at, position=position, **options) == unbroken[resumed_at:]


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 40), min_size=4, max_size=9),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(0, 99),
)
def test_many_shards_are_mixed_a_group_at_a_time(
    lengths: list[int], mixed: int, batch_size: int, seed: int
) -> None:
    """Every window that lies in one shard once an epoch, those of `mixed` shards before those of the next."""
    seq_len, starts = 4, np.cumsum([0, *lengths])
    whole = np.arange(starts[-1])
    dataset = TokenDataset("t", np.split(whole, starts[1:-1]), vocab_size=len(whole), bytes_of_text=1)
    inside = {
        start: shard
        for start in range(0, len(whole), seq_len)
        for shard in [int(np.searchsorted(starts, start, side="right")) - 1]
        if start + seq_len < starts[shard + 1]
    }
    options = {"batch_size": batch_size, "seq_len": seq_len, "seed": seed}
    steps = -(-2 * len(inside) // batch_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "MIXED_SHARDS", mixed)
        if not inside:
            refused = (
                "no shard of t holds a whole sequence" if len(whole) > seq_len else "one sequence needs 5"
            )
            with pytest.raises(DataError, match=refused):
                take(dataset, 1, **options)
            return
        batches = take(dataset, steps, **options)
        resumed = take(dataset, steps - 1, position=batches[0][1], **options) if steps > 1 else []
    assert resumed == batches[1:]
    rows = [row for batch, _ in batches for row in batch]
    assert all(row == list(range(row[0], row[0] + seq_len + 1)) for row in rows)
    for epoch in range(2):
        seen = [row[0] for row in rows[epoch * len(inside) : (epoch + 1) * len(inside)]]
        assert sorted(seen) == sorted(inside)
        order = np.argsort(np.random.PCG64([seed, epoch]).random_raw(len(lengths)), kind="stable").tolist()
        groups = [order.index(inside[start]) // mixed for start in seen]
        assert groups == sorted(groups)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, Path]:
    """A folder of text and rows, and the shards built from it."""
    base = tmp_path_factory.mktemp("stream")
    (base / "text").mkdir()
    text = SHIPPED["tinyshakespeare"].read_text()
    (base / "text" / "a.txt").write_text(text[:100_000])
    (base / "text" / "c.txt").write_text("a short one")
    rows = [text[start : start + start % 700] for start in range(100_000, 130_000, 450)]
    (base / "text" / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    build(str(base / "text"), base / "data", vocab_size=400, valid_fraction=0.2, shard_tokens=9_000)
    return DataConfig(source=str(base / "text"), seq_len=50, valid_fraction=0.2), base / "data"


@pytest.mark.parametrize("seq_len", [1, 50, 3_000])
def test_the_stream_equals_the_shards_unshuffled(corpus: tuple[DataConfig, Path], seq_len: int) -> None:
    data, folder = corpus
    dataset = TokenDataset.open(folder, "train")
    windows = dataset.windows(seq_len)
    rows = dataset.read_windows(np.arange(windows), seq_len).tolist()
    batch_size = -(-windows // 3)
    streamed = take(TokenStream(data, load_tokenizer(folder)), 5, batch_size=batch_size, seq_len=seq_len)
    assert [row for batch, _ in streamed for row in batch] == (rows + rows)[: 5 * batch_size]


@settings(max_examples=6)
@given(resumed_at=st.integers(1, 11), world_size=st.sampled_from([1, 2, 4]))
def test_the_stream_resumes_from_any_position(
    corpus: tuple[DataConfig, Path], resumed_at: int, world_size: int
) -> None:
    data, folder = corpus
    tokenizer = load_tokenizer(folder)
    options = {"batch_size": 124, "seq_len": 50}  # an epoch ends within a batch
    unbroken = take(TokenStream(data, tokenizer), 12, **options)
    assert unbroken[-1][1]["epoch"] >= 1
    ranks = [
        take(
            TokenStream(data, tokenizer),
            12 - resumed_at,
            position=unbroken[resumed_at - 1][1],
            rank=rank,
            world_size=world_size,
            **options,
        )
        for rank in range(world_size)
    ]
    for step, (batch, position) in enumerate(unbroken[resumed_at:]):
        assert [row for rank in ranks for row in rank[step][0]] == batch
        assert ranks[0][step][1] == position


def test_a_stream_that_nobody_holds_has_no_threads(corpus: tuple[DataConfig, Path]) -> None:
    """It does not wait for the garbage collector, which may run in one of them, and no thread can join itself."""
    data, folder = corpus
    before = set(threading.enumerate())
    gc.disable()
    try:
        order = TokenStream(data, load_tokenizer(folder)).order(seq_len=50, seed=0, position=None)
        order.claim(1, slice(0, 1))()
        assert set(threading.enumerate()) > before
        del order
        assert set(threading.enumerate()) <= before
    finally:
        gc.enable()


def test_the_head_of_a_stream_is_the_head_of_the_split(corpus: tuple[DataConfig, Path]) -> None:
    data, folder = corpus
    whole = TokenDataset.open(folder, "valid")
    stream = TokenStream(data, load_tokenizer(folder))
    head = stream.head("valid", tokens=2_000)
    assert 2_000 <= head.tokens < whole.tokens
    assert head.read_windows(np.arange(39), 50).tolist() == whole.read_windows(np.arange(39), 50).tolist()
    everything = stream.head("valid", tokens=10**9)
    assert (everything.tokens, everything.bytes_of_text) == (whole.tokens, whole.bytes_of_text)


def test_sequences_are_cut_into_four_at_first_and_read_in_the_same_order() -> None:
    options = {"batch_size": 4, "seq_len": 8, "seed": 3}
    whole, cut = (take(counting(401), 3, **options, cut=count) for count in (0, 2))
    for (rows, _), (pieces, _) in zip(whole[:2], cut[:2], strict=True):
        assert pieces == [row[start : start + 3] for row in rows for start in (0, 2, 4, 6)]
    assert cut[2] == whole[2]
    assert [position for _, position in cut] == [position for _, position in whole]
    assert take(counting(401), 2, **options, cut=1, position=cut[0][1]) == cut[1:], "resumed in the ramp"
    halves = [take(counting(401), 1, **options, cut=1, rank=rank, world_size=2)[0][0] for rank in range(2)]
    assert halves[0] + halves[1] == cut[0][0]


def test_a_corpus_too_short_is_refused(tmp_path: Path, corpus: tuple[DataConfig, Path]) -> None:
    with pytest.raises(DataError, match="test has 8 tokens and one sequence needs 9"):
        Loader(counting(8), batch_size=1, seq_len=8, seed=0)
    (tmp_path / "a.txt").write_text("tiny")
    data = DataConfig(source=str(tmp_path / "a.txt"), seq_len=64, valid_fraction=0)
    loader = Loader(TokenStream(data, load_tokenizer(corpus[1])), batch_size=1, seq_len=64, seed=0)
    with pytest.raises(DataError, match=r"has \d training tokens and one sequence needs 65"):
        loader.next()
    loader.close()
    with pytest.raises(
        ConfigError, match=r"batch_size \(3\) must be a multiple of the number of processes \(2\)"
    ):
        Loader(counting(99), batch_size=3, seq_len=8, seed=0, world_size=2)


def test_an_error_in_the_thread_is_raised_by_next_after_the_good_batches() -> None:
    dataset = TokenDataset("test", [np.array([1] * 40 + [77])], vocab_size=50, bytes_of_text=1)
    loader = Loader(dataset, batch_size=1, seq_len=4, seed=3, prefetch=4)
    order = [row[0] for batch, _ in take(counting(41), 10, batch_size=1, seq_len=4, seed=3) for row in batch]
    for _ in range(order.index(36)):
        loader.next()
    for _ in range(2):  # it does not go past the bad batch
        with pytest.raises(DataError, match="holds token 77, beyond the vocabulary of 50"):
            loader.next()
    loader.close()


def test_all_threads_read_even_if_fewer_batches_are_to_be_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, all_three = counting(1_000), threading.Barrier(3, timeout=60)
    read = dataset.read_windows

    def together(indices: np.ndarray, seq_len: int) -> np.ndarray:
        all_three.wait()
        return read(indices, seq_len)

    monkeypatch.setattr(dataset, "read_windows", together)
    loader = Loader(dataset, batch_size=2, seq_len=4, seed=0, threads=3, prefetch=1)
    loader.next()
    all_three.abort()  # of the next ones
    loader.close()


def test_waiting_is_counted_and_close_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances while the first batch is read; reading begins when somebody waits for it."""
    dataset, now_s, asked = counting(1_000), 0.0, threading.Event()
    before = set(threading.enumerate())
    read = dataset.read_windows

    def clock() -> float:
        read_s = now_s  # first: then the batch is read, and the clock advances
        asked.set()
        return read_s

    def slow(indices: np.ndarray, seq_len: int) -> np.ndarray:
        nonlocal now_s
        asked.wait()
        now_s = 5.0
        return read(indices, seq_len)

    monkeypatch.setattr(dataset, "read_windows", slow)
    monkeypatch.setattr(time, "perf_counter", clock)
    loader = Loader(dataset, batch_size=2, seq_len=4, seed=0, prefetch=2)
    loader.next()
    assert loader.waited_s == 5.0
    loader.next()
    assert loader.waited_s == 5.0, "what is there is not waited for"
    loader.close()
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("loader")]


def test_a_program_that_forgets_to_close_ends() -> None:
    code = """
import numpy as np
from redline.data.loader import Loader
from redline.data.shards import TokenDataset
dataset = TokenDataset("x", [np.arange(99)], vocab_size=99, bytes_of_text=1)
loader = Loader(dataset, batch_size=4, seq_len=8, seed=0, pin_memory=True)
loader.next()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("sequences", "micro_batch"), [(7, 2), (8, 8), (1, 3), (99, 4)])
def test_validation_reads_each_window_once_in_step(world_size: int, sequences: int, micro_batch: int) -> None:
    dataset = counting(20 * 5 + 1)
    ranks = [
        list(
            valid_batches(
                dataset,
                seq_len=5,
                sequences=sequences,
                micro_batch=micro_batch,
                rank=rank,
                world_size=world_size,
            )
        )
        for rank in range(world_size)
    ]
    shapes = [[inputs.shape for inputs, _ in rank] for rank in ranks]
    assert shapes == [shapes[0]] * world_size  # a sharded model runs forward on all ranks at once
    assert all(rows <= micro_batch for rows, _ in shapes[0])
    counted = [
        (row[0].item(), target.tolist())
        for rank in ranks
        for inputs, targets in rank
        for row, target in zip(inputs, targets, strict=True)
        if target[0] != IGNORED
    ]
    assert sorted(counted) == [(i * 5, list(range(i * 5 + 1, i * 5 + 6))) for i in range(min(sequences, 20))]
