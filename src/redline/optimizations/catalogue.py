"""The catalogue of optimisations: what each claims, when it applies, what it switches, and what it does to the
numbers. The entries are data (catalogue.toml); this file defines what an entry is. Runs without torch.

    entry = find("bf16")
    entry.claimed                            # (2.0, 3.0)
    entry.why_not(recipe, hardware)          # None if it applies, else the reason
    entry.off, entry.on                      # {"precision": "fp32"}, {"precision": "bf16"}
    study("seeds/002")                       # which entries `redline ablate seeds/002` runs, in which order

To add an optimisation, write an entry in catalogue.toml (and a line in plan/values.py if it switches a new value):
`ablate`, `optimizations`, the tuner and the diagnosis read it from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from redline.config.load import build
from redline.config.recipe import Recipe
from redline.config.rules import check
from redline.errors import ConfigError, nearest
from redline.plan.plan import Hardware
from redline.plan.values import NEEDED_CAPABILITY, VALUES, Beside, Need, needs_cuda, needs_softmax, why_not
from redline.record.files import shipped

WorkloadName = Literal["train", "generate", "finetune"]
EntryEffect = Literal["exact", "rounding", "changes-training"]
"""`exact` and `rounding` as in plan/values.py; `changes-training`: another training, whose speed is not comparable."""
Standing = Literal["switch", "built in", "recipe", "thrown out", "refuted"]
"""`switch`: `redline ablate` turns it off and on. `built in`: always on. `recipe`: set in the recipe. `thrown out`:
built, measured, and removed because it did not pay; the note has the numbers. `refuted`: impossible, or about something that
does not exist; the note has the arithmetic."""
FILE = "optimizations/catalogue.toml"
PLANNER = "planner"
GUIDE = "tuning guide"
"""The start of a claim's source if one of the five guides of docs/claims.md makes it."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What somebody promises: speed with over speed without; an "up to" starts at 1; no bounds: no number given."""

    source: str
    words: str
    """The source's words, shortened."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the tuner tries: another value, with the speed it should give."""

    origin: Any = None
    """None: from any other value."""
    to: Any
    """`twice`: twice the value there is."""
    workload: WorkloadName | None = None
    """Where it is tried; None: in every workload of its entry."""
    gain: float | None = None
    """Measured before, or estimated: `seen` says where."""
    seen: str = ""
    predicted_by: Literal["", "roofline", "data wait"] = ""
    """How the gain is predicted if none was measured."""
    compile_s: float = 0.0
    """Extra time that a trial takes (gpt2-124m on an H200: 203 s for max-autotune, LOG.md)."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """How the recipe changes if the entry is another training."""

    field: str
    """The field, as `table.key`."""
    value: Any = None
    times: int | None = None
    multiple_of: int | None = None

    def before_and_after(self, recipe: Recipe) -> tuple[Any, Any]:
        table, key = self.field.split(".")
        before = getattr(getattr(recipe, table), key)
        if self.multiple_of is not None:
            return before, -(-before // self.multiple_of) * self.multiple_of
        return before, self.value if self.times is None else self.times * before

    def __call__(self, recipe: Recipe) -> Recipe:
        table, key = self.field.split(".")
        changed = replace(getattr(recipe, table), **{key: self.before_and_after(recipe)[1]})
        return replace(recipe, **{table: changed})


@dataclass(frozen=True, kw_only=True)
class Optimization:
    family: str
    name: str
    title: str
    workloads: tuple[WorkloadName, ...]
    effect: EntryEffect
    claims: tuple[Claim, ...]
    standing: Standing = "switch"
    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)
    """Plan values without and with it; None: what the planner decides."""
    change: Change | None = None
    needs: tuple[str, ...] = ()
    """Names of CONDITIONS, in addition to what its values need (plan/values.py)."""
    tries: tuple[Attempt, ...] = ()
    mends: tuple[str, ...] = ()
    """Causes of `redline diagnose` that it fixes, or that are wrongly blamed on its absence."""
    note: str = ""
    """What else to know; for what was thrown out the numbers, for a refuted claim the arithmetic."""

    @property
    def claimed(self) -> tuple[float, float] | None:
        return span(self.claims)

    def why_not(self, recipe: Recipe, hardware: Hardware) -> str | None:
        """Why it does not apply to a recipe on this hardware; None if it does."""
        reasons = [CONDITIONS[need](recipe, hardware, {}) for need in self.needs]
        reasons += [why_not(name, value, recipe, hardware) for name, value in self.on.items()]
        if self.change is not None:
            before, after = self.change.before_and_after(recipe)
            already = f"{self.change.field} is {value_words(before)} already"
            reasons.append(already if before == after else None)
            try:
                check(self.change(recipe))
            except ConfigError as error:
                reasons.append(str(error))
        return next((reason for reason in reasons if reason), None)


def _vocabulary_to_sample(recipe: Recipe, _hardware: Hardware, _beside: Beside) -> str | None:
    if recipe.model.vocab_size < 49_152:
        return "24,576 candidates would be more than half of the vocabulary"
    tokens = recipe.tokens_per_step
    # English Wikipedia with GPT-2's tokenizer: 7,200 different targets in 2^15 tokens, 17,000 in 2^17, 23,400 in 2^18
    few = tokens <= 2**17
    return (
        None if few else f"{tokens:,} tokens per update have too many different targets for 24,576 candidates"
    )


CONDITIONS: dict[str, Need] = {
    "softmax attention": needs_softmax,
    "cuda": needs_cuda,
    "muon": lambda recipe, *_: (
        None if recipe.train.optimizer == "muon" else "it is a choice of Muon, and train.optimizer is adamw"
    ),
    "back-propagation": lambda recipe, *_: (
        "feedback alignment keeps the activations of one block anyway" if recipe.feedback else None
    ),
    "no bf16": lambda _, hardware, __: (
        None
        if hardware.compute_capability < NEEDED_CAPABILITY["bf16"]
        else "this GPU multiplies bf16 at the same rate, and bf16 needs no loss scaler (a host sync per update)"
    ),
    "a second core": lambda _, hardware, __: (
        None if hardware.cores > 1 else "this machine has one core: a second thread would slow the step"
    ),
    "a batch to cut": lambda recipe, *_: (
        None if recipe.train.batch_size > 1 else "a batch of 1 sequence cannot be cut"
    ),
    "a vocabulary to sample": _vocabulary_to_sample,
    "rows of examples": lambda recipe, *_: (
        "reinforcement learning never pads its rows" if recipe.rl is not None else None
    ),
}
"""What an entry may need: each says why a recipe or a machine does not give it, or None."""


# ---- the file ----


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What generation completes: prompts, samples of each, and lengths spread evenly from 1 to `new_tokens`."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A claim in the words of the study's document, about speed, memory, utilisation or loss."""

    words: str
    low: float | None = None
    high: float | None = None
    of: str = ""
    """The row that answers it: an entry's, or `all`."""
    measures: Literal["speed", "memory"] = "speed"
    answer: str = ""
    """The answer if no row has one."""


