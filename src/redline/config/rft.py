"""The tables of a recipe of rejection-sampling fine-tuning: the questions, who samples, and the test."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The questions that are sampled."""

    name: str
    """A task's name (`redline tasks`), or your own file and its function: my_task.py:make."""
    data: str | None = None
    """Folder with the split's file; not given: the task generates its questions."""
    split: str = "train"
    rows: int | None = None
    """The first rows of the split; not given: all."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Who writes the samples, how, and how many are kept."""

    sampler: str | None = None
    """Another model that writes the samples; not given: the model itself."""
    server: str | None = None
    """URL of an OpenAI-compatible server that writes the samples: http://host:port, or a URL that ends in
    /chat/completions to send messages."""
    server_model: str | None = None
    """The model's name on that server."""
    samples_per_question: int = 30
    temperature: float = 0.7
    later_temperature: float = 1.0
    """Temperature after the first round: a trained sampler would otherwise repeat itself."""
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int = 128
    distinct_correct: int | None = None
    """Stop asking a question once it has this many different correct answers; not given: never."""
    spend_rest: bool = True
    """Whether samples saved by `distinct_correct` go to questions without a correct answer."""
    max_factor: float = 4.0
    """Most samples for a hard question, as a multiple of `samples_per_question`."""
    keep_per_question: int = 4
    """Correct, different answers per question to train on, the first ones drawn; 0: all."""


@dataclass(frozen=True, kw_only=True)
class TestConfig:
    """The questions answered greedily before and after training."""

    __test__: ClassVar[bool] = False  # pytest: this is not a test
    split: str = "valid"
    rows: int = 100
    """The first rows of the split; 0: all."""


PRESETS: dict[str, dict[str, Any]] = {
    "quality": {"samples_per_question": 50, "temperature": 0.5},
    "balanced": {"samples_per_question": 30, "temperature": 0.7},
    "speed": {"samples_per_question": 20, "temperature": 0.9},
}
"""Named settings of the sample table, as the systems that Redline grew out of shipped them."""
