"""The training stage: fine-tune the model on the kept samples or, for comparison, on the task's reference solutions.

    done = train(session, "samples")      # -> adapter/, or model/ after full fine-tuning
    done = train(session, "answers")      # -> adapter-answers/: plain supervised fine-tuning, the baseline

After a kill or a stop the same call resumes from the last checkpoint; once `done.json` exists, it returns that.
"""

import json
import textwrap
import time
from array import array
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from redline.config.load import build
from redline.config.recipe import fingerprint_of
from redline.engine.prompt import answer_text, ask, end_id
from redline.errors import CheckpointError, ConfigError, DataError
from redline.finetune import check_result, job_of, prepare, write_result
from redline.finetune import train as run_job
from redline.record.files import read_json, write_atomic
from redline.record.observe import Observers
from redline.record.read import Line, total, values
from redline.record.run import RunFolder, read_lines
from redline.rft.session import Session
from redline.rft.store import Source, Store
from redline.tasks.task import Question
from redline.train.open_run import OpenRun
from redline.train.packed import Example
from redline.train.packed import fingerprint as examples_fingerprint
from redline.train.places import step_folders

On = Literal["samples", "answers"]


@dataclass(frozen=True)
class Place:
    record: Path
    adapter: Path
    model: Path

    @property
    def done(self) -> Path:
        return self.record / "done.json"


@dataclass(frozen=True, kw_only=True)
class Done:
    """`done.json`: the summary of a finished training."""

    on: str
    why: str
    fingerprint: str
    examples: int
    updates: int
    loss: float | None = None
    rows_per_s: float | None = None
    elapsed_s: float
    files: dict[str, int] = field(default_factory=dict)
    """The result's files with their sizes."""


def place_of(run: Path, on: On) -> Place:
    end = "" if on == "samples" else f"-{on}"
    return Place(run / f"train-{on}", run / f"adapter{end}", run / f"model{end}")


def train(session: Session, on: On) -> dict[str, Any]:
    """Fine-tune; returns what was done (see `Done`) and `why` it ended."""
    check_result(session.recipe)
    recipe, place = session.recipe, place_of(session.folder.path, on)
    examples = _examples(session, on)
    training = [asdict(recipe.train), asdict(recipe.lora) if recipe.lora else None, session.start]
    fingerprint = fingerprint_of([*training, examples_fingerprint(examples)])
    if (finished := read_done(place)) is not None:
        if finished["fingerprint"] != fingerprint:
            raise ConfigError(
                f"the examples have changed since {place.record} was trained: give another --run, or delete it"
            )
        return finished
    session.drop_adapters()
    model = session.model.model
    prepare(model, recipe, session.process)
    began_s = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(place.record))
        resume_step = max(step_folders(folder.checkpoints_path), default=0)
        exporters = Observers(session.exporters(place.record, resume_step))
        stack.callback(exporters.close)
        opened = OpenRun(place.record, folder, [session.observers, exporters])
        job = job_of(model, examples, recipe, session.plan, session.process, opened=opened)
        session.stage(place.record.name, f"fine-tuning on {len(examples):,} {on}", total_steps=job.steps)
        outcome = run_job(job, session.process)
    elapsed_s = time.monotonic() - began_s
    told = {"why": outcome.why, "step": outcome.step, "elapsed_s": round(elapsed_s, 3)}
    session.folder.event(f"training_on_{on}", **told)
    lines = read_lines(folder.metrics_path)  # an attempt that was killed may have made the last update
    # of every attempt that ended
    spent_s = total(read_lines(session.folder.events_path), f"training_on_{on}")
    done = Done(
        on=on, why=outcome.why, fingerprint=fingerprint, examples=len(examples), updates=outcome.step,
        loss=next(iter(values(lines[-1:], "loss")), None), rows_per_s=_rows_per_s(lines), elapsed_s=spent_s,
    )  # fmt: skip
    if outcome.why == "finished":
        base = session.model.opened
        write_result(model, recipe, base, session.process, adapter=place.adapter, whole=place.model)
        done = replace(done, files=_sizes(place))
        write_atomic(place.done, json.dumps(asdict(done), indent=2) + "\n")
    if recipe.lora is None:
        session.forget_model()
    return asdict(done)


def _rows_per_s(lines: list[Line]) -> float | None:
    """Examples per second over all updates but the first, weighted by time: an epoch's last batch may be short."""
    timed = [line for line in lines[1:] or lines if line.get("rows_per_s") and line.get("step_s")]
    spent_s = sum(values(timed, "step_s"))
    return sum(line["rows_per_s"] * line["step_s"] for line in timed) / spent_s if timed else None


