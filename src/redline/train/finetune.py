"""Fine-tuning on prompts and answers: LoRA where the model has adapters, else all of its weights.

    add_lora(model, LoraConfig(), seed=0)
    outcome = finetune(model, examples, FinetuneConfig(epochs=3), folder=folder)

A batch is counted in examples and packed without padding; the loss of an update is the sum over its answer
tokens divided by their number. On CUDA the whole update is one CUDA graph (`graph`); elsewhere the same
update runs eagerly. Killed at any moment, the same call goes on from the last checkpoint, to the same bits on
hardware that computes the same bits twice. Left out: several processes, validation (a task's own score is the
measure, and it lives above), fp16.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from redline.config.recipe import Schedule, TrainConfig
from redline.errors import CheckpointError, ConfigError, TrainingError
from redline.model.lora import lora_layers
from redline.model.transformer import Transformer
from redline.record.observe import Observer
from redline.record.run import LineWriter, RunFolder
from redline.train.checkpoint import Checkpoints, load
from redline.train.checkpoint_files import step_name
from redline.train.graph import UpdateGraphs
from redline.train.instruments import Instruments
from redline.train.loop import STOPPED, Outcome, stop_on_signal
from redline.train.optimizer import make_optimizers, set_lr, state_tensors
from redline.train.packing import (
    Example,
    Shape,
    batches,
    check_examples,
    exact,
    fingerprint,
    pack,
    static_shapes,
    unpack,
)
from redline.train.process import Process
from redline.train.schedule import lr_factor
from redline.train.step import Learner, Update, update

__all__ = ["Example", "FinetuneConfig", "Finetuner", "finetune"]

_EXECUTION = ("examples_per_pass", "graph", "compile", "checkpoint_every")
"""Fields that say how a training is computed and saved, not what it is."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How the weights move; `examples_per_pass`, `graph` and `compile` say how it is computed, and change
    nothing but rounding."""

    epochs: int = 3
    batch_size: int = 32
    """Examples in one update."""
    lr: float = 2e-4
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    warmup_fraction: float = 0.1
    """Share of the updates in which the learning rate rises."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    seed: int = 0
    """Seeds the order of the examples."""
    checkpoint_every: int = 0
    """Updates between checkpoints; 0: only at the end (and on Ctrl-C)."""
    examples_per_pass: int | None = None
    """Examples computed at once, at most; not given: the whole batch. The update is the same."""
    graph: bool = True
    """On CUDA: the update as a CUDA graph."""
    compile: bool = False
    """Blocks compiled: fewer kernels, for about 20 s before the first update."""

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("epochs", self.epochs > 0, "greater than 0"),
            ("batch_size", self.batch_size > 0, "greater than 0"),
            ("lr", 0 < self.lr < math.inf, "a number greater than 0"),
            ("schedule", self.schedule in ("cosine", "linear", "constant"), "cosine, linear or constant"),
            ("warmup_fraction", 0 <= self.warmup_fraction <= 1, "between 0 and 1"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "between 0 and 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a number that is not negative"),
            ("beta1", 0 <= self.beta1 < 1, "from 0 to below 1"),
            ("beta2", 0 <= self.beta2 < 1, "from 0 to below 1"),
            ("eps", 0 < self.eps < math.inf, "a number greater than 0"),
            ("clip_norm", 0 <= self.clip_norm < math.inf, "a number that is not negative"),
            ("seed", self.seed >= 0, "not negative"),
            ("checkpoint_every", self.checkpoint_every >= 0, "not negative"),
            (
                "examples_per_pass",
                self.examples_per_pass is None or self.examples_per_pass > 0,
                "greater than 0",
            ),
        ):
            if not holds:
                raise ConfigError(f"finetune.{name} must be {rule}, got {getattr(self, name)}")

    def train_config(self, steps: int) -> TrainConfig:
        """The same as the train room knows it, for a run of so many updates."""
        shared = (
            "batch_size",
            "lr",
            "schedule",
            "min_lr_ratio",
            "weight_decay",
            "beta1",
            "beta2",
            "eps",
            "clip_norm",
            "seed",
        )
        warmup_steps = round(self.warmup_fraction * steps)
        return TrainConfig(
            steps=steps, warmup_steps=warmup_steps, **{name: getattr(self, name) for name in shared}
        )


