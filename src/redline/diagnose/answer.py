"""What to say beside the findings, in the reader's words: what the run is, where the time of an update went, and whether its
speed was judged at all.

    verdict(observed, findings)    "found", "failed", "fast enough", or "not judged" with what it would need

No finding is good news only where the speed was judged and is good.
"""

from dataclasses import dataclass
from statistics import fmean

from redline.diagnose.finding import Finding, worth
from redline.diagnose.observed import FEWEST_UPDATES, Observed
from redline.diagnose.rules.memory import achieved
from redline.record.metrics import PHASES
from redline.record.units import format_count, format_duration, format_limit_share, format_rate, format_share

BESIDE = ("gen", "reward", "old log prob", "ref", "values", "adv", "update critic", "update actor")
GOOD = 0.35
"""MFU from which on a run is fast enough: what is left needs other kernels or FP8, and no setting."""
GOOD_OWN = 0.75
"""The same for our own runs, as a share of what the roofline allows their plan: it leaves out launches and caches."""


@dataclass(frozen=True)
class Verdict:
    word: str
    """`found`, `failed`, `fast enough`, `not judged`."""
    text: str
    needs: tuple[str, ...] = ()
    """What is missing to judge the speed."""


def split(observed: Observed) -> dict[str, float]:
    """Mean seconds of each part of an update, and the rest as `idle`. Means add up to the update; medians do not. If the
    update itself was not split, the parts beside it (a trainer's own, such as verl's timing_s, that do not contain each
    other) and the rest as `other`, or nothing."""
    step_s = observed.mean("step_s") or 0.0
    measured = [name for name in PHASES if any(getattr(s, name) for s in observed.steady)]
    known = {name.removesuffix("_s"): observed.share(name) * step_s for name in measured}
    if observed.mean("forward_s") is None:
        own = observed.kind == "run"
        parts = known if own else {name: value for name in BESIDE if (value := observed.part(name))}
        left_s = step_s - sum(parts.values())
        return parts | {"other": max(0.0, left_s)} if parts and step_s and left_s > -0.1 * step_s else {}
    left_s = max(0.0, step_s - sum(known.values()))
    wait_s = min(fmean(s.felt_wait_s for s in observed.steady), left_s)
    return known | {"data wait": wait_s, "idle": left_s - wait_s}


def mfu(observed: Observed) -> tuple[float, str] | None:
    """MFU with its convention: by arithmetic where the GPU is known, else as the log prints it."""
    facts, rate, peak = observed.facts, achieved(observed), observed.peak_tflops
    if rate and peak and facts.gpus and facts.mfu_scope == "the step":
        counted = "as the log counts FLOPs" if facts.flops_per_token else "6N + 12LdT"
        return rate[0] / peak, f"{counted}, against {peak:,.0f} TFLOP/s"
    printed = observed.median("mfu")
    if printed is None:
        return None
    against = f", against {facts.mfu_peak_tflops:,.0f} TFLOP/s" if facts.mfu_peak_tflops else ""
    scope = "" if facts.mfu_scope == "the step" else f" for {facts.mfu_scope}"
    return printed, f"as the log prints it{scope}{against}"


def what_it_is(observed: Observed) -> list[tuple[str, str]]:
    """The run in a few lines: trainer, model, GPUs, batch, time of an update, speed, MFU."""
    facts, step_s, speed = observed.facts, observed.median("step_s"), observed.tokens_per_s
    lines: list[tuple[str, str]] = []
    if observed.trainer.title or observed.format != "run":
        lines.append(("trainer", f"{observed.trainer.title or 'not recognised'} ({observed.format})"))
    if facts.parameters:
        trained = f", {format_count(facts.trained_parameters)} trained" if facts.trained_parameters else ""
        name = f"{facts.model}, " if facts.model else ""
        lines.append(("model", f"{name}{format_count(facts.parameters)} parameters{trained}"))
    if facts.gpus or facts.gpu:
        board = f" x {observed.spec.title}" if observed.spec else ""
        many = f"{facts.gpus:.0f}{board}" if facts.gpus else f"{board[3:]}, the log does not say how many"
        lines.append(("GPUs", many))
    tokens = observed.median("tokens") or facts.tokens
    if facts.batch_size or tokens:
        rows = f"{facts.batch_size:,.0f} sequences" if facts.batch_size else ""
        held = f"{tokens:,.0f} tokens per update" if tokens else ""
        lines.append(("batch", ", ".join(filter(None, [rows, held]))))
    if observed.steps:
        more = observed.planned is not None and observed.planned > observed.updates
        planned = f" of {observed.planned:,}" if more else ""
        each = f", {format_duration(step_s)} each (median)" if step_s else ""
        lines.append(("updates", f"{observed.updates:,}{planned}{each}"))
    if speed:
        share = mfu(observed)
        said = f", MFU {format_share(share[0])} ({share[1]})" if share else ""
        lines.append(("speed", format_rate(speed, "tokens") + said))
    return lines