def read_done(place: Place) -> dict[str, Any] | None:
    """The summary of a finished training; None if there is none, or if its result is gone or damaged."""
    if not place.done.is_file():
        return None
    done = build(Done, read_json(place.done, dict), where=str(place.done))
    return asdict(done) if done.files.items() <= _sizes(place).items() else None


def _sizes(place: Place) -> dict[str, int]:
    return {
        str(path.relative_to(place.record.parent)): path.stat().st_size
        for folder in (place.adapter, place.model)
        for path in sorted(folder.glob("*"))
    }


def _examples(session: Session, on: On) -> list[Example]:
    """Prompt and answer of everything that is trained on, in the order of the questions."""
    questions = session.train_questions()
    if on == "answers":
        pairs: list[tuple[Question, str, bytes | None]] = [
            (question, question.solution, None) for question in questions if question.solution
        ]
        if not pairs:
            raise DataError(
                f"task {session.asked.name} gives no reference solutions to train on: train on the samples"
            )
    else:
        pairs = _kept(session, {question.id: question for question in questions})
    prompt, loaded, tokenizer = session.recipe.prompt, session.model.opened.loaded, session.model.tokenizer
    end = end_id(loaded, tokenizer, prompt.mode)
    answers = tokenizer.encode([answer_text(text, prompt.mode) for _, text, _ in pairs])
    prompts: dict[str, tuple[int, ...]] = {}
    examples = []
    for (question, _, sampled), spelt in zip(pairs, answers, strict=True):
        # several token sequences can spell a text: the model learns the one it sampled
        answer = spelt if sampled is None else array("i", sampled)
        if question.id not in prompts:
            asked = ask(session.task, question, loaded, tokenizer, prompt, trained=True)
            prompts[question.id] = asked.prompt
        examples.append(Example(prompt=prompts[question.id], answer=(*answer, end)))
    return examples


def _kept(session: Session, questions: dict[str, Question]) -> list[tuple[Question, str, bytes | None]]:
    """What to train on: the question, the text, and its token ids if sampler and model share a tokenizer."""
    with Store(session.folder.path / "samples.db", create=False) as store:
        source, settings = store.latest()
        ours = session.recipe.sampling
        if {key: settings.get(key) for key in ours} != ours:
            raise DataError(
                f"{store.path} was last sampled with other settings than the recipe's: run `redline rft sample` again"
            )
        _check_writer(session, source, store.path)
        kept = store.kept(source, session.recipe.sample.keep_per_question)
        if not kept:
            raise DataError(_nothing_correct(store, source))
    shared = settings.get("tokenizer") == session.model.tokenizer.fingerprint
    known = [row for row in kept if row.question in questions]
    return [(questions[row.question], row.reasoning, row.ids if shared else None) for row in known]


def _nothing_correct(store: Store, source: Source) -> str:
    """What the samples look like if none is correct: most often the prompt or the scorer is to blame."""
    shown = [
        f"{textwrap.shorten(row['text'], 160, placeholder=' ...')!r} (expected {row['expected']!r}, understood"
        f" {row['answer']!r}, score {row['reward']:g})"
        for row in store.examples(source, correct=False, most=2)
    ]
    cut = store.cut(source)
    ended = f" {cut:,} ran out of tokens (sample.max_new_tokens)." if cut else ""
    return (
        f"none of the {len(store.verdicts(source)):,} samples was scored correct, so there is nothing to train"
        f" on.{ended} Two of them: {'; '.join(shown)}. Check the prompt and the scorer (docs/tasks.md), or use a"
        " better sampler"
    )


def _check_writer(session: Session, source: Source, samples: Path) -> None:
    """Refuse samples of other weights than those the recipe names now. A sampler may be gone once it has done its work:
    the user is told that the check was not possible, and training continues."""
    place = session.recipe.sample
    try:
        writer = session.writer
    except CheckpointError as error:
        session.folder.event("writer_not_checked", why=str(error))
        session.note(f"cannot check that {samples} was written by the recipe's sampler: {error}")
        return
    if writer != source.model:
        raise DataError(
            f"{samples} was last sampled by another model ({source.model}) than what is now at"
            f" {place.server or place.sampler or session.start} ({writer}): run `redline rft sample` again, or put the"
            " model back"
        )
