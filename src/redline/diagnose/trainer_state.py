"""Hugging Face's trainer_state.json -> Observed.

Times of single updates stand in it only with `include_num_input_tokens_seen`; else the mean of the whole run
does, once it has ended. Both count evaluations in; each states its own `eval_runtime`, which is taken off.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from redline.diagnose.amounts import finite, number
from redline.diagnose.observed import Facts, Observed, Step
from redline.diagnose.tables import json_table

_TIMES = ("step", "train_runtime", "num_input_tokens_seen")


def is_trainer_state(text: str) -> bool:
    return text.lstrip().startswith("{") and '"log_history"' in text


def read_trainer_state(text: str, source: str) -> Observed:
    state = json_table(text, source)
    history = state.get("log_history")
    entries = (
        [e for e in history if isinstance(e, dict) and finite(e.get("step")) is not None]
        if isinstance(history, list)
        else []
    )
    steps: list[Step] = []
    events: list[dict[str, Any]] = []
    before, last, validated_s = dict.fromkeys(_TIMES, 0.0), {}, 0.0
    for entry in entries:
        if "train_samples_per_second" in entry or "train_steps_per_second" in entry:
            last = entry
        elif "loss" in entry:
            steps.append(_step(entry, before, validated_s))
            before = {name: _or(finite(entry.get(name)), before[name]) for name in before}
            validated_s = 0.0
        elif took_s := sum(
            finite(value) or 0.0
            for name, value in entry.items()
            if re.fullmatch(r"eval_(\w+_)?runtime", name)
        ):
            events.append({"event": "validation", "step": int(entry["step"]), "took_s": took_s})
            validated_s += took_s
    if not any(s.step_s for s in steps):
        steps = _mean_of_the_run(state, last, steps, sum(event["took_s"] for event in events))
    per_s, updates_per_s = (
        finite(last.get("train_samples_per_second")),
        finite(last.get("train_steps_per_second")),
    )
    facts = Facts(
        batch_size=_share(per_s, updates_per_s),
        micro_batch=finite(state.get("train_batch_size")),
        flops_per_token=_share(finite(state.get("total_flos")), finite(state.get("num_input_tokens_seen"))),
    )
    repairs = (
        ["num_input_tokens_seen counts padding unless include_num_input_tokens_seen is 'non_padding'"]
        if before[_TIMES[2]]
        else []
    )
    if events and any(s.step_s for s in steps):
        repairs.append(
            f"evaluations taken off the updates: {len(events)},"
            f" {sum(event['took_s'] for event in events):,.1f} s together"
        )
    return Observed(
        source=source,
        format="hf",
        steps=tuple(steps),
        facts=facts,
        repairs=tuple(repairs),
        events=tuple(events),
        lines_are_means=True,
    )


def _step(entry: Mapping[str, Any], before: Mapping[str, float], validated_s: float) -> Step:
    step, elapsed_s, seen = (finite(entry.get(name)) for name in _TIMES)
    assert step is not None
    done = max(1.0, step - before["step"])
    took_s = (elapsed_s or 0.0) - before["train_runtime"]
    trained_s = took_s - validated_s if took_s > validated_s else took_s
    loss, norm = number(entry["loss"]), number(entry.get("grad_norm", 0.0))
    return Step(
        step=int(step),
        loss=finite(loss),
        not_a_number=loss is None or not math.isfinite(loss),
        bad_norm=norm is None or not math.isfinite(norm),
        step_s=trained_s / done if took_s > 0 else None,
        tokens=(seen - before["num_input_tokens_seen"]) / done or None if seen is not None else None,
        elapsed_s=elapsed_s,
    )


def _mean_of_the_run(
    state: Mapping[str, Any], last: Mapping[str, Any], steps: list[Step], validated_s: float
) -> list[Step]:
    """All there is without the times of single updates: the mean, the first update included. Without an end
    of the run, not even that."""
    updates, per_s = finite(state.get("global_step")), finite(last.get("train_steps_per_second"))
    if not updates or not per_s:
        return steps
    mean_s = 1 / per_s - validated_s / updates
    mean_s, tokens = (
        mean_s if mean_s > 0 else 1 / per_s,
        _share(finite(state.get("num_input_tokens_seen")), updates),
    )
    return [replace(s, step_s=mean_s, tokens=tokens) for s in steps] or [
        Step(step=int(updates), step_s=mean_s, tokens=tokens)
    ]


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part and whole else None
