"""The gate of a race: is a recipe slower than in a recorded race, beyond the interval over the seeds? No torch.

before = recorded(path, arms, facts, seeds)     # refuses what cannot be compared, before anything is trained
slower_than(race(arms, ...), before)            # one line for each recipe that became slower
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from redline.config.differences import data_of
from redline.config.load import build
from redline.errors import ConfigError
from redline.machine.facts import MachineFacts, same_kind
from redline.measure.statistics import APART_SPREAD, difference
from redline.record.files import read_json
from redline.tune.race import Arm, Lane, Result, lowest_of_all


def recorded(path: Path, arms: Sequence[Arm], facts: MachineFacts, seeds: int) -> Result:
    """A recorded race; refuses one that these arms cannot be compared with, before they train for hours."""
    found = read_json(path, dict, error=ConfigError)
    try:
        before = build(Result, found, where="the file")
    except ConfigError as error:
        raise ConfigError(
            f"{path} is not the race.json of a race ({error}): give one with --against"
        ) from error
    if not same_kind(before.machine, asdict(facts)):
        raise ConfigError(f"{path} was made on another kind of machine: record one here first")
    if before.data != data_of(arms[0].recipe):
        raise ConfigError(
            f"{path} used other data or another validation set: record a race on this one first"
        )
    names = {arm.name for arm in arms}
    both = [lane for lane in before.lanes if lane.curves and lane.name in names]
    if not both:
        raise ConfigError(f"{path} holds none of these recipes: give the record of a race between them")
    if (fewest := min(seeds, *(len(lane.curves) for lane in both))) < 2:
        raise ConfigError(
            f"--against compares over seeds: give at least 2 here and in {path}, got {fewest}: give --seeds 3, or record again"
        )
    return before


def changed(arms: Sequence[Arm], before: Result) -> list[str]:
    """Names of the arms whose recipe has another fingerprint than the recorded one of that name."""
    then = {lane.name: lane.fingerprint for lane in before.lanes}
    return [arm.name for arm in arms if then.get(arm.name) not in (None, arm.recipe.fingerprint)]


def check_tokens(tokens: str | None, before: Result) -> None:
    """Refuse a record of other tokens than those with this fingerprint."""
    if None not in (tokens, before.tokens) and tokens != before.tokens:
        raise ConfigError("the data has changed since the record was made: record a race on this data first")


def slower_than(result: Result, before: Result) -> list[str]:
    """The recipes slower than in the recorded race, beyond the interval over the seeds; refuses one on other data."""
    check_tokens(result.tokens, before)
    then = {lane.name: lane for lane in before.lanes if lane.curves}
    both = [(lane, then[lane.name]) for lane in result.lanes if lane.name in then]
    return [why for pair in both if (why := _slower(*pair))]


def _slower(now: Lane, then: Lane) -> str:
    """Why a lane is slower, judged at the target or the lowest loss that all seeds of the record reached. The worst of a
    few seeds ends higher than that every other time, so seeds that do not get there are judged by their losses, and at
    the lowest loss that all of both reached."""
    if len(now.failed) > len(then.failed) or len(now.curves) < 2:
        shares = [f"{len(lane.failed)} of {lane.seeds}" for lane in (now, then)]
        return f"{now.name} failed with {shares[0]} seeds; recorded {shares[1]}"
    goal = max(lowest_of_all(then), then.target or 0.0, now.target or 0.0)
    higher = difference(then.lowest, now.lowest)
    if len(now.at(goal)) < len(now.curves) and higher.low > 0:
        losses = [fmean(lane.lowest) for lane in (now, then)]
        by = f"{higher.mean:.4f}, at least {higher.low:.4f}, higher"
        return f"{now.name} gets to a loss of {losses[0]:.4f}; recorded {losses[1]:.4f} ({by})"
    loss = max(goal, lowest_of_all(now))
    before, here = ([math.log(point.seconds) for point in lane.at(loss)] for lane in (then, now))
    found = difference(before, here)
    if found.low <= math.log1p(APART_SPREAD):
        return ""
    took_s, recorded_s = (math.exp(fmean(logs)) for logs in (here, before))
    ratio = f"{math.exp(found.mean):.2f}x, at least {math.exp(found.low):.2f}x"
    return f"{now.name} takes {took_s:.1f} s to a loss of {loss:g}; recorded {recorded_s:.1f} s ({ratio})"
