"""What the stages of one RFT run share: the recipe, the run folder, the task, the model (opened once), the observers.

with open_session(recipe, plan, Path("runs/units"), outside) as session:
    sample(session); train(session, "samples"); run_test(session, "samples")

runs/units/
    recipe.toml  plan.json  events.jsonl
    samples.db            every completion with its verdict (store.py)
    evaluations.jsonl     one line per test
    train-samples/        the fine-tuning on the kept samples: metrics.jsonl, checkpoints/, done.json
    adapter/              its result in PEFT's format (after full fine-tuning model/, a Hugging Face folder)
    train-answers/  adapter-answers/     the same for plain fine-tuning on the reference solutions
"""

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from redline.config.recipe import Recipe, fingerprint_of
from redline.config.rft import TaskConfig
from redline.data.tokenizer import Tokenizer
from redline.engine.local import LocalEngine, fitting_slots
from redline.engine.prompt import Asked, ask, stop_ids
from redline.engine.ray import OnRay, RayEngine
from redline.engine.request import Engine, Sampling
from redline.engine.server import ServerEngine
from redline.errors import ConfigError, DataError, MachineError
from redline.machine.nvml import process_rss_bytes
from redline.model.lora import lora_layers
from redline.model.transformer import Transformer
from redline.plan.bounds import Outside, bounded_slots
from redline.plan.plan import Plan, Why, save
from redline.record.observe import Observer, Observers
from redline.record.run import RunFolder
from redline.tasks.registry import load_task
from redline.tasks.task import Question, Task
from redline.train.execution import COMPUTE_DTYPE
from redline.train.open_run import open_run
from redline.train.process import Process
from redline.train.restore import Opened, open_weights

T = TypeVar("T")


@dataclass(frozen=True)
class Speaker:
    """A model with what is needed to ask it."""

    opened: Opened
    model: Transformer

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return self.opened.tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.opened)


def weights_fingerprint(opened: Opened) -> str:
    """A hash of the weights as the files hold them. A base and its adapter are hashed separately, not merged: the last
    bits of a product depend on the CPU, and a run may resume on another one. This reads the base once more."""
    if (adapter := opened.adapter) is None:
        return _tensors_fingerprint(opened.loaded.weights)
    base = weights_fingerprint(open_weights(adapter.base))
    return fingerprint_of([base, _tensors_fingerprint(adapter.tensors), adapter.scale])


def _tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of all tensors, computed on all cores."""

    def digest(name: str) -> bytes:
        data = memoryview(tensors[name].detach().contiguous().cpu().view(torch.uint8).numpy())  # type: ignore[arg-type]
        return name.encode() + hashlib.blake2b(data, digest_size=16).digest()

    with ThreadPoolExecutor() as threads:
        return hashlib.blake2b(b"".join(threads.map(digest, sorted(tensors))), digest_size=8).hexdigest()


Exporters = Callable[[Path, int], Sequence[Observer]]
"""Makes what else watches a training, given its record's folder and the step that it resumes from."""


