"""What trainers print: nanoGPT, torchtitan, verl. Each reader is a regular expression and the meaning of its
groups, units repaired.

The conventions were read in the trainers' sources: nanoGPT counts MFU against an A100's 312 TFLOP/s whatever
the GPU is, of one GPU, and its evaluation is part of an iteration; torchtitan's tps and verl's
perf/throughput are tokens a second of one GPU; verl's perf/mfu/actor covers the update alone. A line that was
cut, or that does not hold what its format says, is left out.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import Any

from redline.diagnose.amounts import NUMBER, finite, number
from redline.diagnose.observed import Facts, Observed, Setting, Step
from redline.diagnose.segments import longest, runs_of, told
from redline.diagnose.tables import json_lines

NANOGPT_TFLOPS = 312.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NANOGPT = re.compile(rf"\biter (\d+): loss ({NUMBER}), time ({NUMBER})ms, mfu ({NUMBER})%")
_NANOGPT_VALIDATION = re.compile(r"\bstep (\d+): train loss ")
_COUNT = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_STAMP = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+)"
_TITAN = re.compile(
    rf"{_STAMP}.*?(?<!validate )step:\s*(\d+)\s+loss:\s*({NUMBER})(?:.*?grad_norm:\s*({NUMBER}))?.*?"
    rf"memory:\s*([\d.]+)GiB\(([\d.]+)%\)\s+tps:\s*({_COUNT})(?:.*?tflops:\s*({_COUNT}))?(?:.*?mfu:\s*([\d.]+)%)?"
)
_TITAN_PAUSE = re.compile(
    rf"{_STAMP}.*?(?:validate step:\s*(\d+)|Finished saving the checkpoint.*?in ([\d.]+) seconds|Starting"
    r" job|Training starts at step)"
)
"""The end of a validation or of a checkpoint, or a new start of the job."""
_VERL = re.compile(r"\bstep:(\d+) - (\S+:(?:np\.|[-\d.]|nan|inf).*)$", re.MULTILINE)
_VERL_NAMES = ("perf/", "timing_s/", "response_length/", "prompt_length/", "actor/pg_loss", "actor/grad_norm")
"""What is read of a verl line; the rest of it is not of speed."""
_VERL_PAUSES = {"validation": "testing", "checkpoint": "save_checkpoint"}
_VERL_SETTING = re.compile(
    r"['\"]?\b(rollout\.name|use_cache|attn_implementation|use_remove_padding|n_gpus_per_node|nnodes)['\"]?\s*[=:]\s*['\"]?([\w.]+)"
)
_VERL_ROLLOUT = re.compile(r"['\"]rollout['\"]: \{.*?['\"]name['\"]: ['\"](\w+)", re.DOTALL)
SHOWS = 0.05
"""Share of an iteration from which on an evaluation inside it can be told from noise."""
MOST_ATTENTION = 1.5
"""FLOPs of a token over 6 per parameter, at most: 1.15 for GPT-2 with 1,024 tokens. Numbers further apart are
not of one run."""
_FIRST_LINES = 20
"""How many lines of a JSONL are looked at for its format: the first may be of a validation."""


def first(pattern: str, text: str, *, last: bool = False) -> float | None:
    """The first group of the first match (or of the last) as a number, with a K, M or B behind it."""
    every = list(re.finditer(pattern, text)) if last else [re.search(pattern, text)]
    found = every[-1] if every else None
    if found is None:
        return None
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(
        found[2].upper() if found.lastindex and found.lastindex > 1 and found[2] else "", 1.0
    )
    value = finite(found[1].replace(",", ""))
    return value * scale if value is not None else None


def _bad(*raw: str | None) -> bool:
    return any(text is not None and not math.isfinite(float(text)) for text in raw)


def is_nanogpt(text: str) -> bool:
    return _NANOGPT.search(text) is not None


def read_nanogpt(text: str, source: str) -> Observed:
    rows = [(m, ms / 1e3) for m in _NANOGPT.finditer(text) if (ms := finite(m[3])) is not None and ms > 0]
    runs = runs_of(rows, lambda row: int(row[0][1]))
    run = longest(runs)
    validated, head = _nanogpt_validations(text, runs, run), text[: run[0][0].start()] if run else text
    tokens = first(r"tokens per iteration will be: ([\d,]+)", head, last=True)
    steps = [
        Step(
            step=int(m[1]),
            loss=finite(m[2]),
            not_a_number=_bad(m[2]),
            step_s=step_s,
            tokens=tokens,
            # -100 until it has been measured
            mfu=mfu / 100 if (mfu := finite(m[4])) is not None and mfu >= 0 else None,
        )
        for m, step_s in run
    ]
    steps, events = _without_validations(steps, validated)
    facts = Facts(
        parameters=first(r"number of parameters: ([\d.]+)([KMB])", head, last=True),
        micro_batch=first(r"\bbatch_size = (\d+)", head, last=True),
        seq_len=first(r"\bblock_size = (\d+)", head, last=True),
        mfu_peak_tflops=NANOGPT_TFLOPS,
    )
    observed = Observed(
        source=source, format="nanogpt", steps=tuple(steps), facts=facts, text=text, events=tuple(events)
    )
    gpus = _nanogpt_gpus(observed, head)
    repairs = ["times in ms read as seconds"]
    if gpus:
        repairs.append(
            f"{gpus:.0f} GPU{'s' if gpus > 1 else ''}, from its tokens/s, parameters and MFU (--fact gpus=N"
            " overrules)"
        )
    if any("took_s" in event for event in events):
        repairs.append(f"evaluations taken off the iterations that they are part of: {len(events)}")
    repairs += told(len(runs), steps[0].step, steps[-1].step) if steps else ()
    return replace(observed, facts=replace(facts, gpus=gpus), repairs=tuple(repairs))


def _nanogpt_validations(
    text: str, runs: list[list[tuple[re.Match[str], float]]], run: list[tuple[re.Match[str], float]]
) -> list[int]:
    """The iterations of a run in which it evaluated: the line stands before that of its iteration, behind the
    last of the run before."""
    place = next((at for at, other in enumerate(runs) if other is run), 0)
    start = runs[place - 1][-1][0].end() if place else 0
    end = run[-1][0].end() if place < len(runs) - 1 else len(text)
    return list(dict.fromkeys(int(m[1]) for m in _NANOGPT_VALIDATION.finditer(text, start, end)))


def _without_validations(steps: list[Step], validated: list[int]) -> tuple[list[Step], list[dict[str, Any]]]:
    """The iterations without the evaluation inside some of them, and those evaluations as events. What one
    took is the iteration's time above the median of the others; the first iteration compiles too, so there
    the median of the evaluations is taken."""
    evaluated = set(validated)
    plain = [s.step_s for s in steps[1:] if s.step not in evaluated and s.step_s]
    if not validated or not plain:
        return steps, [{"event": "validation", "step": step} for step in validated]
    usual_s = median(plain)
    took_s = {s.step: max(0.0, s.step_s - usual_s) for s in steps[1:] if s.step in evaluated and s.step_s}
    typical_s = median(took_s.values()) if took_s else 0.0
    if typical_s < SHOWS * usual_s:
        return steps, [{"event": "validation", "step": step} for step in validated]
    took_s = {step: took_s.get(step, typical_s) for step in validated}
    steps = [
        replace(s, step_s=max(usual_s, s.step_s - took_s[s.step])) if s.step_s and s.step in took_s else s
        for s in steps
    ]
    return steps, [{"event": "validation", "step": step, "took_s": value} for step, value in took_s.items()]


def _nanogpt_gpus(observed: Observed, head: str) -> float | None:
    """MFU = tokens/s of one GPU x FLOPs per token / peak, solved for the GPUs. The attention's FLOPs need the
    shape; where the log does not print it, 6 per parameter give too few GPUs, and the next number is taken
    that the batch can be divided by."""
    facts, speed, mfu = observed.facts, observed.tokens_per_s, observed.median("mfu")
    if not facts.parameters or not speed or not mfu:
        return None
    layers, width, length = (
        first(rf"\b{name} = (\d+)", head, last=True) for name in ("n_layer", "n_embd", "block_size")
    )
    attention = 12 * layers * width * length if layers and width and length else None
    found = speed * (6 * facts.parameters + (attention or 0.0)) / (mfu * NANOGPT_TFLOPS * 1e12)
    if attention is not None:
        return float(max(1, round(found)))
    tokens = observed.median("tokens")
    rows = (
        round(tokens / (facts.micro_batch * facts.seq_len))
        if tokens and facts.micro_batch and facts.seq_len
        else 0
    )
    possible = [n for n in range(1, rows + 1) if rows % n == 0] or [2**power for power in range(14)]
    return next((float(n) for n in possible if 0.95 * found <= n <= MOST_ATTENTION * found), None)


def is_torchtitan(text: str) -> bool:
    return "tps:" in text and _TITAN.search(_ANSI.sub("", text)) is not None


@dataclass(frozen=True)
class _TitanRow:
    """A line of a step: what it holds, and the mean time of the updates since the line before, where that can
    be told."""

    step: int
    line: re.Match[str]
    step_s: float | None


@dataclass(frozen=True)
class _TitanPause:
    at: float
    place: int
    event: dict[str, Any]


def _titan_rows(text: str) -> tuple[list[_TitanRow], list[_TitanPause]]:
    """The lines of steps, and the validations and checkpoints between them. Every rank prints the same line:
    the first counts.

    The time of a line is that since the line before, pauses taken off. Behind a new start of the job it is
    not known, nor behind a validation that began some updates after the line before it. The last line may
    have been cut in the middle of tps.
    """
    rows: list[_TitanRow] = []
    pauses: list[_TitanPause] = []
    since: float | None = None  # when the line before was printed, moved on by the pauses since
    for m in sorted(
        (m for pattern in (_TITAN, _TITAN_PAUSE) for m in pattern.finditer(text)), key=lambda m: m.start()
    ):
        at, step = _stamp(m[1]), rows[-1].step if rows else 0
        if at is None or (m.re is _TITAN and m.end() == len(text) and rows):
            continue
        if m.re is _TITAN_PAUSE:
            if m[2] or m[3]:
                since = _titan_pause(m, at, step, since, pauses)
            else:
                since = None
        elif rows and int(m[2]) == step:
            since = since or at
        else:
            took_s = (at - since) / (int(m[2]) - step) if since is not None and int(m[2]) > step else 0.0
            rows.append(_TitanRow(int(m[2]), m, took_s if took_s > 0 else None))
            since = at
    return rows, pauses


def _titan_pause(
    m: re.Match[str], at: float, step: int, since: float | None, pauses: list[_TitanPause]
) -> float | None:
    """Note a pause, unless another rank has told of it, and give the time from which on the next updates are
    counted."""
    kind, until = ("validation", int(m[2])) if m[2] else ("checkpoint", step)
    before = next((pause for pause in reversed(pauses) if pause.event["event"] == kind), None)
    if before and (before.event["step"] == until if m[2] else at - float(m[3]) < before.at):
        return since
    took_s = float(m[3]) if m[3] else at - since if since is not None and until == step else None
    pauses.append(
        _TitanPause(
            at, m.start(), {"event": kind, "step": until} | ({} if took_s is None else {"took_s": took_s})
        )
    )
    return since + took_s if since is not None and took_s is not None else None


def _stamp(text: str) -> float | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp()
    except ValueError:
        return None


def _titan_gpus(text: str) -> float | None:
    """The product of the device mesh's sides."""
    mesh = re.search(r"device mesh with .*?\[(\d+(?:, *\d+)*)\]", text)
    return (
        float(math.prod(int(side) for side in mesh[1].split(",")))
        if mesh
        else first(r"world size (\d+)", text)
    )


