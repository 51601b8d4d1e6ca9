"""The rules that a recipe must keep: ranges of single values, and relations between them.

Rules are tried in order and the first that is broken is raised, so a later one may rely on those before it.
"""

import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any

from redline.config.recipe import PIECES, Recipe
from redline.errors import ConfigError

Rule = tuple[bool, str]
"""Whether it holds, and what to say if not."""


def check(recipe: Recipe) -> Recipe:
    """Return the recipe, or raise the first rule it breaks."""
    for holds, rule in chain(_ranges(recipe), _relations(recipe)):
        if not holds:
            raise ConfigError(f"recipe {recipe.name:.100}: {rule}")
    return recipe


_SHAPE = ("vocab_size", "num_layers", "hidden_size", "num_heads", "ffn_size", "context_length")


@cache
def _allowed() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("redline") / "config/ranges.toml").read_text(encoding="utf-8"))


def _ranges(recipe: Recipe) -> Iterator[Rule]:
    """Rules about single values."""
    # it names the run folder, under runs/
    parts = recipe.name.split("/")
    fits = all(p.isprintable() and not p.startswith((".", " ")) and 0 < len(p) <= 100 for p in parts)
    named = f"name must be printable, at most 100 characters long, and not a path; got {recipe.name!r:.120}"
    yield fits and len(parts) <= 3, named
    unknown = recipe.model.init_from is not None and not recipe.model.is_shaped
    for table, names in _allowed()["positive"].items():
        for name, v in _values(recipe, table, names):
            left_out = name in _SHAPE and v == 0 and unknown
            yield v > 0 or left_out, f"{table}.{name} must be greater than 0, got {v}"
    for table, names in _allowed()["not_negative"].items():
        for name, v in _values(recipe, table, names):
            yield v >= 0, f"{table}.{name} must not be negative, got {v}"
    for table, bounds in _allowed()["between"].items():
        for name, v in _values(recipe, table, bounds):
            low, high = bounds[name]
            yield low <= v <= high, f"{table}.{name} must be between {low} and {high}, got {v}"
    for name, v in _values(recipe, "train", ("beta1", "beta2")):
        yield v < 1, f"train.{name} must be less than 1, got {v}"


def _values(recipe: Recipe, table: str, names: Iterable[str]) -> list[tuple[str, Any]]:
    given = [(name, getattr(getattr(recipe, table), name, None)) for name in names]
    return [(name, value) for name, value in given if value is not None]


