"""The arms of `redline bench rl`, each a function that yields rows in a separate process.

`trl`, `trl-continuous`   TRL's GRPOTrainer with `generate`, or with transformers' continuous batching.
`redline`                 our loop: the same weights, prompts, group size, lengths and rewards.
`actor`                   the update of our loop alone, on packed answers.

Weights are random, so answers run to their full length, but for the few that hit the end token by chance.
"""

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from redline.bench import theirs
from redline.bench.results import BenchRow
from redline.bench.rl import PHASES, WORKS, RlWork
from redline.config.recipe import DEFAULTS, ModelConfig, Recipe, TrainConfig
from redline.config.rl import RlConfig
from redline.data.tokenizer import END_OF_TEXT
from redline.errors import need
from redline.machine.facts import read_facts
from redline.measure.child import cuda_peaks, synchronize, timed
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.rl import rehearsal
from redline.rl.domains import Asked, Domain, Domains
from redline.rl.run import job_of
from redline.tasks.task import Question, Task, Verdict
from redline.train.execution import equip
from redline.train.loop import Trainer
from redline.train.process import Process
from redline.train.restore import Opened, open_weights


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def words_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """A word for every id, so that both sides read the same tokens from the same text."""
    words = [END_OF_TEXT, *(f"w{number}" for number in range(1, vocab_size))]
    made = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=END_OF_TEXT)
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    return made


def prompts_of(work: RlWork, count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(1, work.model.vocab_size, work.prompt_tokens).tolist() for _ in range(count)]


def _weights(work: RlWork) -> dict[str, torch.Tensor]:
    return dict(build_model(work.model, device=_device(), seed=0).named_parameters())


def reward(text: str) -> float:
    """A coin toss that depends on the answer's beginning."""
    return float(sum(text[:8].encode()) % 2)


def _row(work: RlWork, questions: int, line: dict[str, Any], seconds: Sequence[float]) -> BenchRow:
    """`line` says how many tokens a step had and where its time went; `seconds` begin with the step that warms up."""
    peak = cuda_peaks()["allocated_bytes"] if torch.cuda.is_available() else None
    first, *timed_s = seconds
    row: BenchRow = {
        "rows": questions * work.group_size, "tokens": line["step_tokens"], "first_step_s": first,
        "seconds": timed_s, "memory_bytes": peak,
    }  # fmt: skip
    phases = {name: line[key] for key, name in PHASES.items() if key in line}
    return row | ({"phases_s": phases} if phases else {})


def _empty() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---- TRL ----