def read_torchtitan(text: str, source: str) -> Observed:
    text = _ANSI.sub("", text)
    (rows, pauses), gpus = _titan_rows(text), _titan_gpus(text)
    runs = runs_of(rows, lambda row: row.step)
    run = longest(runs)
    start = run[0].line.start() if run else 0
    end = min((other[0].line.start() for other in runs if other[0].line.start() > start), default=len(text))
    seq_len, batch = first(r"sequence length (\d+)", text), first(r"global batch size (\d+)", text)
    tokens = seq_len * batch if seq_len and batch else None
    repairs = (
        [f"tps is tokens/s of one GPU; all {gpus:.0f} together give {gpus:.0f} times as much"]
        if gpus and gpus > 1
        else []
    )
    if not gpus:
        repairs = ["tps is tokens/s of one GPU; the log does not say how many there are (--fact gpus=N)"]
    repairs.append("the time of an update is taken from the time stamps of the lines")
    repairs += told(len(runs), run[0].step, run[-1].step) if run else ()
    return Observed(
        source=source,
        format="torchtitan",
        steps=tuple(_titan_step(row, tokens, gpus) for row in run),
        facts=_titan_facts(text, run[-1].line, gpus) if run else Facts(),
        text=text,
        repairs=tuple(repairs),
        events=tuple(pause.event for pause in pauses if start <= pause.place < end),
        lines_are_means=True,
    )


