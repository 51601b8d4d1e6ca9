"""The source of an RL run: a batch is a rollout, drawn from the weights as they are, or by workers elsewhere from those
of some steps before (`rl.max_versions_behind`), while the trainer computes an update.

    source = Rollouts(domains, policy, algorithm, samples, done=0)
    rollout = source.next()      # questions of every domain, answers, rewards

Questions and random numbers are functions of (seed, step), and groups are kept as soon as they are scored, so an
attempt that was killed neither loses nor repeats an answer: what is in the step's file is not drawn again. Each
group names the version of the weights that drew it. What was in flight is drawn again, from the weights of the attempt
that resumes.
Questions that teach nothing (to GRPO: all answers equally good) are replaced, `rl.refills` times. Several processes
share the questions and exchange the answers, so that all of them hold the whole rollout.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import torch

from redline.config.rl import RlConfig
from redline.rl.algorithm import Algorithm, Part, Row
from redline.rl.domains import Domains
from redline.rl.policy import Policy, Run, Voice
from redline.rl.samples import Group, Key, Sample, Samples, read_group, write_group
from redline.train.process import Process
from redline.train.step import Update

PENALISED = 0.2
"""Share of the longest answer over which the penalty for length rises from 0 to 1 (DAPO: 4,096 of 20,480)."""


@dataclass
class Rollout:
    """What a step learns from: all of it, on every process."""

    position: int
    """Steps done when this one is."""
    all_rows: list[Row]
    facts: dict[str, float]
    groups: Sequence[Group] = ()
    counted: bool = True
    """On the first process, which counts rows and tokens for all."""
    parts: list[Part] = field(default_factory=list)
    prepared: bool = False
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)
    """Critic updates already taken, when memory ran out in the next one."""

    @property
    def rows(self) -> int:
        return self.counted * len(self.all_rows)

    @property
    def tokens(self) -> int:
        return self.counted * sum(row.example.length for row in self.all_rows)

    @property
    def targets(self) -> int:
        return self.counted * sum(len(row.example.answer) for row in self.all_rows)


@dataclass
class _Drawing:
    """A step's questions, answers and rewards, as they come."""

    step: int
    version: int
    voice: Voice
    phase: Callable[[str | None], None]
    groups: list[Group] = field(default_factory=list)
    rows: dict[Key, list[Row]] = field(default_factory=dict)
    generated_s: float = 0.0
    """When the last token of a round was there."""
    reward_s: float = 0.0
    spent_s: float = 0.0

    def rewarding(self) -> None:
        self.phase("reward")
        self.generated_s = time.perf_counter()


