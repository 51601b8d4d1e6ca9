"""Named sets of upper bounds, as public RFT recipes have them. On any GPU the planner derives its own values; a
profile only lowers them, and the plan says so."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from redline.config.recipe import Recipe
from redline.errors import ConfigError, nearest


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
        raise ConfigError(
            f"there is no profile {name!r}{nearest(name, PROFILES)}; known: {', '.join(PROFILES)}"
        )
    return PROFILES[name]


def fewer_samples(recipe: Recipe, profile: Profile | None, say: Callable[[str], None]) -> Recipe:
    """The recipe with at most as many samples a question as the profile allows; the user is told that this is another
    recipe."""
    wanted = recipe.sample.samples_per_question
    if recipe.workload != "rft" or profile is None or profile.samples_per_question >= wanted:
        return recipe
    say(
        f"profile {profile.name} lowers sample.samples_per_question from {wanted} to"
        f" {profile.samples_per_question}: another recipe"
    )
    return replace(recipe, sample=replace(recipe.sample, samples_per_question=profile.samples_per_question))
