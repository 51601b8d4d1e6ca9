"""Folders of trials: what stands in them after a crash or a hand's edit."""

import json
from pathlib import Path

import pytest

from redline.config.load import build
from redline.errors import DataError, StorageError
from redline.measure.trial import Measurement, TrialFolder

OK = {"outcome": "ok", "blocks_s": [0.5, 0.5], "tokens_per_step": 8}
TOO_MUCH = {"outcome": "out_of_memory", "error": "out of memory"}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ({}, "'measured'"),
        ({"key": "a", "measured": 3}, "measured must be a table, got 3"),
        ({"key": "a", "measured": {"outcome": "fine"}}, "must be one of ok"),
        ({"key": "a", "measured": OK, "beside": 3, "paired": True}, "beside must be a table"),
    ],
)
def test_a_damaged_trial_is_one_line_that_says_which(
    tmp_path: Path, line: dict[str, object], part: str
) -> None:
    good = json.dumps({"key": "b", "beside": None, "paired": None, "measured": OK}) + "\n"
    (tmp_path / "trials.jsonl").write_text(good + json.dumps(line) + "\n")
    with (
        pytest.raises(DataError, match=rf"trials.jsonl is damaged: .*{part}.*; delete that line") as caught,
        TrialFolder(tmp_path),
    ):
        pass
    assert json.dumps(line)[:100] in str(caught.value)
    (tmp_path / "trials.jsonl").write_text(good)
    with TrialFolder(tmp_path) as folder:  # it was let go
        assert folder.find("b") is not None


@pytest.mark.parametrize(
    ("line", "stands"),
    [
        ({"measured": OK}, True),
        ({"measured": OK, "beside": OK, "paired": True}, True),
        ({"measured": OK, "beside": {"outcome": "crashed"}, "paired": True}, False),
        ({"measured": {"outcome": "crashed"}}, False),
        ({"measured": {"outcome": "timed_out"}, "beside": {"outcome": "ok"}, "paired": True}, False),
        ({"measured": TOO_MUCH}, True),
        ({"measured": TOO_MUCH, "beside": OK, "paired": False}, True),
        ({"measured": TOO_MUCH, "beside": OK, "paired": True}, False),
    ],
)
def test_what_ended_well_or_did_not_fit_alone_is_not_run_again(
    tmp_path: Path, line: dict[str, object], stands: bool
) -> None:
    (tmp_path / "trials.jsonl").write_text(
        json.dumps({"key": "a", "beside": None, "paired": None, **line}) + "\n"
    )
    with TrialFolder(tmp_path) as folder:
        assert (folder.find("a") is not None) == stands


def test_what_both_commands_say_of_a_folder_speaks_of_trials(tmp_path: Path) -> None:
    with (
        TrialFolder(tmp_path),
        pytest.raises(StorageError, match="is in use by another process"),
        TrialFolder(tmp_path),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match="the trials cannot be written to"),
        TrialFolder(tmp_path / "file" / "below"),
    ):
        pass


def test_trials_of_another_machine_stay_in_the_file_and_are_not_found(tmp_path: Path) -> None:
    for machine, step_s in (("a100", 1.0), ("h200", 0.5)):
        with TrialFolder(tmp_path, machine) as folder:
            assert folder.find("key") is None
            folder.add("key", "rules", build(Measurement, {**OK, "blocks_s": [step_s]}, where="trial"))
    for machine, step_s in (("a100", 1.0), ("h200", 0.5)):
        with TrialFolder(tmp_path, machine) as folder:
            found = folder.find("key")
            assert found is not None
            assert found.blocks_s == (step_s,)
    with TrialFolder(tmp_path, "h200 with another torch") as folder:
        assert folder.find("key") is None
