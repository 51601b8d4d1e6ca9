"""`redline bench rl`: whole GRPO steps against TRL's GRPOTrainer on the same weights, prompts, group size, lengths and
rewards; and how well the update of a larger model uses the GPU (`actor`).

    path = bench_rl("full", facts, Path("benchmarks"))       # rl_<hardware>_<date>.{json,md}

Each side runs in its own process. A step is everything from the question to the changed weights. Tokens count as verl
counts them: prompt and answer of every answer. Weights are random, so answers run to their full length. TRL runs as fast
as it can without vLLM: bf16 weights, no gradient checkpointing (its defaults are fp32 and checkpointing), SDPA
attention. Rewards cost nothing on both sides.
"""

import importlib.util
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tokenizers
import torch

from redline.bench import theirs
from redline.bench.results import MEASURED, SMOLLM2_360M, TINY, Bench, BenchRow, run_arms, shape
from redline.config.recipe import DEFAULTS, Compile, ModelConfig, PlanPins, Recipe, TrainConfig
from redline.config.rl import RlConfig
from redline.data.tokenizer import END_OF_TEXT
from redline.engine.prompt import Asked
from redline.errors import need
from redline.machine.facts import read_facts
from redline.measure.child import device, empty, half, peak_bytes, timed
from redline.measure.generation import words_tokenizer
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.model.weights import Loaded
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.plan.predict import longest_row
from redline.record.units import format_duration, format_share
from redline.rl import rehearsal
from redline.rl.domains import Domain, Domains
from redline.rl.run import job_of
from redline.tasks.task import Question, Task, Verdict
from redline.train.execution import equip
from redline.train.loop import Trainer
from redline.train.process import Process
from redline.train.restore import Opened, open_weights

LABELS = {
    "trl": "TRL, `generate`",
    "trl_continuous": "TRL, transformers' continuous batching",
    "redline": "redline",
    "redline_compiled": "redline, `plan.compile=default`",
    "actor": "redline, update alone",
}
PHASES = {
    "generate_s": "generate",
    "reward_s": "reward",
    "weights_s": "weights into the engine",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimiser",
}
"""Parts of a step, as its line has them."""


@dataclass(frozen=True, kw_only=True)
class RlWork:
    model: ModelConfig
    prompt_tokens: int
    new_tokens: int
    group_size: int
    questions: tuple[int, ...]
    """Questions per step."""
    pass_rows: int
    """Answers in one pass of TRL's update."""
    steps: int
    """Timed steps, after one that warms up."""
    actor: ModelConfig
    actor_rows: int
    actor_tokens: int
    """Answer tokens of a row of the actor's update."""


WORKS = {
    "full": RlWork(
        model=SMOLLM2_360M, prompt_tokens=96, new_tokens=256, group_size=8, questions=(4, 16, 64), pass_rows=64, steps=3,
        actor=ModelConfig(
            vocab_size=32768, num_layers=24, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=5632,
            context_length=2048, tie_embeddings=False,
        ),
        actor_rows=64, actor_tokens=1024,
    ),
    "quick": RlWork(
        model=replace(TINY, init_std=0.2), prompt_tokens=6, new_tokens=8, group_size=4, questions=(2,), pass_rows=4,
        steps=2, actor=TINY, actor_rows=4, actor_tokens=16,
    ),
}  # fmt: skip


def _about(work: RlWork) -> list[str]:
    with_vllm = importlib.util.find_spec("vllm") is not None
    return [
        f"GRPO, {shape(work.model)}; prompts of {work.prompt_tokens} tokens, groups of {work.group_size} answers of up"
        f" to {work.new_tokens} tokens. Tokens of prompts and answers over the whole step: drawing, scoring, update."
        " Median; interval: slowest to fastest. vLLM is"
        f" {'installed here, and TRL was not asked to use it' if with_vllm else 'not installed here'}."
    ]


