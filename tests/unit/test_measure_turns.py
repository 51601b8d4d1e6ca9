"""Turn-taking with children that answer from a table: who runs when, what is tried once more, and what counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab import HANGS, KILLED, Behaviour, Lab

from redline.measure import turns as room
from redline.measure.statistics import hopeless
from redline.measure.trial import Pair, Timing, Trial, TrialFolder
from redline.measure.turns import Arm, Turns, take_turns


def trial(name: str, **timing: Any) -> Trial:
    return Trial(subject="", setting={"name": name}, timing=Timing(**timing))


A, B = trial("a"), trial("b")


def lab(**how: Behaviour) -> Lab:
    return Lab(lambda trial: how.get(trial.setting["name"], Behaviour()))


@contextmanager
def turns(lab: Lab, folder: Path, minutes: float = 60.0, machine: str = "", **more: Any) -> Iterator[Turns]:
    with (
        TrialFolder(folder, machine) as trials,
        Turns(trials, lab, minutes=minutes, progress=more.pop("say", lambda text: None), **more) as found,
    ):
        yield found
    assert not any(child.alive for child in lab.children), "every child ends with its turns"


def order(lab: Lab) -> str:
    return "".join(trial.setting["name"] for trial in lab.blocks)


def starts(lab: Lab) -> str:
    return "".join(trial.setting["name"] for trial in lab.started)


# ---- rounds ----


def test_arms_take_turns_in_turned_order_after_a_round_that_does_not_count(tmp_path: Path) -> None:
    here = lab()
    with turns(here, tmp_path) as each:
        pair = each.pair("b", A, B)
    assert pair is not None
    assert order(here) == "ab" + "abba" * 3
    assert (len(pair.before.blocks_s), len(pair.after.blocks_s), pair.paired) == (6, 6, True)


def test_long_steps_need_no_round_that_is_not_counted(tmp_path: Path) -> None:
    long_s = 1.01 * room.UNMOVED_S
    here = lab(a=Behaviour(step_s=long_s), b=Behaviour(step_s=long_s))
    with turns(here, tmp_path) as each:
        pair = each.pair("b", A, B)
    assert pair is not None
    assert order(here) == "ab" + "baab" * 2 + "ba"


@pytest.mark.parametrize(("takes_s", "rounds"), [(0.1, 24), (3.0, 7)])
def test_noise_gets_more_rounds_within_the_time_that_they_were_meant_to_take(
    tmp_path: Path, takes_s: float, rounds: int
) -> None:
    """Blocks of whole steps may be longer than the half second asked for: generation's are."""
    noisy = Behaviour(noise=(0.0, 0.0, 0.5, 0.5), takes_s=takes_s)
    with turns(lab(a=Behaviour(takes_s=takes_s), b=noisy), tmp_path) as each:
        pair = each.pair("b", A, B, enough=lambda first, second: False)
    assert pair is not None
    assert pair.rounds == rounds


def test_whatever_has_blocks_can_take_turns() -> None:
    """Also steps of one process, as in `redline bench train`."""

    class Steps:
        failed = None

        def __init__(self, name: str) -> None:
            self.name, self.blocks_s = name, list[float]()

        def block(self) -> None:
            ran.append(self.name)
            self.blocks_s.append(1.0)

        def forget(self) -> None:
            self.blocks_s = []

    ran: list[str] = []
    arms = [Steps("x"), Steps("y"), Steps("z")]
    take_turns(arms, 2, block_s=1.0, clock=lambda: 0.0)
    assert "".join(ran) == "xyz" + "xyzzyx"
    assert [len(arm.blocks_s) for arm in arms] == [2, 2, 2]


@pytest.mark.parametrize("together", [True, False])
def test_a_pair_ends_early_when_enough_is_known(tmp_path: Path, together: bool) -> None:
    here = lab(b=Behaviour(step_s=1.1))
    with turns(here, tmp_path) as each:
        early = each.pair("b", A, B, enough=hopeless, together=together)
        last = each.pair("b", A, B, enough=lambda *_: False, together=together, again=" final")
    assert early is not None
    assert last is not None
    assert (len(early.after.blocks_s), len(last.after.blocks_s)) == (4, 6)
    assert early.paired == together


# ---- what stays warm ----


def test_an_arm_stays_warm_as_long_as_the_next_pair_needs_it(tmp_path: Path) -> None:
    here = lab()
    with turns(here, tmp_path) as each:
        each.alone("a", A)
        each.pair("b", A, B)
        each.pair("c", A, trial("c"))
        each.pair("d", trial("c"), trial("d"))
        each.pair("b again", trial("d"), B)
        assert sum(child.alive for child in here.children) == 2
    assert starts(here) == "abcdb"


