"""The questions of every domain, chosen by (seed, step), as the model reads them; and who scores the answers.

with open_domains(recipe, opened) as domains:
    asked = domains.ask(12, ("units", 3))                      # the fourth question of units in step 12
    for key, samples in domains.answers(run, {("units", 3): asked}): ...
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from redline.config.recipe import Recipe
from redline.engine.prompt import Asked, ask
from redline.engine.request import Completion, Request, Sampling
from redline.errors import ConfigError, DataError
from redline.machine.facts import cpu_cores
from redline.rl.policy import Run
from redline.rl.samples import Key, Sample
from redline.tasks.pool import Pool
from redline.tasks.registry import load_task
from redline.tasks.task import Question, Task, Verdict
from redline.train.restore import Opened


@dataclass
class Domain:
    name: str
    task: Task
    questions: list[Question]
    held_out: list[Question]
    pool: Pool
    _read: dict[str, Asked] = field(default_factory=dict)


class Domains:
    def __init__(self, recipe: Recipe, opened: Opened, domains: Sequence[Domain]) -> None:
        assert recipe.rl is not None
        self.recipe, self.rl, self.opened = recipe, recipe.rl, opened
        self.by_name = {domain.name: domain for domain in domains}
        self.tokenizer = opened.tokenizer
        self._step = -1
        self._drawn: dict[str, tuple[list[Asked], Iterator[Asked]]] = {}
        """What was asked of each domain in this step, and what comes next."""

    def shares(self) -> dict[str, int]:
        """Questions of a step by domain: in proportion to the weights, and at least one of each."""
        weights = self.rl.weights or (1.0,) * len(self.rl.domains)
        total, count = sum(weights), self.recipe.train.batch_size
        exact = [max(1.0, count * weight / total) for weight in weights]
        found = [int(share) for share in exact]
        while sum(found) > count:
            found[found.index(max(found))] -= 1
        for place in sorted(range(len(exact)), key=lambda i: found[i] - exact[i])[: count - sum(found)]:
            found[place] += 1
        return dict(zip(self.rl.names, found, strict=True))

    def ask(self, step: int, key: Key) -> Asked:
        """That question of a step; the same for the same seed."""
        domain, number = key
        if self._step != step:
            self._step, self._drawn = step, {name: ([], self._shuffled(name, step)) for name in self.by_name}
        drawn, following = self._drawn[domain]
        while len(drawn) <= number:
            drawn.append(next(following))
        return drawn[number]

    def seed(self, step: int, key: Key) -> int:
        text = "/".join(map(str, (self.recipe.train.seed, step, *key)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def held_out(self, domain: str) -> list[Asked]:
        own = self.by_name[domain]
        return list(self._fitting(own, own.held_out))

    def sampling(self, stops: tuple[str, ...], *, greedy: bool = False) -> Sampling:
        most, temperature = self.rl.max_new_tokens, 0.0 if greedy else 1.0
        return Sampling(max_new_tokens=most, temperature=temperature, stop_strings=stops)

    def answers(
        self,
        run: Run,
        asked: Mapping[Key, Asked],
        *,
        samples: int = 1,
        seed: Callable[[Key], int] | None = None,
        generated: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Key, tuple[Sample, ...]]]:
        """The answers to each question with their rewards, in the order in which their last answers came; greedy
        ones without seeds. Each is scored in another process while the rest is generated. `generated` is called when
        only scores are missing. A scorer that hangs or dies costs its own answer: 0, with the reason."""
        requests = [
            Request(
                prompt=one.prompt,
                sampling=self.sampling(one.stops, greedy=seed is None),
                samples=samples,
                seed=seed(key) if seed is not None else 0,
                tag=key,
            )
            for key, one in asked.items()
        ]
        heard = defaultdict[Key, list[_Heard]](list)
        whole: deque[Key] = deque()

        def scored() -> tuple[Key, tuple[Sample, ...]]:
            key = whole.popleft()
            own = sorted(heard.pop(key), key=lambda one: one.completion.sample)
            return key, tuple(_sample(self.by_name[key[0]].task, one) for one in own)

        for completion in run(requests):
            key: Key = completion.request.tag
            domain = self.by_name[key[0]]
            text = self._text(domain.task, completion)
            verdict = domain.pool.submit(asked[key].question, domain.task.answer_of(text))
            heard[key].append(_Heard(completion, text, verdict))
            whole.extend([key] if len(heard[key]) == samples else [])
            while whole and all(one.verdict.done() for one in heard[whole[0]]):
                yield scored()
        generated()
        while whole:
            yield scored()

    def _text(self, task: Task, completion: Completion) -> str:
        """The text of an answer: the engine cuts a stop string off, but the end of an answer belongs to it."""
        said, end = completion.text, task.end
        closed = end and end not in said and end in self.tokenizer.decode(list(completion.tokens))
        return said + end if closed else said

    def _shuffled(self, domain: str, step: int) -> Iterator[Asked]:
        """The domain's questions in the order of this step, over and over."""
        own, number = self.by_name[domain], self.seed(step, (domain, -1)) % 2**63
        order = np.random.default_rng(number).permutation(len(own.questions)).tolist()
        while True:
            yield from self._fitting(own, (own.questions[place] for place in order))

    def _fitting(self, domain: Domain, questions: Iterable[Question]) -> Iterator[Asked]:
        """The questions whose prompts are short enough; if there is none, an error."""
        longest, fitting = self.rl.max_prompt_tokens, False
        for question in questions:
            if len((asked := self._asked(domain, question)).prompt) <= longest:
                fitting = True
                yield asked
        if not fitting:
            raise DataError(
                f"every prompt of domain {domain.name} is longer than rl.max_prompt_tokens ({longest}): raise it, or"
                " lower prompt.shots"
            )

    def _asked(self, domain: Domain, question: Question) -> Asked:
        if (known := domain._read.get(question.id)) is not None:
            return known
        loaded, prompt, task = self.opened.loaded, self.recipe.prompt, domain.task
        asked = ask(task, question, loaded, self.tokenizer, prompt, trained=True)
        stops = (*asked.stops, task.end) if task.end else asked.stops
        return domain._read.setdefault(question.id, asked._replace(stops=stops))


