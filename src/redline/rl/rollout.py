"""The source of an RL run: a batch is a rollout, drawn from the weights as they are.

    source = Rollouts(domains, policy, algorithm, samples, process, done=0)
    rollout = source.next()      # questions of every domain, answers, rewards

Questions and random numbers are functions of (seed, step), and groups are kept as soon as they are scored, so an
attempt that was killed neither loses nor repeats an answer: what stands in the file of the step is not drawn again.
Answers are scored in other processes while the rest is generated. Questions that teach nothing (to GRPO: all answers
equally good) are replaced, `rl.refills` times. Several processes share the questions and exchange the answers, so that
all of them hold the whole rollout.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch.distributed as dist

from redline.config.rl import RlConfig
from redline.engine.request import Completion, Request
from redline.rl.algorithm import Algorithm, Row, share_of
from redline.rl.domains import Domains
from redline.rl.policy import Policy
from redline.rl.samples import Group, Sample, Samples, from_bytes, to_bytes
from redline.train.process import Process
from redline.train.step import Update

PENALISED = 0.2
"""Share of the longest answer over which the penalty for length rises from 0 to 1 (DAPO: 4,096 of 20,480)."""

Key = tuple[str, int]


@dataclass
class Rollout:
    """What is learnt from in a step: on every process all of it, and this process's part."""

    position: int
    """Steps done when this one is."""
    all_rows: list[Row]
    own: list[Row]
    facts: dict[str, float]
    prepared: bool = False
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)
    """Taken already, when memory ran out in the next one."""

    @property
    def rows(self) -> int:
        return len(self.own)

    @property
    def tokens(self) -> int:
        return sum(row.example.length for row in self.own)

    @property
    def targets(self) -> int:
        return sum(len(row.example.answer) for row in self.own)


class Rollouts:
    def __init__(
        self,
        domains: Domains,
        policy: Policy,
        algorithm: Algorithm,
        samples: Samples,
        process: Process,
        *,
        done: int,
        event: Callable[..., None] = lambda kind, **facts: None,
        phase: Callable[[str | None], None] = lambda name: None,
    ) -> None:
        """`phase` is told what begins: generate, reward, update."""
        self.domains, self.policy, self.algorithm, self.samples = domains, policy, algorithm, samples
        self.process, self.done, self.event, self.phase = process, done, event, phase
        self.rl: RlConfig = domains.rl
        self.waited_s = 0.0
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="redline-reward")
        self._reward_s = 0.0

    def next(self) -> Rollout:
        self._settle()
        step, began_s, weights_s = self.done + 1, time.perf_counter(), self.policy.weights_s
        self._reward_s = 0.0
        kept = {group.key: group for group in self.samples.of(step)}
        self.process.barrier()  # nobody writes before all have read
        wanted = [(name, n) for name, count in self.domains.shares().items() for n in range(count)]
        groups: list[Group] = []
        useful: list[Group] = []
        for _ in range(1 + self.rl.refills):
            groups += self._draw(step, wanted, kept)
            useful = [group for group in groups if self.algorithm.teaches(group, self._rewards(group))]
            wanted = self._replacements(groups, useful)
            if not wanted:
                break
        self.samples.sync(step)
        self.phase("update")
        self.done = step
        weights_s = self.policy.weights_s - weights_s
        times = {
            "weights_s": weights_s,
            "reward_s": self._reward_s,
            "generate_s": time.perf_counter() - began_s - weights_s - self._reward_s,
        }
        return self._rollout(step, groups, useful, times)

    def close(self) -> None:
        self.phase(None)
        self._threads.shutdown(cancel_futures=True)
        self.policy.close()

    def _settle(self) -> None:
        """Wait for the update before, so that its time is not taken for generation's."""
        if self.process.device.type == "cuda":
            torch.cuda.synchronize()

    def _replacements(self, groups: Sequence[Group], useful: Sequence[Group]) -> list[Key]:
        """As many further questions of each domain as had no lesson in them."""
        wanted: list[Key] = []
        for name, count in self.domains.shares().items():
            asked = sum(group.domain == name for group in groups)
            good = sum(group.domain == name for group in useful)
            wanted += [(name, asked + n) for n in range(count - good)]
        return wanted

    def _draw(self, step: int, wanted: Sequence[Key], kept: dict[Key, Group]) -> list[Group]:
        """These groups in their order: from the file of the step, or drawn now and written there."""
        missing = [key for key in wanted if key not in kept]
        if missing:
            mine = missing[self.process.rank :: self.process.world_size]
            self.phase("generate")
            with self.policy.speaking():  # on all processes, even on one that has nothing to say
                drawn = self._generate(step, mine)
            for group in _exchange(drawn, self.process):
                kept[group.key] = group
            if self.process.is_first:
                self.samples.add([kept[key] for key in missing if key not in mine])
        return [kept[key] for key in wanted]

    def _generate(self, step: int, keys: Sequence[Key]) -> list[Group]:
        """Answers and rewards of these groups; running out of memory keeps what is done and goes on with fewer
        slots."""
        groups: list[Group] = []
        while True:
            left = [key for key in keys if key not in {group.key for group in groups}]
            try:
                for group in self._scored(step, left) if left else ():
                    groups.append(group)
                    if self.process.is_first:
                        self.samples.add([group])
                return groups
            except torch.OutOfMemoryError as error:
                self.policy.fewer_slots(error)

    def _scored(self, step: int, keys: Sequence[Key]) -> Iterator[Group]:
        """Groups as they are scored, in the order in which their last answers came."""
        asked = {key: self.domains.ask(step=step, domain=key[0], number=key[1]) for key in keys}
        requests = [
            Request(
                prompt=one.prompt,
                sampling=self.domains.sampling(one.stops),
                samples=self.rl.group_size,
                seed=self.domains.seed(step=step, domain=key[0], number=key[1]),
                tag=key,
            )
            for key, one in asked.items()
        ]
        open_: dict[Key, list[Completion]] = {key: [] for key in keys}
        scoring: deque[tuple[Key, Future[list[Sample]]]] = deque()

        def finished(key: Key, found: Future[list[Sample]]) -> Group:
            one = asked[key]
            return Group(step, *key, one.question.id, one.question.text, one.prompt, tuple(found.result()))

        for completion in self.policy.engine.run(requests):
            key: Key = completion.request.tag
            open_[key].append(completion)
            if len(open_[key]) == self.rl.group_size:
                answers = sorted(open_.pop(key), key=lambda one: one.sample)
                job = self._threads.submit(self.domains.scored, key[0], asked[key].question, answers)
                scoring.append((key, job))
            while scoring and scoring[0][1].done():
                yield finished(*scoring.popleft())
        self.phase("reward")
        began_s = time.perf_counter()
        while scoring:
            yield finished(*scoring.popleft())
        self._reward_s += time.perf_counter() - began_s

    def _rollout(
        self, step: int, groups: list[Group], useful: list[Group], times: dict[str, float]
    ) -> Rollout:
        rows = [
            row
            for group in useful
            for row in self.algorithm.rows(group, self._rewards(group))
            if not (self.rl.overlong == "mask" and row.cut)
        ]
        failed = [sample.reason for group in groups for sample in group.answers if sample.reason is not None]
        if failed:
            self.event("scorer_failed", step=step, answers=len(failed), why=failed[0])
        if not rows:
            self.event("nothing_to_learn", step=step, groups=len(groups))
        facts = {**rollout_facts(groups, useful), **times}
        return Rollout(step, rows, share_of(rows, self.process), facts)

    def _rewards(self, group: Group) -> list[float]:
        return [shaped_reward(sample, self.rl) for sample in group.answers]


