"""What trainers print: nanoGPT, torchtitan, verl. Each reader is a regular expression and the meaning of its groups, units repaired.

The conventions were read in the trainers' sources: nanoGPT counts MFU against an A100's 312 TFLOP/s whatever the GPU is; torchtitan's tps
and verl's perf/throughput are tokens a second of one GPU; verl's perf/mfu/actor covers the update alone.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from statistics import median
from typing import Any

from redline.diagnose.observed import Facts, Observed, Setting, Step
from redline.diagnose.tables import json_lines

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NANOGPT = re.compile(r"^iter (\d+): loss ([\d.naif]+), time ([\d.]+)ms, mfu (-?[\d.]+)%", re.MULTILINE)
_TITAN = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+).*?step:\s*(\d+)\s+loss:\s*([\d.naif]+).*?memory:\s*([\d.]+)GiB\(([\d.]+)%\)\s+"
    r"tps:\s*([\d,]+)(?:.*?tflops:\s*([\d.,]+))?(?:.*?mfu:\s*([\d.]+)%)?"
)
_VERL = re.compile(r"\bstep:(\d+) - (\S+:[-\d.].*)$", re.MULTILINE)
_VERL_PAIR = re.compile(r"(\S+?):(?:np\.float\d+\()?([-+\d.eE]+|nan|inf)\)?(?: - |$)")
_VERL_SETTING = re.compile(
    r"['\"]?\b(rollout\.name|use_cache|attn_implementation|use_remove_padding|n_gpus_per_node|nnodes)['\"]?\s*[=:]\s*['\"]?([\w.]+)"
)
_VERL_ROLLOUT = re.compile(r"['\"]rollout['\"]: \{.*?['\"]name['\"]: ['\"](\w+)", re.DOTALL)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def first(pattern: str, text: str) -> float | None:
    """The first group of the first match as a number, with a K, M or B behind it."""
    if (found := re.search(pattern, text)) is None:
        return None
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(found[2].upper() if found.lastindex and found.lastindex > 1 and found[2] else "", 1.0)
    return number(found[1]) * scale


def is_nanogpt(text: str) -> bool:
    return _NANOGPT.search(text) is not None


def read_nanogpt(text: str, source: str) -> Observed:
    tokens = first(r"tokens per iteration will be: ([\d,]+)", text)
    steps = tuple(
        Step(
            step=int(step),
            loss=float(loss),
            step_s=float(ms) / 1e3,
            tokens=tokens,
            mfu=float(mfu) / 100 if float(mfu) >= 0 else None,  # -100 until it has been measured
        )
        for step, loss, ms, mfu in _NANOGPT.findall(text)
    )
    facts = Facts(
        parameters=first(r"number of parameters: ([\d.]+)([KMB])", text),
        micro_batch=first(r"\bbatch_size = (\d+)", text),
        seq_len=first(r"\bblock_size = (\d+)", text),
        mfu_peak_tflops=312.0,
    )
    return Observed(source=source, format="nanogpt", steps=steps, facts=facts, repairs=("times in ms read as seconds",), text=text)


def is_torchtitan(text: str) -> bool:
    return _TITAN.search(_ANSI.sub("", text)) is not None


def read_torchtitan(text: str, source: str) -> Observed:
    text = _ANSI.sub("", text)
    rows = {int(m[2]): m for m in _TITAN.finditer(text)}  # every rank prints the same line
    times = {step: datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() for step, m in rows.items()}
    gpus = first(r"device mesh with .*?\[([\d]+)\]", text) or first(r"world size (\d+)", text)
    seq_len, batch = first(r"sequence length (\d+)", text), first(r"global batch size (\d+)", text)
    order, steps = sorted(rows), []
    for before, step in zip([None, *order], order, strict=False):
        m = rows[step]
        step_s = (times[step] - times[before]) / (step - before) if before is not None else None
        tokens = seq_len * batch if seq_len and batch else (number(m[6]) * step_s * gpus if step_s and gpus else None)
        mfu = number(m[8]) / 100 if m[8] else None
        memory = number(m[4]) * 2**30
        steps.append(Step(step=step, loss=float(m[3]), step_s=step_s, tokens=tokens, mfu=mfu, memory_bytes=memory))
    m = rows[order[-1]]
    rate_flops = number(m[7]) * 1e12 if m[7] else None
    facts = Facts(
        parameters=first(r"size: ([\d,]+) total parameters", text),
        flops_per_token=rate_flops / number(m[6]) if rate_flops and number(m[6]) else None,
        gpus=gpus,
        memory_bytes=number(m[4]) * 2**30 / (number(m[5]) / 100) if number(m[5]) else None,
        batch_size=batch,
        micro_batch=first(r"local batch size (\d+)", text),
        seq_len=seq_len,
        recompute="on" if re.search(r"Applied (full|selective) activation checkpointing", text) else None,
        mfu_peak_tflops=(first(r"Peak FLOPS used for computing MFU: ([\d.]+e\+\d+)", text) or 0) / 1e12 or None,
    )
    repairs = [f"tps is tokens/s of one GPU; all {gpus:.0f} together give {gpus:.0f} times as much"] if gpus and gpus > 1 else []
    if not gpus:
        repairs = ["tps is tokens/s of one GPU; the log does not say how many there are (--fact gpus=N)"]
    repairs.append("the time of an update is taken from the time stamps of the lines")
    return Observed(source=source, format="torchtitan", steps=tuple(steps), facts=facts, text=text, repairs=tuple(repairs))


def is_verl(text: str) -> bool:
    if _VERL.search(text) is not None:
        return True
    head = text.lstrip().partition("\n")[0]
    return head.startswith("{") and '"data"' in head and ("perf/" in head or "timing_s/" in head)


def read_verl(text: str, source: str) -> Observed:
    if text.lstrip().startswith("{"):
        entries = json_lines(text, source)
        rows: list[tuple[int, dict[str, Any]]] = [
            (int(e["step"]), e["data"]) for e in entries if "step" in e and isinstance(e.get("data"), dict)
        ]
    else:
        rows = [(int(m[1]), {name: float(value) for name, value in _VERL_PAIR.findall(m[2])}) for m in _VERL.finditer(text)]
    gpus = _verl_gpus(data for _, data in rows)
    seen = dict(_VERL_SETTING.findall(text))
    if gpus is None and "n_gpus_per_node" in seen:
        gpus = float(seen["n_gpus_per_node"]) * float(seen.get("nnodes", 1))
    rollout = _VERL_ROLLOUT.search(text)
    facts = Facts(
        gpus=gpus,
        prompt_length=_typical(rows, "prompt_length/mean"),
        response_length=_typical(rows, "response_length/mean"),
        rollout=seen.get("rollout.name") or (rollout[1] if rollout else None),
        use_cache=seen["use_cache"].lower() if "use_cache" in seen else None,
        mfu_scope="the actor's update",
    )
    settings = tuple(Setting(name, value, 0) for name, value in seen.items())
    steps = tuple(_verl_step(step, data, gpus) for step, data in rows)
    return Observed(source=source, format="verl", steps=steps, facts=facts, settings=settings, text=text, repairs=_verl_repairs(rows, gpus))


def _verl_step(step: int, data: Mapping[str, Any], gpus: float | None) -> Step:
    per_gpu, step_s = data.get("perf/throughput"), data.get("perf/time_per_step") or data.get("timing_s/step")
    tokens = data.get("perf/total_num_tokens") or (per_gpu * step_s * gpus if per_gpu and step_s and gpus else None)
    memory = data.get("perf/max_memory_allocated_gb")
    longest, mean = data.get("response_length/max"), data.get("response_length/mean")
    prompt, prompt_max = data.get("prompt_length/mean"), data.get("prompt_length/max")
    padded = None
    if longest and mean and prompt and prompt_max:
        padded = 1 - (mean + prompt) / (longest + prompt_max)
    return Step(
        step=step,
        step_s=step_s,
        tokens=tokens,
        loss=data.get("actor/pg_loss"),
        mfu=data.get("perf/mfu/actor"),
        memory_bytes=memory * 2**30 if memory else None,
        padding_share=padded,
        parts_s={name.removeprefix("timing_s/"): value for name, value in data.items() if name.startswith("timing_s/")},
    )


def _verl_gpus(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """tokens = throughput x seconds x GPUs, solved for the GPUs."""
    names = ("perf/total_num_tokens", "perf/throughput", "perf/time_per_step")
    found = [d[names[0]] / (d[names[1]] * d[names[2]]) for d in rows if all(d.get(name) for name in names)]
    return float(round(median(found))) if found else None


def _typical(rows: list[tuple[int, dict[str, Any]]], name: str) -> float | None:
    found = [data[name] for _, data in rows if name in data]
    return median(found) if found else None


def _verl_repairs(rows: list[tuple[int, dict[str, Any]]], gpus: float | None) -> tuple[str, ...]:
    per_gpu = _typical(rows, "perf/throughput")
    if per_gpu is None:
        return ()
    all_gpus = f"{per_gpu * gpus:,.0f} tokens/s of all {gpus:.0f}" if gpus else "the log does not say of how many (--fact gpus=N)"
    return (f"perf/throughput {per_gpu:,.0f} is tokens/s of one GPU over the whole step, prompts included: {all_gpus}",)
