"""How good a model is: mean loss, perplexity and bits per byte on held-out tokens.

Losses are computed eagerly even if the model is compiled: compiling a second graph for a few batches would take longer
than it saves.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from redline.config.recipe import IGNORED, DataConfig
from redline.data.build import prepare
from redline.data.loader import valid_batches
from redline.data.remote import folder_at, is_remote
from redline.data.shards import Manifest, TokenDataset, check_vocab
from redline.data.stream import TokenStream
from redline.data.tokenizer import Tokenizer
from redline.errors import ConfigError, DataError
from redline.model.transformer import Transformer
from redline.plan.arithmetic import VALIDATION_CHUNKS
from redline.train.execution import eagerly
from redline.train.process import Process
from redline.train.restore import Opened


@dataclass(frozen=True)
class HeldOut:
    loss: float
    """Nats per token."""
    tokens: int
    bytes_per_token: float
    words: int = 0
    """Runs of characters between white space in the text of those tokens; 0: not counted."""

    def metrics(self) -> dict[str, float]:
        """Under the record's names. Perplexity is capped at 1e300, because JSON has no infinity."""
        return {
            "valid_loss": self.loss,
            "valid_perplexity": _capped(self.loss),
            "valid_bits_per_byte": self.loss / math.log(2) / self.bytes_per_token,
        } | ({"valid_word_perplexity": _capped(self.loss * self.tokens / self.words)} if self.words else {})


def _capped(nats: float) -> float:
    return min(1e300, math.exp(min(nats, 690.0)))


@torch.no_grad()
def held_out_loss(
    model: Transformer,
    dataset: TokenDataset,
    *,
    seq_len: int,
    sequences: int,
    micro_batch: int,
    process: Process,
    tokenizer: Tokenizer | None = None,
) -> HeldOut:
    """Mean loss over the first `sequences` windows of the data set, each read once, over all processes."""
    total, count, words = torch.zeros((), dtype=torch.float64, device=process.device), 0, 0
    sizes = {"seq_len": seq_len, "sequences": sequences, "micro_batch": micro_batch}
    batches = valid_batches(dataset, **sizes, rank=process.rank, world_size=process.world_size)
    with eagerly(), _in_pieces(model):
        for inputs_BT, targets_BT in batches:
            total += model(inputs_BT.to(process.device), targets_BT.to(process.device))
            count += int((targets_BT != IGNORED).sum())
            if tokenizer is not None:
                rows = [[t for t in row if t != IGNORED] for row in targets_BT.tolist()]
                words += sum(len(text.split()) for text in tokenizer.decode_batch(rows))
    tokens, words = process.sum(float(count)), int(process.sum(float(words)))
    return HeldOut(process.sum(total.item()) / tokens, int(tokens), dataset.bytes_per_token, words)


@contextmanager
def _in_pieces(model: Transformer) -> Iterator[None]:
    chunks = model.loss_chunks
    model.loss_chunks = max(VALIDATION_CHUNKS, chunks)
    try:
        yield
    finally:
        model.loss_chunks = chunks


def evaluate_opened(
    opened: Opened,
    model: Transformer,
    *,
    source: str | None,
    text_field: str,
    seq_len: int | None,
    sequences: int | None,
) -> HeldOut:
    """The loss of an opened model on its run's validation split, or on any text or data folder."""
    recipe = opened.recipe if opened.recipe and opened.recipe.workload == "pretrain" else None
    if recipe is None and source is None:
        raise ConfigError("only a pre-training run has its own validation split: give --data SOURCE")
    if seq_len is None:
        seq_len = recipe.data.seq_len if recipe else model.config.context_length
    if not 0 < seq_len <= model.config.context_length:
        longest = f"the model's context, {model.config.context_length}"
        raise ConfigError(f"the sequence length must be between 1 and {longest}; got {seq_len}")
    if sequences is None:
        sequences = recipe.train.eval_sequences if recipe and source is None else 256
    if sequences < 1:
        raise ConfigError(f"the number of sequences must be at least 1, got {sequences}")
    dataset = _held_out(opened, source, text_field, tokens=sequences * seq_len + 1)
    dataset.need_window(seq_len)
    check_vocab(dataset.vocab_size, model.config.vocab_size)
    process = Process(0, 1, model.embed.weight.device)
    how = {"seq_len": seq_len, "sequences": sequences, "micro_batch": 8}
    return held_out_loss(model, dataset, **how, process=process, tokenizer=opened.tokenizer)


def _held_out(opened: Opened, source: str | None, text_field: str, *, tokens: int) -> TokenDataset:
    """The run's own validation split, the one of a data folder, or the text at `source`."""
    if source is None:
        assert opened.recipe is not None
        data = opened.recipe.data
        if data.stream:
            return TokenStream(data, opened.tokenizer).head("valid", tokens=tokens)
        folder = prepare(data, opened.config.vocab_size)
    elif is_remote(source) or (Path(source) / "manifest.json").exists():
        folder = folder_at(source)
    else:
        data = DataConfig(source=source, seq_len=1, text_field=text_field, valid_fraction=0.0)
        return TokenStream(data, opened.tokenizer).head("train", tokens=tokens)
    if Manifest.load(folder).tokenizer != opened.tokenizer.fingerprint:
        wrong = f"wrong tokenizer: {folder} was not built with that of {opened.source}"
        raise DataError(f"{wrong}; evaluate on its text instead")
    return TokenDataset.open(folder, "valid")