def test_a_child_that_nobody_needs_measures_the_next_trial_of_its_kind(tmp_path: Path) -> None:
    def kind(name: str, process: str) -> Trial:
        return Trial(subject="", setting={"name": name}, process=process)

    here = lab(d=Behaviour(starts={1: "crashed"}))
    with turns(here, tmp_path) as each:
        each.pair("b", kind("a", "x"), kind("b", "x"))
        each.pair("c", kind("a", "x"), kind("c", "x"))
        assert len(here.children) == 2, "the loser's child took the next one"
        each.pair("d", kind("a", "x"), kind("d", "x"))
        assert len(here.children) == 3, "one that crashes in a used child is started in a new one"
        each.pair("e", kind("a", "x"), kind("e", "y"))
        assert len(here.children) == 4
        assert [child.alive for child in here.children].count(True) == 2


# ---- failures ----

FAILING = {"crashed": "crashed", KILLED: "crashed", "out_of_memory": "out_of_memory", HANGS: "timed_out"}


@pytest.mark.parametrize(
    ("before", "after", "outcomes", "paired", "started"),
    [
        (
            {"blocks": {3: "crashed"}},
            {},
            ("ok", "ok"),
            True,
            "aba",
        ),  # by chance: once more, the other stays warm
        ({"blocks": {3: HANGS}}, {}, ("ok", "ok"), True, "aba"),
        ({"blocks": {3: KILLED}}, {}, ("ok", "ok"), True, "aba"),
        ({"blocks": {3: "crashed", 5: "crashed"}}, {}, ("ok", "ok"), False, "abaab"),  # not alone
        ({"starts": {0: "crashed"}}, {}, ("crashed", "ok"), False, "abaaab"),  # never
        ({"starts": {1: "crashed", 2: "crashed", 3: "crashed"}}, {}, ("ok", "ok"), False, "abaaab"),
        ({"blocks": {3: "out_of_memory"}}, {}, ("ok", "ok"), False, "abab"),  # memory that the change took
        ({}, {"blocks": {3: "out_of_memory"}}, ("ok", "ok"), False, "abab"),
        ({}, {"starts": {0: "out_of_memory"}}, ("ok", "out_of_memory"), False, "abab"),
        ({}, {"blocks": {3: KILLED}}, ("ok", "ok"), False, "abab"),  # perhaps by the system, for memory
        ({}, {"blocks": {3: "crashed"}}, ("ok", "crashed"), True, "ab"),  # a result
        ({}, {"starts": {0: HANGS}}, ("ok", "timed_out"), True, "ab"),
    ],
)
def test_what_fails_by_chance_or_beside_another_is_no_result(
    tmp_path: Path, before: Any, after: Any, outcomes: tuple[str, str], paired: bool, started: str
) -> None:
    here = lab(a=Behaviour(**before), b=Behaviour(**after))
    with turns(here, tmp_path) as each:
        pair = each.pair("b", A, B)
        assert pair is not None
        assert (pair.before.outcome, pair.after.outcome, pair.paired) == (*outcomes, paired)
        assert starts(here) == started
        if outcomes == ("ok", "ok"):
            assert each.pair("b", A, B) == pair, "it is kept"
            assert starts(here) == started


def test_what_ran_before_and_crashes_is_started_once_more_and_never_written_down(tmp_path: Path) -> None:
    here = lab(b=Behaviour(blocks={8: "crashed"}))
    with turns(here, tmp_path) as each:
        each.alone("b", B)
        pair = each.pair("b", A, B)
        assert pair is not None
        assert (pair.after.outcome, starts(here)) == ("ok", "bab")
    here = lab(b=Behaviour(starts={2: "out_of_memory", 3: "out_of_memory"}))
    with turns(here, tmp_path / "other") as each:
        each.alone("b", B)
        each.aside(lambda: None)  # ends the arms
        pair = each.pair("b", A, B)
        assert pair is not None
        assert pair.after.outcome == "out_of_memory"
        assert not each.knows(A, B), "it is not refused for ever by what went wrong once"


def test_a_trial_alone_that_crashes_is_started_once_more_and_one_that_lacks_memory_is_not(
    tmp_path: Path,
) -> None:
    here = lab(a=Behaviour(blocks={2: KILLED}), b=Behaviour(starts={0: "out_of_memory"}))
    with turns(here, tmp_path) as each:
        first, second = each.alone("a", A), each.alone("b", B)
        assert first is not None
        assert second is not None
        assert (first.outcome, second.outcome, starts(here)) == ("ok", "out_of_memory", "aab")


