"""The figures of a report: speed, time, memory and loss of one run, each from the record and with its convention.
No torch.

What a speed is, its interval and the updates it leaves out are defined in record/read.py. A figure that nobody
recorded is None and is shown as a dash.
"""

from statistics import median
from typing import NamedTuple

from redline.record.metrics import METRICS, PHASES
from redline.record.read import Line, Run, before_fork_s, number, table, total, values

ALWAYS = {"forward_s", "backward_s", "optimizer_s"}
"""Phases that every update has, if it was split."""


class Speed:
    """How fast, compared with what the plan predicts is possible."""

    def __init__(self, run: Run) -> None:
        precision = _precision(run)
        dtype = "bf16" if precision == "fp8" else precision
        peak = number(table(run.hardware.get("peak_tflops")).get(dtype))
        matmul = number(table(run.hardware.get("measured_tflops")).get(precision))
        each = "6N + 12LdT per token, of"
        self.unit = METRICS[run.rate].unit
        """tokens/s, or rows/s in fine-tuning."""
        self.update, self.step_s = run.speed, run.typical("step_s")
        """Speed of the updates alone."""
        self.whole_run = run.whole_run_speed
        """Speed with compilation, validations and checkpoints."""
        self.mfu, self.mfu_note = run.typical("mfu"), "no datasheet peak is known"
        if peak:
            self.mfu_note = f"{each} {peak:,.0f} TFLOP/s, dense {dtype} datasheet peak"
        self.ceiling_share, self.ceiling_note = run.typical("ceiling_share"), "nothing measured"
        if matmul:
            rate = f"{matmul:,.0f} TFLOP/s" if matmul >= 10 else f"{matmul * 1e3:,.0f} GFLOP/s"
            self.ceiling_note = f"{each} the {rate} measured for {precision} matrix products"
        self.attainable = number(run.prediction.get("attainable_tokens_per_s"))
        """Predicted by the roofline."""
        self.ceiling = number(run.prediction.get("ceiling_tokens_per_s"))
        """Predicted, if only matrix products took time."""

    @property
    def attained_share(self) -> float | None:
        return self.update.value / self.attainable if self.update and self.attainable else None


class Memory:
    """The peak that was seen. Predictions are for a GPU's memory only."""

    def __init__(self, run: Run) -> None:
        prediction, self.seen_note = {}, "of the whole process, Python and torch included"
        if run.on_gpu:
            prediction, self.seen_note = run.prediction, "peak allocated by torch"
        parts = table(prediction.get("memory_parts_bytes"))
        self.seen_bytes = max(values(run.metrics, "memory_bytes"), default=None)
        self.predicted_bytes = number(prediction.get("memory_bytes"))
        self.predicted_parts_bytes = {n: size for n, value in parts.items() if (size := number(value))}
        self.device_bytes = number(run.hardware.get("memory_bytes"))

    @property
    def error(self) -> float | None:
        """How far the prediction is above what was seen, as a share."""
        predicted, seen = self.predicted_bytes, self.seen_bytes
        return predicted / seen - 1 if predicted and seen else None


class Quality:
    """Loss at the beginning and the end; the step and the figures of the last validation and of the best."""

    def __init__(self, run: Run) -> None:
        losses = values(run.metrics, "loss")
        tested = [
            {name: value for name, value in line.items() if name == "step" or name.startswith("valid_")}
            for line in run.metrics
            if number(line.get("valid_loss")) is not None
        ]
        self.first_loss = losses[0] if losses else None
        self.last_loss = losses[-1] if losses else None
        self.valid: Line = tested[-1] if tested else {}
        self.best: Line = min(tested, key=lambda line: float(line["valid_loss"]), default={})
        self.nan_step: int | None = next((line["step"] for line in without_number(run.metrics)), None)
        """The first update after which no recorded loss is a number; None if the last is one."""


class Summary:
    def __init__(self, run: Run) -> None:
        last, world_size = run.metrics[-1] if run.metrics else {}, number(run.plan.get("world_size"))
        self.label, self.path, self.recipe = run.label, str(run.path), run.name
        self.about = str(run.recipe.get("about", ""))
        self.workload, self.fingerprint, self.state = run.workload, run.fingerprint, run.state
        self.hardware, self.hardware_source = run.hardware.get("title"), run.hardware.get("source")
        self.world_size = None if world_size is None else int(world_size)
        self.precision = _precision(run) or None
        self.parameters = number(run.prediction.get("parameters"))
        self.started_at = number(run.events[0].get("at")) if run.events else None
        """Unix seconds."""
        self.updates, self.planned_updates = int(last.get("step", 0)), run.planned_updates
        self.tokens, self.elapsed_s = number(last.get("tokens")), run.elapsed_s
        self.attempts, self.missing = len(run.attempts), _missing(run)
        self.speed, self.time = Speed(run), time_parts(run)
        self.memory, self.quality = Memory(run), Quality(run)