def finetune(
    model: Transformer,
    examples: Sequence[Example],
    config: FinetuneConfig,
    *,
    folder: RunFolder | None = None,
    observers: Sequence[Observer] = (),
) -> Outcome:
    """Train the model in place on the examples, to the end or to a request to stop. With a run folder there
    is a record, and the run can be resumed by the same call on the same model; without, nothing is
    written."""
    check_examples(examples, context_length=model.config.context_length, vocab_size=model.config.vocab_size)
    return Finetuner(model, examples, config, folder, observers).run()


@dataclass
class _Progress:
    """Where the run stands; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


class Finetuner:
    """One fine-tuning. `run` is all of it; a loop of one's own calls `update` and `write_ready`, and in the
    end `drain` and `close`."""

    def __init__(
        self,
        model: Transformer,
        examples: Sequence[Example],
        config: FinetuneConfig,
        folder: RunFolder | None,
        observers: Sequence[Observer],
    ) -> None:
        self.model, self.examples, self.config, self.folder, self.observers = (
            model,
            examples,
            config,
            folder,
            observers,
        )
        self.device = model.embed.weight.device
        counts = {"batch_size": config.batch_size, "epochs": config.epochs, "seed": config.seed}
        self.batches = [[examples[i] for i in numbers] for numbers in batches(len(examples), **counts)]
        self.train = config.train_config(len(self.batches))
        self.learner = Learner(
            model, make_optimizers(model, self.train), Process(0, 1, self.device), config.clip_norm
        )
        if self.device.type == "cuda" and model.compute_dtype != torch.float32:
            model.cross_entropy = "fused"
        self.tensors = state_tensors(model, self.learner.optimizers)
        self.fingerprint = self._fingerprint()
        self.checkpoints = Checkpoints(folder.checkpoints_path, keep=1) if folder is not None else None
        self.pass_size = min(config.batch_size, config.examples_per_pass or config.batch_size)
        """Examples in one pass; smaller once memory ran out."""
        self.graphs: UpdateGraphs | None = None
        self.progress = _Progress()
        self._resume()
        self.shapes = self._choose_shapes()
        self.metrics = self._open_metrics()
        self.last_line: dict[str, Any] = {}
        self.saving: dict[str, Any] | None = None
        """The checkpoint that is being written and has not been announced."""
        self.stop_requested = False
        self.clock_started_s = time.monotonic()
        self.instruments = Instruments(self.device, self._rates)

    def run(self) -> Outcome:
        if self.config.compile:
            for block in self.model.blocks:
                block.compile(fullgraph=True, dynamic=False)
        try:
            with stop_on_signal(self._request_stop):
                why = self._why_stop()
                while why is None:
                    self.update()
                    why = self._why_stop()
                    if why is not None or (
                        self.config.checkpoint_every
                        and self.progress.step % self.config.checkpoint_every == 0
                    ):
                        self._checkpoint()
                    self.write_ready()
                    if self.checkpoints is not None and self.checkpoints.idle():
                        self._announce_checkpoint()
            self._announce_checkpoint()
            self._event("end", step=self.progress.step, why=why, elapsed_s=round(self._elapsed_s(), 3))
            return Outcome(self.progress.step, why, self.last_line)
        finally:
            self.close()

    # ---- an update ----

    def update(self) -> None:
        """One update on the next batch; running out of memory halves the passes and tries the same batch
        again."""
        factor = lr_factor(self.train, self.progress.step + 1)
        while True:
            try:
                outcome = self._attempt(self.progress.step, factor)
                break
            except torch.OutOfMemoryError as error:
                self._shrink(error)
        done, batch = self.progress, self.batches[self.progress.step]
        done.step, done.tokens = done.step + 1, done.tokens + exact(batch).tokens
        shape = self.shapes[done.step - 1]
        room = shape.tokens * self._passes() if shape is not None else exact(batch).tokens
        facts = {
            "step": done.step,
            "lr": self.config.lr * factor,
            "tokens": done.tokens,
            "padding_share": 1 - exact(batch).tokens / room,
            "elapsed_s": self._elapsed_s(),
        }
        self.instruments.push(facts, outcome)

    def _attempt(self, number: int, factor: float) -> Update:
        batch, shape = self.batches[number], self.shapes[number]
        answers = exact(batch).answers
        rows = [pack(row, shape or exact(row)) for row in self._split(batch)]
        if self.config.graph and self.device.type == "cuda":
            assert shape is not None
            if self.graphs is None:
                self.graphs = self._capture(number)
            self._wait_for_snapshot()
            return self.graphs.run(rows, shape, lr=self.config.lr * factor, answers=answers)
        self._wait_for_snapshot()
        set_lr(self.learner.optimizers, factor)
        shapes = [shape or exact(row) for row in self._split(batch)]
        unpacked = (
            unpack(torch.from_numpy(row).to(self.device), own) for row, own in zip(rows, shapes, strict=True)
        )
        losses = (
            self.model(tokens_1T, targets_1A, packing=packing) for tokens_1T, targets_1A, packing in unpacked
        )
        return update(self.learner, losses, tokens=float(answers))

    def _capture(self, number: int) -> UpdateGraphs:
        started_s = time.perf_counter()
        shapes = {shape for shape in self.shapes[number:] if shape is not None}
        graphs = UpdateGraphs(self.learner, shapes, passes=self._passes())
        self._event(
            "captured",
            graphs=len(shapes),
            rows_tokens=sorted(shape.tokens for shape in shapes),
            seconds=_since(started_s),
        )
        return graphs

    def _choose_shapes(self) -> list[Shape | None]:
        """Static shapes where graphs or compiled code need them, else None: every row as long as it is."""
        if self.device.type != "cuda" and not self.config.compile:
            return [None] * len(self.batches)
        updates = [[exact(row) for row in self._split(batch)] for batch in self.batches]
        return list(
            static_shapes(
                updates, context_length=self.model.config.context_length, single=self.config.compile
            )
        )

    def _split(self, batch: Sequence[Example]) -> list[Sequence[Example]]:
        """The passes of a batch. A short last batch has as many on CUDA, some of them empty, since a graph's
        number of passes is fixed."""
        starts = range(
            0, self.config.batch_size if self.device.type == "cuda" else len(batch), self.pass_size
        )
        return [batch[start : start + self.pass_size] for start in starts]

    def _passes(self) -> int:
        return -(-self.config.batch_size // self.pass_size)

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Passes of half the examples; the batch, and so the training, stays what it was."""
        step, before = self.progress.step + 1, self.pass_size
        if before == 1:
            longest = max(example.length for example in self.batches[step - 1])
            raise TrainingError(
                f"out of memory at step {step} with one example of up to {longest} tokens a pass: leave out"
                " long ones, or shrink the model"
            ) from error
        self.pass_size = -(-before // 2)
        self._event(
            "out_of_memory", step=step, examples_per_pass_before=before, examples_per_pass=self.pass_size
        )
        for optimizer in self.learner.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.graphs = None
        torch.cuda.empty_cache()
        self.shapes = self._choose_shapes()

    # ---- the record ----

    def _rates(self, facts: dict[str, Any], step_s: float) -> dict[str, float | None]:
        batch = self.batches[facts["step"] - 1]
        return {"rows_per_s": len(batch) / step_s, "tokens_per_s": exact(batch).tokens / step_s}

    def write_ready(self) -> None:
        """Put the lines of finished updates into the record."""
        self._write(self.instruments.ready())

    def drain(self) -> None:
        """Wait for every update so far, put its line into the record, and time the next one afresh."""
        self._write(self.instruments.ready(drain=True))
        self.instruments.restart()

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            for name in ("loss", "grad_norm"):
                if not math.isfinite(line[name]):
                    raise TrainingError(
                        f"{name} is {line[name]} at step {line['step']}: lower finetune.lr (now"
                        f" {self.config.lr}), set finetune.clip_norm, or look at the examples; nothing after"
                        " the last checkpoint was saved, and the same command goes on from there"
                    )
            self.last_line = line
            if self.metrics is not None:
                self.metrics.append(line)
            for observer in self.observers:
                observer.metrics(line)

    def _event(self, kind: str, **facts: Any) -> None:
        if self.folder is not None:
            self.folder.event(kind, **facts)
        for observer in self.observers:
            observer.event(kind, facts)

    def _checkpoint(self) -> None:
        """Lines first: a checkpoint is committed after the metrics up to it, and never holds an update that
        went wrong."""
        self._write(self.instruments.ready(drain=True))
        if self.checkpoints is None or self.folder is None:
            return
        started_s = time.perf_counter()
        self._announce_checkpoint()
        state = {
            **asdict(replace(self.progress, elapsed_s=self._elapsed_s())),
            "fingerprint": self.fingerprint,
        }
        self.checkpoints.save(self.progress.step, self.tensors, state, before_commit=self.folder.sync)
        self.saving = {"step": self.progress.step, "stalled_s": _since(started_s)}
        self.instruments.restart()

    def _announce_checkpoint(self) -> None:
        """Record the last checkpoint when it is on the disk, and not before: a run can be resumed from what
        its events say."""
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if self.saving is not None:
            self._event("checkpoint", **self.saving)
            self.saving = None

    def _wait_for_snapshot(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.copy_done()

    # ---- beginning and end ----

    def _fingerprint(self) -> str:
        """Of everything that defines the training, the model's weights aside."""
        config = {name: value for name, value in asdict(self.config).items() if name not in _EXECUTION}
        lora = next((asdict(layer.config) for layer in lora_layers(self.model).values()), None)
        what = {
            "finetune": config,
            "lora": lora,
            "examples": fingerprint(self.examples),
            "model": asdict(self.model.config),
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def _resume(self) -> None:
        if self.checkpoints is None or (step := self.checkpoints.latest()) is None:
            return
        path = self.checkpoints.folder / step_name(step)
        state = load(path, self.tensors)
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{path} was made with other examples or settings ({state['fingerprint']}, not"
                f" {self.fingerprint}): restore them, or use a new folder"
            )
        self.progress = _Progress(**{name: state[name] for name in asdict(self.progress)})

    def _open_metrics(self) -> LineWriter | None:
        step = self.progress.step
        dropped = self.folder.cut_metrics(step) if self.folder is not None else 0
        method = "lora" if lora_layers(self.model) else "full"
        facts = {
            "examples": len(self.examples),
            "updates": len(self.batches),
            "method": method,
            "metrics_dropped": dropped,
        }
        self._event("resume" if step else "start", step=step, **facts)
        return LineWriter(self.folder.metrics_path) if self.folder is not None else None

    def _why_stop(self) -> str | None:
        if self.progress.step >= len(self.batches):
            return "finished"
        return STOPPED if self.stop_requested else None

    def _elapsed_s(self) -> float:
        return self.progress.elapsed_s + time.monotonic() - self.clock_started_s

    def _request_stop(self) -> None:
        self.stop_requested = True

    def close(self) -> None:
        if self.config.compile:
            for block in self.model.blocks:
                block._compiled_call_impl = None  # other shapes than these would each be compiled anew
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.metrics is not None:
            self.metrics.close()


def _since(started_s: float) -> float:
    return round(time.perf_counter() - started_s, 3)
