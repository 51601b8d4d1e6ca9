"""Loops as a user writes them, under `redline.watch`, each with a fault that can be left out: what planted.py
turns by hand.

    loop = train_on_rows(folder, torch.device("cpu"), faulty=True)
    run = next(loop)                        # one update

A small Llama from a config, by transformers. On a GPU it is wide and of few layers, in bf16: a pass computes
for longer than its launches take, so that the planted fault is what holds it up.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import redline
from redline.observe import WatchedRun

VOCABULARY = 512
IGNORED = -100
HOST_S = 0.02
"""Work of the host in an update of `read_every_loss`."""


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    rows: int
    length: int
    """Positions of a training row, or of a prompt."""
    new_tokens: int = 0


ROWS = {
    "cpu": Shape(layers=2, width=96, rows=12, length=96),
    "cuda": Shape(layers=4, width=2048, rows=64, length=512),
}
TEXTS = {
    "cpu": Shape(layers=2, width=128, rows=8, length=8, new_tokens=56),
    "cuda": Shape(layers=4, width=2048, rows=128, length=128, new_tokens=40),
}


def llama(shape: Shape, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(2, shape.width // 128),
        max_position_embeddings=shape.length + shape.new_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


# ---- padding ----


def mixed_rows(shape: Shape) -> Iterator[list[Tensor]]:
    """The texts of an update, from an eighth to a half of the longest allowed; the lengths are always the
    same, the tokens are not."""
    draw, lengths = (
        torch.Generator().manual_seed(0),
        torch.linspace(shape.length // 8, shape.length // 2, shape.rows).long().tolist(),
    )
    while True:
        yield [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]


def collated(rows: list[Tensor], length: int) -> dict[str, Tensor]:
    """Every row padded to one length."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def packed(rows: list[Tensor], length: int) -> dict[str, Tensor]:
    """The same texts end to end, in as few rows as they need, all about as long."""
    joined = torch.cat(rows)
    each = math.ceil(len(joined) / math.ceil(len(joined) / length))
    return collated(list(joined.split(each)), each)


def train_on_rows(folder: Path, device: torch.device, *, faulty: bool) -> Iterator[WatchedRun]:
    """Training on texts of mixed length. The fault: each is padded to the longest allowed. Without it the
    same texts are packed."""
    shape = ROWS[device.type]
    model = llama(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    texts = mixed_rows(shape)
    loader = (collated(rows, shape.length) if faulty else packed(rows, shape.length) for rows in texts)

    with redline.watch(folder, model=model, quiet=True) as run:
        for batch in run.batches(loader):
            with run.phase("copy"):
                ids = batch["input_ids"].to(device, non_blocking=True)
            loss = update(run, model, optimizer, ids)
            run.step(loss=loss)
            yield run


def update(run: WatchedRun, model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One update, its phases marked."""
    # causal, and padding stands at the end: no text sees it, so the model needs no mask
    with run.phase("forward"):
        loss = loss_of(model, ids)
    with run.phase("backward"):
        loss.backward()
    with run.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    targets = ids[:, 1:]
    return cross_entropy(
        logits.flatten(0, 1).float(),
        targets.masked_fill(targets == 0, IGNORED).flatten(),
        ignore_index=IGNORED,
    )


# ---- waits ----


def read_every_loss(folder: Path, device: torch.device, *, faulty: bool) -> Iterator[WatchedRun]:
    """Updates with some work of the host in each (here a sleep), which hides behind the GPU. The fault:
    the loss is read before it, so that the GPU has nothing to do meanwhile."""
    shape = ROWS[device.type]
    model = llama(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = (packed(rows, shape.length) for rows in mixed_rows(shape))

    with redline.watch(folder, model=model, quiet=True) as run:
        for batch in run.batches(batches):
            with run.phase("copy"):
                ids = batch["input_ids"].to(device, non_blocking=True)
            loss = update(run, model, optimizer, ids)
            if faulty:
                loss.item()
            time.sleep(HOST_S)
            run.step(loss=loss)
            yield run


# ---- generation ----


def learn_from_samples(folder: Path, device: torch.device, *, faulty: bool) -> Iterator[WatchedRun]:
    """The shape of reinforcement learning: draw continuations, then train on them. The fault: generation
    keeps no keys and values."""
    shape = TEXTS[device.type]
    model = llama(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    draw = torch.Generator(device).manual_seed(0)

    with redline.watch(folder, model=model, quiet=True) as run:
        while True:
            prompts = torch.randint(1, VOCABULARY, (shape.rows, shape.length), generator=draw, device=device)
            with run.phase("generate"):
                texts = model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=shape.new_tokens,
                    do_sample=True,
                    use_cache=not faulty,
                )
            loss = update(run, model, optimizer, texts)
            run.step(loss=loss, tokens=texts.numel())
            yield run
