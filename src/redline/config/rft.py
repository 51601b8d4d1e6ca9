"""The RFT recipe: which questions are sampled, how, what is trained on the answers that were right, and what
is tested.

    recipe = load_rft("rft/seeds-000", ["sample.temperature=0.9"], preset="speed")

Frozen tables read from TOML by `redline.config.load`, as strictly as a pre-training recipe. `sampling` names
what makes a sample what it is: samples drawn under one such fingerprint may be put together. Left out: how it
is executed (slots, passes), which `rft/plan.py` decides.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from redline.config.load import build, parse, read_table
from redline.errors import ConfigError, nearest

PromptMode = Literal["chat", "text"]
Method = Literal["lora", "full"]
Shape = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """The questions that are sampled."""

    name: str
    """A task's name (`redline tasks`), or a file of your own and its function: my_task.py:make."""
    data: str | None = None
    """Folder with the split's file; not given: the task generates its questions."""
    split: str = "train"
    rows: int | None = None
    """The first rows of the split; not given: all."""


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """The model that is trained and tested, and who writes the samples if not itself."""

    path: str
    """A run folder, a checkpoint, a Hugging Face folder or a .gguf file."""
    sampler: str | None = None
    """Another model that writes the samples; not given: the model itself."""
    server: str | None = None
    """URL of an OpenAI-compatible completion server that writes the samples."""
    server_model: str | None = None
    """The model's name on that server."""


@dataclass(frozen=True, kw_only=True)
class PromptTable:
    mode: PromptMode = "text"
    """`chat`: through the model's chat template; `text`: for models that continue text."""
    shots: int | None = None
    """Examples of the task before the question, for whoever writes the samples and for the test before
    training; not given: all."""
    trained_shots: int | None = None
    """The same in what is trained on, and in the test of what was trained; not given: as `shots`."""

    def shots_of(self, *, trained: bool) -> int | None:
        return self.trained_shots if trained and self.trained_shots is not None else self.shots


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """How answers are sampled, and how many are kept."""

    samples_per_question: int = 30
    temperature: float = 0.7
    later_temperature: float = 1.0
    """Of rounds after the first, whose sampler has been trained and would repeat itself."""
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int = 128
    distinct_correct: int | None = None
    """A question with this many different correct answers is asked no more; not given: every question gets
    all of its samples."""
    spend_rest: bool = True
    """Samples saved by `distinct_correct` go to the questions that have no correct answer yet."""
    max_factor: float = 4.0
    """Samples that a hard question may get in all, as a multiple of `samples_per_question`."""
    keep_per_question: int = 4
    """Different correct answers of a question that are trained on, the first ones drawn; 0: all."""


@dataclass(frozen=True, kw_only=True)
class FinetuneTable:
    """How the model is fine-tuned; a batch is counted in examples."""

    method: Method = "lora"
    rank: int = 16
    alpha: float = 64.0
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    epochs: int = 3
    batch_size: int = 32
    lr: float = 2e-4
    schedule: Shape = "cosine"
    warmup_fraction: float = 0.1
    """Share of the updates in which the learning rate rises."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    checkpoint_every: int = 50
    """Updates between checkpoints; 0: only at the end (and on Ctrl-C)."""


@dataclass(frozen=True, kw_only=True)
class HeldOutTable:
    """The questions that are answered greedily, before and after."""

    split: str = "valid"
    rows: int = 100
    """The first rows of the split; 0: all."""


@dataclass(frozen=True, kw_only=True)
class RftRecipe:
    name: str
    about: str = ""
    seed: int = 0
    """Seeds the samples, the order of the examples and the adapters; and the draw of generated training
    questions."""
    task: TaskTable
    model: ModelTable
    prompt: PromptTable = field(default_factory=PromptTable)
    sample: SampleTable = field(default_factory=SampleTable)
    train: FinetuneTable = field(default_factory=FinetuneTable)
    test: HeldOutTable = field(default_factory=HeldOutTable)

    @property
    def sampling(self) -> dict[str, Any]:
        """What decides the text of sample n of a question, beside the weights."""
        drawn = ("temperature", "top_p", "top_k", "max_new_tokens")
        task = {name: getattr(self.task, name) for name in ("name", "data", "split")}
        prompt = {"mode": self.prompt.mode, "shots": self.prompt.shots}
        return {"seed": self.seed, **task, **prompt, **{name: getattr(self.sample, name) for name in drawn}}


def fingerprint_of(what: Any) -> str:
    """A short hash of JSON values."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