def _missing(run: Run) -> str:
    """The updates missing from the record, in words."""
    places = [f"{a:,} to {b:,}" if a < b else f"{a:,}" for a, b in run.holes]
    more = f" and {len(places) - 3} more stretches" if len(places) > 3 else ""
    return f"updates {', '.join(places[:3])}{more} are missing from metrics.jsonl" if places else ""


def _precision(run: Run) -> str:
    return str(table(run.plan.get("precision")).get("value") or "")


class TimePart(NamedTuple):
    name: str
    elapsed_s: float
    note: str


def time_parts(run: Run) -> list[TimePart]:
    """Where the time went: parts that add up to the training time, or for an RFT run to the time of its stages."""
    if run.workload != "rft":
        return _training_parts(run)
    about = "fine-tuning on the samples"
    tuned = [part._replace(note=": ".join(filter(None, (about, part.note)))) for part in _training_parts(run)]
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
    (cold, first_s), wait_s = _warm_up(run), sum(values(run.metrics, "data_wait_s"))
    stalled_s = total(run.events, "checkpoint", "stalled_s")
    first = run.metrics[0]
    before_s = before_fork_s(run.events, number(first.get("elapsed_s")), number(first.get("step_s")))
    rest = "validation" if run.told("validation") else "other"
    rest_s = total_s - step_s - stalled_s - before_s
    parts = [
        *_update_parts(run, step_s - first_s - wait_s),
        TimePart("data wait", wait_s, "waiting for the loader"),
        TimePart("first updates", first_s, f"compilation and warm-up beyond the median; updates: {cold}"),
        TimePart("checkpoints", stalled_s, "stalls of the loop; writing continues in parallel"),
        TimePart(rest, rest_s, "training time outside updates and checkpoints"),
        TimePart("before the fork", before_s, "training time of the run that this one was forked from"),
    ]
    return [part for part in parts if part.elapsed_s > 1e-4]  # less is what rounding in the record leaves


def _warm_up(run: Run) -> tuple[int, float]:
    """The first updates of each attempt: how many, and how much longer they took than the median of the others. Neither
    counts the wait for data, which is a part of its own."""
    first = {line["step"] for line in run.metrics} - {line["step"] for line in run.warm}
    cold, warm = ([line for line in run.metrics if (line["step"] in first) is it] for it in (True, False))
    own_s = [_own_s(line) for line in cold]
    return len(cold), max(0.0, sum(own_s) - len(cold) * median(map(_own_s, warm))) if warm else 0.0


def _own_s(line: Line) -> float:
    """Time of an update without its wait for data."""
    return (number(line.get("step_s")) or 0.0) - (number(line.get("data_wait_s")) or 0.0)


def _update_parts(run: Run, update_s: float) -> list[TimePart]:
    """The updates, split into phases if the record has them; the first updates split like the others."""
    sums = {name: total_s for name in PHASES if (total_s := sum(values(run.metrics, name)))}
    rest, about = "between phases", "updates outside the recorded phases"
    if not sums.keys() >= ALWAYS:
        sums = {name: total_s for name, total_s in sums.items() if name == "generate_s"}
        rest, about = "updates", "forward, backward, optimiser; not recorded separately"
    computed_s = sum(values(run.metrics, "step_s")) - sum(values(run.metrics, "data_wait_s"))
    whole = max(sum(sums.values()), computed_s)
    rest_s = update_s * (1 - sum(sums.values()) / whole) if whole else update_s
    phases = [TimePart(PHASES[name], update_s * total_s / whole, "") for name, total_s in sums.items()]
    return [*phases, TimePart(rest, rest_s, about)]


def without_number(lines: list[Line]) -> list[Line]:
    """The last updates whose loss is recorded and is not a number. Updates that fp16 skipped are ignored."""
    told = [line for line in lines if "loss" in line and not line.get("skipped")]
    good = next((n for n in range(len(told), 0, -1) if number(told[n - 1]["loss"]) is not None), 0)
    return told[good:]
