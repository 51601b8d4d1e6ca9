"""What a diagnosis says: a cause with its evidence in numbers, the fix, and what the fix should bring.

    Finding(cause="slow-loader", title=..., evidence=[Evidence("data wait", 0.31, "of the step")], fix=..., gain=Gain(1.3, 1.4, "..."), ...)

A gain is a factor on the speed of the whole step (or of the whole run, where the reason says so). A finding
about a claim or a unit has no gain: correcting a number makes nothing faster, but what was believed because
of it should not be.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

SLOW_UPDATES = "slow-updates"
"""The cause that says that time is lost and not to what: it stands behind all that do."""

Kind = Literal["failure", "cause", "claim", "unit"]


@dataclass(frozen=True)
class Gain:
    """A predicted speed-up as a range, and the arithmetic behind it."""

    low: float
    high: float
    why: str

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


@dataclass(frozen=True)
class Evidence:
    name: str
    value: float | str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    cause: str
    """A short fixed name; docs/diagnose.md lists them."""
    kind: Kind
    """`failure`: why it did not train at all; `cause`: why it is slow; `claim`: a statement that cannot hold;
    `unit`: a number that means something else than it seems to."""
    title: str
    evidence: tuple[Evidence, ...]
    fix: str
    gain: Gain | None
    confidence: float
    """0 to 1: how sure it is that the cause is there and the fix removes it."""
    optimisation: str | None = field(default=None)
    """The entry of the catalogue that applies the fix."""


def worth(finding: Finding) -> float:
    """What orders findings: the time that the fix should save, times the confidence."""
    return (1 - 1 / finding.gain.middle) * finding.confidence if finding.gain else 0.0


def ordered(findings: list[Finding]) -> list[Finding]:
    """Failures first, for the speed of a run that failed comes second; then most worth; what brings no speed
    after it, the surest first."""
    return sorted(
        findings,
        key=lambda f: (
            f.kind != "failure",
            worth(f) == 0,
            f.cause == SLOW_UPDATES,
            -worth(f),
            -f.confidence,
            f.cause,
        ),
    )
