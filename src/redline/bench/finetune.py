"""`redline bench finetune`: LoRA fine-tuning against Hugging Face's Trainer with PEFT.

    path = bench_finetune("full", facts, Path("benchmarks"), ...)          # finetune_<hardware>_<date>.{json,md}

Each arm runs in its own process, starts from the same weights and adapters, and reads the same rows in the same order at
a constant learning rate; ours is the real loop with its record on a disk. Rows are random tokens with lengths like those
of the unit-conversion task: speed and loss curve depend on lengths and not on meaning. Left out: accuracy (`redline rft
test`).
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from redline.bench import theirs
from redline.bench.results import MEASURED, SMOLLM2_360M, TINY, Bench, BenchRow, run_arms, shape, spread
from redline.config.recipe import DataConfig, LoraConfig, ModelConfig, Recipe, TrainConfig
from redline.errors import need
from redline.finetune import prepare
from redline.machine.facts import read_facts
from redline.measure.child import device, peak_bytes, timed
from redline.measure.training import TrainingSubject, random_rows, whole_batches
from redline.measure.trial import ANSWER_SHARE, PROMPT_SHARE, RANDOM_ROWS, RANDOM_WEIGHTS, train_trial
from redline.model.transformer import build_model
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.record.units import format_duration
from redline.train.adapter import MODULES, peft_tensors
from redline.train.packed import Example, batches, exact
from redline.train.process import Process

LABELS = {
    "hf-seeds": "HF Trainer + PEFT, fp32, checkpointing",
    "hf-best": "HF Trainer + PEFT, bf16, no checkpointing, fused AdamW",
    "graph": "redline",
    "fp32": "redline in fp32",
}
"""The arms in the order they run; the last is there for its losses, to compare with the first's."""


@dataclass(frozen=True, kw_only=True)
class FinetuningWork:
    model: ModelConfig
    padded_to: int
    """Tokens of a row for Hugging Face's Trainer; random rows have shares of that."""
    batch_size: int
    lora: LoraConfig
    lr: float
    updates: dict[str, int]
    """Updates of each arm; fewer for the slow ones."""

    @property
    def recipe(self) -> Recipe:
        steady: dict[str, Any] = {"epochs": 1, "schedule": "constant", "weight_decay": 0.0, "beta2": 0.999}
        train = TrainConfig(batch_size=self.batch_size, lr=self.lr, **steady)
        data, lora = DataConfig(source=RANDOM_WEIGHTS, seq_len=self.padded_to), self.lora
        return Recipe(name="bench", workload="finetune", model=self.model, data=data, train=train, lora=lora)


WORKS = {
    "full": FinetuningWork(
        model=replace(SMOLLM2_360M, init_from=RANDOM_WEIGHTS), padded_to=128, batch_size=32,
        lora=LoraConfig(rank=16, alpha=64), lr=2e-4,
        updates={"hf-seeds": 16, "hf-best": 64, "graph": 96, "fp32": 16},
    ),
    "quick": FinetuningWork(
        model=replace(TINY, init_from=RANDOM_WEIGHTS), padded_to=32, batch_size=8,
        lora=LoraConfig(rank=4, alpha=16), lr=2e-3,
        updates={"hf-seeds": 6, "hf-best": 6, "graph": 18, "fp32": 6},
    ),
}  # fmt: skip
"""The thousand rows and the batch of 32 of tuning guide 003 (docs/claims.md); and one that a CPU runs in seconds."""


def _summary(row: BenchRow, rows: Sequence[BenchRow], *_: Any) -> BenchRow:
    """Its speeds in the timed blocks, and how far its losses are from each of Hugging Face's at most."""
    found: BenchRow = {}
    if "blocks" in row:
        found |= spread([block["examples"] / block["seconds"] for block in row["blocks"]], "rows_per_s")
        found["tokens_per_s"] = median(block["tokens"] / block["seconds"] for block in row["blocks"])
        found["update_ms"] = median(1e3 * block["seconds"] / block["updates"] for block in row["blocks"])
    found["loss_differences"] = {
        other["row"]: max(abs(a - b) for a, b in zip(row["losses"], other["losses"], strict=False))
        for other in rows
        if other["row"].startswith("hf") and not row["row"].startswith("hf")
        if "losses" in row.keys() & other.keys()
    }
    return found


def _about(work: FinetuningWork) -> list[str]:
    shortest, longest = (
        sum(round(share[end] * work.padded_to) for share in (PROMPT_SHARE, ANSWER_SHARE)) for end in (0, 1)
    )
    return [
        f"{shape(work.model)}; LoRA of rank {work.lora.rank} on all linear layers, batch {work.batch_size}, loss on"
        f" the answers. {RANDOM_ROWS:,} rows of random tokens, {shortest} to {longest} long, in the same order for all"
        f" arms; Hugging Face's are padded to {work.padded_to}, ours packed.",
        "Median over blocks of updates, interval from the slowest to the fastest; tokens are those of the rows,"
        " padding not counted. The first update's time is from the start of the training: compilation and graphs"
        " included, the model's loading not.",
    ]


