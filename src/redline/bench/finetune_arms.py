"""The arms of `redline bench finetune`, all in this process: `python -m redline.bench.finetune_arms full
hf-seeds graph`.

Every arm starts from the same weights and adapters, reads the same rows in the same order (`packing.batches`)
at a constant learning rate, and prints one line of JSON: its losses, and the seconds of blocks of updates.
Ours is the real loop with its record on a disk.
"""

import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.bench.finetune import SETTINGS, Setting
from redline.config.recipe import LoraConfig, Recipe, TrainConfig
from redline.errors import RedlineError, need
from redline.finetune import job_of, prepare, train
from redline.machine.facts import read_facts
from redline.model.huggingface import config_json, to_huggingface
from redline.model.transformer import Transformer, build_model
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.record.run import RunFolder
from redline.train.adapter import MODULES, peft_tensors
from redline.train.execution import COMPUTE_DTYPE
from redline.train.packing import Example, batches
from redline.train.process import Process

BLOCKS = 3
"""Timed blocks of an arm, after the first updates."""
WARM_UP = 2
"""Updates that are not timed: the first compiles, captures and fills caches."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ANSWER_WORDS = 64
"""Different tokens in the answers, so that there is something to learn and the loss falls."""


def main(name: str, *arms: str) -> None:
    setting = SETTINGS[name]
    for arm in arms:
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            result = _huggingface(arm, setting) if arm.startswith("hf") else _ours(arm, setting)
        except (RedlineError, torch.OutOfMemoryError) as error:  # the other arms are measured all the same
            result = {"failed": str(error).splitlines()[0][:300]}
        memory_bytes = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
        sys.stdout.write(json.dumps({"row": arm, **result, "memory_bytes": memory_bytes}) + "\n")
        sys.stdout.flush()


def examples(setting: Setting) -> list[Example]:
    draw = random.Random(0)
    most = setting.model.vocab_size
    return [
        Example(
            tuple(draw.randrange(most) for _ in range(draw.randint(*setting.prompt_tokens))),
            tuple(
                draw.randrange(min(ANSWER_WORDS, most)) for _ in range(draw.randint(*setting.answer_tokens))
            ),
        )
        for _ in range(setting.rows)
    ]


def order(setting: Setting, arm: str) -> Iterator[list[int]]:
    """The rows of each update of the arm."""
    epochs = -(-setting.updates[arm] * setting.batch_size // setting.rows)
    made = batches(setting.rows, batch_size=setting.batch_size, epochs=epochs, seed=0)
    return (batch for batch, _ in zip(made, range(setting.updates[arm]), strict=False))


def _blocks(setting: Setting, arm: str, ends_s: list[float]) -> list[dict[str, Any]]:
    """The updates after the warm-up in BLOCKS pieces, from the moments at which each update ended."""
    rows, done = examples(setting), list(order(setting, arm))
    size = max(1, (len(done) - WARM_UP) // BLOCKS)
    found = []
    for start in range(WARM_UP, WARM_UP + BLOCKS * size, size):
        numbers = [i for batch in done[start : start + size] for i in batch]
        tokens = sum(len(rows[i].prompt) + len(rows[i].answer) for i in numbers)
        seconds = ends_s[start + size - 1] - ends_s[start - 1]
        found.append({"updates": size, "examples": len(numbers), "tokens": tokens, "seconds": seconds})
    return found


def tuned_recipe(setting: Setting, epochs: int = 1) -> Recipe:
    train = TrainConfig(
        batch_size=setting.batch_size,
        lr=setting.lr,
        epochs=epochs,
        schedule="constant",
        weight_decay=0.0,
        beta2=0.999,
    )
    lora, name = LoraConfig(rank=setting.rank, alpha=setting.alpha), "bench"
    return Recipe(name=name, workload="finetune", model=setting.model, train=train, lora=lora)


def adapted(setting: Setting, dtype: torch.dtype) -> Transformer:
    model = build_model(setting.model, device=DEVICE, seed=0)
    model.compute_dtype = dtype
    prepare(model, tuned_recipe(setting), Process(0, 1, torch.device(DEVICE)))
    return model


# ---- ours ----


class _Stop(Exception):
    """Enough updates were made."""


class _Watch:
    """An observer that keeps losses and the moments at which updates ended."""

    def __init__(self, updates: int) -> None:
        self.updates, self.started_s = updates, time.perf_counter()
        self.first_update_s = 0.0
        self.losses: list[float] = []
        self.ends_s: list[float] = []

    def metrics(self, line: dict[str, Any]) -> None:
        if not self.losses:
            self.first_update_s = time.perf_counter() - self.started_s
        self.losses.append(line["loss"])
        self.ends_s.append((self.ends_s[-1] if self.ends_s else 0.0) + line["step_s"])
        if len(self.losses) == self.updates:
            raise _Stop

    def event(self, kind: str, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def _ours(arm: str, setting: Setting) -> dict[str, Any]:
    updates, process = setting.updates[arm], Process(0, 1, torch.device(DEVICE))
    recipe = tuned_recipe(setting, epochs=-(-updates * setting.batch_size // setting.rows))
    plan = make_plan(recipe, hardware_here(read_facts(), None))
    if arm == "fp32":
        plan = replace(plan, precision="fp32", cross_entropy="torch")
    if arm == "compiled":
        plan = replace(plan, compile="default")
    model = adapted(setting, COMPUTE_DTYPE[plan.precision])
    watch = _Watch(updates)
    with tempfile.TemporaryDirectory() as run, RunFolder(Path(run)) as folder, suppress(_Stop):
        rows = examples(setting)
        train(
            job_of(model, rows, recipe, plan, process, run=Path(run), folder=folder, observers=[watch]),
            process,
        )
    return {
        "losses": watch.losses,
        "blocks": _blocks(setting, arm, watch.ends_s),
        "first_update_s": watch.first_update_s,
    }


# ---- Hugging Face's Trainer with PEFT ----


def peft_model(setting: Setting) -> Any:
    """Their model with our weights and our adapters."""
    transformers, peft = need("transformers", extra="hf"), need("peft", extra="hf")
    ours = adapted(setting, torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config_json(setting.model)), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(scratch)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(DEVICE)
    plain = {name: p.detach() for name, p in ours.named_parameters() if "lora" not in name}
    missing, unexpected = theirs.load_state_dict(to_huggingface(setting.model, plain), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "the head is the embedding, and nothing else is left over"
    modules = [module.split(".")[1] for module in MODULES.values()]
    lora = peft.LoraConfig(
        r=setting.rank, lora_alpha=setting.alpha, target_modules=modules, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(theirs, lora)
    start = peft_tensors(ours)
    learning = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert learning.keys() == start.keys()
    for name, p in learning.items():
        p.data.copy_(start[name])
    return model


def _huggingface(arm: str, setting: Setting) -> dict[str, Any]:
    transformers = need("transformers", extra="hf")
    model, watch = peft_model(setting), _watch_of_theirs(transformers)
    as_seeds = arm == "hf-seeds"
    with tempfile.TemporaryDirectory() as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=setting.batch_size,
            max_steps=setting.updates[arm],
            learning_rate=setting.lr,
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
            use_cpu=DEVICE == "cpu",
        )
        rows = [_padded(example, setting.padded_to) for example in examples(setting)]
        trainer = _trainer_of_theirs(transformers, setting)(
            model=model, args=arguments, train_dataset=rows, callbacks=[watch]
        )
        watch.started_s = time.perf_counter()
        trainer.train()
    losses = [float(loss) for loss in trainer.losses]
    return {
        "losses": losses,
        "blocks": _blocks(setting, arm, watch.ends_s),
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


def _trainer_of_theirs(transformers: Any, setting: Setting) -> Any:
    class Order(torch.utils.data.Sampler[int]):
        """Our order: an iteration is an epoch."""

        epoch = 0

        def __len__(self) -> int:
            return setting.rows

        def __iter__(self) -> Iterator[int]:
            (numbers,) = batches(setting.rows, batch_size=setting.rows, epochs=1, seed=self.epoch)
            self.epoch += 1
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
            if DEVICE == "cuda":
                # an update takes a quarter of a second there, and waiting for its end some microseconds
                torch.cuda.synchronize()
            self.ends_s.append(time.perf_counter())

    return Watch()


if __name__ == "__main__":
    main(*sys.argv[1:])
