"""A tiny model for RFT's tests: a Hugging Face folder with a tokenizer, random weights, and a task that a
random model solves at times.

A completion is right if it holds an a or an e. So right and wrong answers, and several different right ones,
come from random weights, and fine-tuning on the right ones makes the model better. Half of the held-out
questions are in the training split too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.config.load import load_recipe
from redline.config.recipe import ModelConfig, Recipe
from redline.data.tokenizer import train_bpe
from redline.machine.facts import read_facts
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.model.weights import Loaded
from redline.plan.bounds import Outside
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.record.run import read_lines
from redline.rft.session import open_session
from redline.train.restore import with_shape

CONFIG = ModelConfig(
    vocab_size=300,
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    ffn_size=64,
    context_length=128,
    init_std=0.2,
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASK = """
from redline.tasks.task import Question, Task, Verdict

def questions(split, count, seed):
    first = {"train": 0, "valid": 10}[split]
    numbers = range(first, first + 20)
    meta = {n: {"family": "odd" if n % 2 else "even", "from": "x", "to": "y", "number": n} for n in numbers}
    return [Question(f"{split}-{n}", f"Write {n}", "a", "aaa", meta[n]) for n in numbers][:count]

def score(question, completion):
    correct = "a" in completion or "e" in completion
    return Verdict(correct, bool(completion.strip()), float(correct), completion[:1] or None)

class Letters(Task):
    def finished(self, completion, finish):
        return True  # two letters are all that is asked for

def make(data):
    return Letters(name="letters", about="letters", questions=questions, score=score)

def make_ending(data):
    return Task(name="letters", about="letters", questions=questions, score=score, end="a")
"""
RECIPE = """
workload = "rft"
[task]
name = "{task}:make"
rows = 20
[model]
init_from = "{model}"
[prompt]
mode = "text"
[sample]
samples_per_question = 40
temperature = 1.0
max_new_tokens = 2
distinct_correct = 3
[lora]
rank = 4
alpha = 16
[train]
seed = 3
epochs = 8
batch_size = 8
lr = 1e-2
checkpoint_every = 3
[test]
rows = 20
"""


def tiny_model(folder: Path, *, chat: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model; the same every time. In double for a command that computes in double, which reads no fp32."""
    tokenizer = train_bpe(iter(["Question: Write a\nAnswer: b c d"]), CONFIG.vocab_size)
    model = build_model(CONFIG, device="cpu", seed=5)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_folder(
        folder,
        Loaded(
            config=CONFIG,
            weights=weights,
            tokenizer_json=tokenizer.text,
            chat_template=CHAT_TEMPLATE if chat else None,
            eos_ids=[tokenizer.eot_id],
        ),
        dtype,
    )
    return folder


def letters_recipe(folder: Path, model: Path) -> Path:
    """Write the task and a recipe for it."""
    task, recipe = folder / "letters.py", folder / "letters.toml"
    task.write_text(TASK)
    recipe.write_text(RECIPE.format(task=task, model=model))
    return recipe


def letters_place(factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and its recipe, letters.toml."""
    folder = factory.mktemp("rft")
    letters_recipe(folder, tiny_model(folder / "model"))
    return folder


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run / "events.jsonl") if event["event"] == kind]


def planned(
    recipe: str | Path, overrides: Sequence[str] = (), **environment: str
) -> tuple[Recipe, Plan, Outside]:
    """The recipe with its model's shape, its plan on this CPU, and what bounds that from outside."""
    shaped, outside = with_shape(load_recipe(str(recipe), overrides)), Outside(environment=environment)
    return (
        shaped,
        make_plan(shaped, hardware_here(replace(read_facts(), gpus=()), None), outside=outside),
        outside,
    )


def session_of(
    recipe: str | Path,
    run: Path,
    overrides: Sequence[str] = (),
    observers: Sequence[Any] = (),
    **environment: str,
) -> Any:
    """An open session of the recipe on this CPU."""
    shaped, plan, outside = planned(recipe, overrides, **environment)
    return open_session(shaped, plan, run, outside, observers=observers)
