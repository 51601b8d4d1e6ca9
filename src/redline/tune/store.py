"""Where a tuning lives: its trials, so that a killed one resumes, and its result, which `--plan auto`
finds. No torch.

    $REDLINE_CACHE/tune/<machine>-<work>-<pins>/
        recipe.toml       what is trained: trials of another recipe do not belong here
        trials.jsonl      one line per finished trial; a trial listed there is not run again
        plan.json         the fastest plan, every value with its reason
        result.json       how much faster than the rules' plan, measured when, on what

The machine key holds GPU, driver, CPU and torch version; the work what one update computes (model, length, batch,
optimiser, adapters); the pins what the user fixed. If any of them differs, it is another tuning.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.config.load import build, from_toml
from redline.config.recipe import Recipe, fingerprint_of
from redline.errors import ConfigError, DataError, Say, StorageError
from redline.machine.facts import MachineFacts, machine_key
from redline.measure.statistics import Comparison
from redline.measure.trial import Measurement, Pair, TrialOutcome
from redline.plan.plan import PLANNED, Plan, check_fit, load, save
from redline.record.files import cache_folder, read_json, read_text, write_atomic
from redline.record.units import format_rate
from redline.tune.quality import Quality


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    name: str
    predicted: float | None
    """Speed against the best plan so far, before it was tried."""
    outcome: TrialOutcome | None = None
    """None: not tried."""
    tokens_per_s: float | None = None
    """Tokens/s of the median block."""
    memory_bytes: int | None = None
    """Peak reserved by torch; on a CPU, resident memory."""
    comparison: Comparison | None = None
    """The comparison with the best plan so far."""
    rounds: int | None = None
    """Blocks of each in the comparison; below FEWEST_BLOCKS if it was given up early."""
    verdict: str
    """kept; the comparison's; the outcome if it failed; not compared, if there was no reference; not tried."""
    note: str = ""
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    tuned_at: str
    """ISO time, UTC."""
    against: str = "the rules' plan"
    """What the ratio is against: the rules' plan, or, if that did not run, what it was cut to."""
    ratio: float
    """Speed of the plan against the rules' plan, measured in turns; 1 if the rules' plan was kept."""
    low: float
    high: float
    paired: bool
    tokens_per_s: float
    trials: int
    elapsed_s: float
    untried: tuple[str, ...]
    """Candidates for which there was no time left."""
    unconfirmed: str = ""
    """Why the last comparison failed; the ratio is then the product of the comparisons that chose the winner."""
    quality: Quality | None = None
    """What the rules' plan and the fastest one train to, if that was asked for; the rules' plan stays unless it passed."""
    rows: tuple[TrialRow, ...]


class TrialTable:
    """The rows of a search as they come; each is also printed."""

    def __init__(self, say: Say) -> None:
        self.rows: list[TrialRow] = []
        self._say = say

    def add(
        self,
        name: str,
        predicted: float | None = None,
        *,
        measured: Measurement | None = None,
        pair: Pair | None = None,
        note: str = "",
        verdict: str = "",
        kept: bool = False,
    ) -> None:
        """Without a pair there was nothing to compare with; without a measurement it was not tried."""
        measured = pair.after if pair else measured
        found = pair.comparison if pair else None
        if measured is None or measured.outcome != "ok":
            verdict = verdict or (measured.outcome if measured else "not tried")
        row = TrialRow(
            name=name,
            predicted=predicted,
            outcome=measured.outcome if measured else None,
            tokens_per_s=measured.tokens_per_s if measured and measured.blocks_s else None,
            memory_bytes=measured.memory.reserved_bytes if measured and measured.memory else None,
            comparison=found,
            rounds=pair.rounds if pair and found else None,
            verdict="kept" if kept else verdict or (found.verdict if found else "not compared"),
            note=note,
            kept=kept,
        )
        self.rows.append(row)
        speed = f" {format_rate(row.tokens_per_s, 'tokens')}" if row.tokens_per_s is not None else ""
        against = f" {found}" if found else ""
        self._say(f"{'+' if kept else ' '} {name}:{speed}{against}  {note}")


def pinned(plan: Plan) -> dict[str, Any]:
    """Values that the user fixed, which a search must leave alone."""
    chosen = ("rule", "measurement")
    return {name: getattr(plan, name) for name in PLANNED if plan.why[name].source not in chosen}


def tuning_folder(facts: MachineFacts, rules: Plan) -> Path:
    """The folder of the tuning that starts from this plan of the rules."""
    pins = fingerprint_of(pinned(rules))[:8]
    return cache_folder() / "tune" / f"{machine_key(facts)}-{rules.work}-{pins}"


def tuned_plan(folder: Path, recipe: Recipe) -> tuple[Plan, TuningResult] | None:
    """The result kept in a folder, or None. One in another layout, or of another recipe, is an error."""
    if not (folder / "result.json").exists():
        return None
    try:
        table = read_json(folder / "result.json", dict)
        plan, result = load(folder / "plan.json"), build(TuningResult, table, where="result.json")
        check_fit(plan, recipe, world_size=1)
        return plan, result
    except (DataError, ConfigError) as error:
        raise ConfigError(
            f"the tuning kept in {folder} cannot be used: {error}; run `redline tune` again, or delete it"
        ) from error


def check_folder(path: Path, recipe: Recipe, rules: Plan | None = None) -> None:
    """Refuse a folder whose run, trials of another workload, or tuning with other pins (given `rules`) the trials of
    this recipe would overwrite. A plan that cannot be read does not matter."""
    way_out = "give another folder with --out"
    for name in ("metrics.jsonl", "checkpoints", "samples.db"):
        if (path / name).exists():
            raise StorageError(f"{path} holds a run ({name}), which the trials would overwrite: {way_out}")
    try:
        kept = load(path / "plan.json")
    except ConfigError:
        kept = None
    name, work = (kept.recipe, kept.work) if kept else ("", recipe.work)
    if (path / "recipe.toml").exists():
        try:
            before = from_toml(read_text(path / "recipe.toml"), where="recipe.toml")
        except (DataError, ConfigError) as error:
            raise StorageError(
                f"{path} holds a recipe that cannot be read, and may not be this one: {error}; {way_out}"
            ) from error
        name, work = before.name, before.work
    if work != recipe.work:
        raise StorageError(
            f"{path} holds trials of another workload (recipe {name}, work {work}, not {recipe.work}): {way_out}, or"
            " delete that one"
        )
    then, now = pinned(kept) if kept else {}, pinned(rules) if rules else {}
    other = [pin for pin in then | now if then.get(pin) != now.get(pin)] if kept and rules else []
    if other:
        how = ", ".join(f"{pin} {then.get(pin, 'free')} before, {now.get(pin, 'free')} now" for pin in other)
        raise StorageError(f"{path} holds a tuning with other pins ({how}): {way_out}, or delete that one")


def keep(folder: Path, plan: Plan, result: TuningResult) -> None:
    """The result last, and an earlier one is gone before: one beside another plan would be believed."""
    (folder / "result.json").unlink(missing_ok=True)
    save(plan, folder / "plan.json")
    write_atomic(folder / "result.json", json.dumps(asdict(result), indent=1) + "\n")
