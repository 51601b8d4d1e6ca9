"""Logging that holds the loop up: what the callback of Hugging Face's Trainer saw between an update and the next (observe/trainer.py)."""

from redline.diagnose.causes import WORTH_SAYING, saved
from redline.diagnose.finding import Evidence, Finding
from redline.diagnose.observed import Observed


def logging_pause(observed: Observed) -> list[Finding]:
    """Logs that take a share of the run worth saying: a service that is waited for, other callbacks, printing."""
    told = [event for event in observed.events if event["event"] == "logging" and event.get("times")]
    total_s = max((float(event.get("elapsed_s") or 0.0) for event in observed.events), default=0.0)
    stalled_s, mean_s = sum(float(event["stalled_s"]) for event in told), observed.mean("step_s")
    if not told or not mean_s or not total_s or stalled_s / total_s < WORTH_SAYING:
        return []
    share, times = stalled_s / total_s, sum(int(event["times"]) for event in told)
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
            fix="raise logging_steps; let what is slow in on_log (a service that is waited for, a file far away) work in a thread",
            gain=saved(mean_s, 0.5 * share, 0.9 * share, "of the whole run, half as often or ten times"),
            confidence=0.9,
        )
    ]


RULES = (logging_pause,)
