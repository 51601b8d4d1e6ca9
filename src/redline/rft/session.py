"""What the stages of one RFT run share: the recipe, the run folder, the task, the model opened once, and who
watches.

with open_session(recipe, Path("runs/units"), bounds) as session:
    sample(session); train(session, "samples"); test(session)

runs/units/
    recipe.toml  plan.json  events.jsonl
    samples.db            every completion with its verdict (store.py)
    evaluations.jsonl     one line per test
    train-samples/        the fine-tuning on the kept samples: metrics.jsonl, checkpoints/, done.json
    adapter/              what it gave, in PEFT's format (model/, a Hugging Face folder, after full fine-
                          tuning)
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
from typing import TypeVar

import torch
from torch import Tensor

from redline.config.load import to_toml
from redline.config.rft import RftRecipe, fingerprint_of, rft_differences, rft_from_toml, with_samples
from redline.data.tokenizer import Tokenizer
from redline.engine.local import LocalEngine, fitting_slots
from redline.engine.prompt import render, stop_ids
from redline.engine.request import Engine, Sampling
from redline.engine.server import ServerEngine
from redline.errors import ConfigError, DataError, MachineError
from redline.machine.telemetry import process_rss_bytes
from redline.model.lora import LoraConfig, lora_layers
from redline.model.transformer import Transformer
from redline.plan.plan import Why
from redline.record.files import write_atomic
from redline.record.observe import Observer, Observers
from redline.record.run import RunFolder, failures_recorded
from redline.rft.plan import Bounds, plan_precision, plan_samples, plan_slots, save_plan
from redline.tasks.registry import load_task
from redline.tasks.task import Question, Task
from redline.train.restore import Opened, open_on, open_weights

T = TypeVar("T")
_BEGUN = ("samples.db", "evaluations.jsonl", "train-samples", "train-answers")
"""What there is to lose: a run that failed before the first of these does not hold its folder to a recipe."""


@dataclass(frozen=True)
class Speaker:
    """A model with what is needed to ask it."""

    opened: Opened
    model: Transformer
    tokenizer: Tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return stop_ids(self.opened.loaded, self.tokenizer)

    @functools.cached_property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.opened)


def weights_fingerprint(opened: Opened) -> str:
    """A hash of the weights as the files hold them. A base and its adapter are hashed, not what merging makes
    of them: the last bits of a product depend on the CPU, and a run may go on on another one. The base is
    read once more for it."""
    if (adapter := opened.adapter) is None:
        return _tensors_fingerprint(opened.loaded.weights)
    return fingerprint_of(
        [
            weights_fingerprint(open_weights(adapter.base)),
            _tensors_fingerprint(adapter.tensors),
            adapter.scale,
        ]
    )


def _tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of every tensor, on as many threads as there are cores."""

    def digest(name: str) -> bytes:
        data = memoryview(tensors[name].detach().contiguous().cpu().view(torch.uint8).numpy())  # type: ignore[arg-type]
        return name.encode() + hashlib.blake2b(data, digest_size=16).digest()

    with ThreadPoolExecutor() as threads:
        return hashlib.blake2b(b"".join(threads.map(digest, sorted(tensors))), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Prompts:
    """Questions as a model reads them."""

    texts: list[str]
    ids: list[tuple[int, ...]]
    stops: tuple[str, ...]
    """The texts that end an answer."""

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))


