"""The test stage: greedy answers to held-out questions, before fine-tuning and after, with accuracy, answer
rate and their intervals.

    line = run_test(session, "base")         # or "samples", "answers": the weights from training
    line["accuracy"], line["accuracy_low"], line["accuracy_high"], line["n"]

Each result is a line of evaluations.jsonl and is not computed twice. Questions that ask for the same conversion as a
training question (equal `from`, `to` and `number`) are also counted separately, because data files may overlap.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from redline.config.recipe import fingerprint_of
from redline.engine.request import Completion, Request
from redline.errors import DataError
from redline.model.lora import merged
from redline.record.files import write_atomic
from redline.record.run import read_lines
from redline.rft.session import Session, Speaker
from redline.rft.train import place_of, read_done
from redline.tasks.pool import Pool
from redline.tasks.task import Question, Verdict, shares
from redline.train.adapter import read_adapter
from redline.train.execution import COMPUTE_DTYPE
from redline.train.restore import open_weights

Weights = Literal["base", "answers", "samples"]
_ASKED = ("from", "to", "number")
"""The facts of a question that make it the same conversion as another."""


def trained(run: Path) -> list[Weights]:
    """The weights of a run that can be tested: the base, and what has been trained."""
    both: tuple[Literal["answers", "samples"], ...] = ("answers", "samples")
    return ["base", *(on for on in both if read_done(place_of(run, on)) is not None)]


def run_test(session: Session, weights: Weights) -> dict[str, Any]:
    """Accuracy of these weights on the recipe's test questions, as a line of evaluations.jsonl."""
    path = session.folder.path / "evaluations.jsonl"
    recipe = session.recipe
    asked = [asdict(session.asked), asdict(recipe.prompt), asdict(recipe.test), recipe.sample.max_new_tokens]
    key = fingerprint_of([weights, _trained_as(session, weights), session.model.fingerprint, *asked])
    lines = read_lines(path)
    for line in lines:
        if line.get("key") == key:
            return line
    questions = session.questions(recipe.test.split, recipe.test.rows or None)
    began_s = time.monotonic()
    verdicts, tokens, cut = session.until_it_fits("test", lambda: _answer(session, questions, weights))
    line = {
        "at": round(time.time(), 3),
        "key": key,
        "weights": weights,
        "split": recipe.test.split,
        **shares(verdicts),
        "tokens": tokens,
        "cut": cut,
        "elapsed_s": round(time.monotonic() - began_s, 3),
        **_groups(session, questions, verdicts),
        "scorer_failures": sum(verdict.reason is not None for verdict in verdicts),
    }
    write_atomic(path, "".join(json.dumps(known) + "\n" for known in (*lines, line)))
    return line


def _trained_as(session: Session, weights: Weights) -> str | None:
    if weights == "base":
        return None
    place = place_of(session.folder.path, weights)
    if (done := read_done(place)) is None:
        raise DataError(
            f"nothing has been trained on {weights} in {session.folder.path}: run `redline rft train --on"
            f" {weights}` first"
        )
    return str(done["fingerprint"])


def _answer(
    session: Session, questions: Sequence[Question], weights: Weights
) -> tuple[list[Verdict], int, int]:
    """Verdicts, tokens, and how many answers were cut off, which count as wrong."""
    count = len(questions)
    said = "the base model" if weights == "base" else f"the model trained on the {weights}"
    session.stage("test", f"testing {said} on {count:,} questions", questions=count)
    began_s, tokens, heard = time.monotonic(), 0, list[Completion]()
    with ExitStack() as stack:
        speaker = stack.enter_context(_speaker(session, weights))
        asked = session.ask(questions, speaker, trained=weights != "base")
        engine = stack.enter_context(session.engine(speaker, asked, sequences=count))
        sampling = session.settings(asked[0].stops, greedy=True)
        requests = [Request(prompt=one.prompt, sampling=sampling, tag=i) for i, one in enumerate(asked)]
        for completion in engine.run(requests):
            heard.append(completion)
            done, tokens = len(heard), tokens + completion.new_tokens
            # scored when all of them are there
            facts = {"questions": count, "questions_done": done, "samples": done, "correct": None}
            elapsed_s = time.monotonic() - began_s
            session.progress(tokens, elapsed_s, left_s=(count - done) * elapsed_s / done, **facts)
    heard.sort(key=lambda one: one.request.tag)
    with Pool(session.asked.name, session.asked.data) as pool:
        texts = [session.task.answer_of(one.text) for one in heard]
        verdicts = pool.score(list(zip(questions, texts, strict=True)))
    whole = [session.task.finished(one.text, one.finish) for one in heard]
    counted = [
        verdict if ended else verdict._replace(correct=False)
        for verdict, ended in zip(verdicts, whole, strict=True)
    ]
    return counted, tokens, whole.count(False)


@contextmanager
def _speaker(session: Session, weights: Weights) -> Iterator[Speaker]:
    """The base model, the base with adapters merged during the test, or a fully trained model."""
    if weights == "base":
        session.drop_adapters()
        yield session.model
    elif session.recipe.lora is not None:
        read_adapter(place_of(session.folder.path, weights).adapter, session.model.model)
        with merged(session.model.model):
            yield session.model
    else:
        opened = open_weights(place_of(session.folder.path, weights).model)
        model = opened.build(session.process.device, COMPUTE_DTYPE[session.plan.precision])
        yield Speaker(opened, model)


def _groups(session: Session, questions: Sequence[Question], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Shares by family, and separately for questions that are in the training data; if the questions' meta tells."""
    families: dict[str, list[Verdict]] = defaultdict(list)
    apart: dict[str, list[Verdict]] = defaultdict(list)
    known = {_asked(question) for question in session.train_questions()}
    for question, verdict in zip(questions, verdicts, strict=True):
        if "family" in question.meta:
            families[str(question.meta["family"])].append(verdict)
        if (asked := _asked(question)) is not None:
            apart["in_train" if asked in known else "unseen"].append(verdict)
    found: dict[str, Any] = {}
    if families:
        found["families"] = {name: shares(rows) for name, rows in sorted(families.items())}
    return found | ({name: shares(rows) for name, rows in apart.items()} if "in_train" in apart else {})


def _asked(question: Question) -> tuple[Any, ...] | None:
    known = all(name in question.meta for name in _ASKED)
    return tuple(question.meta[name] for name in _ASKED) if known else None
