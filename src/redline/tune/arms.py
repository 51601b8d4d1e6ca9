"""From an ablation's switches to a trial: a plan for training, an engine's settings for generation. No torch.

    arms = arms_for("train", recipe, hardware, samples=samples_of(recipe), timing=Timing())
    state = naive(entries, hardware)           # every switch off
    arms.trial(state)                          # what to measure

A state maps names of values (plan/values.py) to values, and CHANGES to the entries that change the recipe. One that does not work with the others (fused loss in
fp32) falls back to the planner's choice, so that each switch can be turned alone.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from redline.config.load import to_toml
from redline.config.recipe import LoraConfig, PlanPins, Recipe
from redline.config.rules import check
from redline.errors import ConfigError, MachineError
from redline.measure.trial import RANDOM_WEIGHTS, GenerationSwitches, Timing, Trial, train_trial
from redline.optimizations.catalogue import Optimization, Samples, WorkloadName, find
from redline.plan.plan import Hardware, Plan, Why
from redline.plan.planner import make_plan
from redline.plan.values import ALLOCATOR_VARIABLES, why_not
from redline.tune.candidates import PINS
from redline.tune.memory import divisors

Switches = dict[str, Any]
CHANGES = "changes"
"""Names of the catalogue's entries that make the recipe another one."""
GENERATION = "redline.measure.generation:GenerationSubject"


@dataclass(frozen=True, kw_only=True)
class UpdateArms:
    """Pre-training, fine-tuning and the update of RL: a state is a plan, and whether rows are padded."""

    recipe: Recipe
    hardware: Hardware
    timing: Timing

    def plan(self, state: Switches) -> tuple[Recipe, Plan]:
        """What `redline train` would be given: the recipe with the state's pins over its own, and the plan that follows."""
        recipe = changed(self.recipe, state)
        pins = {**asdict(recipe.plan), **{name: value for name, value in state.items() if name in PINS}}
        if pins["micro_batch"] is not None:
            pins["micro_batch"] = max(d for d in divisors(recipe.rows_per_update) if d <= pins["micro_batch"])
        if pins["precision"] == "fp32" and state.get("tf32"):
            pins["precision"] = "tf32"
        for name in ("cross_entropy", "attention", "graph"):  # what is not possible is left to the planner
            if why_not(name, pins[name], recipe, self.hardware, pins) is not None:
                pins[name] = None
        pinned = replace(recipe, plan=PlanPins(**pins))
        plan = make_plan(pinned, self.hardware)
        theirs = next((name for name in ALLOCATOR_VARIABLES if name in os.environ), None)
        if state.get("allocator") and theirs:
            raise ConfigError(
                f"{theirs} is set, and every trial takes the allocator from there: unset it to compare"
            )
        if "allocator" in state:
            why = {**plan.why, "allocator": Why(reason="switched by the ablation", source="user")}
            plan = replace(plan, allocator=state["allocator"], why=why)
        return pinned, plan

    def held(self, state: Switches) -> Switches:
        """The state with every value fixed that it leaves to a rule, so that one thing changes at a time."""
        try:
            plan = self.plan(state)[1]
        except MachineError:  # the first state does not fit; a later one may
            return state
        held = {name: getattr(plan, name) for name in PINS}
        return held | {name: value for name, value in state.items() if value is not None}

    def trial(self, state: Switches) -> Trial:
        return train_trial(*self.plan(state), self.timing, padded=state.get("padded", False))

    def precision(self, state: Switches) -> str:
        """What a state computes in, which sets the guard's band."""
        return self.plan(state)[1].coarsest


@dataclass(frozen=True, kw_only=True)
class GenerationArms:
    recipe: Recipe
    hardware: Hardware
    samples: Samples
    timing: Timing

    def held(self, state: Switches) -> Switches:
        return state  # nothing here is left to a rule

    def trial(self, state: Switches) -> Trial:
        how, work = GenerationSwitches(**state).in_force(), self.samples
        if how.slots is not None and how.slots >= work.prompts * work.samples:
            how = replace(how, slots=None)
        if how.cached and work.samples == 1:  # each prompt is read once anyway
            how = replace(how, shared=True)
        on = {"recipe": to_toml(self.recipe), "device": self.hardware.kind}
        setting = {**on, "samples": asdict(work), "how": asdict(how)}
        return Trial(subject=GENERATION, setting=setting, timing=self.timing)

    def precision(self, state: Switches) -> str:
        return GenerationSwitches(**state).precision


Arms = UpdateArms | GenerationArms


def arms_for(
    workload: WorkloadName, recipe: Recipe, hardware: Hardware, *, samples: Samples, timing: Timing
) -> Arms:
    if workload == "generate":
        # A step is a whole batch of samples, up to 20 s without a cache; the guard's numbers come with the first.
        timing = replace(timing, guard_steps=1)
        return GenerationArms(recipe=recipe, hardware=hardware, samples=samples, timing=timing)
    if workload == "finetune" and recipe.workload == "pretrain":
        recipe = rehearsed(recipe)
    return UpdateArms(recipe=recipe, hardware=hardware, timing=timing)


def samples_of(recipe: Recipe) -> Samples:
    """Unless the study says: a rollout of RL, or 32 of the recipe's questions, prompts as long as the answers."""
    if (rl := recipe.rl) is not None:
        return Samples(
            prompts=recipe.train.batch_size,
            samples=rl.group_size,
            prompt_tokens=rl.max_prompt_tokens,
            new_tokens=rl.max_new_tokens,
        )
    tokens = min(recipe.sample.max_new_tokens, max(1, recipe.model.context_length // 2))
    samples = recipe.sample.samples_per_question
    return Samples(prompts=32, samples=samples, prompt_tokens=tokens, new_tokens=tokens)


def changed(recipe: Recipe, state: Switches) -> Recipe:
    """The recipe with the state's changes, which must keep the rules."""
    for change in (find(name).change for name in state.get(CHANGES, ())):
        recipe = change(recipe) if change else recipe
    return check(recipe)


def rehearsed(recipe: Recipe) -> Recipe:
    """LoRA fine-tuning of a model of the recipe's shape, on random rows."""
    return replace(
        recipe,
        workload="finetune",
        model=replace(recipe.model, init_from=RANDOM_WEIGHTS),
        train=replace(recipe.train, steps=0, epochs=1, eval_every=0, early_stop_evals=0, length_ramp_steps=0),
        lora=recipe.lora or LoraConfig(),
    )


def naive(entries: Sequence[Optimization], hardware: Hardware) -> Switches:
    """Every switch off; of several for one value, the first. A CPU emulates half precision, so it takes fp32."""
    state: Switches = {"precision": "fp32"} if hardware.kind == "cpu" else {}
    for entry in entries:
        for name, value in entry.off.items():
            state.setdefault(name, value)
    return state
