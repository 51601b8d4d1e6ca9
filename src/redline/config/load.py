"""Strict reading: TOML or a shipped name -> a recipe, with `--set table.key=value` overrides; and back to
TOML.

An unknown key, a wrong type or an impossible combination is an error that names the nearest right thing. No
aliases and no silent defaults: what a recipe does not say is the default written in `recipe.py` (or `rft.py`,
which reads its recipes through here). `--set table.key=none` takes a value back; where `none` is itself a
value of the field (`plan.recompute`) it is that value.
"""

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from redline.config.recipe import Recipe, check
from redline.errors import ConfigError, nearest

T = TypeVar("T")
Workload = Literal["pretrain", "rft"]


def shipped(workload: Workload = "pretrain") -> dict[str, Path]:
    """Names of the workload's recipes that come with the package, in alphabetical order; those of RFT lie in
    a folder of their own."""
    root = Path(str(resources.files("redline"))) / "recipes"
    names = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.toml"))}
    return {name: path for name, path in names.items() if name.startswith("rft/") == (workload == "rft")}


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its shipped name or its path, apply `table.key=value` overrides, and check every
    rule."""
    return check(build(Recipe, read_table(Recipe, name_or_path, overrides), where=str(name_or_path)))


def read_table(
    kind: type, name_or_path: str, overrides: Sequence[str] = (), workload: Workload = "pretrain"
) -> dict[str, Any]:
    """The table of a recipe of this kind with the overrides put in, named after its file unless it has a
    name; nothing in it is checked yet."""
    path = _find(name_or_path, workload)
    table = _parse_file(path)
    for override in overrides:
        _apply(kind, table, override)
    table.setdefault("name", path.stem)
    return table


def workload_of(name_or_path: str) -> Workload:
    """Whose recipe it is, for a command that takes either: by its shipped name, or by whether the file has a
    task."""
    if name_or_path in shipped("rft"):
        return "rft"
    is_file = name_or_path not in shipped() and Path(name_or_path).is_file()
    return "rft" if is_file and "task" in _parse_file(Path(name_or_path)) else "pretrain"


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_text(encoding="utf-8-sig"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a text file: {error}") from error


def _find(name_or_path: str, workload: Workload) -> Path:
    recipes = shipped(workload)
    if name_or_path in recipes:
        return recipes[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if name_or_path in shipped("pretrain" if workload == "rft" else "rft"):
        kind, use = (
            ("pre-training", "redline train") if workload == "rft" else ("fine-tuning", "redline rft run")
        )
        raise ConfigError(
            f"{name_or_path} is a {kind} recipe, which this command does not take: use `{use} {name_or_path}`"
        )
    raise ConfigError(
        f"no recipe {name_or_path!r}: give a path or one of"
        f" {', '.join(recipes)}{nearest(name_or_path, recipes)}"
    )


def parse(text: str, where: str) -> dict[str, Any]:
    """TOML as tables."""
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
            raise ConfigError(
                f"{where}: unknown key {key!r}{nearest(key, fields)}; known: {', '.join(fields)}"
            )
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in table.items()}
    for name, f in fields.items():
        if (
            name not in values
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ):
            raise ConfigError(f"{where}: {name!r} is missing")
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(
                f"{where} must be one of {', '.join(map(str, args))}; got"
                f" {value!r}{nearest(str(value), args)}"
            )
        return value
    if origin in (dict, tuple):
        return _convert_many(origin, args, value, where)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not types.NoneType]
        return None if value is None else _convert(inner[0], value, where)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{where} must be a number of at most 64 bits, got one of {value.bit_length()}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        kinds = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise ConfigError(f"{where} must be {kinds.get(hint, hint)}, got {value!r} ({type(value).__name__})")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where} must be a finite number, got {value}")
    return value


def _convert_many(origin: type, args: tuple[Any, ...], value: Any, where: str) -> Any:
    """A table of like values (`dict[str, T]`) or a list of them (`tuple[T, ...]`)."""
    if origin is dict and isinstance(value, dict):
        return {key: _convert(args[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(args[0], entry, where) for entry in value)
    raise ConfigError(f"{where} must be a {'table' if origin is dict else 'list'}, got {value!r}")


def _apply(kind: type, table: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in the table. The value is read as TOML, and as a plain string where that fails."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError(f"--set takes table.key=value, got {override!r}")
    *parents, key = dotted.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a table")
    # TOML has no word for it: back to the default
    if text.strip() == "none" and _taken_back([*parents, key], kind):
        table.pop(key, None)
        return
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        table[key] = text


def _taken_back(names: Sequence[str], kind: Any) -> bool:
    """Whether `none` says that the field is not given: it does unless it is one of the field's own words, or
    there is no such field."""
    for name in names:
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return kind is not None and not any(
        "none" in typing.get_args(hint) for hint in (kind, *typing.get_args(kind))
    )


def to_toml(recipe: Any) -> str:
    """A recipe's dataclass as TOML that reads back to an equal one; values that are not given are left
    out."""
    lines: list[str] = []

    def table(obj: Any, prefix: str) -> None:
        nested = []
        for f in dataclasses.fields(obj):
            value = getattr(obj, f.name)
            if dataclasses.is_dataclass(value):
                nested.append((f.name, value))
            elif value is not None:
                lines.append(f"{f.name} = {_toml_value(value)}")
        for name, value in nested:
            lines.extend(["", f"[{prefix}{name}]"])
            table(value, f"{prefix}{name}.")

    table(recipe, "")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)


def from_toml(text: str, where: str) -> Recipe:
    """Read back what `to_toml` wrote."""
    return check(build(Recipe, parse(text, where), where))
