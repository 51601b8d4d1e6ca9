"""Our own run folder -> Observed: metrics.jsonl, events.jsonl, and recipe.toml and plan.json where they are
there and read.

The folder of a watched loop (observe/) has no recipe: its plan.json holds what was seen of the model and the
machine.
"""

from pathlib import Path
from typing import Any

from redline.config.load import from_toml
from redline.config.recipe import Recipe
from redline.diagnose.observed import MEASURED, Facts, Observed, Step
from redline.diagnose.readers.cells import finite
from redline.diagnose.trainers import named
from redline.errors import ConfigError, DataError
from redline.machine.specs import match_spec
from redline.plan.plan import Plan, from_json
from redline.record import read
from redline.record.slowest import slowest


def read_run(path: Path) -> Observed:
    """A run of any workload; without a pre-training recipe beside it the rules about plans stay silent."""
    return observed(read.read_run(path))


def observed(run: read.Run) -> Observed:
    watched = any(event.get("loop") == "watched" for event in run.events)
    recipe, plan, notes = (None, None, ()) if watched else _plan_and_recipe(run)
    ramp = 0 if recipe is None else recipe.train.length_ramp_steps  # meant to be faster: sequences are cut
    warm = {line["step"] for line in run.warm if line["step"] > ramp}
    # the Trainer's arguments say whether it recomputes; a loop has none
    by_trainer = watched and read.table(run.plan.get("recompute")).get("source") == "user"
    whose = "huggingface" if by_trainer else "watched"
    if recipe is not None:
        whose = "redline-rl" if recipe.rl else "redline"
    return Observed(
        source=str(run.path),
        format="run",
        trainer=named(whose),
        steps=tuple(_step(line, cold=line["step"] not in warm) for line in run.metrics),
        updates=run.metrics[-1]["step"] if run.metrics else 0,
        facts=_facts(run, recipe, watched),
        notes=notes,
        events=tuple(run.events),
        recipe=recipe,
        plan=plan,
        late=next((one for one in slowest(run) if one.slow), None),
    )


def _step(line: dict[str, Any], *, cold: bool) -> Step:
    names = MEASURED & line.keys() - {"tokens"}
    known = {name: value for name in names if (value := finite(line[name])) is not None}
    bad = any(name in line and finite(line[name]) is None for name in ("loss", "grad_norm"))
    lost = bad and not line.get("skipped")
    speed, step_s = finite(line.get("tokens_per_s")), known.get("step_s")
    tokens = speed * step_s if speed and step_s else None
    return Step(step=line["step"], not_a_number=lost, cold=cold, tokens=tokens, **known)  # type: ignore[arg-type]


def _plan_and_recipe(run: read.Run) -> tuple[Recipe | None, Plan | None, tuple[str, ...]]:
    """Both, or neither and why: another workload's, or written by another version."""
    try:
        return from_toml(run.recipe_text, where="recipe.toml"), from_json(run.plan, where="plan.json"), ()
    except ConfigError as error:
        missing = "recipe.toml" if not run.recipe_text else "plan.json" if not run.plan else ""
        why = f"there is no {missing}" if missing else str(error)
        why = "this is an RFT run" if (run.path / "samples.db").exists() else why
        return None, None, (f"nothing is said about the plan of pre-training: {why}",)


def _facts(run: read.Run, recipe: Recipe | None, watched: bool) -> Facts:
    """What plan.json says about model and machine, for a run of ours or a loop that we watched."""
    seen = run.plan
    if not seen or (recipe is None and not watched):
        return Facts()
    try:
        hardware, prediction = seen["hardware"], seen["prediction"]
        value = {name: entry["value"] for name, entry in seen.items() if "value" in read.table(entry)}
        spec, cuda = match_spec(hardware["title"], hardware["memory_bytes"]), hardware["kind"] == "cuda"
        rows, passes = value["micro_batch"], value["accumulation"]
        told = {"flops_per_token": prediction.get("flops_per_token")}
        told |= {"seq_len": (recipe and recipe.data.seq_len) or None}
        told = {name: value[name] for name in ("flops_per_token", "seq_len", "compile")} if watched else told
        return Facts(
            parameters=prediction["parameters"],
            gpus=seen["world_size"] if cuda else None,
            gpu=spec.name if spec and cuda and watched else None,
            memory_bytes=hardware["memory_bytes"],
            batch_size=rows * passes * seen["world_size"] if rows else None,
            micro_batch=rows,
            precision=value["precision"],
            recompute="off" if value["recompute"] == "none" else value["recompute"],
            mfu_peak_tflops=hardware["peak_tflops"].get(value["precision"]),
            **told,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"{run.path / 'plan.json'} is not what a watched loop writes: {error!r}; move it away to continue without it"
        ) from error
