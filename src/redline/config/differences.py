"""How two recipes differ, and what to say if a run folder holds a run of another recipe."""

from dataclasses import asdict
from typing import Any

from redline.config.recipe import ENDS, Recipe


def differences(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """What makes two fingerprints differ: `table.key` -> (value before, value now)."""
    return _unlike(flat(before.defining()), flat(now.defining()))


def data_of(recipe: Recipe) -> dict[str, Any]:
    """What decides which tokens a recipe validates on, by `table.key`."""
    said = {f"data.{key}": value for key, value in asdict(recipe.data).items()}
    said |= {"workload": recipe.workload, "train.eval_sequences": recipe.train.eval_sequences}
    trained = recipe.data.tokenizer == "bpe"  # on the source, to the size of the model's vocabulary
    return said | ({"model.vocab_size": recipe.model.vocab_size} if trained else {})


def unlike_data(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """How two recipes differ in those values; empty if their validation losses are comparable."""
    return _unlike(data_of(first), data_of(second))


def _unlike(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)}


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one flat table, by `table.key`."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def lasting(changed: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """The differences besides those that only change when the training ends."""
    ends = {f"train.{name}" for name in ENDS}
    return {key: values for key, values in changed.items() if key not in ends}


def refusal(where: str, changed: dict[str, tuple[Any, Any]]) -> str:
    """The line for a folder that holds another recipe's run."""
    shown = [f"{key} ({old} before, {new} now)" for key, (old, new) in changed.items()]
    more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
    return (
        f"{where} holds a run of another recipe: {', '.join(shown[:2])}{more}; give another folder with --run, "
        f"start from its weights with --fork {where}, or use the recipe that made it"
    )
