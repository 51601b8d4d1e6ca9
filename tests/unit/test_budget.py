"""The budget asks for what the verdicts call for: against a plain simulation, in any order of arrival, and
across kills."""

import random

import pytest

from redline.config.rft import SampleConfig
from redline.engine.request import Request, Sampling
from redline.rft.budget import Budget

Key = tuple[str, int]
HARDNESS = {f"q{i}": chance for i, chance in enumerate([0.0, 0.02, 0.1, 0.3, 0.5, 0.9, 1.0, 0.05, 0.0, 0.7])}


def verdict(question: str, sample: int) -> tuple[bool, str | None]:
    """The truth about a sample, a function of its name alone."""
    draw = random.Random(f"{question}/{sample}")
    correct = draw.random() < HARDNESS[question]
    return correct, str(draw.randrange(6)) if correct else None


def asked(name: str) -> Request:
    return Request(prompt=f"prompt of {name}", sampling=Sampling(), tag=name)


def make(settings: SampleConfig, done: dict[Key, tuple[bool, str | None]] | None = None) -> Budget:
    known = [(*key, *value) for key, value in (done or {}).items()]
    return Budget([asked(name) for name in HARDNESS], settings, seed=7, done=known)


def play(
    budget: Budget, order: random.Random, stop_after: int | None = None
) -> dict[Key, tuple[bool, str | None]]:
    """An engine whose completions come in a random order, in batches; returns every verdict, none of them
    twice."""
    flying: list[tuple[Request, int]] = []
    found: dict[Key, tuple[bool, str | None]] = {}
    for request in budget.requests():
        if request is not None:
            flying += [(request, request.first_sample + i) for i in range(request.samples)]
            if order.random() < 0.7:
                continue
        order.shuffle(flying)
        batch = []
        for _ in range(order.randint(0, min(len(flying), 9))):
            asked, sample = flying.pop()
            budget.arrived()
            assert (asked.tag, sample) not in found, "asked for twice"
            found[asked.tag, sample] = verdict(asked.tag, sample)
            batch.append((asked.tag, sample, *found[asked.tag, sample]))
        budget.record(batch)
        if stop_after is not None and len(found) >= stop_after:
            budget.stop()
    return found


def expected(settings: SampleConfig) -> set[Key]:
    """The rule, written plainly: rounds of a quarter, then waves over the unsolved."""
    own, enough = settings.samples_per_question, settings.distinct_correct
    drawn = dict.fromkeys(HARDNESS, 0)

    def verdicts(question: str) -> list[tuple[bool, str | None]]:
        return [verdict(question, i) for i in range(drawn[question])]

    for question in HARDNESS:
        while drawn[question] < own:
            if enough is not None and len({key for correct, key in verdicts(question) if correct}) >= enough:
                break
            drawn[question] += own if enough is None else min(-(-own // 4), own - drawn[question])
    left = own * len(HARDNESS) - sum(drawn.values())
    most = int(settings.max_factor * own)
    while settings.spend_rest and left > 0:
        hard = [q for q in HARDNESS if drawn[q] < most and not any(correct for correct, _ in verdicts(q))]
        if not hard:
            break
        share = max(-(-own // 4), left // (2 * len(hard)))
        for question in hard:
            more = min(share, most - drawn[question], left)
            drawn[question] += more
            left -= more
    return {(question, i) for question, count in drawn.items() for i in range(count)}


SETTINGS = [
    SampleConfig(samples_per_question=10),
    SampleConfig(samples_per_question=10, distinct_correct=2),
    SampleConfig(samples_per_question=30, distinct_correct=3, max_factor=2.5),
    SampleConfig(samples_per_question=7, distinct_correct=1, spend_rest=False),
    SampleConfig(samples_per_question=1, distinct_correct=1, max_factor=20),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_drawn_follows_the_rule_in_any_order_of_arrival(settings, seed):
    assert set(play(make(settings), random.Random(seed))) == expected(settings)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_budget_that_is_killed_again_and_again_draws_exactly_the_rest(settings):
    order = random.Random(str(settings))
    stored: dict[Key, tuple[bool, str | None]] = {}
    for _ in range(6):
        found = play(make(settings, stored), order, stop_after=order.randint(1, 25))
        # the last batch was not stored yet
        kept = {key: value for key, value in found.items() if order.random() < 0.8}
        assert not stored.keys() & kept.keys()
        stored |= kept
    rest = play(make(settings, stored), order)
    assert not stored.keys() & rest.keys()
    assert stored.keys() | rest.keys() == expected(settings)
    assert make(settings, stored | rest).finished


def test_what_is_saved_on_easy_questions_is_spent_on_hard_ones():
    drawn = play(make(SETTINGS[2]), random.Random(0))
    count = {question: sum(name == question for name, _ in drawn) for question in HARDNESS}
    assert count["q6"] < 30 < count["q0"] <= 75
    assert len(drawn) <= 30 * len(HARDNESS)


def test_a_sample_has_its_own_seed_whatever_the_other_questions():

    alone = Budget([asked("q3")], SampleConfig(), seed=7)
    request = next(r for r in make(SETTINGS[0]).requests() if r is not None and r.tag == "q3")
    first = next(alone.requests())
    assert first is not None
    assert request.seed == first.seed
    assert next(Budget([asked("q3")], SampleConfig(), seed=8).requests()).seed != first.seed


def test_progress_counts_down_to_nothing():
    budget = make(SETTINGS[1])
    assert budget.samples_left() == 100
    assert budget.questions_done == 0
    play(budget, random.Random(3))
    assert budget.samples_left() == 0
    assert budget.questions_done == len(HARDNESS)


def test_what_is_left_is_never_more_than_was_said():
    settings = SampleConfig(samples_per_question=8, distinct_correct=1)
    budget = Budget([asked("easy"), asked("hard")], settings, seed=0)
    said, drawn = [], 0
    for request in budget.requests():
        for number in range(request.samples if request else 0):
            budget.arrived()
            easy = request.tag == "easy"
            budget.record([(request.tag, request.first_sample + number, easy, "key" if easy else None)])
            drawn += 1
            said.append((drawn, budget.samples_left()))
    assert drawn == 16, "what the easy question left went to the hard one"
    assert all(drawn - before <= left for before, left in said)
