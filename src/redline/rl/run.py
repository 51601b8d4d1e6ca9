"""The RL workload: a model, questions and their scorers become a better model.

    with join(plan.hardware.kind) as process:
        outcome = reinforce(recipe, plan, Path("runs/rl-demo"), process)

runs/rl-demo/
    recipe.toml  plan.json  metrics.jsonl  events.jsonl  checkpoints/
    samples/             step-00000012.jsonl: every question and answer of a step (samples.py)
    adapter/             in PEFT's format, when the run has finished (model/, a Hugging Face folder, where the recipe
                         has no [lora] table)

If it is killed, the same call resumes: a step whose answers are in its file is not drawn again.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from redline.config.recipe import Recipe, fingerprint_of
from redline.engine.ray import OnRay
from redline.errors import TrainingError
from redline.finetune import check_result, prepare, write_result
from redline.plan.plan import Plan
from redline.plan.predict import longest_row, pcgrad_place
from redline.rl.algorithm import Algorithm
from redline.rl.domains import Domains, open_domains
from redline.rl.grpo import GRPO
from redline.rl.imitation import IMITATION
from redline.rl.objective import Policies, Updates
from redline.rl.policy import Policy
from redline.rl.ppo import PPO, make_critic
from redline.rl.rollout import Rollouts
from redline.rl.samples import Samples
from redline.rl.speed import make_derived
from redline.rl.validation import make_validation
from redline.rl.watchdog import Watchdog
from redline.train.execution import COMPUTE_DTYPE, check_device, equip
from redline.train.loop import Outcome, Trainer
from redline.train.objective import Job
from redline.train.open_run import OpenRun, Watching, open_run
from redline.train.pcgrad import Mode, PCGrad
from redline.train.process import Process, shard
from redline.train.restore import Opened, open_weights
from redline.train.step import Combination, Learner

ALGORITHMS: dict[str, Algorithm] = {"grpo": GRPO, "ppo": PPO, "imitation": IMITATION}


def reinforce(
    recipe: Recipe,
    plan: Plan,
    run: Path,
    process: Process,
    *,
    observers: Watching = lambda resume_step: (),
    fork: Path | None = None,
    on: OnRay | None = None,
) -> Outcome:
    """Train on the recipe's domains and write the result. `on`: workers that answer; else the trainer does."""
    check_device(plan)
    check_result(recipe)
    with open_run(recipe, plan, run, process, observers=observers, fork=fork) as opened:
        base = open_weights(Path(recipe.model.init_from or ""))
        with (
            open_domains(recipe, base, processes=process.world_size) as domains,
            Watchdog(opened.event, alone=process.world_size == 1) as watchdog,
        ):
            phase = watchdog.phase
            job = job_of(recipe, plan, base, domains, process, opened=opened, phase=phase, on=on)
            trainer = Trainer(job, process)
            if trainer.progress.step == 0 and recipe.train.eval_every and job.validate is not None:
                opened.event("validation", step=0, **job.validate(job.model, plan.micro_batch))
                trainer.drain()  # it is not part of the first step's time
            outcome = trainer.run()
        if outcome.why.startswith("the phase "):
            raise TrainingError(f"{outcome.why}; a checkpoint was saved: run the same command to resume")
        if outcome.complete:
            write_result(job.model, recipe, base, process, adapter=run / "adapter", whole=run / "model")
        return outcome


def job_of(
    recipe: Recipe,
    plan: Plan,
    base: Opened,
    domains: Domains,
    process: Process,
    *,
    opened: OpenRun | None = None,
    phase: Callable[[str | None], None] = lambda name: None,
    on: OnRay | None = None,
) -> Job:
    """What the loop needs; without a run folder nothing is kept. `phase` is told which part of a step begins."""
    rl, opened = domains.rl, opened or OpenRun()
    algorithm, dtype = ALGORITHMS[rl.algorithm], COMPUTE_DTYPE[plan.precision]
    model = base.build(process.device, dtype)
    prepare(model, recipe, process)
    equip(model, plan, longest=longest_row(recipe))
    critic = make_critic(base, recipe, plan, process) if rl.algorithm == "ppo" else None
    reference = None
    if rl.kl > 0 and recipe.lora is None:
        reference = base.build(process.device, dtype).requires_grad_(False)
        if process.world_size > 1:
            shard(reference, process, dtype)
    policy = Policy(model, base, process, rl, slots=plan.slots, event=opened.event, phase=phase, on=on)
    samples = Samples(opened.run)
    return Job(
        recipe=recipe,
        plan=plan,
        steps=recipe.train.steps,
        model=model,
        source=lambda position, _done: Rollouts(domains, policy, algorithm, samples, done=position or 0),
        objective=Policies(algorithm, recipe, process, pass_size=plan.micro_batch, reference=reference),
        executor=partial(Updates, critic=critic),
        state=critic.state if critic is not None else {},
        data_fingerprint=fingerprint_of(
            [[name, q.id, q.text, q.answer] for name, own in domains.by_name.items() for q in own.questions]
        ),
        opened=opened,
        validate=make_validation(domains, policy),
        combine=_combination(recipe, plan, opened.event),
        derived=make_derived(plan),
    )


def _combination(
    recipe: Recipe, plan: Plan, event: Callable[..., None]
) -> Callable[[Learner, Callable[[], int]], Combination] | None:
    """The domains' gradients kept apart, compared, and projected, as far as the recipe says so."""
    rl = recipe.rl
    if rl is None or rl.pcgrad == "off":
        return None
    mode: Mode = rl.pcgrad
    place, why = pcgrad_place(recipe, plan)
    event("pcgrad", mode=mode, kept_on=place, why=why)
    return lambda learner, updates_done: PCGrad(
        learner, groups=rl.names, mode=mode, seed=recipe.train.seed, updates_done=updates_done, place=place
    )
