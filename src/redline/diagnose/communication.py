"""Waits for other processes: gathers and reductions that no computing hid. Only our own runs record them
(train/communication.py)."""

from redline.diagnose.causes import enough, saved
from redline.diagnose.finding import Evidence, Finding, Gain
from redline.diagnose.observed import Observed
from redline.diagnose.plans import unpinned
from redline.plan.arithmetic import received_bytes

LARGE = 0.1
"""Share of the update from which on its waits are told. Some are left in every sharded run: the first gather
of a pass and its last reduction have nothing to hide behind."""
FASTER_LINK = 0.5
"""What a link of twice the speed takes off the waits at least: half of them, and more where a part is hidden,
which stays so."""


def communication(observed: Observed) -> list[Finding]:
    """The update stands still until weights are gathered or gradients reduced."""
    wait_s, mean_s = observed.mean("communication_s"), observed.mean("step_s")
    if not wait_s or not mean_s or not enough(observed) or wait_s / mean_s < LARGE:
        return []
    share = wait_s / mean_s
    fix, gain = _fewer_passes(observed, mean_s, share) or _faster_link(observed, mean_s, share)
    return [
        Finding(
            cause="communication",
            kind="cause",
            title=f"The update waits for other processes {share:.0%} of its time",
            evidence=(
                Evidence("wait", wait_s * 1e3, "ms an update, mean of process 0"),
                Evidence("update", mean_s * 1e3, "ms, mean"),
                Evidence("wait", share, "of the update"),
                *_traffic(observed, wait_s),
            ),
            fix=fix,
            gain=gain,
            confidence=0.85,
        )
    ]


def _traffic(observed: Observed, wait_s: float) -> tuple[Evidence, ...]:
    """What has to come over the link, and how fast it came at most: what was hidden took time too."""
    recipe, plan = observed.recipe, observed.plan
    if recipe is None or plan is None:
        return ()
    received = received_bytes(
        recipe.model, precision=plan.precision, accumulation=plan.accumulation, world_size=plan.world_size
    )
    passes = f"{plan.accumulation} passes" if plan.accumulation > 1 else "one pass"
    return (
        Evidence(
            "received",
            received / 2**20,
            f"MiB an update by each of {plan.world_size} processes, by arithmetic: {passes}",
        ),
        Evidence(
            "bandwidth",
            received / wait_s / 1e9,
            "GB/s at most, over the waits alone; far below the link, a process comes late",
        ),
    )


def _fewer_passes(observed: Observed, mean_s: float, share: float) -> tuple[str, Gain] | None:
    """Each pass gathers and reduces everything anew, so fewer and larger ones wait less; where memory and
    batch allow them."""
    if observed.recipe is None or observed.plan is None:
        return None
    now, best = observed.plan, unpinned(observed.recipe, observed.plan)
    if best.accumulation >= now.accumulation:
        return None
    left = best.accumulation / now.accumulation
    fix = (
        f"--set plan.micro_batch={best.micro_batch} (or no pin): {best.accumulation} passes an update instead"
        f" of {now.accumulation}, so that a gather serves more tokens; then a faster link, or fewer processes"
    )
    return fix, saved(
        mean_s,
        (1 - left) * share,
        share,
        f"{left:.0%} of the passes wait as much each, or all of it is hidden",
    )


def _faster_link(observed: Observed, mean_s: float, share: float) -> tuple[str, Gain]:
    on_gpus = observed.plan is None or observed.plan.hardware.kind == "cuda"
    link = (
        "NCCL_DEBUG=INFO says which is used: NVLink in a machine, InfiniBand between them"
        if on_gpus
        else "gloo hides none of it"
    )
    fix = (
        f"a faster link ({link}), or fewer processes with larger passes, so that a gather serves more tokens;"
        " where the recipe allows it, a larger train.batch_size"
    )
    return fix, saved(
        mean_s, FASTER_LINK * share, share, "a link of twice the speed, or one that is hidden altogether"
    )


RULES = (communication,)
