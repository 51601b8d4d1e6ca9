"""The fine-tuning workload: a model, and examples of what it should say, become an adapter or a new model.

    with join(plan.hardware.kind) as process:
        outcome = finetune(recipe, plan, Path("runs/mine"), process)

runs/mine/
    recipe.toml  plan.json  metrics.jsonl  events.jsonl  checkpoints/
    adapter/             in PEFT's format, when the training has finished (model/, a Hugging Face folder, where the
                         recipe has no [lora] table)

RFT trains through `job_of` and `write_result` too. Examples are packed, the loss is on the answers alone, and a
share of the rows (`data.valid_fraction`, chosen by a hash of each) is held out.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from redline.config.recipe import Recipe
from redline.data.examples import read_chats
from redline.data.hub import fetch_data, is_hub_name
from redline.data.read import split_of
from redline.engine.prompt import tokenized
from redline.errors import DataError
from redline.model.huggingface import architecture
from redline.model.huggingface_out import write_folder
from redline.model.lora import add_lora
from redline.model.transformer import Transformer
from redline.plan.arithmetic import flops_per_token
from redline.plan.plan import Plan
from redline.train.adapter import check_family, write_adapter
from redline.train.execution import COMPUTE_DTYPE, check_device, eagerly, equip, strip_compiled
from redline.train.instruments import limit_shares
from redline.train.loop import Outcome, Trainer
from redline.train.objective import Job
from redline.train.open_run import OpenRun, Watching, open_run
from redline.train.packed import Example, Examples, Packed, batches_of, check_examples, fingerprint, pack_row
from redline.train.process import Process, full, shard
from redline.train.restore import Opened, open_weights


@dataclass(frozen=True)
class Split:
    train: list[Example]
    valid: list[Example]
    left_out: int
    """Rows that could not be read, or are longer than `data.seq_len`."""


def finetune(
    recipe: Recipe,
    plan: Plan,
    run: Path,
    process: Process,
    *,
    observers: Watching = lambda resume_step: (),
    fork: Path | None = None,
) -> Outcome:
    """Fine-tune the recipe's model on its examples in the run folder, and write the result there."""
    check_device(plan)
    check_result(recipe)
    with open_run(recipe, plan, run, process, observers=observers, fork=fork) as opened:
        base = open_weights(Path(recipe.model.init_from or ""))
        split = read_split(recipe, base)
        if split.left_out:
            opened.event("examples_left_out", rows=split.left_out)
        model = base.build(process.device, COMPUTE_DTYPE[plan.precision])
        prepare(model, recipe, process)
        job = job_of(model, split.train, recipe, plan, process, valid=split.valid, opened=opened)
        outcome = train(job, process)
        if outcome.complete:
            write_result(model, recipe, base, process, adapter=run / "adapter", whole=run / "model")
        return outcome


def prepare(model: Transformer, recipe: Recipe, process: Process) -> None:
    """Put the recipe's adapters on the model, and spread it over several processes."""
    if recipe.lora is not None:
        add_lora(model, recipe.lora, recipe.train.seed, cast=process.world_size == 1)
    model.train()
    if process.world_size > 1:
        shard(model, process, model.compute_dtype)