PRESETS: dict[str, dict[str, Any]] = {
    "quality": {"samples_per_question": 50, "temperature": 0.5},
    "balanced": {"samples_per_question": 30, "temperature": 0.7},
    "speed": {"samples_per_question": 20, "temperature": 0.9},
}
"""Named values of the sample table, as the systems Redline grew out of shipped them."""


def load_rft(name_or_path: str, overrides: Sequence[str] = (), *, preset: str | None = None) -> RftRecipe:
    """Read a recipe by its shipped name or its path; the preset's values go over the file's, and the
    overrides over both."""
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}{nearest(preset, PRESETS)}: known are {', '.join(PRESETS)}")
    first = [f"sample.{key}={value}" for key, value in PRESETS[preset].items()] if preset else []
    table = read_table(RftRecipe, name_or_path, [*first, *overrides], "rft")
    return check_rft(build(RftRecipe, table, where=str(name_or_path)))


def rft_from_toml(text: str, where: str) -> RftRecipe:
    """Read back what `to_toml` wrote."""
    return check_rft(build(RftRecipe, parse(text, where), where))


def check_rft(recipe: RftRecipe) -> RftRecipe:
    """Return the recipe, or raise the first rule it breaks."""
    for holds, rule in _rules(recipe):
        if not holds:
            raise ConfigError(f"recipe {recipe.name}: {rule}")
    return recipe


def _rules(recipe: RftRecipe) -> list[tuple[bool, str]]:
    s, t, m = recipe.sample, recipe.train, recipe.model
    positive = {
        "task.rows": recipe.task.rows,
        "sample.samples_per_question": s.samples_per_question,
        "sample.temperature": s.temperature,
        "sample.later_temperature": s.later_temperature,
        "sample.top_k": s.top_k,
        "sample.max_new_tokens": s.max_new_tokens,
        "sample.distinct_correct": s.distinct_correct,
        "train.rank": t.rank,
        "train.alpha": t.alpha,
        "train.epochs": t.epochs,
        "train.batch_size": t.batch_size,
        "train.lr": t.lr,
    }
    not_negative = {
        "seed": recipe.seed,
        "test.rows": recipe.test.rows,
        "sample.keep_per_question": s.keep_per_question,
        "prompt.shots": recipe.prompt.shots,
        "prompt.trained_shots": recipe.prompt.trained_shots,
        "train.weight_decay": t.weight_decay,
        "train.clip_norm": t.clip_norm,
        "train.checkpoint_every": t.checkpoint_every,
    }
    return [
        *((v is None or v > 0, f"{k} must be greater than 0, got {v}") for k, v in positive.items()),
        *((v is None or v >= 0, f"{k} must not be negative, got {v}") for k, v in not_negative.items()),
        (0 < s.top_p <= 1, f"sample.top_p must be greater than 0 and at most 1, got {s.top_p}"),
        (s.max_factor >= 1, f"sample.max_factor must be at least 1, got {s.max_factor}"),
        (0 <= t.min_lr_ratio <= 1, f"train.min_lr_ratio must lie between 0 and 1, got {t.min_lr_ratio}"),
        (
            0 <= t.warmup_fraction <= 1,
            f"train.warmup_fraction must lie between 0 and 1, got {t.warmup_fraction}",
        ),
        (
            m.sampler is None or m.server is None,
            "model.sampler and model.server are both given: one of them writes the samples",
        ),
        (m.server_model is None or m.server is not None, "model.server_model needs model.server"),
    ]


def later_round(recipe: RftRecipe, before: str) -> RftRecipe:
    """The recipe of a round after the one in that folder: what was trained there writes the samples, asked as
    it was trained."""
    return replace(
        recipe,
        model=replace(recipe.model, sampler=before, server=None, server_model=None),
        prompt=replace(recipe.prompt, shots=recipe.prompt.shots_of(trained=True)),
        sample=replace(recipe.sample, temperature=recipe.sample.later_temperature),
    )


def with_samples(recipe: RftRecipe, samples_per_question: int) -> RftRecipe:
    """The recipe with another number of samples a question."""
    return replace(recipe, sample=replace(recipe.sample, samples_per_question=samples_per_question))


def rft_differences(before: RftRecipe, now: RftRecipe) -> list[str]:
    """What would make the rest of a run another run, as `table.key (value before, value now)`; what is tested
    may change."""
    found = [f"seed ({before.seed} before, {now.seed} now)"] if before.seed != now.seed else []
    for table in ("task", "model", "prompt", "sample", "train"):
        old, new = asdict(getattr(before, table)), asdict(getattr(now, table))
        found += [f"{table}.{key} ({old[key]} before, {new[key]} now)" for key in new if old[key] != new[key]]
    return found