def _titan_step(row: _TitanRow, tokens: float | None, gpus: float | None) -> Step:
    m, tps, mfu, memory = row.line, _count(row.line[7]), finite(row.line[9]), finite(row.line[5])
    return Step(
        step=row.step,
        loss=finite(m[3]),
        not_a_number=_bad(m[3]),
        bad_norm=_bad(m[4]),
        step_s=row.step_s,
        tokens=tokens or (tps * row.step_s * gpus if tps and row.step_s and gpus else None),
        mfu=mfu / 100 if mfu is not None else None,
        memory_bytes=memory * 2**30 if memory else None,
    )


def _count(text: str | None) -> float | None:
    return finite(text.replace(",", "")) if text else None


def _titan_facts(text: str, last: re.Match[str], gpus: float | None) -> Facts:
    tps, tflops, memory, share = _count(last[7]), _count(last[8]), finite(last[5]), finite(last[6])
    recompute = re.search(r"Applied (full|selective) activation checkpointing", text)
    peak = first(r"Peak FLOPS used for computing MFU: ([\d.]+e\+\d+)", text)
    return Facts(
        parameters=first(r"size: ([\d,]+) total parameters", text),
        flops_per_token=tflops * 1e12 / tps if tflops and tps else None,
        gpus=gpus,
        memory_bytes=memory * 2**30 / (share / 100) if memory and share else None,
        batch_size=first(r"global batch size (\d+)", text),
        micro_batch=first(r"local batch size (\d+)", text),
        seq_len=first(r"sequence length (\d+)", text),
        recompute=recompute[1] if recompute else None,
        mfu_peak_tflops=peak / 1e12 if peak else None,
    )