def _findings(rows: Sequence[BenchRow], work: RlWork) -> list[str]:
    """Where the time of a step goes, and the speed of the update alone."""
    parts = [
        f"- A step of {LABELS[row['row']]} with {row['rows']:,} answers: "
        + ", ".join(f"{name} {format_duration(part)}" for name, part in row["phases_s"].items())
        for row in rows
        if "phases_s" in row
    ]
    alone = (
        f"- Update alone: {shape(work.actor)}; rows of {work.prompt_tokens} + {work.actor_tokens} tokens, packed. MFU:"
        " 6N + 12LdT, then as verl counts it."
    )
    return parts + [alone] * any(row["row"] == "actor" for row in rows)


BENCH = Bench(
    verb="rl",
    title="Reinforcement learning",
    works=WORKS,
    arm="redline.bench.rl:{arm}",
    columns=(
        ("arm", LABELS.get, "row"),
        ("answers a step", "{:,}".format, "rows"),
        *MEASURED,
        ("a step", lambda seconds: format_duration(median(seconds)), "seconds"),
        ("against TRL", "{:.1f}x".format, "against"),
        ("MFU", lambda *shares: ", ".join(map(format_share, shares)), "mfu_share", "mfu_verl_share"),
        ("first step", format_duration, "first_step_s"),
    ),
    reference=lambda other, row: other["row"] == "trl" and other.get("rows") == row.get("rows"),
    about=_about,
    findings=_findings,
)
bench_rl = partial(run_arms, BENCH)


# ---- the arms, each in its process ----


def _weights(work: RlWork) -> dict[str, torch.Tensor]:
    return dict(build_model(work.model, device=device(), seed=0).named_parameters())


def reward(text: str) -> float:
    """A coin toss that depends on the answer's beginning."""
    return float(sum(text[:8].encode()) % 2)


def _row(work: RlWork, questions: int, line: dict[str, Any], seconds: Sequence[float]) -> BenchRow:
    """`line` says how many tokens a step had and where its time went; `seconds` begin with the step that warms up."""
    first, *timed_s = seconds
    row: BenchRow = {
        "rows": questions * work.group_size, "tokens": line["step_tokens"], "first_step_s": first,
        "seconds": timed_s, "memory_bytes": peak_bytes(),
    }  # fmt: skip
    phases = {name: line[key] for key, name in PHASES.items() if key in line}
    return row | ({"phases_s": phases} if phases else {})


# ---- TRL ----