def trl(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    for questions in work.questions:
        yield _trl(work, questions, continuous=False)


def trl_continuous(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = replace(WORKS[setting["name"]], steps=1)  # 20 s each on an H200
    yield _trl(work, work.questions[0], continuous=True)


def _trl(work: RlWork, questions: int, *, continuous: bool) -> BenchRow:
    hf, its, datasets = (need(name, extra="bench") for name in ("transformers", "trl", "datasets"))
    _empty()
    vocabulary = words_tokenizer(work.model.vocab_size)
    ends = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "padding_side": "left"}
    cuda, rows = _device().type == "cuda", questions * work.group_size
    dtype = torch.bfloat16 if cuda else torch.float32
    small = {} if cuda else {"num_blocks": 64, "max_batch_tokens": 64}  # its defaults fill a CPU's memory
    ended_s: list[float] = []
    counted: list[float] = []

    class Watch(hf.TrainerCallback):  # type: ignore[name-defined]  # a peer's class
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            ended_s.append(time.perf_counter())

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            counted.extend([float(logs["num_tokens"])] if "num_tokens" in logs else [])

    with tempfile.TemporaryDirectory() as folder:
        trainer = its.GRPOTrainer(
            model=theirs.model_of(work.model, _weights(work), device=_device(), dtype=dtype),
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=its.GRPOConfig(
                output_dir=folder, max_steps=1 + work.steps, learning_rate=1e-6, num_generations=work.group_size,
                per_device_train_batch_size=min(work.pass_rows, rows),
                gradient_accumulation_steps=max(1, rows // work.pass_rows), max_completion_length=work.new_tokens,
                gradient_checkpointing=False, bf16=cuda, use_cpu=not cuda, logging_steps=1, save_strategy="no",
                report_to=[], disable_tqdm=True, use_transformers_continuous_batching=continuous,
                transformers_continuous_batching_config=small if continuous else None,
            ),
            train_dataset=datasets.Dataset.from_dict(
                {"prompt": [" ".join(f"w{i}" for i in ids) for ids in prompts_of(work, questions)] * (1 + work.steps)}
            ),
            processing_class=hf.PreTrainedTokenizerFast(tokenizer_object=vocabulary, **ends),
            callbacks=[Watch()],
        )  # fmt: skip
        trainer.remove_callback(hf.PrinterCallback)
        began_s = time.perf_counter()
        trainer.train()
    seconds = np.diff([began_s, *ended_s]).tolist()
    return _row(work, questions, {"step_tokens": (counted[-1] - counted[0]) / work.steps}, seconds)


# ---- ours ----


class _Coin:
    """Scores without a process: on both sides rewards shall cost nothing."""

    def score(self, items: Sequence[tuple[Question, str]]) -> list[Verdict]:
        return [Verdict(bool(reward(text)), True, reward(text), None) for _, text in items]


class _Whole(Task):
    """Random weights never end an answer, and those that are cut would all earn nothing."""

    def finished(self, completion: str, finish: str) -> bool:
        return True


def _recipe(
    model: ModelConfig, work: RlWork, questions: int, new_tokens: int, init_from: str | None = None
) -> Recipe:
    # one more than are run: the last step of a training ends with a validation
    given = {"batch_size": questions, "steps": 2 + work.steps, "eval_every": 0, "checkpoint_every": 0}
    return Recipe(
        name="bench",
        workload="rl",
        model=replace(model, init_from=init_from),
        train=TrainConfig(**DEFAULTS["rl"]["train"] | given),
        rl=RlConfig(
            domains=("coin",), group_size=work.group_size, max_prompt_tokens=work.prompt_tokens,
            max_new_tokens=new_tokens, overlong="none", refills=0,
        ),
    )  # fmt: skip


def _plan(recipe: Recipe) -> Plan:
    facts = read_facts()
    return make_plan(
        recipe, hardware_here(facts if torch.cuda.is_available() else replace(facts, gpus=()), None)
    )


def redline(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model"
        tokenizer = words_tokenizer(work.model.vocab_size).to_str()
        write_folder(weights, work.model, _weights(work), tokenizer, torch.bfloat16, eos_ids=(0,))
        for questions in work.questions:
            yield _ours(work, questions, open_weights(weights))


def _ours(work: RlWork, questions: int, opened: Opened) -> BenchRow:
    _empty()
    recipe = _recipe(work.model, work, questions, work.new_tokens, str(opened.source))
    asked = [Question(str(number), "", "") for number in range(questions)]
    prompts = {
        question.id: Asked(question, tuple(ids), ())
        for question, ids in zip(asked, prompts_of(work, questions), strict=True)
    }
    task = _Whole(
        name="coin", about="", questions=lambda *_: asked, score=lambda *_: Verdict(True, True, 1.0, None)
    )
    domain = Domain("coin", task, asked, asked[:1], _Coin(), prompts)  # type: ignore[arg-type]  # no pool
    process, plan = Process(0, 1, _device()), _plan(recipe)
    trainer = Trainer(job_of(recipe, plan, opened, Domains(recipe, opened, [domain]), process), process)
    return _row(work, questions, *_steps(trainer, work))


def _steps(trainer: Trainer, work: RlWork) -> tuple[dict[str, Any], list[float]]:
    """What the last step said, and the seconds of all."""

    def step() -> None:
        trainer.turn()
        trainer.drain()

    try:
        seconds = [timed(1, step) for _ in range(1 + work.steps)]
        line = trainer.last_line
        return {**line, "step_tokens": line["tokens_per_s"] * line["step_s"]}, seconds
    finally:
        trainer.close()


def actor(setting: dict[str, str]) -> Iterator[BenchRow]:
    work, count = WORKS[setting["name"]], WORKS[setting["name"]].actor_rows
    recipe = _recipe(work.actor, work, count // work.group_size, work.actor_tokens)
    plan, process = _plan(recipe), Process(0, 1, _device())
    model = build_model(work.actor, device=process.device, seed=0)
    equip(model, plan)
    job = rehearsal.job_of(recipe, plan, model, rehearsal.random_rows(recipe, shortest=1), process)
    line, seconds = _steps(Trainer(job, process), work)
    row = _row(work, count // work.group_size, line, seconds)
    yield row | {"rows": count, "mfu_share": line["actor_mfu"], "mfu_verl_share": line["perf/mfu/actor"]}
