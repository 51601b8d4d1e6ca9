"""The sampling stage: the budget's requests go through an engine, completions are scored in other processes, and
everything goes into the store.

    outcome = sample(session)      # resumes where an earlier attempt stopped

The engine runs in the calling thread. A second thread takes what has come since its last turn, has it scored, stores
it in one transaction and tells the budget, so neither scoring nor the disk holds up the engine. What the engine had
in progress when a run was stopped or killed is drawn again. At the end the engine's log-probabilities of some
completions are compared with the training forward's, and the difference is written into the events.
"""

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from redline.config.recipe import fingerprint_of
from redline.data.tokenizer import Tokenizer
from redline.engine.local import LocalEngine
from redline.engine.prompt import Asked
from redline.engine.ray import RayEngine
from redline.engine.request import Completion, Engine, Request
from redline.model.transformer import Transformer
from redline.record.run import read_lines
from redline.rft.budget import Budget
from redline.rft.session import Session
from redline.rft.store import Sample, Source, Store, reasoning_key
from redline.tasks.pool import Pool
from redline.tasks.task import Question, Task, prompt_messages
from redline.train.execution import eagerly
from redline.train.stop import STOPPED, stop_on_signal

Keep = Callable[[Sequence[Completion]], None]

COMPARED = 64
"""Completions whose log-probabilities are compared with the training forward's."""
SCORED_AT_ONCE = 2048
"""Most completions in one transaction, so that a kill costs a fraction of a second of work."""


@dataclass
class Outcome:
    """What sampling gave. Drawn samples, tokens, times and failures are this call's; the rest is the store's."""

    why: str = ""
    questions: int = 0
    solved: int = 0
    samples: int = 0
    correct: int = 0
    cut: int = 0
    """Samples that ran out of tokens before the answer was complete; they count as wrong."""
    drawn: int = 0
    """Samples of this call."""
    tokens: int = 0
    elapsed_s: float = 0.0
    scorer_failures: int = 0
    """Samples whose scorer failed; they count as wrong."""


def sample(session: Session) -> Outcome:
    """Draw what the budget still asks for. Ctrl-C stops it; the same call resumes."""
    session.drop_adapters()
    questions = session.train_questions()
    asked = session.ask(questions, session.sampler)
    with Store(session.folder.path / "samples.db") as store:
        store.put_questions(questions)
        settings = {
            **session.recipe.sampling,
            "first_prompt": fingerprint_of(asked[0].text),
            "tokenizer": session.sampler.tokenizer.fingerprint,
        }
        drawing = _Drawing(session, store, store.open_source(session.writer, settings), asked)
        why = session.until_it_fits("sample", drawing.run)
        outcome = drawing.outcome(why)
    if outcome.drawn or (outcome.samples and not _told(session, outcome)):
        session.folder.event("sampling_end", **asdict(outcome))
    if why == "finished":
        session.release_sampler()
    return outcome


def _told(session: Session, outcome: Outcome) -> bool:
    """Whether the events say how many samples there are; a kill after the last sample leaves that out."""
    told = [e for e in read_lines(session.folder.events_path) if e["event"] == "sampling_end"]
    return bool(told) and told[-1].get("samples") == outcome.samples