def trl(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    for questions in work.questions:
        yield _trl(work, questions)


def trl_continuous(setting: dict[str, str]) -> Iterator[BenchRow]:
    """The smallest rollout, timed once: 20 s per step on an H200."""
    work = replace(WORKS[setting["name"]], steps=1)
    yield _trl(work, work.questions[0], continuous=True)


def _trl(work: RlWork, questions: int, *, continuous: bool = False) -> BenchRow:
    hf, its, datasets = (need(name, extra="bench") for name in ("transformers", "trl", "datasets"))
    empty()
    vocabulary = tokenizers.Tokenizer.from_str(words_tokenizer(work.model.vocab_size).text)
    ends = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "padding_side": "left"}
    cuda, rows = device().type == "cuda", questions * work.group_size
    clock = theirs.clock(warm_up=1, per_block=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = its.GRPOTrainer(
            model=theirs.model_of(work.model, _weights(work), device=device(), dtype=half()),
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=its.GRPOConfig(
                output_dir=folder, max_steps=1 + work.steps, learning_rate=1e-6, num_generations=work.group_size,
                per_device_train_batch_size=min(work.pass_rows, rows),
                gradient_accumulation_steps=max(1, rows // work.pass_rows), max_completion_length=work.new_tokens,
                gradient_checkpointing=False, bf16=cuda, use_cpu=not cuda, logging_steps=1, save_strategy="no",
                report_to=[], disable_tqdm=True, use_transformers_continuous_batching=continuous,
                transformers_continuous_batching_config=theirs.batching_options() if continuous else None,
            ),
            train_dataset=datasets.Dataset.from_dict(
                {"prompt": [" ".join(f"w{i}" for i in ids) for ids in theirs.prompts_of(work, questions)] * (1 + work.steps)}
            ),
            processing_class=hf.PreTrainedTokenizerFast(tokenizer_object=vocabulary, **ends),
            callbacks=[clock],
        )  # fmt: skip
        trainer.remove_callback(hf.PrinterCallback)
        clock.started_s = time.perf_counter()
        trainer.train()
    counted = [float(line["num_tokens"]) for line in trainer.state.log_history if "num_tokens" in line]
    line = {"step_tokens": (counted[-1] - counted[0]) / work.steps}
    return _row(work, questions, line, [clock.first_step_s, *clock.blocks_s])


# ---- ours ----


class _Coin:
    """Scores without a process: rewards must cost nothing on both sides."""

    def submit(self, _question: Question, text: str) -> Future[Verdict]:
        verdict = Future[Verdict]()
        verdict.set_result(Verdict(bool(reward(text)), True, reward(text), None))
        return verdict


class _Whole(Task):
    """Random weights never end an answer, and those that are cut would all earn nothing."""

    def finished(self, completion: str, finish: str) -> bool:
        return True


def _recipe(
    model: ModelConfig,
    work: RlWork,
    questions: int,
    new_tokens: int,
    init_from: str | None = None,
    compiled: Compile | None = None,
) -> Recipe:
    # one more than are run: the last step of a run ends with a validation
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
        plan=PlanPins(compile=compiled),
    )  # fmt: skip


def _plan(recipe: Recipe) -> Plan:
    facts = read_facts()
    facts = facts if torch.cuda.is_available() else replace(facts, gpus=())
    return make_plan(recipe, hardware_here(facts, None))


def redline(setting: dict[str, str], compiled: Compile = "off") -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model"
        tokenizer = words_tokenizer(work.model.vocab_size).text
        random = Loaded(config=work.model, weights=_weights(work), tokenizer_json=tokenizer, eos_ids=(0,))
        write_folder(weights, random, torch.bfloat16)
        for questions in work.questions:
            yield _ours(work, questions, open_weights(weights), compiled)


def redline_compiled(setting: dict[str, str]) -> Iterator[BenchRow]:
    """A training of hundreds of steps earns the compiler's time back; here it is in the first step."""
    return redline(setting, "default")


def _ours(work: RlWork, questions: int, opened: Opened, compiled: Compile) -> BenchRow:
    empty()
    recipe = _recipe(work.model, work, questions, work.new_tokens, str(opened.source), compiled)
    asked = [Question(str(number), "", "") for number in range(questions)]
    prompts = {
        question.id: Asked(question, "", tuple(ids), ())
        for question, ids in zip(asked, theirs.prompts_of(work, questions), strict=True)
    }
    task = _Whole(
        name="coin", about="", questions=lambda *_: asked, score=lambda *_: Verdict(True, True, 1.0, None)
    )
    domain = Domain("coin", task, asked, asked[:1], _Coin(), prompts)  # type: ignore[arg-type]  # no pool
    process, plan = Process(0, 1, device()), _plan(recipe)
    trainer = Trainer(job_of(recipe, plan, opened, Domains(recipe, opened, [domain]), process), process)
    return _row(work, questions, *_steps(trainer, work))


def _steps(trainer: Trainer, work: RlWork) -> tuple[dict[str, Any], list[float]]:
    """The line of the last step, and the seconds of all."""

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
    plan, process = _plan(recipe), Process(0, 1, device())
    model = build_model(work.actor, device=process.device, seed=0)
    equip(model, plan, longest=longest_row(recipe))
    job = rehearsal.job_of(recipe, plan, model, rehearsal.random_rows(recipe, shortest=1), process)
    line, seconds = _steps(Trainer(job, process), work)
    row = _row(work, count // work.group_size, line, seconds)
    yield row | {"mfu_share": line["actor_mfu"], "mfu_verl_share": line["perf/mfu/actor"]}
