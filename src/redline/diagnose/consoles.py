"""What trainers print: nanoGPT, torchtitan, verl. Each reader is a regular expression and the meaning of its groups, units repaired.

The conventions were read in the trainers' sources: nanoGPT counts MFU against an A100's 312 TFLOP/s whatever the GPU is, of one GPU, and
its evaluation is part of an iteration; torchtitan's tps and verl's perf/throughput are tokens a second of one GPU; verl's perf/mfu/actor
covers the update alone. A line that was cut, or that does not hold what its format says, is left out.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from statistics import median
from typing import Any

from redline.diagnose.amounts import NUMBER, finite, number
from redline.diagnose.observed import Facts, Observed, Setting, Step
from redline.diagnose.tables import json_lines

NANOGPT_TFLOPS = 312.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NANOGPT = re.compile(rf"\biter (\d+): loss ({NUMBER}), time ({NUMBER})ms, mfu ({NUMBER})%")
_NANOGPT_VALIDATION = re.compile(r"\bstep (\d+): train loss ")
_COUNT = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_TITAN = re.compile(
    rf"(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+).*?step:\s*(\d+)\s+loss:\s*({NUMBER})(?:.*?grad_norm:\s*({NUMBER}))?.*?"
    rf"memory:\s*([\d.]+)GiB\(([\d.]+)%\)\s+tps:\s*({_COUNT})(?:.*?tflops:\s*({_COUNT}))?(?:.*?mfu:\s*([\d.]+)%)?"
)
_VERL = re.compile(r"\bstep:(\d+) - (\S+:(?:np\.|[-\d.]|nan|inf).*)$", re.MULTILINE)
_VERL_NAMES = ("perf/", "timing_s/", "response_length/", "prompt_length/", "actor/pg_loss", "actor/grad_norm")
"""What is read of a verl line; the rest of it is not of speed."""
_VERL_SETTING = re.compile(
    r"['\"]?\b(rollout\.name|use_cache|attn_implementation|use_remove_padding|n_gpus_per_node|nnodes)['\"]?\s*[=:]\s*['\"]?([\w.]+)"
)
_VERL_ROLLOUT = re.compile(r"['\"]rollout['\"]: \{.*?['\"]name['\"]: ['\"](\w+)", re.DOTALL)
SHOWS = 0.05
"""Share of an iteration from which on an evaluation inside it can be told from noise."""
MOST_ATTENTION = 1.5
"""FLOPs of a token over 6 per parameter, at most: 1.15 for GPT-2 with 1,024 tokens. Numbers further apart are not of one run."""
_FIRST_LINES = 20
"""How many lines of a JSONL are looked at for its format: the first may be of a validation."""


def first(pattern: str, text: str) -> float | None:
    """The first group of the first match as a number, with a K, M or B behind it."""
    if (found := re.search(pattern, text)) is None:
        return None
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(found[2].upper() if found.lastindex and found.lastindex > 1 and found[2] else "", 1.0)
    value = finite(found[1].replace(",", ""))
    return value * scale if value is not None else None


def _bad(*raw: str | None) -> bool:
    return any(text is not None and not math.isfinite(float(text)) for text in raw)


def is_nanogpt(text: str) -> bool:
    return _NANOGPT.search(text) is not None


def read_nanogpt(text: str, source: str) -> Observed:
    tokens = first(r"tokens per iteration will be: ([\d,]+)", text)
    steps = [
        Step(
            step=int(step),
            loss=finite(loss),
            not_a_number=_bad(loss),
            step_s=ms / 1e3,
            tokens=tokens,
            mfu=mfu / 100 if (mfu := finite(share)) is not None and mfu >= 0 else None,  # -100 until it has been measured
        )
        for step, loss, time, share in _NANOGPT.findall(text)
        if (ms := finite(time)) is not None and ms > 0
    ]
    steps, events = _without_validations(steps, [int(step) for step in _NANOGPT_VALIDATION.findall(text)])
    facts = Facts(
        parameters=first(r"number of parameters: ([\d.]+)([KMB])", text),
        micro_batch=first(r"\bbatch_size = (\d+)", text),
        seq_len=first(r"\bblock_size = (\d+)", text),
        mfu_peak_tflops=NANOGPT_TFLOPS,
    )
    observed = Observed(source=source, format="nanogpt", steps=tuple(steps), facts=facts, text=text, events=tuple(events))
    gpus = _nanogpt_gpus(observed)
    repairs = ["times in ms read as seconds"]
    if gpus:
        repairs.append(f"{gpus:.0f} GPU{'s' if gpus > 1 else ''}, from its tokens/s, parameters and MFU (--fact gpus=N overrules)")
    if any("took_s" in event for event in events):
        repairs.append(f"evaluations taken off the iterations that they are part of: {len(events)}")
    return replace(observed, facts=replace(facts, gpus=gpus), repairs=tuple(repairs))


def _without_validations(steps: list[Step], validated: list[int]) -> tuple[list[Step], list[dict[str, Any]]]:
    """The iterations without the evaluation inside some of them, and those evaluations as events. What one took is the iteration's time
    above the median of the others; the first iteration compiles too, so there the median of the evaluations is taken."""
    plain = [s.step_s for s in steps[1:] if s.step not in validated and s.step_s]
    if not validated or not plain:
        return steps, [{"event": "validation", "step": step} for step in validated]
    usual_s = median(plain)
    took_s = {s.step: max(0.0, s.step_s - usual_s) for s in steps[1:] if s.step in validated and s.step_s}
    typical_s = median(took_s.values()) if took_s else 0.0
    if typical_s < SHOWS * usual_s:
        return steps, [{"event": "validation", "step": step} for step in validated]
    took_s = {step: took_s.get(step, typical_s) for step in validated}
    steps = [replace(s, step_s=max(usual_s, s.step_s - took_s[s.step])) if s.step_s and s.step in took_s else s for s in steps]
    return steps, [{"event": "validation", "step": step, "took_s": value} for step, value in took_s.items()]


def _nanogpt_gpus(observed: Observed) -> float | None:
    """MFU = tokens/s of one GPU x FLOPs per token / peak, solved for the GPUs. The attention's FLOPs need the shape; where the log does not
    print it, 6 per parameter give too few GPUs, and the next number is taken that the batch can be divided by."""
    facts, speed, mfu = observed.facts, observed.tokens_per_s, observed.median("mfu")
    if not facts.parameters or not speed or not mfu:
        return None
    layers, width, length = (first(rf"\b{name} = (\d+)", observed.text) for name in ("n_layer", "n_embd", "block_size"))
    attention = 12 * layers * width * length if layers and width and length else None
    found = speed * (6 * facts.parameters + (attention or 0.0)) / (mfu * NANOGPT_TFLOPS * 1e12)
    if attention is not None:
        return float(max(1, round(found)))
    tokens = observed.median("tokens")
    rows = round(tokens / (facts.micro_batch * facts.seq_len)) if tokens and facts.micro_batch and facts.seq_len else 0
    possible = [n for n in range(1, rows + 1) if rows % n == 0] or [2**power for power in range(14)]
    return next((float(n) for n in possible if 0.95 * found <= n <= MOST_ATTENTION * found), None)


def is_torchtitan(text: str) -> bool:
    return "tps:" in text and _TITAN.search(_ANSI.sub("", text)) is not None


def _titan_rows(text: str) -> dict[int, tuple[float, re.Match[str]]]:
    """When each step was printed, and its line; every rank prints the same one. The last line may have been cut in the middle of tps."""
    rows: dict[int, tuple[float, re.Match[str]]] = {}
    for m in _TITAN.finditer(text):
        try:
            printed_at = datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        except ValueError:
            continue
        if m.end() < len(text) or not rows:
            rows[int(m[2])] = (printed_at, m)
    return rows


def _titan_gpus(text: str) -> float | None:
    """The product of the device mesh's sides."""
    mesh = re.search(r"device mesh with .*?\[(\d+(?:, *\d+)*)\]", text)
    return float(math.prod(int(side) for side in mesh[1].split(","))) if mesh else first(r"world size (\d+)", text)