@dataclass(frozen=True, kw_only=True)
class StudyPart:
    """Entries of one workload in the order they are applied; an entry that is not a switch is a row without a measurement."""

    workload: WorkloadName
    names: tuple[str, ...]
    start: Mapping[str, Any] = field(default_factory=dict)
    """Values of the first state that differ from what the entries switch from."""
    samples: Samples | None = None
    quotes: tuple[Quote, ...] = ()


@cache
def catalogue() -> dict[str, Optimization]:
    """Every optimisation by its name, families together."""
    families = {name: tables for name, tables in shipped(FILE).items() if name != "study"}
    return {table["name"]: _entry(family, table) for family, tables in families.items() for table in tables}


def _entry(family: str, table: dict[str, Any]) -> Optimization:
    table, where = dict(table), f"catalogue.toml: {table['name']}"
    switch: dict[str, list[Any]] = table.pop("switch", {})
    off, on = ({name: _planned(ends[end]) for name, ends in switch.items()} for end in (0, 1))
    tries = [Attempt(origin=each.pop("from", None), **each) for each in map(dict, table.pop("tries", ()))]
    effects = {VALUES[name].effect for name in switch}
    rounds = "rounding" if "rounding" in effects else "exact"
    table.setdefault("effect", rounds if switch else "changes-training")
    entry = build(Optimization, {"family": family, **table}, where)
    return replace(entry, off=off, on=on, tries=tuple(tries))


def _planned(value: Any) -> Any:
    return None if value == PLANNER else value


def find(name: str) -> Optimization:
    if name not in catalogue():
        hint = nearest(name, catalogue())
        raise ConfigError(f"there is no optimisation {name!r}{hint}: `redline optimizations` lists them")
    return catalogue()[name]


def study(name: str, workload: str = "pretrain") -> tuple[StudyPart, ...]:
    """The parts of a recipe's ablation: the guide's if the name is one, else the workload's.

    A guide's study starts in the state that the guide describes and takes its changes in its order; what the guide
    does not mention comes last. A workload's study starts with every switch of its list off."""
    studies, parts = shipped(FILE)["study"], []
    for table in studies[name if name.startswith("seeds/") and name in studies else workload]:
        rest = {key: value for key, value in table.items() if key != "start"}
        part = build(StudyPart, rest, f"catalogue.toml: study {name}")
        start = {value: _planned(at) for value, at in table.get("start", {}).items()}
        parts.append(replace(part, start=start))
    return tuple(parts)


def claims_for(entry: Optimization, name: str) -> tuple[Claim, ...]:
    """The claims of the study's guide about an entry, else those of papers and projects; all claims without a guide."""
    if not name.startswith("seeds/"):
        return entry.claims
    own = f"{GUIDE} {name.removeprefix('seeds/')}"
    others = tuple(claim for claim in entry.claims if not claim.source.startswith(GUIDE))
    return tuple(claim for claim in entry.claims if claim.source.startswith(own)) or others


# ---- words ----


def span(claims: Sequence[Claim | Quote]) -> tuple[float, float] | None:
    """The range that claims span; None if none gave a number."""
    lows = [claim.low for claim in claims if claim.low is not None]
    highs = [claim.high for claim in claims if claim.high is not None]
    return (min(lows), max(highs)) if lows and highs else None


def ratio(claimed: tuple[float, float] | None) -> str:
    """`2-3x`, `1.25x`, or a dash if no number was given."""
    if claimed is None:
        return "–"
    low, high = (f"{bound:.4g}" for bound in claimed)
    return f"{low}x" if low == high else f"{low}-{high}x"


def switched(entry: Optimization) -> str:
    """`precision: fp32 to bf16`; for what is not a switch, its standing."""
    if entry.standing != "switch":
        return entry.standing
    if entry.change is not None:
        return "another recipe"
    ends = ((name, value_words(entry.off[name]), value_words(value)) for name, value in entry.on.items())
    return ", ".join(f"{name}: {off} to {on}" for name, off, on in ends)


def value_words(value: object) -> str:
    if isinstance(value, bool):  # 1 == True, and a number of chunks is not a switch
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return "the planner's" if value is None else str(value) or "torch's default"
