"""What bounds a plan from outside the recipe: the environment, a profile, and what the user typed.

A profile is a named set of upper bounds from public RFT recipes. The planner derives its own values for any GPU; a
profile only lowers them, and the plan says so."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from redline.config.recipe import Recipe
from redline.errors import ConfigError, Say, nearest
from redline.plan.plan import Why

Decision = tuple[Any, Why]


@dataclass(frozen=True, kw_only=True)
class Profile:
    name: str
    sample_batch: int
    """Sequences generated together (MICRO_BATCH_SIZE)."""
    micro_batch: int
    """Sequences in one training pass (A100_BATCH_SIZE)."""
    samples_per_question: int


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="a100-80g", sample_batch=512, micro_batch=64, samples_per_question=50),
        Profile(name="a100-40g", sample_batch=256, micro_batch=32, samples_per_question=30),
        Profile(name="v100-32g", sample_batch=128, micro_batch=16, samples_per_question=20),
        Profile(name="conservative", sample_batch=32, micro_batch=8, samples_per_question=15),
    )
}


def find_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise ConfigError(f"no profile {name!r}{nearest(name, PROFILES)}; known: {', '.join(PROFILES)}")
    return PROFILES[name]


def fewer_samples(recipe: Recipe, profile: Profile | None, say: Say) -> Recipe:
    """The recipe with at most the profile's samples per question; the user is told that this is another recipe."""
    wanted = recipe.sample.samples_per_question
    if recipe.workload != "rft" or profile is None or profile.samples_per_question >= wanted:
        return recipe
    most = profile.samples_per_question
    say(f"profile {profile.name} lowers sample.samples_per_question from {wanted} to {most}: another recipe")
    return replace(recipe, sample=replace(recipe.sample, samples_per_question=most))


@dataclass(frozen=True)
class Outside:
    environment: Mapping[str, str]
    profile: Profile | None = None
    typed: frozenset[str] = frozenset()
    """The pins that the user typed with --set."""
    prefer: str = "speed"
    """`memory`: of the ways to run a pass that is not too thin, the one that takes the least memory."""


def bounded_slots(chosen: Decision, outside: Outside, *, pin: Decision | None = None) -> Decision:
    """The slots of a rule or a measurement, or fewer: MICRO_BATCH_SIZE, CHUNK_SIZE, a profile and a pin bound them."""
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
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18 or int(text) == 0:
        raise ConfigError(f"{name} in the environment must be a whole number greater than 0, got {text!r}")
    return int(text)