def read_torchtitan(text: str, source: str) -> Observed:
    text = _ANSI.sub("", text)
    rows, gpus = _titan_rows(text), _titan_gpus(text)
    seq_len, batch = first(r"sequence length (\d+)", text), first(r"global batch size (\d+)", text)
    order, steps = sorted(rows), []
    for before, step in zip([None, *order], order, strict=False):
        printed_at, m = rows[step]
        step_s = (printed_at - rows[before][0]) / (step - before) if before is not None else None
        step_s = step_s if step_s and step_s > 0 else None
        tps, mfu, memory = _count(m[7]), finite(m[9]), finite(m[5])
        tokens = seq_len * batch if seq_len and batch else (tps * step_s * gpus if tps and step_s and gpus else None)
        steps.append(
            Step(
                step=step,
                loss=finite(m[3]),
                not_a_number=_bad(m[3], m[4]),
                step_s=step_s,
                tokens=tokens,
                mfu=mfu / 100 if mfu is not None else None,
                memory_bytes=memory * 2**30 if memory else None,
            )
        )
    repairs = [f"tps is tokens/s of one GPU; all {gpus:.0f} together give {gpus:.0f} times as much"] if gpus and gpus > 1 else []
    if not gpus:
        repairs = ["tps is tokens/s of one GPU; the log does not say how many there are (--fact gpus=N)"]
    repairs.append("the time of an update is taken from the time stamps of the lines")
    return Observed(
        source=source,
        format="torchtitan",
        steps=tuple(steps),
        facts=_titan_facts(text, rows[order[-1]][1], gpus) if rows else Facts(),
        text=text,
        repairs=tuple(repairs),
        lines_are_means=True,
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
    return any(line.startswith("{") and '"data"' in line and ("perf/" in line or "timing_s/" in line) for line in lines)


def read_verl(text: str, source: str) -> Observed:
    started = _VERL.search(text)
    head = text[: started.start()] if started else ""
    rows = _verl_lines(text) if started else _verl_entries(text, source)
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
    return Observed(source=source, format="verl", steps=steps, facts=facts, settings=settings, text=text, repairs=_verl_repairs(rows, gpus))


def _verl_lines(text: str) -> list[tuple[int, dict[str, float]]]:
    """The console's lines, those of a validation alone left out. Where the last was cut, its last value may have been."""
    rows = []
    for m in _VERL.finditer(text):
        items = m[2].split(" - ")[: -1 if m.end() == len(text) else None]
        pairs = [item.rpartition(":") for item in items if item.startswith(_VERL_NAMES)]
        data = {name: value for name, _, raw in pairs if (value := number(raw.rpartition("(")[2].rstrip(")\r "))) is not None}
        if data:
            rows.append((int(m[1]), data))
    return rows


def _verl_entries(text: str, source: str) -> list[tuple[int, dict[str, float]]]:
    rows = []
    for entry in json_lines(text, source):
        step, values = finite(entry.get("step")), entry.get("data")
        if step is None or not isinstance(values, dict):
            continue
        data = {name: value for name, raw in values.items() if name.startswith(_VERL_NAMES) and (value := number(raw)) is not None}
        if data:
            rows.append((int(step), data))
    return rows


def _verl_step(step: int, data: Mapping[str, float], gpus: float | None) -> Step:
    known = {name: value for name, value in data.items() if math.isfinite(value)}
    per_gpu, step_s = known.get("perf/throughput"), known.get("perf/time_per_step") or known.get("timing_s/step")
    tokens = known.get("perf/total_num_tokens") or (per_gpu * step_s * gpus if per_gpu and step_s and gpus else None)
    memory = known.get("perf/max_memory_allocated_gb")
    longest, mean = known.get("response_length/max"), known.get("response_length/mean")
    prompt, prompt_max = known.get("prompt_length/mean"), known.get("prompt_length/max")
    padded = None
    if longest and mean and prompt and prompt_max:
        padded = 1 - (mean + prompt) / (longest + prompt_max)
    return Step(
        step=step,
        step_s=step_s,
        tokens=tokens,
        loss=known.get("actor/pg_loss"),
        not_a_number=any(name in data and name not in known for name in ("actor/pg_loss", "actor/grad_norm")),
        mfu=known.get("perf/mfu/actor"),
        memory_bytes=memory * 2**30 if memory else None,
        padding_share=padded,
        parts_s={name.removeprefix("timing_s/"): value for name, value in known.items() if name.startswith("timing_s/")},
    )


def _verl_gpus(rows: Iterable[Mapping[str, float]]) -> float | None:
    """tokens = throughput x seconds x GPUs, solved for the GPUs."""
    names = ("perf/total_num_tokens", "perf/throughput", "perf/time_per_step")
    found = [d[names[0]] / (d[names[1]] * d[names[2]]) for d in rows if all(finite(d.get(name)) for name in names)]
    return float(round(median(found))) if found else None


def _typical(rows: list[tuple[int, dict[str, float]]], name: str) -> float | None:
    found = [data[name] for _, data in rows if finite(data.get(name)) is not None]
    return median(found) if found else None


def _verl_repairs(rows: list[tuple[int, dict[str, float]]], gpus: float | None) -> tuple[str, ...]:
    per_gpu = _typical(rows, "perf/throughput")
    if per_gpu is None:
        return ()
    all_gpus = f"{per_gpu * gpus:,.0f} tokens/s of all {gpus:.0f}" if gpus else "the log does not say of how many (--fact gpus=N)"
    return (f"perf/throughput {per_gpu:,.0f} is tokens/s of one GPU over the whole step, prompts included: {all_gpus}",)
