"""`diagnose` on logs of other people's trainers, judged by what a reader of each found (expected.toml).

The shared logs are not part of the repository: without ../shared/data/logs those tests are skipped, and the
logs of our own making, one for each form of log, stand in for them.
"""

from functools import cache
from pathlib import Path

import pytest
from real_logs import EXPECTED, Answer, answer, answers, document, score
from real_logs import OWN as LOGS

DIAGNOSE_PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"
OWN = [entry for entry in EXPECTED if entry.get("own")]


@cache
def shared() -> tuple[Answer, ...]:
    given = tuple(answers(own=False))
    if not given:
        pytest.skip("the shared logs are not on this machine")
    return given


def test_nine_step_times_in_ten_are_read_right() -> None:
    right, timed = score(shared()).step_times
    assert right >= 0.9 * timed


def test_no_log_gets_a_wrong_number() -> None:
    assert [wrong for one in shared() for wrong in one.wrong_numbers] == []


def test_a_log_without_times_gets_no_step_time() -> None:
    assert [one.name for one in shared() if "no_step_s" in one.expected and one.step_s is not None] == []


def test_no_wrong_finding_is_sure() -> None:
    assert score(shared()).surely_wrong == ()


def test_every_other_run_has_an_expert_finding_first() -> None:
    first, held_back = score(shared()).expert_first
    assert first >= 0.5 * held_back


def test_the_page_shows_precision_and_recall() -> None:
    assert document(shared()) in DIAGNOSE_PAGE.read_text()


@pytest.mark.parametrize("entry", OWN, ids=[entry["file"] for entry in OWN])
def test_a_log_of_our_own_making(entry: dict[str, object]) -> None:
    one = answer(LOGS / str(entry["file"]), entry)
    assert one.refused is None
    assert one.step_time_is_right, one.step_s
    assert one.wrong_numbers == []
    assert [finding.cause for finding in one.wrong] == []
    if one.has_cause:
        assert one.expert_first, [finding.cause for finding in one.findings]
