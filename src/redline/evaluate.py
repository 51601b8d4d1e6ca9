"""How good a model is: mean loss, perplexity and bits per byte on held-out tokens.

Losses are computed eagerly even if the model is compiled: compiling a second graph for a few batches would take longer
than it saves.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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
class Text:
    """What lies behind the tokens that a loss is a mean over."""

    words: int
    """Runs of characters between white space."""
    size_bytes: int


def text_of(dataset: TokenDataset, tokenizer: Tokenizer, *, seq_len: int, sequences: int) -> Text:
    """The text of the targets of `held_out_loss`, document by document: a word or a character may lie on the border of
    two windows, and the token that ends a document is no text."""
    count = min(sequences, dataset.windows(seq_len))
    targets = dataset.read_windows(np.arange(count), seq_len)[:, 1:].reshape(-1)
    ends = targets == tokenizer.eot_id
    documents = np.split(targets[~ends], np.cumsum(~ends)[ends])
    texts = tokenizer.decode_batch([document.tolist() for document in documents])
    sizes = (len(text.encode(errors="replace")) for text in texts)
    return Text(words=sum(len(text.split()) for text in texts), size_bytes=max(1, sum(sizes)))


@dataclass(frozen=True)
class HeldOut:
    loss: float
    """Nats per token."""
    tokens: int
    bytes_per_token: float
    words: int = 0
    """Of the text of those tokens; 0: not counted."""

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
    text: Text | None = None,
) -> HeldOut:
    """Mean loss over the first `sequences` windows of the data set, each read once, over all processes. Without their
    `text`, the bytes of a token are the mean of the whole split, which may differ by some percent."""
    total, count = torch.zeros((), dtype=torch.float64, device=process.device), 0
    sizes = {"seq_len": seq_len, "sequences": sequences, "micro_batch": micro_batch}
    batches = valid_batches(dataset, **sizes, rank=process.rank, world_size=process.world_size)
    with eagerly(), _in_pieces(model):
        for inputs_BT, targets_BT in batches:
            total += model(inputs_BT.to(process.device), targets_BT.to(process.device))
            count += int((targets_BT != IGNORED).sum())
    tokens = int(process.sum(float(count)))
    loss = process.sum(total.item()) / tokens
    if text is None:
        return HeldOut(loss, tokens, dataset.bytes_per_token)
    return HeldOut(loss, tokens, text.size_bytes / tokens, text.words)


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
    read = {"seq_len": seq_len, "sequences": sequences}
    text = text_of(dataset, opened.tokenizer, **read)
    return held_out_loss(model, dataset, **read, micro_batch=8, process=process, text=text)


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
