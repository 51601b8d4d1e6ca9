"""What trainers print, made here: a template a format (diagnose_formats.toml), filled with a run whose times are known.

text = FORMATS["megatron"].text(run)
"""

import tomllib
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """A run as it was: every update and what it took."""

    updates: int = 60
    step_s: float = 0.5
    tokens: int = 65_536
    gpus: int = 8
    losses: tuple[float, ...] = ()
    times: tuple[float, ...] = ()

    def took_s(self, step: int) -> float:
        return self.times[step - 1] if self.times else self.step_s

    def loss(self, step: int) -> float:
        return self.losses[step - 1] if self.losses else 8.0 * (0.2 + 1 / (1 + step / 20))

    def clock_s(self, step: int) -> float:
        return sum(self.took_s(each) for each in range(1, step + 1)) if self.times else step * self.step_s

    def at(self, step: int) -> datetime:
        return datetime(2026, 3, 1, 9, 30) + timedelta(seconds=self.clock_s(step))

    def stamp(self, step: int) -> str:
        return f"{self.at(step):%Y-%m-%d %H:%M:%S},{self.at(step).microsecond // 1000:03d}"

    def values(self, n: int) -> dict[str, Any]:
        """What a template may name of update `n`."""
        s, clock = self.took_s(n), self.clock_s(n)
        return {
            "n": n,
            "updates": self.updates,
            "loss": self.loss(n),
            "s": s,
            "mean": self.step_s,
            "clock": clock,
            "bar_clock": hms(clock),
            "at": self.at(n),
            "stamp": self.stamp(n),
            "tokens": self.tokens,
            "rate": self.tokens / s,
            "rate_of_one": self.tokens / s / self.gpus,
            "bar": self.bar(n),
            "ten_bars": " ".join(self.bar(each) for each in range(max(1, n - 9), n + 1)),
            "timedelta": timedelta,
        }

    def bar(self, n: int) -> str:
        left, clock = hms((self.updates - n) * self.step_s), hms(self.clock_s(n))
        return f"{100 * n // self.updates:3d}%|███       | {n}/{self.updates} [{clock}<{left}, {self.took_s(n):5.2f}s/it]"


def hms(seconds: float) -> str:
    whole = int(seconds)
    hours = f"{whole // 3600:02d}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:02d}:{whole % 60:02d}"


def filled(template: str, values: dict[str, Any]) -> str:
    return str(eval(f"f{template!r}", values))


@dataclass(frozen=True)
class Format:
    line: str
    tenth: str = ""
    head: str = ""
    tail: str = ""
    every: int = 1
    name: str = "train.log"
    trainer: str = ""
    tokens: bool = True
    """Whether tokens/s of all GPUs follow from the log."""
    times: bool = True
    """Whether the log holds times at all."""
    exact: float = 0.02
    """How well the time of an update can be known from it."""
    losses: bool = True
    per_line: int = 1
    """Updates that a line counts."""

    @property
    def exact_lines(self) -> bool:
        """Whether every update has a line, with a time that is its own."""
        return self.every == 1 and self.exact <= 0.02 and self.per_line == 1

    def text(self, run: Run) -> str:
        steps = range(self.every, run.updates + 1, self.every)
        lines = [filled(self.line + (self.tenth if n % 10 == 0 else ""), run.values(n)) for n in steps]
        return "\n".join(filter(None, [self.head, *lines, self.tail])) + "\n"


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FORMATS = {name: Format(**about) for name, about in _TABLE.items()}
