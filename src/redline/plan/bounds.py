"""What bounds a plan from outside the recipe: the environment, a profile, and what the user typed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from redline.errors import ConfigError
from redline.plan.plan import Why
from redline.plan.profiles import Profile

Decision = tuple[Any, Why]


@dataclass(frozen=True)
class Outside:
    """What comes from outside the recipe: environment, profile, and which pins the user typed."""

    environment: Mapping[str, str]
    profile: Profile | None = None
    typed: frozenset[str] = frozenset()
    prefer: str = "speed"
    """`memory`: of the ways to run a pass that is not too thin, the one that takes the least."""


def bounded_slots(chosen: Decision, outside: Outside, *, pin: Decision | None = None) -> Decision:
    """The slots that a rule or a measurement gave, or fewer: MICRO_BATCH_SIZE, CHUNK_SIZE, a profile and a pin are
    upper bounds."""
    bounds = [
        (bound, Why(reason=f"{name}={bound} in the environment", source="environment"))
        for name in ("MICRO_BATCH_SIZE", "CHUNK_SIZE")
        if (bound := positive(outside.environment, name)) is not None
    ]
    if not bounds and (profile := outside.profile) is not None:
        bounds.append((profile.sample_batch, Why(reason=f"profile {profile.name}", source="profile")))
    if pin is not None:
        bounds.append(pin)
    bound, why = min(bounds, key=lambda decision: decision[0], default=chosen)
    if bound >= chosen[0]:
        return chosen
    reason = f"{why.reason}, an upper bound; without it {chosen[0]:,}: {chosen[1].reason}"
    return bound, replace(why, reason=reason)


def positive(environment: Mapping[str, str], name: str) -> int | None:
    """The whole number in an environment variable; None if it is not set."""
    text = environment.get(name)
    if text is None or text == "":
        return None
    if not text.isdecimal() or len(text) > 18 or int(text) == 0:
        raise ConfigError(f"{name} in the environment must be a whole number greater than 0, got {text!r}")
    return int(text)