class _Heard(NamedTuple):
    completion: Completion
    text: str
    verdict: Future[Verdict]


def _sample(task: Task, heard: _Heard) -> Sample:
    """An answer that was cut may read as correct; it does not count as such."""
    completion, verdict = heard.completion, heard.verdict.result()
    whole = task.finished(heard.text, completion.finish)
    return Sample(
        text=heard.text,
        reward=verdict.reward if whole else 0.0,
        correct=verdict.correct and whole,
        parsed=verdict.parsed,
        cut=completion.finish == "length",
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        reason=verdict.reason,
    )


@contextmanager
def open_domains(recipe: Recipe, opened: Opened, *, processes: int = 1) -> Iterator[Domains]:
    """Load every domain and start its scoring processes; `processes` share the machine."""
    rl, test = recipe.rl, recipe.test
    assert rl is not None
    workers = max(1, cpu_cores() // (len(rl.domains) * processes))
    with ExitStack() as stack:
        found = []
        for spec, name in zip(rl.domains, rl.names, strict=True):
            data = rl.data_of(name)
            task = load_task(spec, data)
            questions = task.questions("train", rl.rows, recipe.train.seed)
            held_out = task.questions(test.split, None, 0)[: test.rows or None]  # a domain may have fewer
            if not questions or not held_out:
                raise ConfigError(f"domain {name} has nothing to train or test on: change test.split")
            pool = stack.enter_context(Pool(spec, data, workers=workers))
            found.append(Domain(name, task, questions, held_out, pool))
        yield Domains(recipe, opened, found)
