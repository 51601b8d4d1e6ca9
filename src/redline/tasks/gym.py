"""The procedural tasks of reasoning-gym by their name: `load_task("gym:chain_sum")`, or any of its hundred others.

    pip install 'redline[gym]'          # some 25 packages, one of which needs a C compiler

A question is one entry of the named data set at its default difficulty, and reasoning-gym's own verifier judges
the answer. An entry is made again from its seed where it is scored, because its facts are not all JSON. Making
one takes a millisecond or, for a zebra puzzle, half a second; nine of ten are thrown away for a held-out split.
"""

import functools
import random
from typing import Any

from redline.errors import ConfigError, nearest, need
from redline.tasks import answers
from redline.tasks.domain import Drawn, generate, split_of
from redline.tasks.task import Question, Task, Verdict


def make(name: str) -> Task:
    gym = need("reasoning_gym", extra="gym")
    known = need("reasoning_gym.factory", extra="gym").DATASETS
    if name not in known:
        raise ConfigError(f"reasoning-gym has no task {name!r}{nearest(name, known)}: it has {len(known)}")

    @functools.lru_cache(maxsize=10_000)
    def entry(seed: int) -> tuple[Any, Any]:
        made = gym.create_dataset(name, size=1, seed=seed)
        return made, made[0]

    def draw(randomness: random.Random) -> Drawn:
        seed = randomness.getrandbits(31)
        text, answer = (str(entry(seed)[1][field]) for field in ("question", "answer"))
        return Drawn(text, answer, f"<answer>{answer}</answer>", split_of(text), str(seed))

    def questions(split: str, count: int | None, seed: int) -> list[Question]:
        return generate(f"gym:{name}", draw, split, count, seed)

    def score(question: Question, completion: str) -> Verdict:
        def earns(answer: str, _expected: str) -> float:
            made, facts = entry(int(question.meta["kind"]))
            return min(1.0, made.score_answer(answer=answer, entry=facts))

        return answers.scored_by(earns)(question, completion)

    return Task(
        name=f"gym:{name}",
        about=f"reasoning-gym's {name}, judged by its own verifier",
        questions=questions,
        score=score,
        instruction=answers.INSTRUCTION.format("…"),
        end=answers.END,
    )