class Rollouts:
    def __init__(
        self, domains: Domains, policy: Policy, algorithm: Algorithm, samples: Samples, *, done: int
    ) -> None:
        self.domains, self.policy, self.algorithm, self.samples = domains, policy, algorithm, samples
        self.process, self.rl, self.phase, self.done = policy.process, policy.rl, policy.phase, done
        self.waited_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redline-draw")
        self._ahead: dict[int, Future[_Drawing]] = {}
        """Steps that are drawn during updates."""

    def next(self) -> Rollout:
        if self.process.device.type == "cuda":
            torch.cuda.synchronize()  # the previous update must not count as generation
        step, began_s, weights_s = self.done + 1, time.perf_counter(), self.policy.weights_s
        if (ahead := self._ahead.pop(step, None)) is None:
            drawn = self._draw(_Drawing(step, self.done, self.policy.voice(), self.phase))
        else:
            self.phase("generate")
            drawn = ahead.result()
        waited_s = time.perf_counter() - began_s - (self.policy.weights_s - weights_s)
        self.phase("update")
        last = min(step + self.policy.behind, self.domains.recipe.train.steps)
        if ahead_of := range(step + 1 + len(self._ahead), last + 1):
            voice = self.policy.voice()
            for later in ahead_of:
                drawing = _Drawing(later, self.done, voice, lambda name: None)
                self._ahead[later] = self._thread.submit(self._draw, drawing)
        self.done = step
        # The rewards come last in what an update hid.
        reward_s = min(drawn.reward_s, waited_s)
        times = {
            "weights_s": self.policy.weights_s - weights_s,
            "reward_s": reward_s,
            "generate_s": waited_s - reward_s,
        }
        if ahead is not None:
            times |= {"beside_s": max(0.0, drawn.spent_s - waited_s)}
        return self._rollout(drawn, times)

    def close(self) -> None:
        self.phase(None)
        self.policy.stop()
        self._thread.shutdown(cancel_futures=True)
        self.policy.close()

    def _draw(self, drawing: _Drawing) -> _Drawing:
        """All questions of a step, those that teach nothing replaced."""
        began_s = time.perf_counter()
        kept = {group.key: group for group in self.samples.of(drawing.step)}
        self.process.barrier()  # nobody writes before all have read
        shares, rows = self.domains.shares(), drawing.rows
        wanted = [(name, n) for name, count in shares.items() for n in range(count)]
        for _ in range(1 + self.rl.refills):
            drawn = self._groups(drawing, wanted, kept)
            drawing.groups += drawn
            rows |= {group.key: self._rows(group) for group in drawn}
            asked, useful = (Counter(name for name, _ in keys) for keys in (rows, filter(rows.get, rows)))
            wanted = [(name, asked[name] + n) for name in shares for n in range(shares[name] - useful[name])]
            if not wanted:
                break
        self.samples.sync(drawing.step)
        drawing.spent_s = time.perf_counter() - began_s
        return drawing

    def _groups(self, drawing: _Drawing, wanted: Sequence[Key], kept: dict[Key, Group]) -> list[Group]:
        """These groups in their order: from the file of the step, or drawn now and written there."""
        if missing := [key for key in wanted if key not in kept]:
            mine = missing[self.process.rank :: self.process.world_size]
            drawing.phase("generate")
            with drawing.voice() as run:  # on all processes, even one with nothing to generate
                drawn = self._generate(drawing, run, mine)
            kept |= {group.key: group for group in _exchange(drawn, self.process)}
            if self.process.is_first:
                self.samples.add([kept[key] for key in missing if key not in mine])
        return [kept[key] for key in wanted]

    def _generate(self, drawing: _Drawing, run: Run, keys: Sequence[Key]) -> list[Group]:
        """Answers and rewards of these groups; out of memory, it keeps what is done and goes on with fewer slots."""
        step, groups = drawing.step, dict[Key, Group]()
        asked = {key: self.domains.ask(step, key) for key in keys}
        while left := {key: one for key, one in asked.items() if key not in groups}:
            answers = self.domains.answers(
                run,
                left,
                samples=self.rl.group_size,
                seed=partial(self.domains.seed, step),
                generated=drawing.rewarding,
            )
            try:
                for key, samples in answers:
                    about, prompt = left[key].question, left[key].prompt
                    groups[key] = Group(step, *key, about.id, about.text, prompt, drawing.version, samples)
                    if self.process.is_first:
                        self.samples.add([groups[key]])
            except torch.OutOfMemoryError as error:
                self.policy.fewer_slots(error)
            else:
                drawing.reward_s += time.perf_counter() - drawing.generated_s
        return list(groups.values())

    def _rows(self, group: Group) -> list[Row]:
        return self.algorithm.rows(group, [shaped_reward(sample, self.rl) for sample in group.answers])

    def _rollout(self, drawn: _Drawing, times: dict[str, float]) -> Rollout:
        groups, found = drawn.groups, drawn.rows
        rows = [row for own in found.values() for row in own if not (self.rl.overlong == "mask" and row.cut)]
        failed = [sample.reason for group in groups for sample in group.answers if sample.reason is not None]
        if failed:
            self.policy.event("scorer_failed", step=self.done, answers=len(failed), why=failed[0])
        if not rows:
            self.policy.event("nothing_to_learn", step=self.done, groups=len(groups))
        facts = {**rollout_facts(groups), "skipped_groups": sum(not own for own in found.values()), **times}
        if self.policy.behind:
            facts["versions_behind"] = fmean(self.done - 1 - group.version for group in groups)
        return Rollout(self.done, rows, facts, groups, counted=self.process.is_first)


def rollout_facts(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a step's answers, over all of them and by domain."""
    answers = [(group.domain, sample) for group in groups for sample in group.answers]
    sizes = [len(sample.tokens) for _, sample in answers]
    found = {
        "response_tokens": fmean(sizes),
        "cut_share": fmean(sample.cut for _, sample in answers),
        "groups": len(groups),
        "new_tokens": sum(sizes),
    }
    for domain in ("", *dict.fromkeys(name for name, _ in answers)):
        own = [sample for name, sample in answers if domain in ("", name)]
        end = f".{domain}" if domain else ""
        found[f"reward{end}"] = fmean(sample.reward for sample in own)
        found[f"accuracy{end}"] = fmean(sample.correct for sample in own)
    return found


def shaped_reward(sample: Sample, rl: RlConfig) -> float:
    """The reward less the penalty for an answer that nears the longest, or reaches it."""
    if rl.overlong != "penalty":
        return sample.reward
    free = (1 - PENALISED) * rl.max_new_tokens
    return sample.reward - max(0.0, (len(sample.tokens) - free) / (rl.max_new_tokens - free))


def _exchange(groups: list[Group], process: Process) -> list[Group]:
    if process.world_size == 1:
        return groups
    return [read_group(line) for lines in process.all_of(list(map(write_group, groups))) for line in lines]