class _Drawing:
    """One call of `sample`: what it draws from and into, and its running numbers."""

    def __init__(self, session: Session, store: Store, source: Source, asked: Sequence[Asked]) -> None:
        self.session, self.store, self.source, self.asked = session, store, source, asked
        self.questions = {one.question.id: one.question for one in asked}
        self.now = Outcome(questions=len(self.questions))
        self.engine: Engine | None = None
        self.budget: Budget

    def run(self) -> str:
        """Run an engine until the budget is spent or the user stops it; returns which."""
        self.budget = self._budget()
        if self.budget.finished:
            return "finished"
        began_s = time.monotonic()
        count = len(self.questions)
        self.session.stage("sample", f"sampling {count:,} questions", questions=count)
        try:
            with ExitStack() as stack:
                pool = stack.enter_context(Pool(self.session.asked.name, self.session.asked.data))
                engine = self.session.sampling_engine(self.asked, sequences=self.budget.samples_left())
                self.engine = stack.enter_context(engine)
                compared = self._draw(engine, lambda completions: self._keep(completions, pool, began_s))
            if not self.budget.stopped:
                self._compare(engine, compared)  # the engine is closed: the forward has its memory
        finally:
            self.now.elapsed_s += time.monotonic() - began_s
        return STOPPED if self.budget.stopped else "finished"

    def outcome(self, why: str) -> Outcome:
        solved = {question for question, _, correct, _ in self.store.verdicts(self.source) if correct}
        return replace(self.now, why=why, solved=len(solved), elapsed_s=round(self.now.elapsed_s, 3))

    def _budget(self) -> Budget:
        """A budget that begins where the store ends."""
        recipe, done = self.session.recipe, self.store.verdicts(self.source)
        self.now.samples, self.now.correct = len(done), sum(correct for _, _, correct, _ in done)
        self.now.cut = self.store.cut(self.source)
        sampling, task = self.session.settings(self.asked[0].stops), self.session.task
        server, shots = recipe.sample.server, recipe.prompt.shots_of(trained=False)
        requests = [
            Request(
                prompt=one.text if server else one.prompt,  # a server has its own tokenizer
                messages=tuple(prompt_messages(task, one.question, shots)),
                sampling=sampling,
                tag=one.question.id,
            )
            for one in self.asked
        ]
        return Budget(requests, recipe.sample, seed=recipe.train.seed, done=done)

    def _draw(self, engine: Engine, keep: Keep) -> list[Completion]:
        """The engine's thread: hand everything over, and set some aside for the comparison."""
        budget, compared = self.budget, list[Completion]()
        with stop_on_signal(budget.stop), _in_background(keep, budget.stop) as hand_over:
            for completion in engine.run(budget.requests()):
                budget.arrived()
                hand_over(completion)
                if completion.sample == 0 and completion.tokens and len(compared) < COMPARED:
                    compared.append(completion)
                if budget.stopped:
                    break
        return compared

    def _keep(self, completions: Sequence[Completion], pool: Pool, began_s: float) -> None:
        """The other thread: score, store, tell the budget and those who watch."""
        rows = score(completions, self.questions, pool, self.session.task, self.session.sampler.tokenizer)
        self.store.add(self.source, rows)
        self.budget.record((row.question, row.sample, row.correct, row.reasoning_key) for row in rows)
        now = self.now
        now.drawn += len(rows)
        now.samples += len(rows)
        now.correct += sum(row.correct for row in rows)
        now.cut += sum(row.finish == "length" for row in rows)
        now.tokens += sum(row.tokens for row in rows)
        now.scorer_failures += sum(row.reason is not None for row in rows)
        left, elapsed_s = self.budget.samples_left(), now.elapsed_s + time.monotonic() - began_s
        facts = {name: getattr(now, name) for name in ("questions", "samples", "correct", "cut")}
        facts |= {"questions_done": self.budget.questions_done, "samples_left": left}
        workers = self.engine.rates() if isinstance(self.engine, RayEngine) else None
        left_s = left * elapsed_s / now.drawn
        self.session.progress(now.tokens, elapsed_s, left_s=left_s, workers=workers, **facts)

    def _compare(self, engine: Engine, compared: Sequence[Completion]) -> None:
        """Record how full our engine's slots were and how far it is from the training forward."""
        if isinstance(engine, LocalEngine | RayEngine):
            self.session.folder.event(
                "engine", **asdict(engine.stats), occupancy=engine.stats.occupancy, slots=self.session.slots
            )
            if compared:
                self.session.folder.event("logprob_gap", **logprob_gap(self.session.sampler.model, compared))


