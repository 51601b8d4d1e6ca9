"""The figures of a report: speed, time, memory and loss of one run, each from the record and with its
convention. No torch.

    summary = summarise(run)
    summary.speed.tokens_per_s, summary.speed.low, summary.speed.high        # median and interval
    summary.time                                                            # parts that add up to the run's
                                                                            training time

What a speed is, its interval and the updates it leaves out are defined in record/read.py. Left out: what nobody
recorded; a missing figure is None and is shown as a dash.
"""

from dataclasses import dataclass
from typing import Any

from redline.record.metrics import METRICS
from redline.record.read import WARM_UP, Measured, Run, State, number, table, values

PHASES = {
    "generate_s": "generation",
    "forward_s": "forward",
    "backward_s": "backward",
    "combine_s": "combining gradients",
    "optimizer_s": "optimiser update",
    "communication_s": "communication",
}
NOT_IN_ALL = {"generate_s", "combine_s", "communication_s"}
"""Phases that an update may have: texts drawn in it, domains kept apart, other processes waited for."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    unit: str
    """tokens/s, or rows/s in fine-tuning."""
    update: Measured | None
    """Over the updates alone."""
    whole_run: float | None
    """Everything counted: compilation, validations and checkpoints."""
    step_s: float | None
    mfu: float | None
    mfu_note: str
    ceiling_share: float | None
    ceiling_note: str
    attainable: float | None
    """By roofline: the floor of the time of a token, predicted."""
    ceiling: float | None
    """If only matrix products took time, predicted."""

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
    """Predictions are of a GPU's memory alone: what a process holds on a CPU is another thing."""

    seen_bytes: float | None
    seen_note: str
    predicted_bytes: float | None
    predicted_parts_bytes: dict[str, float]
    device_bytes: float | None

    @property
    def error(self) -> float | None:
        """How far the prediction lies above what was seen, as a share of it."""
        return (
            self.predicted_bytes / self.seen_bytes - 1 if self.predicted_bytes and self.seen_bytes else None
        )


@dataclass(frozen=True, kw_only=True)
class Quality:
    first_loss: float | None
    last_loss: float | None
    valid_loss: float | None
    valid_perplexity: float | None
    valid_bits_per_byte: float | None
    valid_step: int | None
    best_loss: float | None
    best_step: int | None
    nan_step: int | None
    """The update from which on no recorded loss is a number; None where the last is one."""
    bad_gradient_step: int | None
    """The same of the gradient's norm."""


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
    """Which updates the record has lost, in words."""
    speed: Speed
    time: list[TimePart]
    memory: Memory
    quality: Quality