def test_blocks_of_another_time_do_not_stand_beside_a_trial_that_failed(tmp_path: Path) -> None:
    with turns(lab(b=Behaviour(starts={0: "crashed"})), tmp_path) as each:
        each.alone("a", A)
        pair = each.pair("b", A, B)
        assert pair is not None
        assert (pair.after.outcome, pair.before.outcome, pair.before.blocks_s) == ("crashed", "ok", ())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("out_of_memory", "both do not fit in memory together"),
        (KILLED, "was killed, perhaps for lack of memory"),
    ],
)
def test_what_is_said_of_a_pair_that_is_measured_apart(tmp_path: Path, how: str, said: str) -> None:
    lines: list[str] = []
    with turns(lab(b=Behaviour(blocks={3: how})), tmp_path, say=lines.append) as each:
        each.pair("b", A, B)
    assert [line for line in lines if said in line and line.endswith("one after the other")]


def test_an_arm_that_failed_gives_what_it_had(tmp_path: Path) -> None:
    here = lab(a=Behaviour(blocks={3: "out_of_memory"}, waits=0.25))
    arm = Arm(A, here.take(""), here.clock)
    arm.start()
    for _ in range(6):
        arm.block()
    found = arm.end()
    assert (found.outcome, len(found.blocks_s), found.losses) == ("out_of_memory", 2, (2.0, 1.0))
    assert found.data_wait_share == pytest.approx(0.25)
    assert found.elapsed_s == here.now_s


# ---- time ----


@pytest.mark.parametrize("together", [True, False])
def test_a_pair_ends_with_its_time_and_then_says_nothing(tmp_path: Path, together: bool) -> None:
    here = lab(a=Behaviour(takes_s=10.0), b=Behaviour(takes_s=10.0))
    with turns(here, tmp_path) as each:
        assert each.pair("b", A, B, together=together, until_s=50.0) is None
        assert 50 <= here.now_s <= 50 + 2 * 10 + 2, "the round under way is ended"
        assert not each.knows(A, B)


def test_who_does_not_answer_is_not_waited_for_beyond_the_time(tmp_path: Path) -> None:
    for hanging in ("a", "b"):
        here = lab(**{hanging: Behaviour(blocks={4: HANGS})})
        with turns(here, tmp_path / hanging, minutes=0.5) as each:
            assert each.pair("b", A, trial("b", limit_s=1000)) is None
            assert 30 <= here.now_s <= 30 + room.SHORTEST_LIMIT_S
    here = lab(a=Behaviour(starts={0: HANGS}))
    with turns(here, tmp_path / "alone", minutes=0.5) as each:
        assert each.alone("a", A) is None


def test_when_the_time_is_over_nothing_is_tried_once_more(tmp_path: Path) -> None:
    here = lab(a=Behaviour(blocks={1: "out_of_memory"}, takes_s=100.0))
    with turns(here, tmp_path, minutes=1) as each:
        assert each.pair("b", A, B) is None
        assert starts(here) == "ab"


def test_without_time_for_the_shortest_nothing_is_begun(tmp_path: Path) -> None:
    """A long one before it says little: it may have held the naive state."""
    took = {"a": 10.0, "b": 60.0, "c": 25.0}
    here = lab(**{name: Behaviour(start_s=s, takes_s=0.0) for name, s in took.items()})
    with turns(here, tmp_path, minutes=100 / 60) as each:
        assert [each.alone(name, trial(name)) is not None for name in "abcd"] == [True, True, True, False]


def test_finished_trials_are_not_repeated_and_cost_no_time(tmp_path: Path) -> None:
    with turns(lab(b=Behaviour(step_s=0.5)), tmp_path, machine="here") as each:
        alone, pair = each.alone("a", A), each.pair("b", A, B)
    here = lab()
    with turns(here, tmp_path, minutes=0.0, machine="here") as each:
        assert each.alone("a", A) == alone
        assert each.pair("b", A, B) == pair
        assert each.knows(A, B)
        assert each.alone("b", B) is None
        assert each.alone("a, briefly", A, blocks=2) is None, (
            "two blocks and six are not the same measurement"
        )
        assert each.pair("the other way", B, A) is None
        assert each.pair("once more", A, B, again=" final") is None
    assert not here.started
    with turns(lab(), tmp_path, minutes=0.0, machine="elsewhere") as each:
        assert each.alone("a", A) is None, "another machine measures for itself"


def test_speeds_are_compared_by_the_token(tmp_path: Path) -> None:
    here = lab(a=Behaviour(tokens=1000), b=Behaviour(step_s=2.0, tokens=4000))
    with turns(here, tmp_path) as each:
        pair = each.pair("b", A, B)
    assert pair is not None
    assert pair.comparison is not None
    assert (pair.comparison.ratio, pair.comparison.verdict) == (pytest.approx(2.0, rel=0.01), "faster")
    assert Pair(before=pair.before, after=pair.after, paired=False).comparison is not None