def rollout_facts(groups: Sequence[Group], useful: Sequence[Group]) -> dict[str, float]:
    """What the answers of a step say, over all of them and by domain."""
    answers = [sample for group in groups for sample in group.answers]
    found: dict[str, float] = {
        "reward": fmean(sample.reward for sample in answers),
        "accuracy": fmean(sample.correct for sample in answers),
        "response_tokens": fmean(len(sample.tokens) for sample in answers),
        "cut_share": fmean(sample.cut for sample in answers),
        "groups": len(groups),
        "skipped_groups": len(groups) - len(useful),
        "new_tokens": sum(len(sample.tokens) for sample in answers),
    }
    for domain in dict.fromkeys(group.domain for group in groups):
        own = [sample for group in groups if group.domain == domain for sample in group.answers]
        found |= {
            f"reward.{domain}": fmean(sample.reward for sample in own),
            f"accuracy.{domain}": fmean(sample.correct for sample in own),
        }
    return found


def shaped_reward(sample: Sample, rl: RlConfig) -> float:
    """The reward less the penalty for an answer that nears the longest, or reaches it."""
    if rl.overlong != "penalty":
        return sample.reward
    free = (1 - PENALISED) * rl.max_new_tokens
    return sample.reward - max(0.0, (len(sample.tokens) - free) / (rl.max_new_tokens - free))


def _exchange(groups: list[Group], process: Process) -> list[Group]:
    """The groups of all processes, on all of them."""
    if process.world_size == 1:
        return groups
    own = torch.frombuffer(bytearray(to_bytes(groups)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(process.world_size)]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    longest = max(int(size) for size in sizes)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(padded, torch.cat([own, own.new_zeros(longest - len(own))]))
    found: list[Group] = []
    for size, data in zip(sizes, padded, strict=True):
        found += from_bytes(data[: int(size)].numpy().tobytes())
    return found