def summarise(run: Run) -> Summary:
    """Every figure of one run."""
    hardware, prediction = table(run.plan.get("hardware")), table(run.plan.get("prediction"))
    last = run.metrics[-1] if run.metrics else {}
    world_size = number(run.plan.get("world_size"))
    return Summary(
        label=run.label,
        path=str(run.path),
        recipe=run.name,
        about=str(run.recipe.get("about", "")),
        workload=run.workload,
        fingerprint=run.fingerprint,
        hardware=hardware.get("title"),
        hardware_source=hardware.get("source"),
        world_size=None if world_size is None else int(world_size),
        precision=str(planned(run, "precision") or "") or None,
        parameters=number(prediction.get("parameters")),
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


def planned(run: Run, name: str) -> Any:
    """A value of the plan, without its reason."""
    return table(run.plan.get(name)).get("value")


def speed(run: Run) -> Speed:
    """How fast, beside what the plan holds possible."""
    prediction, hardware = table(run.plan.get("prediction")), table(run.plan.get("hardware"))
    precision = str(planned(run, "precision") or "")
    dtype = "bf16" if precision == "fp8" else precision
    peak, matmul = (
        number(table(hardware.get("peak_tflops")).get(dtype)),
        number(table(hardware.get("measured_tflops")).get(precision)),
    )
    mfu, share, step_s = (run.typical(name) for name in ("mfu", "ceiling_share", "step_s"))
    return Speed(
        unit=METRICS[run.rate].unit,
        update=run.speed,
        whole_run=run.whole_run_speed,
        step_s=step_s.value if step_s else None,
        mfu=mfu.value if mfu else None,
        mfu_note=(
            f"6N + 12LdT per token, of {peak:,.0f} TFLOP/s, dense {dtype} datasheet peak"
            if peak
            else "no datasheet peak is known"
        ),
        ceiling_share=share.value if share else None,
        ceiling_note=(
            f"6N + 12LdT per token, of {_tflops(matmul)}, measured {precision} matrix products"
            if matmul
            else "nothing measured"
        ),
        attainable=number(prediction.get("attainable_tokens_per_s")),
        ceiling=number(prediction.get("ceiling_tokens_per_s")),
    )


def _tflops(rate: float) -> str:
    return f"{rate:,.0f} TFLOP/s" if rate >= 10 else f"{rate * 1e3:,.0f} GFLOP/s"


def time_parts(run: Run) -> list[TimePart]:
    """Where the time went: parts that add up to the training time, and of an RFT run to that of all its
    recorded stages."""
    if run.workload != "rft":
        return _training_parts(run)
    tuned = [
        TimePart(part.name, part.elapsed_s, f"fine-tuning on the samples: {part.note}")
        for part in _training_parts(run)
    ]
    stages = [
        TimePart("sampling", _spent_s(run.events, "sampling_end"), "generation and scoring"),
        TimePart("fine-tuning on answers", _spent_s(run.events, "training_on_answers"), "to compare with"),
        TimePart("tests", sum(values(run.evaluations, "elapsed_s")), "greedy, on held-out questions"),
    ]
    return [*(stage for stage in stages if stage.elapsed_s > 0), *tuned]


def _spent_s(events: list[dict[str, Any]], stage: str) -> float:
    """All attempts at a stage together."""
    return sum(values([event for event in events if event["event"] == stage], "elapsed_s"))


def _training_parts(run: Run) -> list[TimePart]:
    """Only for runs whose updates carry their times."""
    total_s, step_s = run.elapsed_s, sum(values(run.metrics, "step_s"))
    if total_s is None or not step_s:
        return []
    first_s = _warm_up_s(run)
    wait_s = sum(values(run.metrics, "data_wait_s"))
    stalled_s = sum(values([event for event in run.events if event["event"] == "checkpoint"], "stalled_s"))
    rest_s = total_s - step_s - stalled_s
    validations = sum(event["event"] == "validation" for event in run.events)
    parts = [
        *_update_parts(run, step_s - first_s - wait_s),
        TimePart("data wait", wait_s, "waiting for the loader"),
        TimePart(
            "first updates", first_s, f"compilation and warm-up: first {WARM_UP} updates, beyond the median"
        ),
        TimePart("checkpoints", stalled_s, "stalls of the loop; writing goes on beside it"),
        TimePart(
            "validation" if validations else "other",
            rest_s,
            "what the updates and checkpoints leave of the training time",
        ),
    ]
    return [part for part in parts if part.elapsed_s > 0]


def _warm_up_s(run: Run) -> float:
    """How much longer the first updates of each attempt took than the median of the others."""
    warm = {line["step"] for line in run.warm}
    typical = run.typical("step_s")
    cold = values([line for line in run.metrics if line["step"] not in warm], "step_s")
    return max(0.0, sum(cold) - len(cold) * typical.value) if typical else 0.0


def _update_parts(run: Run, update_s: float) -> list[TimePart]:
    """The updates, split into phases where the record has them; the first updates split like the others."""
    sums = {name: total_s for name in PHASES if (total_s := sum(values(run.metrics, name)))}
    split = PHASES.keys() - NOT_IN_ALL <= sums.keys()
    if not split:
        sums = {name: total_s for name, total_s in sums.items() if name == "generate_s"}
    whole = max(
        sum(sums.values()), sum(values(run.metrics, "step_s")) - sum(values(run.metrics, "data_wait_s"))
    )
    rest_s = update_s * (1 - sum(sums.values()) / whole) if whole else update_s
    return [
        *(
            TimePart(PHASES[name], update_s * total_s / whole, "of the updates, by the recorded phases")
            for name, total_s in sums.items()
        ),
        (
            TimePart("between phases", rest_s, "updates outside the recorded phases")
            if split
            else TimePart("updates", rest_s, "forward, backward, optimiser; not recorded apart")
        ),
    ]


def memory(run: Run) -> Memory:
    """Seen, and on a GPU predicted."""
    hardware, on_gpu = table(run.plan.get("hardware")), run.on_gpu
    prediction = table(run.plan.get("prediction")) if on_gpu else {}
    parts = table(prediction.get("memory_parts_bytes"))
    return Memory(
        seen_bytes=max(values(run.metrics, "memory_bytes"), default=None),
        seen_note="peak allocated by torch" if on_gpu else "of the whole process, Python and torch included",
        predicted_bytes=number(prediction.get("memory_bytes")),
        predicted_parts_bytes={name: size for name, value in parts.items() if (size := number(value))},
        device_bytes=number(hardware.get("memory_bytes")),
    )


def quality(run: Run) -> Quality:
    """Loss at the beginning and the end; the last validation and the best."""
    losses = values(run.metrics, "loss")
    tested = [line for line in run.metrics if number(line.get("valid_loss")) is not None]
    best = min(tested, key=lambda line: float(line["valid_loss"]), default=None)
    last = tested[-1] if tested else {}
    return Quality(
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        valid_loss=number(last.get("valid_loss")),
        valid_perplexity=number(last.get("valid_perplexity")),
        valid_bits_per_byte=number(last.get("valid_bits_per_byte")),
        valid_step=int(last["step"]) if last else None,
        best_loss=float(best["valid_loss"]) if best else None,
        best_step=int(best["step"]) if best else None,
        nan_step=_first_step(without_number(run.metrics)),
        bad_gradient_step=_first_step(without_number(run.metrics, "grad_norm")),
    )


def _first_step(lines: list[dict[str, Any]]) -> int | None:
    return int(lines[0]["step"]) if lines else None


def without_number(lines: list[dict[str, Any]], name: str = "loss") -> list[dict[str, Any]]:
    """The updates at the end whose loss (or another metric) is recorded and is no number. Lines that say
    nothing of it count neither way, nor do updates that fp16 skipped."""
    told = [line for line in lines if name in line and not line.get("skipped")]
    good = next((place for place in range(len(told), 0, -1) if number(told[place - 1][name]) is not None), 0)
    return told[good:]
