"""Our own run folder -> Observed: metrics.jsonl, events.jsonl, and recipe.toml and plan.json where they are there and read."""

from dataclasses import fields
from pathlib import Path

from redline.config.load import from_toml
from redline.config.recipe import Recipe
from redline.diagnose.observed import Facts, Observed, Step
from redline.errors import ConfigError
from redline.plan import plan as plans
from redline.plan.plan import Plan
from redline.record.run import RunFolder, read_lines

_NAMES = {field.name for field in fields(Step)} - {"tokens", "parts_s"}


def read_run(path: Path) -> Observed:
    """A run of any workload; without a pre-training recipe beside it the rules about plans stay silent."""
    folder = RunFolder(path)
    lines = next((found for metrics in _metrics(folder) if (found := read_lines(metrics))), [])
    recipe, plan, notes = _plan_and_recipe(folder)
    steps, before = [], 0.0
    for line in lines:
        tokens, before = float(line.get("tokens", before)) - before, float(line.get("tokens", before))
        values = {name: line[name] for name in _NAMES & line.keys() if line[name] is not None}
        steps.append(Step(**values, tokens=tokens or None))
    return Observed(
        source=str(path),
        format="run",
        steps=tuple(steps),
        facts=_facts(recipe, plan),
        repairs=notes,
        events=tuple(read_lines(folder.events_path)),
        recipe=recipe,
        plan=plan,
    )


def _metrics(folder: RunFolder) -> list[Path]:
    """Where the updates of a run are: in the folder itself, or in that of a fine-tuning inside it."""
    return [folder.metrics_path, *sorted(folder.path.glob("train-*/metrics.jsonl"))]


def _plan_and_recipe(folder: RunFolder) -> tuple[Recipe | None, Plan | None, tuple[str, ...]]:
    """Both, or neither and why: another workload's, or written by another version."""
    try:
        recipe = from_toml(folder.recipe_path.read_text(encoding="utf-8"), where=folder.recipe_path.name)
        return recipe, plans.load(folder.plan_path), ()
    except (FileNotFoundError, ConfigError) as error:
        return None, None, (f"nothing is said about the plan, because recipe and plan of pre-training were not read: {error}",)


def _facts(recipe: Recipe | None, plan: Plan | None) -> Facts:
    if recipe is None or plan is None:
        return Facts()
    return Facts(
        parameters=plan.prediction.parameters,
        flops_per_token=plan.prediction.flops_per_token,
        gpus=plan.world_size if plan.hardware.kind == "cuda" else None,
        memory_bytes=plan.hardware.memory_bytes,
        batch_size=recipe.train.batch_size,
        micro_batch=plan.micro_batch,
        seq_len=recipe.data.seq_len,
        precision=plan.precision,
        recompute="on" if plan.recompute != "none" else "off",
        mfu_peak_tflops=plan.hardware.peak_tflops.get(plan.precision),
    )
