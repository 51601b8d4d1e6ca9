"""The figures of a report: speed, time, memory and loss of one run, each from the record and with its convention.
No torch.

What a speed is, its interval and the updates it leaves out are defined in record/read.py. A figure that nobody
recorded is None and is shown as a dash.
"""

from dataclasses import dataclass, replace
from typing import Any

from redline.record.metrics import METRICS
from redline.record.read import WARM_UP, Measured, Run, State, number, table, total, values

PHASES = {
    "diagnose_s": "diagnosis",
    "generate_s": "generation",
    "reward_s": "scoring",
    "weights_s": "weights into the engine",
    "reference_s": "reference model",
    "critic_s": "critic",
    "forward_s": "forward",
    "backward_s": "backward",
    "combine_s": "combining gradients",
    "optimizer_s": "optimiser update",
    "communication_s": "communication",
}
NOT_IN_ALL = set(PHASES) - {"forward_s", "backward_s", "optimizer_s"}
"""Phases that not every update has: generating and scoring text, combining domains, waiting for other processes."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    unit: str
    """tokens/s, or rows/s in fine-tuning."""
    update: Measured | None
    """Of the updates alone."""
    whole_run: float | None
    """With compilation, validations and checkpoints."""
    step_s: float | None
    mfu: float | None
    mfu_note: str
    ceiling_share: float | None
    ceiling_note: str
    attainable: float | None
    """Predicted by the roofline."""
    ceiling: float | None
    """Predicted, if only matrix products took time."""

    @property
    def attained_share(self) -> float | None:
        return self.update.value / self.attainable if self.update and self.attainable else None


@dataclass(frozen=True)
class TimePart:
    name: str
    elapsed_s: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predictions are for a GPU's memory only."""

    seen_bytes: float | None
    seen_note: str
    predicted_bytes: float | None
    predicted_parts_bytes: dict[str, float]
    device_bytes: float | None

    @property
    def error(self) -> float | None:
        """How far the prediction is above what was seen, as a share."""
        return (
            self.predicted_bytes / self.seen_bytes - 1 if self.predicted_bytes and self.seen_bytes else None
        )