def too_little(observed: Observed) -> str | None:
    """Why little can be said about the speed of a log, and how to get what is missing; else None."""
    if observed.format in ("document", "runs"):
        return None
    if not observed.steps:
        return "No update is recorded, so nothing can be said about speed."
    if not any(s.step_s for s in observed.steps):
        own = observed.format == "run"
        how = "write `step_s` with every update" if own else observed.trainer.options["times"]
        return f"The log holds no times, so nothing can be said about speed: {how}."
    if not observed.enough:
        ramp = observed.recipe.train.length_ramp_steps if observed.recipe else 0
        over = f"the {ramp} updates of train.length_ramp_steps" if ramp else "the warm-up"
        timed = len(observed.steady)
        return f"Timed updates after {over}: {timed}, too few to judge the speed (at least {FEWEST_UPDATES})."
    return None


def missing(observed: Observed) -> tuple[str, ...]:
    facts = observed.facts
    size = facts.parameters or facts.flops_per_token or facts.total_flops
    known = {
        "the GPU (--fact gpu=h100-80g)": facts.gpu,
        "the number of GPUs (--fact gpus=8)": facts.gpus,
        "the model's size (--fact parameters=7B)": size,
        "tokens per update (--fact tokens=500k)": observed.tokens_per_s or facts.total_flops,
    }
    return tuple(name for name, value in known.items() if not value)


def verdict(observed: Observed, findings: list[Finding]) -> Verdict:
    """Whether something was found, the run is fast enough, or its speed was not judged, and then why."""
    if any(finding.kind == "failure" for finding in findings):
        return Verdict("failed", "The run failed, or did not train: the speed comes second.")
    if observed.format == "document":
        return _of_a_page(observed, findings)
    if little := too_little(observed):
        return Verdict("not judged", little, missing(observed) if observed.steps else ())
    named = [finding for finding in findings if worth(finding) > 0]
    if observed.format == "runs":
        text = "This is a table of runs: none of them is judged by its updates."
        return Verdict("found" if named else "not judged", text, ("the history of one run",))
    if observed.format == "run":
        return Verdict("found", "") if named else _of_our_run(observed)
    if any(finding.cause != "low-mfu" for finding in named):
        return Verdict("found", "")
    share, facts = mfu(observed), observed.facts
    against = facts.mfu_scope == "the step" and (facts.gpu or facts.mfu_peak_tflops or observed.median("mfu"))
    if share and against and share[0] >= GOOD:
        rest = "good for training; what is left needs other kernels, not other settings"
        return Verdict("fast enough", f"An MFU of {format_share(share[0])} ({share[1]}): {rest}.")
    if named:
        return Verdict("found", "")
    if share and against:
        text = f"An MFU of {format_share(share[0])} ({share[1]}), and nothing in the log says where the rest goes."
        return Verdict("not judged", text)
    needs = missing(observed)
    without = f" without more facts: {', '.join(needs)}" if needs else ""
    text = f"The log shows nothing that holds the run back, but its speed cannot be judged{without}."
    return Verdict("not judged", text, needs)


def _of_a_page(observed: Observed, findings: list[Finding]) -> Verdict:
    if findings:
        return Verdict("found", "")
    if not observed.claims:
        text = "No claim was understood on this page, so none was checked: that is no endorsement."
        return Verdict("not judged", text, ("claims with a before and an after",))
    read = f"{len(observed.claims)} claims were read and none of them contradicts arithmetic"
    return Verdict("not judged", f"{read}; that does not make them true.")


def _of_our_run(observed: Observed) -> Verdict:
    attainable = observed.plan.prediction.attainable_tokens_per_s if observed.plan else None
    share = observed.tokens_per_s / attainable if attainable and observed.tokens_per_s else None
    limit = f"of the {format_rate(attainable, 'tokens')} that the roofline allows"
    word = "fast enough" if share is not None and share >= GOOD_OWN else "not judged"
    rest = "" if word == "fast enough" else ", and no rule explains the rest"
    reached = f" The run reaches {format_limit_share(share, limit)}{rest}." if share else ""
    return Verdict(word, f"Nothing found that would bring more than 5%.{reached}")
