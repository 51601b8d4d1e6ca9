"""The TOML files of this room, which hold what is data and not code: trainers, causes, columns, patterns."""

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(name: str) -> dict[str, Any]:
    return tomllib.loads((files("redline.diagnose") / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def patterns(section: str) -> dict[str, re.Pattern[str]]:
    """A section of patterns.toml, compiled."""
    found = dict(table("patterns")[section])
    for word, stands_for in table("patterns")["words"].items():
        found = {name: pattern.replace(f"<{word}>", stands_for) for name, pattern in found.items()}
    return {name: re.compile(pattern) for name, pattern in found.items()}
