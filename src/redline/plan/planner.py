"""Facts + recipe -> plan. Each value is decided by one function that returns it with its reason.

Who decides, first match wins: the environment, a profile (as an upper bound), the recipe's `[plan]` table or
`--set plan.x=`, the rule. The environment variables are those of the systems Redline grew out of:
A100_BATCH_SIZE and A100_GRAD_ACCUM set the micro-batch and the accumulation (their product must keep the
recipe's batch); MICRO_BATCH_SIZE and CHUNK_SIZE bound how many sequences are generated together. Fine-tuning
counts its batch in examples, which are packed: how many tokens a pass holds is known only when they are read.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError
from redline.plan import arithmetic
from redline.plan.bounds import Decision, Outside, bounded_slots, positive
from redline.plan.plan import Hardware, Plan, Prediction, Why
from redline.plan.predict import MEMORY_SHARE, RL_GENERATION_SHARE, longest_row, predicted_memory, shards_of
from redline.plan.roofline import attainable_tokens_per_s, captured_pays
from redline.plan.values import NEEDED_CAPABILITY, why_not
from redline.record.units import counted, format_duration

FULL_PASS_TOKENS = {"cuda": 65_536, "cpu": 4_096}
"""Tokens of a pass where speed levels off (H200, 124M: 32k reach 96% of 64k's speed, 8k 80%, 1k 11%)."""
THIN_PASS_TOKENS = 4_096
"""Below this a GPU starves, and recomputing activations to fit more tokens pays."""
MOST_SLOTS = {"cuda": 2048, "cpu": 64}
"""More sequences at once add few tokens per second: the matrix products run at full speed already."""
GENERATION_SHARE = 0.85
"""Share of the memory free when the engine opens; the rest is for activations, graphs and later allocations."""
ONE_GPU = "captured updates need one process with a GPU"
GRAPH_MEMORY_SHARE = 0.5
"""Share of the memory up to which a rule lets a graph keep its own activations beside everything else."""
COMPILE_PAYS_S = 120.0
"""Compiling takes 10 to 60 s; a run whose updates are predicted to be shorter than this is not worth it."""
ROLLOUT_SHARE = 0.1
"""Share of a rollout's most tokens. Nobody knows it in advance: unit conversion on an H200 learned from 6 to 11% (LOG.md)."""


def make_plan(
    recipe: Recipe, hardware: Hardware, *, world_size: int = 1, nodes: int = 1, outside: Outside | None = None
) -> Plan:
    """Decide every value. MachineError if the recipe cannot fit, ConfigError if pins contradict the batch."""
    outside = outside or Outside(environment={})
    if world_size < 1:
        raise ConfigError(f"the number of processes must be at least 1, got {world_size}")
    if (batch := recipe.train.batch_size) % world_size:
        raise ConfigError(f"train.batch_size ({batch}) must be a multiple of {world_size} processes")
    decide = _Decider(recipe, hardware, world_size, nodes, outside)
    decide.supported()
    decide.pinned("precision", decide.precision)
    decide.pinned("attention", decide.attention)
    decide.pinned("compile", decide.compile)
    decide.pinned("cross_entropy", decide.cross_entropy)
    decide.pinned("update", decide.update)
    decide.record("slots", decide.slots())  # before the batch: in RL they share the memory
    decide.dividing(decide.pinned("shards", decide.shards))
    decide.capturable(decide.pinned("graph", decide.graph))
    decide.batch()
    decide.pinned("loader_threads", decide.loader_threads)
    decide.pinned("prefetch", decide.prefetch)
    decide.record("allocator", decide.allocator())
    return Plan(
        recipe=recipe.name,
        work=recipe.work,
        hardware=hardware,
        world_size=world_size,
        prediction=decide.prediction(),
        why=decide.why,
        **decide.chosen,
    )


def _rule(value: Any, reason: str) -> Decision:
    return value, Why(reason=reason, source="rule")


class _Decider:
    """One planning session; remembers the reason for each value."""

    def __init__(
        self, recipe: Recipe, hardware: Hardware, world_size: int, nodes: int, outside: Outside
    ) -> None:
        self.recipe, self.hardware, self.outside = recipe, hardware, outside
        self.world_size, self.nodes = world_size, nodes
        self.pretraining = recipe.workload == "pretrain"
        self.why: dict[str, Why] = {}
        self.chosen: dict[str, Any] = {}

    def record(self, name: str, decision: Decision) -> Any:
        value, self.why[name] = decision
        self.chosen[name] = value
        return value

    def pinned(self, name: str, rule: Callable[[], Decision]) -> Any:
        """The recipe's or the user's own value if there is one, else the rule's. On a GPU it must be possible."""
        pin = self._pin(name)
        why = why_not(name, pin[0], self.recipe, self.hardware, self.chosen) if pin else None
        if pin and why and self.hardware.kind == "cuda":
            raise ConfigError(f"plan.{name} {pin[0]} is not possible: {why}; leave it out")
        return self.record(name, pin or rule())

    def _pin(self, name: str) -> Decision | None:
        value = getattr(self.recipe.plan, name)
        if value is None:
            return None
        emulated = value == "fp8" and self.hardware.kind == "cpu"
        note = "; a CPU emulates it: right numbers for tests, slower than fp32" if emulated else ""
        if name in self.outside.typed:
            return value, Why(reason=f"--set plan.{name}{note}", source="user")
        return value, Why(reason=f"pinned in the recipe's [plan] table{note}", source="recipe")

    def _takes(self, name: str, value: Any) -> bool:
        """Whether a value is possible with those decided already."""
        return why_not(name, value, self.recipe, self.hardware, self.chosen) is None

    def precision(self) -> Decision:
        capability = self.hardware.compute_capability
        if self.hardware.kind == "cpu":
            return _rule("fp32", "a CPU without matrix units for bf16 computes it far slower than fp32")
        if capability >= NEEDED_CAPABILITY["bf16"]:
            full = f"compute capability {_dotted(capability)} multiplies bf16 at full rate"
            return _rule("bf16", f"{full}, and bf16 needs no loss scaling")
        if self.recipe.rl is not None:
            return _rule("fp32", "this GPU has no bf16, and reinforcement learning scales no losses for fp16")
        return _rule(
            "fp16",
            f"compute capability {_dotted(capability)} has no bf16; fp16 with a loss scaler, which costs one"
            " host sync per update",
        )

    def capturable(self, graph: bool) -> None:
        """Refuse a pinned graph; unlike other values, it has no meaning on a CPU or for several processes."""
        if graph and (self.world_size > 1 or self.hardware.kind == "cpu"):
            raise ConfigError(f"plan.graph {graph} is not possible: {ONE_GPU}; leave it out")

    def supported(self) -> None:
        """Refuse a pinned precision that the GPU lacks."""
        precision, has = self.recipe.plan.precision, self.hardware.compute_capability
        needs = NEEDED_CAPABILITY.get(precision or "", ())
        if self.hardware.kind == "cuda" and has < needs:
            raise MachineError(
                f"plan.precision {precision} needs compute capability {_dotted(needs)}, {self.hardware.title}"
                f" has {_dotted(has)}: leave it to the planner with --set plan.precision=none"
            )

    def attention(self) -> Decision:
        if self.recipe.model.attention != "softmax":
            return _rule("auto", self._kernel_attention())
        if self.hardware.kind == "cpu":
            return _rule("auto", "torch picks its CPU flash kernel")
        if not self.pretraining:
            return _rule("auto", "packed examples and generation have their own kernels")
        if self.hardware.compute_capability[:1] == (9,) and self._takes("attention", "cudnn"):
            return _rule(
                "cudnn", "on Hopper cuDNN's kernel measured faster than torch's choice, flash (LOG.md)"
            )
        if self.hardware.compute_capability < (8, 0):
            return _rule(
                "auto", "torch picks its memory-efficient kernel; flash needs compute capability 8.0"
            )
        return _rule("auto", "torch picks its flash kernel")

    def _kernel_attention(self) -> str:
        """What computes kernel attention, in words."""
        model, plain = self.recipe.model, "kernel attention in PyTorch"
        if self.hardware.kind == "cpu":
            return f"{plain}: a CPU has no Triton"
        half = self.chosen["precision"] in ("bf16", "fp8")
        if half and arithmetic.favor_fits(model.head_size, model.features):
            return "kernel attention by our Triton kernels"
        return (
            f"{plain}, several times slower than our Triton kernels: they take bf16, heads of 16, 32, 64 or 128"
            f" (here {model.head_size}) and features in multiples of 32 (here {model.features})"
        )

    def cross_entropy(self) -> Decision:
        if self._takes("cross_entropy", "fused"):
            once = "one kernel turns the logits into their gradient in place: fewer passes over memory, one copy less"
            return _rule("fused", once)
        return _rule("torch", "the fused kernel is for half precision on CUDA")

    def update(self) -> Decision:
        return _rule("fused", "one kernel changes many weights at a time: the fewest passes over memory")

    def compile(self) -> Decision:
        if self.hardware.kind == "cpu":
            return _rule("off", "compiling takes 15 to 30 s on a CPU and a small run does not earn it back")
        if self.recipe.feedback is not None and self.recipe.feedback.depth == "layer":
            return _rule("off", "feedback to single layers cuts into blocks, which compiled ones forbid")
        if self.recipe.rl is not None and (self.recipe.rl.algorithm == "ppo" or self.world_size > 1):
            return _rule(
                "off",
                "compiled RL was measured only on one GPU and without a critic; plan.compile=default turns it on",
            )
        if not self.pretraining and self.recipe.rl is None:
            return _rule("off", "inside a captured update compiled blocks measured 0.59x (docs/claims.md)")
        rate, train = self.hardware.rate_tflops(self.chosen["precision"]), self.recipe.train
        tokens = self.recipe.rows_per_step * longest_row(self.recipe)
        flops = self._flops_per_token() * tokens * train.steps * (1.0 if self.pretraining else ROLLOUT_SHARE)
        run_s = flops / (0.3 * 1e12 * rate * self.world_size) if rate else float("inf")
        if train.max_hours is not None:
            run_s = min(run_s, train.max_hours * 3600)
        if run_s < COMPILE_PAYS_S:
            return _rule(
                "off", f"all updates should take {format_duration(run_s)}; compiling takes 10 to 60 s"
            )
        return _rule("default", "fused kernels; the run is long enough to earn back 10 to 60 s of compiling")

    def graph(self) -> Decision:
        if self.recipe.rl is not None:
            return _rule(False, "every rollout has rows of other lengths; each would need its own graph")
        if self.hardware.kind == "cpu" or self.world_size > 1:
            return _rule(False, ONE_GPU)
        if (why := why_not("graph", True, self.recipe, self.hardware, self.chosen)) is not None:
            return _rule(False, why)
        if self.pretraining:
            return _rule(*self._short_update())
        return _rule(True, "a small update is bound by kernel launches: one launch instead of thousands")

    def _short_update(self) -> tuple[bool, str]:
        """Whether a pre-training update is captured, and why: if launches would hold it up and memory is ample."""
        pins, share = self.recipe.plan, self.recipe.rows_per_update
        plain = self.chosen["precision"] == "bf16" and self.recipe.model.attention == "softmax"
        if not plain or pins.recompute not in (None, "none"):
            return False, "measured only in bf16, with softmax attention and without recomputation"
        forced = self._forced_micro_batch(share)
        micro = forced[0] if forced else self._sizes(share)[0]
        chunks = pins.loss_chunks or 1
        values = {**self.chosen, "micro_batch": micro, "recompute": "none", "loss_chunks": chunks}
        pays, why = captured_pays(self.recipe, self.hardware, values)
        need = predicted_memory(self.recipe, self.hardware, 1, {**values, "graph": True}).total
        have = self.hardware.memory_bytes
        if pays and (need > GRAPH_MEMORY_SHARE * have or self.outside.prefer == "memory"):
            keeps = f"{need / 2**30:.1f} of {have / 2**30:.1f} GiB by prediction"
            return False, f"{why}, but it would keep the memory of its activations: {keeps}"
        return pays, why

    def shards(self) -> Decision:
        return _rule(*shards_of(self.recipe, self.hardware, self.world_size, self.nodes, self.chosen))

    def dividing(self, shards: int) -> None:
        if self.world_size % shards:
            raise ConfigError(f"plan.shards ({shards}) must divide the {self.world_size} processes")

    def batch(self) -> None:
        """Micro-batch, accumulation, recomputation and loss chunks together, because they share one memory."""
        rows = self.recipe.rows_per_update
        share = rows // self.world_size
        micro = self._fit(share)
        reason = f"{rows} sequences per update / ({micro} per pass x {counted(self.world_size, 'process')})"
        source = self.why["micro_batch"].source
        why = Why(reason=reason, source="environment" if source == "environment" else "rule")
        self.record("accumulation", (share // micro, why))

    def _fit(self, share: int) -> int:
        """Decide the other three; returns the micro-batch."""
        pins = {
            name: self._forced_micro_batch(share) if name == "micro_batch" else self._pin(name)
            for name in ("micro_batch", "recompute", "loss_chunks")
        }
        seq_len, sizes = longest_row(self.recipe), self._sizes(share)
        ways = [
            (micro, recompute, chunks)
            for recompute, chunks in (("none", 1), ("none", 8), ("selective", 8), ("full", 8))
            for micro in sizes
        ]
        if any(pins.values()):
            given = [pin[0] if pin else None for pin in pins.values()]
            ways = [(given[0] or m, given[1] or r, given[2] or c) for m, r, c in ways]
        budget = MEMORY_SHARE * self.hardware.memory_bytes
        fitting = [way for way in ways if self._memory(*way).total <= budget]
        if not fitting:
            self._refuse(min(ways, key=lambda way: self._memory(*way).total))
        wide = [way for way in fitting if way[0] * seq_len >= THIN_PASS_TOKENS or way[0] == share]
        best = wide[0] if wide else max(fitting, key=lambda way: way[0])
        if self.outside.prefer == "memory":
            best = min(wide or fitting, key=lambda way: self._memory(*way).total)
        self._explain(best, pins, share)
        return best[0]

    def _sizes(self, share: int) -> list[int]:
        limit = FULL_PASS_TOKENS[self.hardware.kind] // longest_row(self.recipe)
        sizes = [d for d in range(min(share, max(1, limit)), 0, -1) if share % d == 0]
        if (profile := self.outside.profile) is not None:
            sizes = [d for d in sizes if d <= profile.micro_batch] or [1]
        return sizes

    def _forced_micro_batch(self, share: int) -> Decision | None:
        """A100_BATCH_SIZE / A100_GRAD_ACCUM, or the pin; it must divide the batch."""
        named = {n: positive(self.outside.environment, n) for n in ("A100_BATCH_SIZE", "A100_GRAD_ACCUM")}
        size, times = named.values()
        if size is None and times is None:
            pin = self._pin("micro_batch")
            if pin and share % pin[0]:
                raise ConfigError(
                    f"plan.micro_batch ({pin[0]}) must divide the {share} sequences that each process takes"
                    f" of train.batch_size ({self.recipe.train.batch_size})"
                )
            profile = self.outside.profile
            return None if pin and profile and pin[0] > profile.micro_batch else pin
        set_ = " and ".join(f"{n}={v}" for n, v in named.items() if v is not None)
        if not self.pretraining:
            most = min(size or share, max(1, share // (times or 1)))
            within = max(divisor for divisor in range(1, min(most, share) + 1) if share % divisor == 0)
            reason = f"{set_} in the environment, an upper bound: the largest divisor of {share} examples within it"
            return within, Why(reason=reason, source="environment")
        if size is None:
            assert times is not None
            size = share // times if share % times == 0 else 0
        if size == 0 or share % size or (times is not None and size * times != share):
            raise ConfigError(
                f"{set_} in the environment must keep the recipe's batch: micro-batch x accumulation must be"
                f" {share} (train.batch_size {self.recipe.train.batch_size} over"
                f" {counted(self.world_size, 'process')}); unset or correct them"
            )
        return size, Why(reason=f"{set_} in the environment", source="environment")

    def _explain(self, best: tuple[int, str, int], pins: dict[str, Decision | None], share: int) -> None:
        _, recompute, chunks = best
        kept = "activations fit, and recomputing them costs up to a third of the step"
        if self.recipe.feedback is not None:
            kept = "feedback alignment runs each block a second time and holds the activations of one"
        traded = f"activations do not fit at {THIN_PASS_TOKENS:,} tokens per pass without it; "
        cost = {
            "none": kept,
            "selective": traded + "cheap operations are redone",
            "full": traded + "every block is computed twice",
        }[recompute]
        pieces = "logits in pieces: less memory, the head is computed twice"
        head = "logits fit in one piece, which is fastest" if chunks == 1 else pieces
        why = [
            self._why_micro_batch(best, share),
            *(Why(reason=text, source="rule") for text in (cost, head)),
        ]
        if self.outside.prefer == "memory":
            least = f"predicted peak {self._memory(*best).total / 2**30:.1f} GiB"
            least = f"--prefer memory: {least}, the least of passes that do not starve the device"
            why = [Why(reason=least, source="user")] * 3
        for (name, pin), value, reason in zip(pins.items(), best, why, strict=True):
            self.record(name, pin or (value, reason))

    def _why_micro_batch(self, best: tuple[int, str, int], share: int) -> Why:
        micro, seq_len, profile = best[0], longest_row(self.recipe), self.outside.profile
        have, limit = self.hardware.memory_bytes, FULL_PASS_TOKENS[self.hardware.kind]
        fits = (
            f"{'' if self.pretraining else 'at most '}{micro * seq_len:,} tokens per pass, predicted peak {self._memory(*best).total / 2**30:.1f} of"
            f" {have / 2**30:.1f} GiB"
        )
        larger = next((d for d in range(micro + 1, min(share, limit // seq_len) + 1) if share % d == 0), None)
        if micro == share:
            return Why(reason=f"the whole batch in one pass: {fits}", source="rule")
        if larger is None:
            level = f"the largest divisor of {share} within {limit:,} tokens, where speed levels off"
            return Why(reason=f"{fits}; {level}", source="rule")
        if profile is not None and larger > profile.micro_batch:
            bound = f"at most {profile.micro_batch} by profile {profile.name}"
            return Why(reason=f"{bound}: {fits}", source="profile")
        return Why(reason=f"{fits}; the next divisor of {share}, {larger}, would not fit", source="rule")

    def _refuse(self, way: tuple[int, str, int]) -> None:
        need, have = self._memory(*way), self.hardware.memory_bytes
        raise MachineError(
            f"recipe {self.recipe.name} does not fit {self.hardware.title}: predicted"
            f" {need.total / 2**30:.1f} GiB at micro-batch {way[0]}, recompute {way[1]}, of"
            f" {have / 2**30:,.1f} GiB ({MEMORY_SHARE:.0%} usable); use more processes, a smaller model or a"
            " shorter data.seq_len"
        )

    def _memory(self, micro: int, recompute: Any, chunks: int) -> arithmetic.Memory:
        values = {**self.chosen, "micro_batch": micro, "recompute": recompute, "loss_chunks": chunks}
        return predicted_memory(self.recipe, self.hardware, self.world_size, values)

    def loader_threads(self) -> Decision:
        if self.recipe.data.stream:
            cores = self.hardware.cores
            free = f"tokenising while training, in Rust threads that leave one of {cores} cores free"
            return _rule(max(1, min(4, cores - 1)), free)
        if not self.pretraining:
            return _rule(1, "packing a batch of examples takes less than its update")
        return _rule(1, "reading memory-mapped tokens takes a few milliseconds per update, during the step")

    def prefetch(self) -> Decision:
        return _rule(2, "one batch in use, one ready; more only hides a loader that is too slow on average")

    def allocator(self) -> Decision:
        if self.hardware.kind == "cpu":
            return _rule("", "only CUDA has an allocator to set")
        if not self.pretraining or self.chosen["graph"]:
            return _rule("", "captured graphs keep their own memory; measured with torch's default")
        return _rule("expandable_segments:True", "growing segments do not fragment when passes change size")

    def slots(self) -> Decision:
        """Sequences generated together, by arithmetic; when the engine opens it measures the memory that is free."""
        if self.recipe.workload not in ("rft", "rl"):
            return _rule(0, "this workload generates no text")
        model, most = self.recipe.model, MOST_SLOTS[self.hardware.kind]
        weights = 2 * 4 * arithmetic.parameters(model).total  # the model, and room for as much again
        room_bytes = GENERATION_SHARE * self.hardware.memory_bytes - weights
        if self.recipe.rl is not None:
            most = min(most, -(-self.recipe.rows_per_step // self.world_size))
            room_bytes = RL_GENERATION_SHARE * self.hardware.memory_bytes
        longest, precision = longest_row(self.recipe), self.chosen["precision"]
        each = arithmetic.slot_bytes(model, tokens=longest, precision=precision)
        fitting = max(1, int(room_bytes) // each)
        if fitting < most:
            chosen = _rule(fitting, f"{each / 2**20:,.1f} MiB of keys and values each fill the memory")
        else:
            whole = most < MOST_SLOTS[self.hardware.kind]
            few = "more sequences add few tokens per second"
            chosen = _rule(most, "all answers of a step together" if whole else few)
        return bounded_slots(chosen, self.outside, pin=self._pin("slots"))

    def _flops_per_token(self) -> int:
        its = self.recipe
        how = (its.lora, its.feedback, its.train.softmax_candidates)
        return arithmetic.flops_per_token(its.model, longest_row(its), *how)

    def prediction(self) -> Prediction:
        values = self.chosen
        parts = predicted_memory(self.recipe, self.hardware, self.world_size, values)
        flops = self._flops_per_token()
        rate, speed = self.hardware.rate_tflops(values["precision"]), None
        if self.pretraining:  # a pass of packed examples has no length until they are read
            speed = attainable_tokens_per_s(self.recipe, self.hardware, self.world_size, values)
        return Prediction(
            parameters=arithmetic.parameters(self.recipe.model).total,
            flops_per_token=flops,
            memory_parts_bytes=asdict(parts),
            memory_bytes=parts.total,
            ceiling_tokens_per_s=self.world_size * rate * 1e12 / flops if rate else None,
            attainable_tokens_per_s=speed,
        )


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))