def _relations(recipe: Recipe) -> Iterator[Rule]:
    """Rules between values that are each in range."""
    m, d, t, workload = recipe.model, recipe.data, recipe.train, recipe.workload
    yield m.is_shaped or m.init_from is not None, "model needs a shape, or init_from to read one from"
    if m.is_shaped:
        yield from _shape(recipe)
    if workload == "pretrain":
        yield d.seq_len > 0, "data.seq_len must be greater than 0, got 0"
        yield t.steps > 0, f"train.steps must be greater than 0, got {t.steps}"
        yield not t.epochs, "pre-training counts train.steps, not train.epochs"
    else:
        yield m.init_from is not None, f"workload {workload} starts from a model: give model.init_from"
        one = bool(t.steps) != bool(t.epochs)
        yield one, f"give either train.steps or train.epochs; got {t.steps} and {t.epochs}"
        yield t.schedule != "wsd" or bool(t.steps), "train.schedule wsd needs train.steps"
    if workload == "rft":
        yield recipe.task is not None, "workload rft samples the questions of a task: give task.name"
    elif workload == "rl":
        yield from _rl(recipe)
    else:
        yield bool(d.source), "data.source is missing"
    both = t.warmup_steps and t.warmup_fraction
    yield not both, "give train.warmup_steps or train.warmup_fraction, not both"
    stops = not t.early_stop_evals or t.eval_every > 0
    yield stops, f"train.early_stop_evals ({t.early_stop_evals}) needs train.eval_every greater than 0"
    learns = workload in ("pretrain", "finetune")
    target = t.target_loss is None or (t.eval_every > 0 and learns)
    needs = "it needs train.eval_every greater than 0, and workload pretrain or finetune"
    yield target, f"train.target_loss ({t.target_loss}) is a validation loss: {needs}"
    cut = f"train.length_ramp_steps needs workload pretrain and a data.seq_len that is a multiple of {PIECES}"
    divided = workload == "pretrain" and d.seq_len % PIECES == 0
    yield not t.length_ramp_steps or divided, f"{cut}, got {workload} and {d.seq_len}: leave it out"
    some, sampled = f"train.softmax_candidates ({t.softmax_candidates})", bool(t.softmax_candidates)
    plain = workload == "pretrain" and t.rule == "backprop"
    needs = (
        f"{some} needs workload pretrain and train.rule backprop, got {workload} and {t.rule}: leave it out"
    )
    yield not sampled or plain, needs
    fewer = not m.is_shaped or t.softmax_candidates < m.vocab_size
    yield not sampled or fewer, f"{some} must be below model.vocab_size ({m.vocab_size}): 0 takes all tokens"
    held_out = t.eval_every == 0 or d.valid_fraction > 0
    yield held_out, "train.eval_every needs a validation split: give data.valid_fraction greater than 0"
    tokens = t.batch_size * d.seq_len
    yield tokens <= 2**27, f"train.batch_size x data.seq_len must not exceed 2^27 tokens, got {tokens}"
    rule = f"train.rule {t.rule} is for workloads pretrain and finetune, got {workload}: leave it out"
    yield t.rule == "backprop" or learns, rule
    yield from _plan(recipe)
    yield from _sample(recipe)


def _shape(recipe: Recipe) -> Iterator[Rule]:
    m, d = recipe.model, recipe.data
    t, pretrains = recipe.train, recipe.workload == "pretrain"
    heads = f"heads no wider ({m.head_size}) than model.hidden_size ({m.hidden_size})"
    kept = not t.orthogonality or (pretrains and m.head_size <= m.hidden_size)
    yield kept, f"train.orthogonality is for workload pretrain and {heads}: leave it out"
    written = f"workload {recipe.workload} writes a Hugging Face folder or an adapter"
    further = "train it further with workload pretrain and model.init_from"
    yield m.own is None or pretrains, f"{written}, which cannot hold {m.own}: {further}"
    grouped = m.num_heads % m.kv_heads == 0
    yield grouped, f"model.num_heads ({m.num_heads}) must be a multiple of model.num_kv_heads ({m.kv_heads})"
    split = m.head_dim is not None or m.hidden_size % m.num_heads == 0
    sizes = f"model.hidden_size ({m.hidden_size}) must be a multiple of model.num_heads ({m.num_heads})"
    yield split, f"{sizes}; or give model.head_dim"
    even = m.positions == "learned" or m.head_size % 2 == 0
    yield even, f"model.head_dim must be even for rope, got {m.head_size}"
    fits = d.seq_len <= m.context_length
    yield fits, f"data.seq_len ({d.seq_len}) must not exceed model.context_length ({m.context_length})"
    yield m.vocab_size < 2**31, f"model.vocab_size must be below 2^31, got {m.vocab_size}"


