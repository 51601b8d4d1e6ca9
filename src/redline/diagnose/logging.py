"""Logging that holds the loop up: what the callback of Hugging Face's Trainer saw between an update and the
next (observe/trainer.py)."""

from itertools import pairwise

from redline.diagnose.causes import WORTH_SAYING, saved
from redline.diagnose.finding import Evidence, Finding
from redline.diagnose.observed import Observed


def _logs(observed: Observed) -> tuple[int, float]:
    """How many, and the time of all."""
    told = [event for event in observed.events if event["event"] == "logging" and event.get("times")]
    return sum(int(event["times"]) for event in told), sum(float(event["stalled_s"]) for event in told)


def logged_s(observed: Observed) -> dict[int, float]:
    """By update, what of it went by in the log of the one before, which alone has a loss; the same for each,
    as the record holds a sum."""
    times, stalled_s = _logs(observed)
    return {
        after.step: stalled_s / times
        for now, after in pairwise(observed.steps)
        if times and now.loss is not None
    }


def logging_pause(observed: Observed) -> list[Finding]:
    """Logs that take a share of the run worth saying: a service that is waited for, other callbacks,
    printing."""
    (times, stalled_s), mean_s = _logs(observed), observed.mean("step_s")
    total_s = max((float(event.get("elapsed_s") or 0.0) for event in observed.events), default=0.0)
    if not times or not mean_s or not total_s or stalled_s / total_s < WORTH_SAYING:
        return []
    share = stalled_s / total_s
    return [
        Finding(
            cause="host-gap",
            kind="cause",
            title=f"Logging takes {share:.0%} of the run",
            evidence=(
                Evidence("logs", times, "between the updates"),
                Evidence("each", stalled_s / times * 1e3, "ms, with what other callbacks do in on_log"),
                Evidence("run", total_s, "s"),
            ),
            fix=(
                "raise logging_steps; let what is slow in on_log (a service that is waited for, a file far"
                " away) work in a thread"
            ),
            gain=saved(mean_s, 0.5 * share, 0.9 * share, "of the whole run, half as often or ten times"),
            confidence=0.9,
        )
    ]


RULES = (logging_pause,)
