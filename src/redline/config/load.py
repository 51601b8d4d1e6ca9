"""Strict reading: TOML or a shipped name -> a recipe, with `--set table.key=value` overrides; and back to TOML.

An unknown key, a wrong type or an impossible combination is an error that suggests the nearest right one. There are no
aliases and no hidden defaults: what a recipe leaves out is the default written in `recipe.py`. `--set table.key=none`
removes a value; if `none` is one of the field's values (`plan.recompute`), it sets that.
"""

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from redline.config.recipe import DEFAULTS, TABLES, Recipe
from redline.config.rft import PRESETS
from redline.config.rules import check
from redline.errors import ConfigError, Say, nearest

T = TypeVar("T")


def shipped() -> dict[str, Path]:
    """Names of the recipes that come with the package, in alphabetical order."""
    root = Path(str(resources.files("redline"))) / "recipes"
    return dict(sorted((str(path.relative_to(root).with_suffix("")), path) for path in root.rglob("*.toml")))


def load_recipe(
    name: str, overrides: Sequence[str] = (), *, preset: str | None = None, say: Say = lambda note: None
) -> Recipe:
    """Read a recipe by name or path, with preset and overrides, and check it. `say` is told what was adjusted."""
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}{nearest(preset, PRESETS)}: known are {', '.join(PRESETS)}")
    path = _find(name)
    try:
        table = parse(path.read_text(encoding="utf-8-sig"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
    first = [f"sample.{key}={value}" for key, value in PRESETS[preset].items()] if preset else []
    for override in (*first, *overrides):
        _apply(Recipe, table, override)
    _replace_the_other(table, {override.partition("=")[0].strip() for override in overrides})
    table.setdefault("name", path.stem)
    recipe = _from_table(table, name)
    train = recipe.train
    if train.steps and train.warmup_steps > train.steps:
        clipped = max(1, train.steps // 10)
        say(
            f"train.warmup_steps {train.warmup_steps} exceeds the run's {train.steps:,} steps: using {clipped:,}"
        )
        recipe = replace(recipe, train=replace(train, warmup_steps=clipped))
    return recipe


def tables_of(workload: str) -> tuple[str, ...]:
    """The tables that a recipe of this workload may have."""
    return (*TABLES[workload], *(("test",) if workload in ("rft", "rl") else ()), "plan")


def from_toml(text: str, where: str) -> Recipe:
    """Read back what `to_toml` wrote."""
    return _from_table(parse(text, where), where)


def _from_table(table: dict[str, Any], where: str) -> Recipe:
    """The checked recipe, over its workload's defaults. A table that the workload does not read is an error."""
    workload = table.get("workload", "pretrain")
    if isinstance(workload, str) and workload in TABLES:
        for name in Recipe.__dataclass_fields__:
            if isinstance(table.get(name), dict) and name not in tables_of(workload):
                unread = f"workload {workload!r} does not read [{name}]"
                raise ConfigError(f"{where}: {unread}: remove it, or correct workload")
        for name, values in DEFAULTS.get(workload, {}).items():
            given = table.setdefault(name, {})
            if isinstance(given, dict):
                dropped = {other for name, other in _EITHER.items() if given.get(name)}
                table[name] = {key: value for key, value in values.items() if key not in dropped} | given
    return check(build(Recipe, table, where))


_EITHER = {"steps": "epochs", "warmup_steps": "warmup_fraction"}
"""Pairs of keys that say one thing in two ways."""


def _replace_the_other(table: dict[str, Any], named: set[str]) -> None:
    """If --set gives steps, drop the epochs (or the fraction) that the file gives."""
    train = table.get("train")
    for name, other in _EITHER.items():
        replaced = f"train.{name}" in named and f"train.{other}" not in named
        if replaced and isinstance(train, dict) and train.get(name):
            train.pop(other, None)


def _find(name: str) -> Path:
    recipes = shipped()
    path = recipes.get(name, Path(name))
    if not path.is_file():
        close = nearest(name, recipes)
        known = "`redline recipes` lists them" if close else f"give a path or one of {', '.join(recipes)}"
        raise ConfigError(f"no recipe {name!r}{close}: {known}")
    return path


def parse(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise ConfigError(f"{where}: not valid TOML: {error}") from error


def build(kind: type[T], table: Any, where: str) -> T:
    """Make the frozen dataclass `kind` from a table, refusing unknown keys, missing keys and wrong types."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key in table:
        if key not in fields:
            inside = " or ".join(keys_named(key, kind))
            meant = f" (did you mean {inside}?)" if inside else nearest(key, fields)
            raise ConfigError(f"{where}: unknown key {key!r}{meant}; known: {', '.join(fields)}")
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in table.items()}
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(f"{where}: {name!r} is missing")
    return kind(**values)


def keys_named(key: str, kind: type = Recipe) -> list[str]:
    """The keys of that name in a recipe's tables: `lr` is train.lr."""
    hints = typing.get_type_hints(kind)
    kinds = [(name, part) for name, hint in hints.items() for part in (hint, *typing.get_args(hint))]
    return [f"{name}.{key}" for name, part in kinds if key in getattr(part, "__dataclass_fields__", ())]


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value not in args:
            known = ", ".join(map(str, args))
            raise ConfigError(f"{where} must be one of {known}; got {value!r}{nearest(str(value), args)}")
        return value
    if origin is dict and isinstance(value, dict):
        return {key: _convert(args[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(args[0], entry, where) for entry in value)
    if origin in (dict, tuple):
        raise ConfigError(f"{where} must be a {'table' if origin is dict else 'list'}, got {value!r}")
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not types.NoneType]
        return None if value is None else _convert(inner[0], value, where)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{where} must fit in 64 bits, got one of {value.bit_length()} bits")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        kinds = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ConfigError(f"{where} must be {kinds.get(hint, hint)}, got {value!r} ({type(value).__name__})")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where} must be a finite number, got {value}")
    return value


def _apply(kind: type, table: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in the table. The value is read as TOML, or as plain text if it is not TOML."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError(f"--set takes table.key=value, got {override!r}")
    *parents, key = dotted.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a table")
    # TOML has no null: fall back to the default
    if text.strip() == "none" and _taken_back([*parents, key], kind):
        table.pop(key, None)
        return
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        table[key] = text


def _taken_back(names: Sequence[str], kind: Any) -> bool:
    """Whether `none` means "not given": it does unless it is one of the field's values."""
    for name in names:
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    hints = (kind, *typing.get_args(kind))
    return kind is not None and not any("none" in typing.get_args(hint) for hint in hints)


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML that reads back equal: the tables of its workload, without values that are not given."""
    lines = [f"{name} = {_toml_value(getattr(recipe, name))}" for name in ("name", "about", "workload")]
    for name in tables_of(recipe.workload):
        if (table := getattr(recipe, name)) is not None:
            given = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml_value(value)}" for key, value in given.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)