def job_of(
    model: Transformer,
    examples: Sequence[Example],
    recipe: Recipe,
    plan: Plan,
    process: Process,
    *,
    valid: Sequence[Example] = (),
    opened: OpenRun | None = None,
) -> Job:
    """What the loop needs to train the model on the examples; without a run folder nothing is kept."""
    config, t = model.config, recipe.train
    check_examples(examples, context_length=config.context_length, vocab_size=config.vocab_size)
    updates = batches_of(examples, batch_size=t.batch_size, epochs=t.epochs, steps=t.steps, seed=t.seed)
    mine = [update[process.rank :: process.world_size] for update in updates]
    objective = Packed(
        mine,
        pass_size=plan.micro_batch,
        batch_size=-(-t.batch_size // process.world_size),
        context_length=config.context_length,
        static=process.device.type == "cuda" or plan.compile != "off",
        single=plan.compile != "off",
        even=process.world_size > 1,
    )
    equip(model, plan)
    trains = (recipe.lora, recipe.feedback)
    a_token = cache(lambda length: flops_per_token(config, length, *trains))

    def derived(line: dict[str, Any]) -> dict[str, Any]:
        """The plan does not know the rows, and counts the attention of each as that of the longest row allowed."""
        own = updates[(line["step"] - 1) % len(updates)]  # a trial begins again after the last
        lengths = [example.length for example in own]
        flops = sum(length * a_token(length) for length in lengths)
        return limit_shares(line, flops / (sum(lengths) * plan.prediction.flops_per_token))

    return Job(
        recipe=recipe,
        plan=plan,
        steps=len(updates),
        model=model,
        source=lambda position, _done: Examples(mine, position or 0),
        objective=objective,
        data_fingerprint=fingerprint(examples),
        opened=opened or OpenRun(),
        validate=_validation(valid, process) if valid else None,
        derived=derived,
    )


def train(job: Job, process: Process) -> Outcome:
    """Run the job; afterwards the model computes eagerly again."""
    try:
        return Trainer(job, process).run()
    finally:
        strip_compiled(job.model)


def read_split(recipe: Recipe, base: Opened) -> Split:
    """The recipe's examples as token ids, held-out ones apart."""
    source = recipe.data.source
    chats = read_chats(fetch_data(source) if is_hub_name(source) else Path(source).expanduser())
    train, valid, left_out = list[Example](), list[Example](), chats.left_out
    longest = recipe.data.seq_len or base.config.context_length
    made = tokenized(base.loaded, base.tokenizer, recipe.prompt.mode, chats.rows)
    for chat, (prompt, answer) in zip(chats.rows, made, strict=True):
        example = Example(prompt, answer)
        held_out = split_of(json.dumps(chat).encode(), recipe.data.valid_fraction) == "valid"
        if example.length > longest:
            left_out += 1
        else:
            (valid if held_out else train).append(example)
    if not train:
        raise DataError(f"{source}: no example of at most {longest} tokens to train on; raise data.seq_len")
    return Split(train, valid, left_out)


def _validation(
    examples: Sequence[Example], process: Process
) -> Callable[[Transformer, int], dict[str, float]]:
    """Mean loss on the held-out answers. Every process computes all: a sharded model must run on all of them."""
    answers = sum(len(example.answer) for example in examples)

    @torch.no_grad()
    def validate(model: Transformer, pass_size: int) -> dict[str, float]:
        total = torch.zeros((), dtype=torch.float64, device=process.device)
        with eagerly():
            for start in range(0, len(examples), pass_size):
                part = examples[start : start + pass_size]
                tokens_1T, targets_1A, packing = pack_row(part, process.device)
                total += model(tokens_1T, targets_1A, packing=packing)
        return {"valid_loss": float(total) / answers}

    return validate


def check_result(recipe: Recipe) -> None:
    """Refuse a model whose training could not be written down, before anything is spent on it."""
    (check_family if recipe.lora is not None else architecture)(recipe.model)


def write_result(
    model: Transformer, recipe: Recipe, base: Opened, process: Process, *, adapter: Path, whole: Path
) -> None:
    """Write the adapter or the whole model, gathered on the first process, over what a killed attempt left."""
    if process.is_first:
        for folder in (adapter, whole):
            shutil.rmtree(folder, ignore_errors=True)
    if recipe.lora is not None:
        write_adapter(adapter, model, base=recipe.model.init_from, write=process.is_first)
        return
    weights = {name: full(parameter.detach()) for name, parameter in model.named_parameters()}
    if process.is_first:
        write_folder(whole, replace(base.loaded, weights=weights), torch.float32)
