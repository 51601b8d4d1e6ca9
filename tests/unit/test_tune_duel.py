"""Two plans measured, with children without torch that do what the name of the plan's attention kernel
says."""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.config.load import load_recipe
from redline.plan.hardware import hardware_as
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.tune import duel as room
from redline.tune import trial
from redline.tune.duel import Duels
from redline.tune.trial import Bounds, Children, train_trial

CHILD = """
import json, os, signal, sys, time
folder = sys.argv[1]
def times(what):
    "How often this happened, this time included."
    with open(f"{folder}/{what}", "a") as file:
        file.write("x")
    return os.path.getsize(f"{folder}/{what}")
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "start":
        name = request["setting"]["plan"]["attention"]["value"]
        how = json.load(open(f"{folder}/world"))[name]
        begun = times(f"{name}-started")
        failed = "out_of_memory" if begun in how.get("starts_out_of_memory", []) else None
        if begun in how.get("starts_dying", []):
            sys.exit("an illegal memory access")
        reply = dict(first_step_s=1, warmup_steps=1, steps_per_block=1, tokens_per_step=1, losses=[1.0], grad_norms=[1.0])
    elif request["do"] == "memory":
        failed, reply = None, dict(allocated_bytes=1, active_bytes=1, reserved_bytes=1, other_bytes=1)
    else:
        block = times(f"{name}-blocks")
        failed = "out_of_memory" if block in how.get("blocks_out_of_memory", []) else None
        if block in how.get("blocks_killed", []):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000 if block in how.get("blocks_hanging", []) else how.get("takes_s", 0))
        reply = dict(step_s=how["step_s"], data_wait_s=0)
    print(json.dumps(dict(failed=failed, error="planted") if failed else reply), flush=True)
"""
RECIPE = load_recipe("gpt2-124m")
BEST = make_plan(RECIPE, hardware_as("h200-141g", 16))
OTHER = replace(BEST, attention="flash")


class Ring:
    """Duels between BEST and OTHER, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.duels = Duels(Children(ahead=False), self._trial, deadline_s=math.inf, say=self.said.append)

    def world(self, best: dict[str, Any], other: dict[str, Any]) -> None:
        (self.folder / "world").write_text(
            json.dumps({"cudnn": {"step_s": 1.0, **best}, "flash": {"step_s": 1.0, **other}})
        )

    def meet(self, *, together: bool = True, final: bool = False, until_s: float = math.inf) -> room.Duel:
        return self.duels.against(BEST, OTHER, together=together, final=final, until_s=until_s)

    def starts(self, name: str) -> int:
        return (self.folder / f"{name}-started").stat().st_size

    @staticmethod
    def _trial(plan: Plan) -> trial.Trial:
        return train_trial(RECIPE, plan, Bounds(limit_s=20))


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    monkeypatch.setattr(trial, "COMMAND", (sys.executable, "-c", CHILD, str(tmp_path)))
    ring = Ring(tmp_path)
    yield ring
    ring.duels.close()


@pytest.mark.parametrize("arm", ["best", "other"])
def test_either_plan_that_runs_out_of_memory_beside_the_other_leads_to_one_after_the_other(
    ring: Ring, arm: str
) -> None:
    ring.world(**{"best": {}, "other": {}, arm: {"blocks_out_of_memory": [3]}})
    duel = ring.meet()
    assert duel.comparison is not None
    assert not duel.paired
    assert ring.said[-1] == "  both plans at once do not fit in memory: one after the other"


def test_a_plan_that_was_killed_is_not_said_to_lack_memory(ring: Ring) -> None:
    ring.world(best={}, other={"blocks_killed": [3]})
    duel = ring.meet()
    assert duel.comparison is not None
    assert not duel.paired
    assert ring.said == ["  one of the two plans was killed, perhaps for want of memory: one after the other"]


def test_a_plan_alone_that_is_killed_is_started_once_more(ring: Ring) -> None:
    ring.world(best={"blocks_killed": [2]}, other={})
    assert ring.duels.alone(BEST).outcome == "ok"
    ring.world(best={"starts_out_of_memory": [3, 4]}, other={})
    ring.duels.close()
    assert ring.duels.alone(BEST).outcome == "out_of_memory"
    assert ring.starts("cudnn") == 3, "what memory says is not asked twice"


def test_blocks_of_another_time_do_not_stand_beside_a_plan_that_failed(ring: Ring) -> None:
    ring.world(best={}, other={"starts_dying": [2]})
    ring.duels.alone(BEST)
    assert len(ring.meet().best.blocks_s) == 6
    ring.duels.close()
    ring.duels.alone(BEST)
    duel = ring.meet()
    assert (duel.measured.outcome, duel.best.outcome, duel.best.blocks_s) == ("crashed", "ok", ())


def test_a_reference_that_dies_by_itself_is_started_once_more(ring: Ring) -> None:
    ring.world(best={"starts_dying": [1]}, other={})
    duel = ring.meet(together=False)
    assert duel.comparison is not None
    assert ring.starts("cudnn") == 2
    assert "once more" in ring.said[-1]


@pytest.mark.parametrize("together", [True, False])
def test_only_what_is_not_the_last_comparison_is_given_up_early(ring: Ring, together: bool) -> None:
    ring.world(best={}, other={"step_s": 2.0})
    assert len(ring.meet(together=together).measured.blocks_s) == 4
    assert len(ring.meet(together=together, final=True).measured.blocks_s) == 6


@pytest.mark.parametrize("together", [True, False])
def test_a_comparison_ends_with_its_time_and_then_says_nothing(ring: Ring, together: bool) -> None:
    ring.world(best={"takes_s": 0.3}, other={"takes_s": 0.3})
    until_s = time.monotonic() + 1.5
    duel = ring.meet(together=together, until_s=until_s)
    assert time.monotonic() < until_s + 1.2
    assert (duel.cut, duel.comparison) == (True, None)
    assert duel.measured.outcome == duel.best.outcome == "ok"


def test_a_reference_that_hangs_is_not_waited_for_beyond_the_time(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SHORTEST_LIMIT_S", 1.0)
    ring.world(best={"blocks_hanging": [7]}, other={})
    assert ring.duels.alone(BEST).outcome == "ok"
    ring.duels._deadline_s = time.monotonic() + 1
    duel = ring.meet(until_s=ring.duels._deadline_s)
    assert time.monotonic() < ring.duels._deadline_s + 3
    assert (duel.best.outcome, duel.cut) == ("timed_out", True)


def test_when_the_time_is_over_nothing_is_tried_once_more(ring: Ring) -> None:
    ring.world(best={"blocks_out_of_memory": [1]}, other={})
    duel = ring.meet(until_s=time.monotonic())
    assert (duel.cut, duel.paired) == (True, True)
    assert (ring.starts("cudnn"), ring.starts("flash")) == (1, 1)


def test_a_comparison_that_was_given_up_before_its_time_was_over_stands(ring: Ring) -> None:
    """Four rounds of twice the time are enough for a candidate, and not for the last comparison."""
    ring.world(best={}, other={"step_s": 2.0})
    four = ring.meet()
    assert room._complete(four, 6, final=False)
    assert not room._complete(four, 6, final=True)
