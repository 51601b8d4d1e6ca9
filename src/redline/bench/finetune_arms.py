"""The arms of `redline bench finetune`, each in a separate process: losses of all updates, seconds of blocks of
them.

Every arm starts from the same weights and adapters, and reads the same rows in the same order at a constant
learning rate. Ours is the real loop with its record on a disk (`measure.training`).
"""

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.bench.finetune import WORKS, FinetuningWork
from redline.bench.results import BenchRow
from redline.errors import need
from redline.finetune import prepare
from redline.machine.facts import read_facts
from redline.measure.child import cuda_peaks, synchronize, timed
from redline.measure.training import TrainingSubject, random_rows, whole_batches
from redline.measure.trial import train_trial
from redline.model.huggingface_out import config_json, to_huggingface
from redline.model.transformer import Transformer, build_model
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.train.adapter import MODULES, peft_tensors
from redline.train.packing import Example, batches, exact
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
        size = max(1, (work.updates[name] - WARM_UP) // BLOCKS)
        blocks_s = [timed(size, subject.step, subject.drain) for _ in range(BLOCKS)]
    finally:
        subject.close()
    blocks = [_block(work, size, seconds, subject.tokens_per_step) for seconds in blocks_s]
    return {"losses": subject.losses, "blocks": blocks, "first_update_s": first_update_s}


# ---- Hugging Face's Trainer with PEFT ----


def _adapted(work: FinetuningWork) -> Transformer:
    """The model that ours starts from, in fp32."""
    process = Process(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model = build_model(work.model, device=process.device, seed=work.recipe.train.seed)
    prepare(model, work.recipe, process)
    return model


def peft_model(work: FinetuningWork) -> Any:
    """Their model with our weights and our adapters."""
    transformers, peft = need("transformers", extra="hf"), need("peft", extra="hf")
    ours = _adapted(work)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config_json(work.model)), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(scratch)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    theirs = theirs.to(ours.embed.weight.device)
    plain = {name: p.detach() for name, p in ours.named_parameters() if "lora" not in name}
    missing, unexpected = theirs.load_state_dict(to_huggingface(work.model, plain), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "the head is the embedding, and nothing else is left over"
    modules = [module.split(".")[1] for module in MODULES.values()]
    lora = peft.LoraConfig(
        r=work.lora.rank, lora_alpha=work.lora.alpha, target_modules=modules, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(theirs, lora)
    start = peft_tensors(ours)
    learning = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert learning.keys() == start.keys()
    for name, p in learning.items():
        p.data.copy_(start[name])
    return model


def _huggingface(name: str, work: FinetuningWork) -> BenchRow:
    transformers = need("transformers", extra="hf")
    model, watch, rows = peft_model(work), _watch_of_theirs(transformers), _rows(work)
    as_seeds, updates = name == "hf-seeds", work.updates[name]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=work.batch_size,
            max_steps=updates,
            learning_rate=work.lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=not as_seeds,
            gradient_checkpointing=as_seeds,
            gradient_checkpointing_kwargs={"use_reentrant": False} if as_seeds else None,
            optim="adamw_torch" if as_seeds else "adamw_torch_fused",
            logging_steps=10**6,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        padded = [_padded(row, work.padded_to) for row in rows]
        trainer = _trainer_of_theirs(transformers, len(rows))(
            model=model, args=arguments, train_dataset=padded, callbacks=[watch]
        )
        watch.started_s = time.perf_counter()
        trainer.train()
    size = max(1, (updates - WARM_UP) // BLOCKS)
    edges = [watch.ends_s[WARM_UP - 1 + place * size] for place in range(BLOCKS + 1)]
    tokens = exact(rows).tokens / (len(rows) // work.batch_size)
    return {
        "losses": [float(loss) for loss in trainer.losses],
        "blocks": [_block(work, size, end - start, tokens) for start, end in itertools.pairwise(edges)],
        "first_update_s": watch.ends_s[0] - watch.started_s,
    }


def _padded(example: Example, length: int) -> dict[str, Tensor]:
    tokens = (*example.prompt, *example.answer)
    padding = length - len(tokens)
    return {
        "input_ids": torch.tensor((*tokens, *[0] * padding)),
        "labels": torch.tensor((*[-100] * len(example.prompt), *example.answer, *[-100] * padding)),
        "attention_mask": torch.tensor((*[1] * len(tokens), *[0] * padding)),
    }


def _trainer_of_theirs(transformers: Any, rows: int) -> Any:
    class Order(torch.utils.data.Sampler[int]):
        """Our order, which a trial goes through again and again: an iteration is an epoch."""

        def __len__(self) -> int:
            return rows

        def __iter__(self) -> Iterator[int]:
            (numbers,) = batches(rows, batch_size=rows, epochs=1, seed=0)
            return iter(numbers)

    class Trainer(transformers.Trainer):
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


def _watch_of_theirs(transformers: Any) -> Any:
    class Watch(transformers.TrainerCallback):
        started_s = 0.0

        def __init__(self) -> None:
            self.ends_s: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            synchronize()  # an update takes a quarter of a second there, and waiting for its end microseconds
            self.ends_s.append(time.perf_counter())

    return Watch()
