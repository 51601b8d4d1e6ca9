"""How an RFT recipe is executed here: slots of the engine, examples in a pass, each with its reason and
source. Runs without torch.

Who decides, as in pre-training: the environment (MICRO_BATCH_SIZE and CHUNK_SIZE bound the slots,
A100_BATCH_SIZE and A100_GRAD_ACCUM the examples in a pass), then a profile, both as upper bounds, then the
rule. The recipe's batch stays what it is. A profile also lowers the samples a question, as the systems it
comes from did: that is a change of the recipe, and the plan says so.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redline.config.rft import RftRecipe
from redline.plan.plan import Why
from redline.plan.planner import positive
from redline.plan.profiles import Profile
from redline.record.files import read_json, write_atomic


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What comes from outside the recipe."""

    environment: Mapping[str, str]
    profile: Profile | None = None


def plan_samples(recipe: RftRecipe, bounds: Bounds) -> tuple[int, Why]:
    """Samples a question: the recipe's, or fewer by a profile."""
    wanted, profile = recipe.sample.samples_per_question, bounds.profile
    if profile is not None and profile.samples_per_question < wanted:
        reason = (
            f"at most {profile.samples_per_question} by profile {profile.name}, fewer than the recipe's"
            f" {wanted}: another recipe"
        )
        return profile.samples_per_question, Why(reason=reason, source="profile")
    return wanted, Why(reason="sample.samples_per_question", source="recipe")


def plan_precision(bf16: bool) -> tuple[str, Why]:
    """What the model computes in, as `open_on` chose it."""
    if bf16:
        return "bf16", Why(reason="this GPU multiplies bf16 at full rate", source="rule")
    return "fp32", Why(reason="a CPU, or a GPU without bf16 in hardware", source="rule")


def plan_slots(fitting: int, sequences: int, bounds: Bounds) -> tuple[int, Why]:
    """Sequences generated at once: what the engine finds room and use for here, and no more than there are to
    generate."""
    slots, why = (
        fitting,
        Why(reason="the engine's own choice for this memory and this kind of device", source="measurement"),
    )
    if sequences < slots:
        slots, why = sequences, Why(reason="as many as there are sequences to generate", source="rule")
    outside = _outside(
        bounds, {"MICRO_BATCH_SIZE": lambda bound: bound, "CHUNK_SIZE": lambda bound: bound}, "sample_batch"
    )
    if outside is None or outside[0] >= slots:
        return slots, why
    return outside[0], replace(
        outside[1], reason=f"{outside[1].reason}, an upper bound; without it {slots:,}: {why.reason}"
    )


def plan_pass(recipe: RftRecipe, bounds: Bounds) -> tuple[int, Why]:
    """Examples in one fine-tuning pass: the batch, or its largest divisor within the bounds."""
    batch = recipe.train.batch_size
    outside = _outside(
        bounds,
        {"A100_BATCH_SIZE": lambda size: size, "A100_GRAD_ACCUM": lambda times: max(1, batch // times)},
        "micro_batch",
    )
    if outside is None or outside[0] >= batch:
        return batch, Why(
            reason="the whole batch in one packed pass; running out of memory halves it", source="rule"
        )
    examples = max(divisor for divisor in range(1, outside[0] + 1) if batch % divisor == 0)
    reason = f"{outside[1].reason}, an upper bound: the largest divisor of train.batch_size {batch} within it"
    return examples, replace(outside[1], reason=reason)


def _outside(
    bounds: Bounds, variables: Mapping[str, Callable[[int], int]], of_profile: str
) -> tuple[int, Why] | None:
    """The lowest bound that the environment sets, each variable by its meaning; else the profile's; None
    where neither says any."""
    given = [
        (mean(value), f"{name}={value}")
        for name, mean in variables.items()
        if (value := positive(bounds.environment, name)) is not None
    ]
    if given:
        return min(given)[0], Why(
            reason=" and ".join(text for _, text in given) + " in the environment", source="environment"
        )
    if bounds.profile is not None:
        return getattr(bounds.profile, of_profile), Why(
            reason=f"profile {bounds.profile.name}", source="profile"
        )
    return None


def save_plan(path: Path, decisions: Mapping[str, tuple[Any, Why]]) -> None:
    """Add values with their reasons to plan.json; those of other stages stay."""
    known = read_json(path, dict) if path.is_file() else {}
    known |= {name: {"value": value, **asdict(why)} for name, (value, why) in decisions.items()}
    write_atomic(path, json.dumps(known, indent=2) + "\n")