def is_verl(text: str) -> bool:
    if _VERL.search(text) is not None:
        return True
    lines = text.lstrip().split("\n", _FIRST_LINES)[:_FIRST_LINES]
    return any(
        line.startswith("{") and '"data"' in line and ("perf/" in line or "timing_s/" in line)
        for line in lines
    )


def read_verl(text: str, source: str) -> Observed:
    started = _VERL.search(text)
    head = text[: started.start()] if started else ""
    runs = runs_of(_verl_lines(text) if started else _verl_entries(text, source), lambda row: row[0])
    rows = longest(runs)
    pairs = _VERL_SETTING.findall(head)
    seen = dict(reversed(pairs))  # the actor's comes first, then the critic's
    gpus = _verl_gpus(data for _, data in rows)
    if gpus is None and (nodes := finite(dict(pairs).get("n_gpus_per_node"))):
        gpus = nodes * (finite(dict(pairs).get("nnodes")) or 1.0)
    rollout = _VERL_ROLLOUT.search(head)
    facts = Facts(
        gpus=gpus,
        prompt_length=_typical(rows, "prompt_length/mean"),
        response_length=_typical(rows, "response_length/mean"),
        longest_response=_typical(rows, "response_length/max"),
        rollout=seen.get("rollout.name") or (rollout[1] if rollout else None),
        use_cache=seen["use_cache"].lower() if "use_cache" in seen else None,
        mfu_scope="the actor's update",
    )
    settings = tuple(Setting(name, value, 0) for name, value in seen.items())
    steps = tuple(_verl_step(step, data, gpus) for step, data in rows)
    repairs = (*_verl_repairs(rows, gpus), *(told(len(runs), rows[0][0], rows[-1][0]) if rows else ()))
    return Observed(
        source=source,
        format="verl",
        steps=steps,
        facts=facts,
        settings=settings,
        text=text,
        repairs=repairs,
        events=tuple(event for step, data in rows for event in _verl_pauses(step, data)),
    )