def _plan(recipe: Recipe) -> Iterator[Rule]:
    m, d, p = recipe.model, recipe.data, recipe.plan
    kernel = p.attention in (None, "auto") or m.attention == "softmax"
    yield kernel, f"plan.attention {p.attention} needs model.attention softmax, got {m.attention}"
    yield not p.graph or recipe.rl is None, "plan.graph is for pre-training and fine-tuning: leave it out"
    steady = "plan.graph repeats one update, and train.orthogonality_warmup_steps changes it: leave one of them out"
    yield not (p.graph and recipe.train.orthogonality and recipe.train.orthogonality_warmup_steps), steady
    generates = recipe.workload in ("rft", "rl")
    yield p.slots is None or generates, "plan.slots is for workloads that generate text: leave it out"
    size, groups = recipe.rows_per_step, " x rl.group_size" if recipe.rl else ""
    whole = p.micro_batch is None or size % p.micro_batch == 0
    yield whole, f"train.batch_size{groups} ({size}) must be a multiple of plan.micro_batch ({p.micro_batch})"
    if recipe.train.rule == "dfa":
        yield not p.graph, "plan.graph cannot capture train.rule dfa: leave it out"
        blocks = recipe.dfa.depth == "block"
        cuts = "dfa.depth layer cuts into the blocks and cannot be compiled: leave plan.compile out"
        yield blocks or p.compile in (None, "off"), cuts
        silent = "dfa.error residual has no signal for single layers: set dfa.depth block"
        yield blocks or recipe.dfa.error != "residual", silent
    if p.precision == "fp8" and m.is_shaped:
        sides = (m.hidden_size, m.ffn_size, m.head_size * m.kv_heads)
        named = f"hidden_size {sides[0]}, ffn_size {sides[1]}, key/value width {sides[2]}"
        multiples = f"plan.precision fp8 needs matrix sides that are multiples of 16: {named}"
        yield all(side % 16 == 0 for side in sides), multiples
        length = f"plan.precision fp8 needs data.seq_len to be a multiple of 16, got {d.seq_len}"
        yield d.seq_len % 16 == 0, length


def _rl(recipe: Recipe) -> Iterator[Rule]:
    r, t, m = recipe.rl, recipe.train, recipe.model
    yield r is not None and bool(r.domains), "workload rl needs questions: name tasks in rl.domains"
    assert r is not None
    count = len(r.domains)
    yield len(set(r.names)) == count, f"rl.domains names one of {list(r.names)} twice"
    weighted = not r.weights or (len(r.weights) == count and min(r.weights) > 0)
    weights = f"rl.weights must hold {count} numbers greater than 0, one per domain"
    yield weighted, f"{weights}, got {list(r.weights)}"
    asked = f"train.batch_size ({t.batch_size}) must be at least {count}, the number of rl.domains"
    yield t.batch_size >= count, f"{asked}: every step asks questions of every domain"
    yield bool(t.steps), "reinforcement learning counts train.steps, not train.epochs"
    least = 2 if r.algorithm == "grpo" else 1
    group = f"rl.group_size must be at least {least} for {r.algorithm}, got {r.group_size}"
    yield r.group_size >= least, group
    parts = r.updates_per_rollout
    split = f"train.batch_size ({t.batch_size}) must be a multiple of rl.updates_per_rollout ({parts})"
    yield t.batch_size % parts == 0, split
    tokens = r.max_prompt_tokens + r.max_new_tokens
    sums = f"rl.max_prompt_tokens + rl.max_new_tokens ({tokens})"
    fits = not m.is_shaped or tokens <= m.context_length
    yield fits, f"{sums} must not exceed the model's context, {m.context_length}"
    yield r.pcgrad == "off" or count > 1, f"rl.pcgrad {r.pcgrad} needs several rl.domains, got one"
    yield recipe.plan.precision != "fp8", "plan.precision fp8 is for pre-training"
    scaled = "plan.precision fp16 needs scaled losses, and reinforcement learning does not scale them; leave it out"
    yield recipe.plan.precision != "fp16", scaled


def _sample(recipe: Recipe) -> Iterator[Rule]:
    s = recipe.sample
    yield s.max_factor >= 1, f"sample.max_factor must be at least 1, got {s.max_factor}"
    yield 0 < s.top_p <= 1, f"sample.top_p must be greater than 0 and at most 1, got {s.top_p}"
    one = s.sampler is None or s.server is None
    yield one, "sample.sampler and sample.server are both given: only one of them can write the samples"
    yield s.server_model is None or s.server is not None, "sample.server_model needs sample.server"