@dataclass
class Session:
    recipe: RftRecipe
    """With the samples a question that the profile leaves."""
    folder: RunFolder
    bounds: Bounds
    device: str | None = None
    observers: Observers = field(default_factory=Observers)
    opening_s: float = 0.0
    """Spent on opening models."""
    slots: int = 0
    """Of the engine that was made last."""
    most_slots: int | None = None
    """Once memory ran out: what the next engine may have at the most."""

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_available() and self.device != "cpu"

    def note(self, text: str) -> None:
        """Tell whoever watches something that the record need not keep."""
        self.observers.event("note", {"text": text})

    def stage(self, name: str, title: str, **size: int) -> None:
        """A part of the run begins: say so, with how much there is to do, and write it down."""
        title = f"{self.recipe.name} · {title}"
        facts = {"name": name, "title": title, "on_gpu": self.on_gpu, **size}
        self.folder.event("stage", **facts)
        self.observers.event("stage", facts)

    @functools.cached_property
    def task(self) -> Task:
        return load_task(self.recipe.task.name, self.recipe.task.data)

    @functools.cached_property
    def model(self) -> Speaker:
        """The model that is trained and tested."""
        return self._speaker(self.recipe.model.path)

    @functools.cached_property
    def sampler(self) -> Speaker:
        """The model that writes the samples, and whose tokenizer and template make their prompts."""
        other = self.recipe.model.sampler
        return self.model if other is None else self._speaker(other)

    @functools.cached_property
    def writer(self) -> str:
        """Who writes the samples, as the store names it: the hash of the sampler's weights; of a server only
        what it calls itself is known. Remembered when the sampler is released; one that is not open is read
        without building it."""
        place = self.recipe.model
        if place.server is not None:
            return fingerprint_of([place.server, place.server_model])
        if place.sampler is None or "sampler" in self.__dict__:
            return self.sampler.fingerprint
        return weights_fingerprint(open_weights(Path(place.sampler)))

    def forget_model(self) -> None:
        """Open the model anew when it is next needed: a training has changed it."""
        for name in ("model", "sampler"):
            self.__dict__.pop(name, None)

    def drop_adapters(self) -> None:
        """Have the model as it was opened again, after a training in this session put adapters on it."""
        if "model" in self.__dict__ and lora_layers(self.model.model):
            self.forget_model()

    def release_sampler(self) -> None:
        """Give the memory of a sampler that is not the model back, once it has nothing more to write."""
        if self.recipe.model.sampler is not None:
            self.__dict__.pop("sampler", None)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _speaker(self, path: str) -> Speaker:
        self.note(f"opening {path}")
        began_s = time.monotonic()
        opened, model = open_on(Path(path), device=self.device)
        self.opening_s += time.monotonic() - began_s
        save_plan(self.folder.plan_path, {"precision": plan_precision(model.compute_dtype == torch.bfloat16)})
        return Speaker(opened, model, opened.tokenizer)

    def questions(self, split: str, rows: int | None) -> list[Question]:
        questions = self.task.questions(
            split, rows, self.recipe.seed if split == self.recipe.task.split else 0
        )
        if not questions:
            raise DataError(f"the {split} split of task {self.recipe.task.name} is empty: name another")
        return questions

    def train_questions(self) -> list[Question]:
        return self.questions(self.recipe.task.split, self.recipe.task.rows)

    def prompts(self, questions: Sequence[Question], speaker: Speaker, *, trained: bool = False) -> Prompts:
        """The questions as the model reads them; `trained`: as fine-tuning has them."""
        mode, shots = self.recipe.prompt.mode, self.recipe.prompt.shots_of(trained=trained)
        made = [render(self.task, q, speaker.opened.loaded, mode, shots) for q in questions]
        prompts = Prompts(
            [text for text, _ in made],
            [tuple(speaker.tokenizer.encode_prompt(text)) for text, _ in made],
            made[0][1],
        )
        context, new = speaker.model.config.context_length, self.recipe.sample.max_new_tokens
        if prompts.longest + new > context:
            raise ConfigError(
                f"the longest prompt has {prompts.longest} tokens, and with {new} new ones the model's"
                f" context of {context} is too short: lower sample.max_new_tokens or prompt.shots"
            )
        return prompts

    def settings(self, stops: tuple[str, ...], *, greedy: bool = False) -> Sampling:
        s = self.recipe.sample
        if greedy:
            return Sampling(max_new_tokens=s.max_new_tokens, temperature=0.0, stop_strings=stops)
        return Sampling(
            max_new_tokens=s.max_new_tokens,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            stop_strings=stops,
        )

    def engine(self, speaker: Speaker, *, longest: int, sequences: int, stage: str) -> Engine:
        """An engine on this machine for that many sequences, its slots written into the plan."""
        new = self.recipe.sample.max_new_tokens
        fitting = fitting_slots(speaker.model, max_prompt_tokens=longest, max_new_tokens=new)
        slots, why = plan_slots(fitting, sequences, self.bounds)
        if self.most_slots is not None and self.most_slots < slots:
            slots, why = (
                self.most_slots,
                Why(
                    reason=f"more ran out of memory; without that {slots:,}: {why.reason}",
                    source="measurement",
                ),
            )
        save_plan(self.folder.plan_path, {f"{stage}_slots": (slots, why)})
        self.slots = slots
        return LocalEngine(
            speaker.model,
            speaker.tokenizer,
            max_prompt_tokens=longest,
            max_new_tokens=new,
            slots=slots,
            eos_ids=speaker.stop_ids,
        )

    def sampling_engine(self, *, longest: int, sequences: int) -> Engine:
        """Whoever writes the samples: the server that the recipe names, or an engine here."""
        place = self.recipe.model
        if place.server is None:
            return self.engine(self.sampler, longest=longest, sequences=sequences, stage="sample")
        return ServerEngine(
            place.server, place.server_model, tokenizer=self.sampler.tokenizer, progress=self.note
        )

    def until_it_fits(self, stage: str, attempt: Callable[[], T]) -> T:
        """What an attempt with an engine gives; running out of memory halves the slots, is written down, and
        it is tried again."""
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                if self.slots <= 1:
                    raise MachineError(
                        f"out of memory while generating one sequence at a time ({stage}): use a smaller"
                        " model"
                    ) from error
                self.most_slots = self.slots // 2
                self.folder.event(
                    "out_of_memory", stage=stage, slots_before=self.slots, slots=self.most_slots
                )
                self.note(
                    f"out of memory with {self.slots:,} sequences at once: going on with {self.most_slots:,}"
                )
            torch.cuda.empty_cache()

    def memory_bytes(self) -> int:
        """Peak on the GPU; on a CPU what this process holds now."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else process_rss_bytes()


@contextlib.contextmanager
def open_session(
    recipe: RftRecipe,
    run: Path,
    bounds: Bounds,
    *,
    device: str | None = None,
    observers: Sequence[Observer] = (),
) -> Iterator[Session]:
    """Own the run folder and make it this recipe's; a folder that holds another recipe's beginnings is
    refused."""
    samples, why = plan_samples(recipe, bounds)
    recipe = with_samples(recipe, samples)
    lora_config(recipe)
    if RunFolder(run).has_begun():
        raise ConfigError(
            f"{run} holds a pre-training run, whose recipe would be lost: give another folder with --run"
        )
    with RunFolder(run) as folder:
        if folder.recipe_path.exists() and any((run / name).exists() for name in _BEGUN):
            before = rft_from_toml(
                folder.recipe_path.read_text(encoding="utf-8"), where=str(folder.recipe_path)
            )
            if changed := rft_differences(_with_sampler_of(before, recipe, run), recipe):
                more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
                raise ConfigError(
                    f"{folder.path} holds a run of another recipe: {', '.join(changed[:2])}{more}; give"
                    " another folder with --run, or the recipe it was made with"
                )
        write_atomic(folder.recipe_path, to_toml(recipe))
        save_plan(folder.plan_path, {"samples_per_question": (samples, why)})
        with failures_recorded(run):  # only now: a run of another recipe has not failed when it is left alone
            yield Session(recipe, folder, bounds, device, Observers(observers))


def _with_sampler_of(before: RftRecipe, now: RftRecipe, run: Path) -> RftRecipe:
    """The recipe that a folder holds, with the sampler as it is called now where both mean the round before
    this one: earlier versions kept the path as it was typed, from wherever that was, and a run may have been
    moved. The store knows the weights themselves."""
    old, new = before.model.sampler, now.model.sampler
    name = Path(old or "").name
    if new is not None and name.startswith("round-") and Path(new).resolve() == run.resolve().with_name(name):
        return replace(before, model=replace(before.model, sampler=new))
    return before


def lora_config(recipe: RftRecipe) -> LoraConfig:
    """The adapters that the recipe asks for, checked: what is wrong with them is said before samples are
    drawn, not after."""
    return LoraConfig(rank=recipe.train.rank, alpha=recipe.train.alpha, targets=recipe.train.targets)