def _verl_pauses(step: int, data: Mapping[str, float]) -> list[dict[str, Any]]:
    """Validations and checkpoints, which verl counts into the step that they follow."""
    took = {kind: finite(data.get(f"timing_s/{name}")) for kind, name in _VERL_PAUSES.items()}
    return [
        {"event": kind, "step": step, "took_s": took_s}
        for kind, took_s in took.items()
        if took_s and took_s > 0
    ]


def _verl_lines(text: str) -> list[tuple[int, dict[str, float]]]:
    """The console's lines, those of a validation alone left out. Where the last was cut, its last value may
    have been."""
    rows = []
    for m in _VERL.finditer(text):
        items = m[2].split(" - ")[: -1 if m.end() == len(text) else None]
        pairs = [item.rpartition(":") for item in items if item.startswith(_VERL_NAMES)]
        data = {
            name: value
            for name, _, raw in pairs
            if (value := number(raw.rpartition("(")[2].rstrip(")\r "))) is not None
        }
        if data:
            rows.append((int(m[1]), data))
    return rows


def _verl_entries(text: str, source: str) -> list[tuple[int, dict[str, float]]]:
    rows = []
    for entry in json_lines(text, source):
        step, values = finite(entry.get("step")), entry.get("data")
        if step is None or not isinstance(values, dict):
            continue
        data = {
            name: value
            for name, raw in values.items()
            if name.startswith(_VERL_NAMES) and (value := number(raw)) is not None
        }
        if data:
            rows.append((int(step), data))
    return rows


def _verl_step(step: int, data: Mapping[str, float], gpus: float | None) -> Step:
    known = {name: value for name, value in data.items() if math.isfinite(value)}
    per_gpu, step_s = (
        known.get("perf/throughput"),
        known.get("perf/time_per_step") or known.get("timing_s/step"),
    )
    tokens = known.get("perf/total_num_tokens") or (
        per_gpu * step_s * gpus if per_gpu and step_s and gpus else None
    )
    paused_s = sum(event["took_s"] for event in _verl_pauses(step, data))
    memory = known.get("perf/max_memory_allocated_gb")
    longest, mean = known.get("response_length/max"), known.get("response_length/mean")
    prompt, prompt_max = known.get("prompt_length/mean"), known.get("prompt_length/max")
    padded = None
    if longest and mean and prompt and prompt_max:
        padded = 1 - (mean + prompt) / (longest + prompt_max)
    return Step(
        step=step,
        step_s=step_s - paused_s if step_s and step_s > paused_s else step_s,
        tokens=tokens,
        loss=known.get("actor/pg_loss"),
        not_a_number="actor/pg_loss" in data and "actor/pg_loss" not in known,
        bad_norm="actor/grad_norm" in data and "actor/grad_norm" not in known,
        mfu=known.get("perf/mfu/actor"),
        memory_bytes=memory * 2**30 if memory else None,
        padding_share=padded,
        parts_s={
            name.removeprefix("timing_s/"): value
            for name, value in known.items()
            if name.startswith("timing_s/")
        },
    )


def _verl_gpus(rows: Iterable[Mapping[str, float]]) -> float | None:
    """tokens = throughput x seconds x GPUs, solved for the GPUs."""
    names = ("perf/total_num_tokens", "perf/throughput", "perf/time_per_step")
    found = [
        d[names[0]] / (d[names[1]] * d[names[2]]) for d in rows if all(finite(d.get(name)) for name in names)
    ]
    return float(round(median(found))) if found else None


def _typical(rows: list[tuple[int, dict[str, float]]], name: str) -> float | None:
    found = [data[name] for _, data in rows if finite(data.get(name)) is not None]
    return median(found) if found else None


def _verl_repairs(rows: list[tuple[int, dict[str, float]]], gpus: float | None) -> tuple[str, ...]:
    per_gpu = _typical(rows, "perf/throughput")
    if per_gpu is None:
        return ()
    all_gpus = (
        f"{per_gpu * gpus:,.0f} tokens/s of all {gpus:.0f}"
        if gpus
        else "the log does not say of how many (--fact gpus=N)"
    )
    return (
        (
            f"perf/throughput {per_gpu:,.0f} is tokens/s of one GPU over the whole step, prompts included:"
            f" {all_gpus}"
        ),
    )