@dataclass
class Session:
    recipe: Recipe
    plan: Plan
    folder: RunFolder
    outside: Outside
    """What limits the plan's values from outside the recipe."""
    process: Process
    observers: Observers
    on_ray: OnRay | None = None
    """Where samples are drawn; None: here."""
    exporters: Exporters = lambda record, resume_step: ()
    opening_s: float = 0.0
    """Time spent on opening models."""
    slots: int = 0
    """Slots of the last engine."""
    most_slots: int | None = None
    """After running out of memory: the most slots that the next engine may have."""
    _open: dict[str, Speaker] = field(default_factory=dict)

    def event(self, kind: str, **facts: Any) -> None:
        self.folder.event(kind, **facts)
        self.observers.event(kind, facts)

    def note(self, text: str) -> None:
        """Tell the observers something that the record need not keep."""
        self.observers.event("note", {"text": text})

    @property
    def on_gpu(self) -> bool:
        return self.process.device.type == "cuda"

    def stage(self, name: str, title: str, **size: int) -> None:
        """Announce and record that a part of the run begins, with how much there is to do."""
        title = f"{self.recipe.name} · {title}"
        self.event("stage", name=name, title=title, on_gpu=self.on_gpu, **size)

    def progress(self, tokens: int, elapsed_s: float, **facts: Any) -> None:
        """Tell the observers how far a stage is (`record.observe.SAMPLING`)."""
        tokens_per_s = tokens / max(1e-9, elapsed_s) if tokens else None
        speed = {"tokens_per_s": tokens_per_s, "elapsed_s": elapsed_s, "memory_bytes": self.memory_bytes()}
        self.observers.metrics(facts | speed)

    @functools.cached_property
    def task(self) -> Task:
        return load_task(self.asked.name, self.asked.data)

    @property
    def asked(self) -> TaskConfig:
        assert self.recipe.task is not None  # a rule of every RFT recipe
        return self.recipe.task

    @property
    def start(self) -> str:
        assert self.recipe.model.init_from is not None  # likewise
        return self.recipe.model.init_from

    @property
    def model(self) -> Speaker:
        """The model that is trained and tested."""
        return self._speaker(self.start)

    @property
    def sampler(self) -> Speaker:
        """The model that writes the samples; its tokenizer and template make their prompts."""
        return self._speaker(self.recipe.sample.sampler or self.start)

    @functools.cached_property
    def writer(self) -> str:
        """Who writes the samples, as the store names it: a hash of the sampler's weights, or of what a server calls
        itself. Remembered when the sampler is released; one that is not open is read without building it."""
        place = self.recipe.sample
        if place.server is not None:
            return fingerprint_of([place.server, place.server_model])
        if place.sampler is None or place.sampler in self._open:
            return self.sampler.fingerprint
        return weights_fingerprint(open_weights(Path(place.sampler)))

    def forget_model(self) -> None:
        """Open the model again when it is next needed, because training has changed it."""
        self._open.pop(self.start, None)

    def drop_adapters(self) -> None:
        """Go back to the model as it was opened if training in this session put adapters on it."""
        if self.start in self._open and lora_layers(self.model.model):
            self.forget_model()

    def release_sampler(self) -> None:
        """Free a sampler that is not the model, once it has nothing more to write."""
        if self.recipe.sample.sampler not in (None, self.start):
            self._open.pop(self.recipe.sample.sampler, None)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _speaker(self, path: str) -> Speaker:
        if path not in self._open:
            self.note(f"opening {path}")
            began_s = time.monotonic()
            opened = open_weights(Path(path))
            model = opened.build(self.process.device, COMPUTE_DTYPE[self.plan.precision])
            self.opening_s += time.monotonic() - began_s
            self._open[path] = Speaker(opened, model)
        return self._open[path]

    def questions(self, split: str, rows: int | None) -> list[Question]:
        seed = self.recipe.train.seed if split == self.asked.split else 0
        questions = self.task.questions(split, rows, seed)
        if not questions:
            raise DataError(f"the {split} split of task {self.asked.name} is empty: name another split")
        return questions

    def train_questions(self) -> list[Question]:
        return self.questions(self.asked.split, self.asked.rows)

    def ask(self, questions: Sequence[Question], speaker: Speaker, *, trained: bool = False) -> list[Asked]:
        """The questions as the model reads them; `trained`: as fine-tuning presents them."""
        how = speaker.opened.loaded, speaker.tokenizer, self.recipe.prompt
        asked = [ask(self.task, question, *how, trained=trained) for question in questions]
        context, new = speaker.model.config.context_length, self.recipe.sample.max_new_tokens
        if (longest := max(len(one.prompt) for one in asked)) + new > context:
            raise ConfigError(
                f"the longest prompt ({longest} tokens) and {new} new tokens do not fit the model's context of"
                f" {context}: lower sample.max_new_tokens or prompt.shots"
            )
        return asked

    def settings(self, stops: tuple[str, ...], *, greedy: bool = False) -> Sampling:
        s, how = self.recipe.sample, dict[str, Any](temperature=0.0)
        if not greedy:
            how = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k}
        return Sampling(max_new_tokens=s.max_new_tokens, stop_strings=stops, **how)

    def engine(
        self, speaker: Speaker, asked: Sequence[Asked], *, sequences: int, on_ray: OnRay | None = None
    ) -> Engine:
        """An engine on this machine, or workers on Ray, for that many sequences; the slots go into the plan."""
        how: dict[str, Any] = {
            "max_prompt_tokens": max(len(one.prompt) for one in asked),
            "max_new_tokens": self.recipe.sample.max_new_tokens,
        }
        self.slots, why = self._slots(fitting_slots(speaker.model, **how), sequences)
        self.plan = replace(self.plan, slots=self.slots, why={**self.plan.why, "slots": why})
        save(self.plan, self.folder.plan_path)
        how |= {"slots": self.slots, "eos_ids": stop_ids(speaker.opened.loaded, speaker.tokenizer)}
        if on_ray is not None:
            return RayEngine(speaker.model, speaker.tokenizer, place=on_ray, event=self.event, **how)
        return LocalEngine(speaker.model, speaker.tokenizer, **how)

    def _slots(self, fitting: int, sequences: int) -> tuple[int, Why]:
        """As many slots as fit and pay here, at most one per sequence, within the bounds."""
        chosen = fitting, Why(reason="what the free memory holds, as far as it pays", source="measurement")
        if sequences < fitting:
            chosen = sequences, Why(reason="as many as there are sequences to generate", source="rule")
        pin = self.recipe.plan.slots
        pinned = (pin, Why(reason="plan.slots", source="recipe")) if pin is not None else None
        slots, why = bounded_slots(chosen, self.outside, pin=pinned)
        if self.most_slots is not None and self.most_slots < slots:
            reason = f"more ran out of memory; without that {slots:,}: {why.reason}"
            return self.most_slots, Why(reason=reason, source="measurement")
        return slots, why

    def sampling_engine(self, asked: Sequence[Asked], *, sequences: int) -> Engine:
        """The engine that writes the samples: the server that the recipe names, workers on Ray, or an engine here."""
        place = self.recipe.sample
        if place.server is None:
            return self.engine(self.sampler, asked, sequences=sequences, on_ray=self.on_ray)
        return ServerEngine(
            place.server, place.server_model, tokenizer=self.sampler.tokenizer, progress=self.note
        )

    def until_it_fits(self, stage: str, attempt: Callable[[], T]) -> T:
        """Run an attempt that uses an engine; if it runs out of memory, try again with half the slots."""
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                if self.slots <= 1:
                    message = f"out of memory while generating one sequence at a time ({stage}): use a smaller model"
                    raise MachineError(message) from error
                before, self.most_slots = self.slots, self.slots // 2
                self.folder.event("out_of_memory", stage=stage, slots_before=before, slots=self.most_slots)
                self.note(f"out of memory with {before:,} sequences: continuing with {self.most_slots:,}")
            torch.cuda.empty_cache()

    def memory_bytes(self) -> int:
        """The peak on the GPU; on a CPU what this process holds now."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else process_rss_bytes()


@contextlib.contextmanager
def open_session(
    recipe: Recipe, plan: Plan, run: Path, outside: Outside, *, observers: Sequence[Observer] = (), **how: Any
) -> Iterator[Session]:
    """Own the run folder for this recipe; one that another recipe has begun is refused. `how` as a Session takes it."""
    process = Process(0, 1, torch.device(plan.hardware.kind))
    with open_run(recipe, plan, run, process) as opened:
        assert opened.folder is not None
        yield Session(recipe, plan, opened.folder, outside, process, Observers(observers), **how)
