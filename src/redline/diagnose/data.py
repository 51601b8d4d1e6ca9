"""The TOML files of this room, which hold what is data and not code: trainers, causes, columns, patterns."""

import re
from functools import cache
from typing import Any

from redline.record.files import shipped


def table(name: str) -> dict[str, Any]:
    return shipped(f"diagnose/{name}.toml")


@cache
def compiled(pattern: str, file: str = "patterns") -> re.Pattern[str]:
    """A regular expression with what a file has under [words] put in for <NAME>."""
    for word, stands_for in table(file)["words"].items():
        pattern = pattern.replace(f"<{word}>", stands_for)
    return re.compile(pattern)


@cache
def patterns(section: str) -> dict[str, re.Pattern[str]]:
    return {name: compiled(text) for name, text in table("patterns")[section].items()}