@dataclass(frozen=True, kw_only=True)
class Quality:
    first_loss: float | None
    last_loss: float | None
    valid: dict[str, Any]
    """The step and the figures of the last validation."""
    best: dict[str, Any]
    """The same of the best."""
    nan_step: int | None
    """The first update after which no recorded loss is a number; None if the last is one."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    label: str
    path: str
    recipe: str
    about: str
    workload: str
    fingerprint: str | None
    hardware: str | None
    hardware_source: str | None
    world_size: int | None
    precision: str | None
    parameters: float | None
    started_at: float | None
    """Unix seconds."""
    state: State
    updates: int
    planned_updates: int | None
    tokens: float | None
    elapsed_s: float | None
    attempts: int
    missing: str
    """The updates missing from the record, in words."""
    speed: Speed
    time: list[TimePart]
    memory: Memory
    quality: Quality


def summarise(run: Run) -> Summary:
    """Every figure of one run."""
    last = run.metrics[-1] if run.metrics else {}
    world_size = number(run.plan.get("world_size"))
    return Summary(
        label=run.label,
        path=str(run.path),
        recipe=run.name,
        about=str(run.recipe.get("about", "")),
        workload=run.workload,
        fingerprint=run.fingerprint,
        hardware=run.hardware.get("title"),
        hardware_source=run.hardware.get("source"),
        world_size=None if world_size is None else int(world_size),
        precision=_precision(run) or None,
        parameters=number(run.prediction.get("parameters")),
        started_at=number(run.events[0].get("at")) if run.events else None,
        state=run.state,
        updates=int(last.get("step", 0)),
        planned_updates=run.planned_updates,
        tokens=number(last.get("tokens")),
        elapsed_s=run.elapsed_s,
        attempts=len(run.attempts),
        missing=_missing(run),
        speed=speed(run),
        time=time_parts(run),
        memory=memory(run),
        quality=quality(run),
    )


def _missing(run: Run) -> str:
    places = [f"{a:,} to {b:,}" if a < b else f"{a:,}" for a, b in run.holes]
    more = f" and {len(places) - 3} more stretches" if len(places) > 3 else ""
    return f"updates {', '.join(places[:3])}{more} are missing from metrics.jsonl" if places else ""


def _precision(run: Run) -> str:
    return str(table(run.plan.get("precision")).get("value") or "")


def speed(run: Run) -> Speed:
    """How fast, beside what the plan predicts is possible."""
    precision = _precision(run)
    dtype = "bf16" if precision == "fp8" else precision
    peak = number(table(run.hardware.get("peak_tflops")).get(dtype))
    matmul = number(table(run.hardware.get("measured_tflops")).get(precision))
    each, datasheet, measured = "6N + 12LdT per token, of", "no datasheet peak is known", "nothing measured"
    if peak:
        datasheet = f"{each} {peak:,.0f} TFLOP/s, dense {dtype} datasheet peak"
    if matmul:
        rate = f"{matmul:,.0f} TFLOP/s" if matmul >= 10 else f"{matmul * 1e3:,.0f} GFLOP/s"
        measured = f"{each} {rate}, measured {precision} matrix products"
    return Speed(
        unit=METRICS[run.rate].unit,
        update=run.speed,
        whole_run=run.whole_run_speed,
        step_s=run.typical("step_s"),
        mfu=run.typical("mfu"),
        mfu_note=datasheet,
        ceiling_share=run.typical("ceiling_share"),
        ceiling_note=measured,
        attainable=number(run.prediction.get("attainable_tokens_per_s")),
        ceiling=number(run.prediction.get("ceiling_tokens_per_s")),
    )


def time_parts(run: Run) -> list[TimePart]:
    """Where the time went: parts that add up to the training time, or for an RFT run to the time of its stages."""
    if run.workload != "rft":
        return _training_parts(run)
    about = "fine-tuning on the samples"
    tuned = [replace(part, note=": ".join(filter(None, (about, part.note)))) for part in _training_parts(run)]
    stages = [
        TimePart("sampling", total(run.events, "sampling_end"), "generation and scoring"),
        TimePart("fine-tuning on answers", total(run.events, "training_on_answers"), "for comparison"),
        TimePart("tests", sum(values(run.evaluations, "elapsed_s")), "greedy, on held-out questions"),
    ]
    return [*(stage for stage in stages if stage.elapsed_s > 0), *tuned]


def _training_parts(run: Run) -> list[TimePart]:
    """Empty if the updates do not carry their times."""
    total_s, step_s = run.elapsed_s, sum(values(run.metrics, "step_s"))
    if total_s is None or not step_s:
        return []
    first_s, wait_s = _warm_up_s(run), sum(values(run.metrics, "data_wait_s"))
    stalled_s = total(run.events, "checkpoint", "stalled_s")
    rest = "validation" if any(event["event"] == "validation" for event in run.events) else "other"
    warm_up = f"compilation and warm-up: first {WARM_UP} updates, beyond the median"
    parts = [
        *_update_parts(run, step_s - first_s - wait_s),
        TimePart("data wait", wait_s, "waiting for the loader"),
        TimePart("first updates", first_s, warm_up),
        TimePart("checkpoints", stalled_s, "stalls of the loop; writing goes on in parallel"),
        TimePart(rest, total_s - step_s - stalled_s, "training time outside updates and checkpoints"),
    ]
    return [part for part in parts if part.elapsed_s > 0]


def _warm_up_s(run: Run) -> float:
    """How much longer the first updates of each attempt took than the median of the others."""
    warm, typical_s = {line["step"] for line in run.warm}, run.typical("step_s")
    cold = values([line for line in run.metrics if line["step"] not in warm], "step_s")
    return max(0.0, sum(cold) - len(cold) * typical_s) if typical_s is not None else 0.0


def _update_parts(run: Run, update_s: float) -> list[TimePart]:
    """The updates, split into phases if the record has them; the first updates split like the others."""
    sums = {name: total_s for name in PHASES if (total_s := sum(values(run.metrics, name)))}
    rest, about = "between phases", "updates outside the recorded phases"
    if not PHASES.keys() - NOT_IN_ALL <= sums.keys():
        sums = {name: total_s for name, total_s in sums.items() if name == "generate_s"}
        rest, about = "updates", "forward, backward, optimiser; not recorded separately"
    computed_s = sum(values(run.metrics, "step_s")) - sum(values(run.metrics, "data_wait_s"))
    whole = max(sum(sums.values()), computed_s)
    rest_s = update_s * (1 - sum(sums.values()) / whole) if whole else update_s
    phases = [TimePart(PHASES[name], update_s * total_s / whole, "") for name, total_s in sums.items()]
    return [*phases, TimePart(rest, rest_s, about)]


def memory(run: Run) -> Memory:
    prediction, seen = {}, "of the whole process, Python and torch included"
    if run.on_gpu:
        prediction, seen = run.prediction, "peak allocated by torch"
    parts = table(prediction.get("memory_parts_bytes"))
    return Memory(
        seen_bytes=max(values(run.metrics, "memory_bytes"), default=None),
        seen_note=seen,
        predicted_bytes=number(prediction.get("memory_bytes")),
        predicted_parts_bytes={name: size for name, value in parts.items() if (size := number(value))},
        device_bytes=number(run.hardware.get("memory_bytes")),
    )


def quality(run: Run) -> Quality:
    """Loss at the beginning and the end; the last validation and the best."""
    losses = values(run.metrics, "loss")
    tested = [
        {name: value for name, value in line.items() if name == "step" or name.startswith("valid_")}
        for line in run.metrics
        if number(line.get("valid_loss")) is not None
    ]
    nan = next(iter(without_number(run.metrics)), {})
    return Quality(
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        valid=tested[-1] if tested else {},
        best=min(tested, key=lambda line: float(line["valid_loss"]), default={}),
        nan_step=nan.get("step"),
    )


def without_number(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last updates whose loss is recorded and is not a number. Updates that fp16 skipped are ignored."""
    told = [line for line in lines if "loss" in line and not line.get("skipped")]
    good = next((n for n in range(len(told), 0, -1) if number(told[n - 1]["loss"]) is not None), 0)
    return told[good:]