@contextmanager
def _in_background(keep: Keep, stop: Callable[[], None]) -> Iterator[Callable[[Completion], None]]:
    """A thread that keeps what has come since its last turn. Its error stops the engine and is raised here."""
    waiting, failed = deque[Completion](), list[BaseException]()

    def turn() -> None:
        batch = [waiting.popleft() for _ in range(min(len(waiting), SCORED_AT_ONCE))]
        if batch and not failed:
            try:
                keep(batch)
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits for this one
                failed.append(error)
                stop()

    def hand_over(completion: Completion) -> None:
        waiting.append(completion)
        thread.submit(turn)

    with ThreadPoolExecutor(1, thread_name_prefix="redline-score-and-store") as thread:
        yield hand_over
    if failed:
        raise failed[0]


def score(
    completions: Sequence[Completion],
    questions: dict[str, Question],
    pool: Pool,
    task: Task,
    tokenizer: Tokenizer,
) -> list[Sample]:
    """Completions, cut where their answers are complete, with their verdicts, as rows of the store."""
    # a server may cut a character in two, and half of one cannot be stored
    texts = [task.answer_of(c.text.encode("utf-8", "replace").decode()) for c in completions]
    asked = [questions[c.request.tag] for c in completions]
    verdicts, now_s, rows = pool.score(list(zip(asked, texts, strict=True))), time.time(), list[Sample]()
    for completion, text, verdict in zip(completions, texts, verdicts, strict=True):
        finished, logprobs = task.finished(text, completion.finish), completion.logprobs
        correct = verdict.correct and finished
        ids = spelling(completion.tokens, text, tokenizer) if verdict.correct and completion.tokens else None
        rows.append(Sample(
            question=completion.request.tag, sample=completion.sample, text=text, tokens=completion.new_tokens,
            logprob_sum=sum(logprobs) if logprobs else None, logprob_min=min(logprobs) if logprobs else None,
            finish="stop" if finished else "length", correct=correct, parsed=verdict.parsed, reward=verdict.reward,
            answer=verdict.answer, reason=verdict.reason, reasoning_key=reasoning_key(text) if correct else None,
            seed=completion.request.seed, at=now_s, ids=None if ids is None else array("i", ids).tobytes(),
        ))  # fmt: skip
    return rows


def spelling(tokens: Sequence[int], text: str, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The leading tokens that spell the text (and white space before it); None if it ends inside a token."""
    whole, wanted = tokenizer.decode(list(tokens)), text.strip()
    end = whole.find(wanted) + len(wanted)
    if not wanted or whole[:end].strip() != wanted:
        return None
    count = bisect_left(range(len(tokens)), end, key=lambda n: len(tokenizer.decode(list(tokens[:n]))))
    return tuple(tokens[:count]) if tokenizer.decode(list(tokens[:count])) == whole[:end] else None


@torch.no_grad()
def logprob_gap(model: Transformer, completions: Sequence[Completion], at_once: int = 8) -> dict[str, float]:
    """Mean and largest difference between the log-probabilities of an engine and of the training forward."""
    gaps: list[torch.Tensor] = []
    device = model.embed.weight.device
    for first in range(0, len(completions), at_once):
        part = completions[first : first + at_once]
        texts = [(*_ids(completion), *completion.tokens) for completion in part]
        width = max(map(len, texts))
        # padded on the right, where causal attention never looks
        tokens_BT = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=device)
        with eagerly():
            logits_BTV = model(tokens_BT)
        for row, completion in enumerate(part):
            begin, count = len(_ids(completion)), len(completion.tokens)
            logprobs_TV = logits_BTV[row, begin - 1 : begin - 1 + count].float().log_softmax(dim=-1)
            trained_T = logprobs_TV.gather(1, tokens_BT[row, begin : begin + count, None])[:, 0]
            gaps.append((trained_T.cpu() - torch.tensor(completion.logprobs)).abs())
    gap_N = torch.cat(gaps)
    return {
        "mean": float(gap_N.mean()),
        "max": float(gap_N.max()),
        "tokens": gap_N.numel(),
        "completions": len(completions),
    }


def _ids(completion: Completion) -> tuple[int, ...]:
    assert isinstance(completion.request.prompt, tuple)
    return completion.request.prompt