def _findings(rows: Sequence[BenchRow], _work: FinetuningWork) -> list[str]:
    made, found = {row["row"]: len(row.get("losses", ())) for row in rows}, []
    for row in rows:
        for other, difference in row["loss_differences"].items():
            updates = min(made[row["row"]], made[other])
            first, last = row["losses"][0], row["losses"][updates - 1]
            found.append(
                f"- {LABELS[row['row']]} and {LABELS[other]}: {difference:.2g} over {updates} updates, in which the"
                f" loss went from {first:.3f} to {last:.3f}."
            )
    title = "Largest difference of the losses over the updates that two arms both made:"
    return [title, "", *found] if found else []


BENCH = Bench(
    verb="finetune",
    title="LoRA fine-tuning",
    works=WORKS,
    arm="redline.bench.finetune:arm",
    columns=(
        ("arm", LABELS.get, "row"),
        ("rows/s", "{:,.0f}".format, "rows_per_s"),
        *MEASURED[1:],  # the interval is that of rows
        MEASURED[0],
        ("update", "{:.1f} ms".format, "update_ms"),
        ("against HF's best", "{:.1f}x".format, "against"),
        ("first update", format_duration, "first_update_s"),
    ),
    reference=lambda other, _: other["row"] == "hf-best",
    about=_about,
    findings=_findings,
    summary=_summary,
)
bench_finetune = partial(run_arms, BENCH)


# ---- the arms, each in its process ----

BLOCKS = 3
"""Timed blocks of an arm, after the first updates."""
WARM_UP = 2
"""Updates that are not timed: the first compiles, captures and fills caches."""


def arm(setting: dict[str, str]) -> Iterator[BenchRow]:
    work, name = WORKS[setting["name"]], setting["arm"]
    found = _huggingface(name, work) if name.startswith("hf") else _ours(name, work)
    yield found | {"memory_bytes": peak_bytes()}


def _block_size(name: str, work: FinetuningWork) -> int:
    return max(1, (work.updates[name] - WARM_UP) // BLOCKS)


def _timed(
    work: FinetuningWork, size: int, blocks_s: Sequence[float], tokens_per_update: float
) -> list[BenchRow]:
    block = {"updates": size, "examples": size * work.batch_size, "tokens": size * tokens_per_update}
    return [{**block, "seconds": seconds} for seconds in blocks_s]


def _ours(name: str, work: FinetuningWork) -> BenchRow:
    plan = make_plan(work.recipe, hardware_here(read_facts(), None))
    if name == "fp32":
        plan = replace(plan, precision="fp32", cross_entropy="torch")
    subject = TrainingSubject(train_trial(work.recipe, plan).setting)
    try:
        first_update_s = timed(1, subject.step, subject.drain)
        timed(WARM_UP - 1, subject.step, subject.drain)
        size = _block_size(name, work)
        blocks_s = [timed(size, subject.step, subject.drain) for _ in range(BLOCKS)]
    finally:
        subject.close()
    blocks = _timed(work, size, blocks_s, subject.tokens_per_step)
    return {"losses": subject.losses, "blocks": blocks, "first_update_s": first_update_s}


# ---- Hugging Face's Trainer with PEFT ----


def peft_model(work: FinetuningWork) -> Any:
    """Their model with our weights and our adapters, in fp32."""
    peft = need("peft", extra="hf")
    process = Process(0, 1, device())
    ours = build_model(work.model, device=process.device, seed=work.recipe.train.seed)
    prepare(ours, work.recipe, process)
    plain = {name: p.detach() for name, p in ours.named_parameters() if "lora" not in name}
    modules = [module.split(".")[1] for module in MODULES.values()]
    its = {"r": work.lora.rank, "lora_alpha": work.lora.alpha, "target_modules": modules}
    lora = peft.LoraConfig(**its, task_type="CAUSAL_LM")
    model = peft.get_peft_model(theirs.model_of(work.model, plain, device=process.device), lora)
    start = peft_tensors(ours)
    learning = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert learning.keys() == start.keys()
    for name, p in learning.items():
        p.data.copy_(start[name])
    return model


def _huggingface(name: str, work: FinetuningWork) -> BenchRow:
    model, size = peft_model(work), _block_size(name, work)
    rows = whole_batches(random_rows(work.model.vocab_size, work.padded_to), work.batch_size)
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
        padded = [_padded(row, work.padded_to) for row in rows]
        clock = theirs.clock(warm_up=WARM_UP, per_block=size)
        trainer = _trainer_of_theirs(len(rows))(
            model=model, args=arguments, train_dataset=padded, callbacks=[clock]
        )
        clock.started_s = time.perf_counter()
        trainer.train()
    tokens = exact(rows).tokens / (len(rows) // work.batch_size)
    return {
        "losses": [float(loss) for loss in trainer.losses],
        "blocks": _timed(work, size, clock.blocks_s[:BLOCKS], tokens),
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
    (order,) = batches(rows, batch_size=rows, epochs=1, seed=0)

    class Trainer(need("transformers", extra="hf").Trainer):  # type: ignore[misc]
        """Takes the rows in our order, the same in every epoch, and keeps every loss without waiting for the GPU."""

        losses: list[Tensor]

        def _get_train_sampler(self, *_: Any) -> list[int]:
            self.losses = []
            return list(order)

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            self.losses.append(loss.detach())
            return loss

    return Trainer
