"""The arms of `redline bench finetune`, each in a separate process: losses of all updates, and seconds of blocks.

Every arm starts from the same weights and adapters, and reads the same rows in the same order at a constant
learning rate. Ours is the real loop with its record on a disk (`measure.training`).
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from redline.bench import theirs
from redline.bench.finetune import WORKS, FinetuningWork
from redline.bench.results import BenchRow
from redline.errors import need
from redline.finetune import prepare
from redline.machine.facts import read_facts
from redline.measure.child import cuda_peaks, timed
from redline.measure.training import TrainingSubject, random_rows, whole_batches
from redline.measure.trial import train_trial
from redline.model.transformer import build_model
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.train.adapter import MODULES, peft_tensors
from redline.train.packed import Example, batches, exact
from redline.train.process import Process

BLOCKS = 3
"""Timed blocks of an arm, after the first updates."""
WARM_UP = 2
"""Updates that are not timed: the first compiles, captures and fills caches."""


def arm(setting: dict[str, str]) -> Iterator[BenchRow]:
    work, name = WORKS[setting["name"]], setting["arm"]
    found = _huggingface(name, work) if name.startswith("hf") else _ours(name, work)
    cuda = torch.cuda.is_available()
    yield found | {"memory_bytes": cuda_peaks()["allocated_bytes"] if cuda else None}


def _rows(work: FinetuningWork) -> list[Example]:
    rows = random_rows(work.model.vocab_size, work.padded_to)
    return whole_batches(rows, work.batch_size)


def _block_size(name: str, work: FinetuningWork) -> int:
    return max(1, (work.updates[name] - WARM_UP) // BLOCKS)


def _block(work: FinetuningWork, updates: int, seconds: float, tokens_per_update: float) -> dict[str, Any]:
    tokens, examples = updates * tokens_per_update, updates * work.batch_size
    return {"updates": updates, "examples": examples, "tokens": tokens, "seconds": seconds}


# ---- ours ----


def _ours(name: str, work: FinetuningWork) -> BenchRow:
    plan = make_plan(work.recipe, hardware_here(read_facts(), None))
    if name == "fp32":
        plan = replace(plan, precision="fp32", cross_entropy="torch")
    if name == "compiled":
        plan = replace(plan, compile="default")
    subject = TrainingSubject(train_trial(work.recipe, plan).setting)
    try:
        first_update_s = timed(1, subject.step, subject.drain)
        timed(WARM_UP - 1, subject.step, subject.drain)
        size = _block_size(name, work)
        blocks_s = [timed(size, subject.step, subject.drain) for _ in range(BLOCKS)]
    finally:
        subject.close()
    blocks = [_block(work, size, seconds, subject.tokens_per_step) for seconds in blocks_s]
    return {"losses": subject.losses, "blocks": blocks, "first_update_s": first_update_s}


# ---- Hugging Face's Trainer with PEFT ----


def peft_model(work: FinetuningWork) -> Any:
    """Their model with our weights and our adapters, in fp32."""
    peft = need("peft", extra="hf")
    process = Process(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    ours = build_model(work.model, device=process.device, seed=work.recipe.train.seed)
    prepare(ours, work.recipe, process)
    plain = {name: p.detach() for name, p in ours.named_parameters() if "lora" not in name}
    modules = [module.split(".")[1] for module in MODULES.values()]
    lora = peft.LoraConfig(
        r=work.lora.rank, lora_alpha=work.lora.alpha, target_modules=modules, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(theirs.model_of(work.model, plain, device=process.device), lora)
    start = peft_tensors(ours)
    learning = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert learning.keys() == start.keys()
    for name, p in learning.items():
        p.data.copy_(start[name])
    return model


def _huggingface(name: str, work: FinetuningWork) -> BenchRow:
    model, rows, size = peft_model(work), _rows(work), _block_size(name, work)
    as_seeds = name == "hf-seeds"
    with tempfile.TemporaryDirectory() as scratch:
        arguments = theirs.arguments(
            scratch,
            per_device_train_batch_size=work.batch_size,
            max_steps=work.updates[name],
            learning_rate=work.lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=not as_seeds,
            gradient_checkpointing=as_seeds,
            gradient_checkpointing_kwargs={"use_reentrant": False} if as_seeds else None,
            optim="adamw_torch" if as_seeds else "adamw_torch_fused",
        )
        padded, clock = (
            [_padded(row, work.padded_to) for row in rows],
            theirs.clock(warm_up=WARM_UP, per_block=size),
        )
        trainer = _trainer_of_theirs(len(rows))(
            model=model, args=arguments, train_dataset=padded, callbacks=[clock]
        )
        clock.started_s = time.perf_counter()
        trainer.train()
    tokens = exact(rows).tokens / (len(rows) // work.batch_size)
    return {
        "losses": [float(loss) for loss in trainer.losses],
        "blocks": [_block(work, size, seconds, tokens) for seconds in clock.blocks_s[:BLOCKS]],
        "first_update_s": clock.first_step_s,
    }


def _padded(example: Example, length: int) -> dict[str, Tensor]:
    tokens = (*example.prompt, *example.answer)
    padding = length - len(tokens)
    return {
        "input_ids": torch.tensor((*tokens, *[0] * padding)),
        "labels": torch.tensor((*[-100] * len(example.prompt), *example.answer, *[-100] * padding)),
        "attention_mask": torch.tensor((*[1] * len(tokens), *[0] * padding)),
    }


def _trainer_of_theirs(rows: int) -> Any:
    class Order(torch.utils.data.Sampler[int]):
        """Our order of the rows; an iteration is an epoch."""

        def __len__(self) -> int:
            return rows

        def __iter__(self) -> Iterator[int]:
            (numbers,) = batches(rows, batch_size=rows, epochs=1, seed=0)
            return iter(numbers)

    class Trainer(need("transformers", extra="hf").Trainer):  # type: ignore[misc]
        """Keeps every loss without waiting for the GPU."""

        losses: list[Tensor]

        def _get_train_sampler(self, *_: Any) -> Order:
            self.losses = []
            return Order()

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            self.losses.append(loss.detach())
            return loss

    return Trainer
