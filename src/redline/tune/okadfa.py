"""The OKADFA study: the same model with softmax or kernel attention, with and without the orthogonality penalty, by
back-propagation or by feedback alignment; several seeds, and the same number of learning rates for every arm.

    rows = study(recipe, title, folder, seeds=3, lrs=(1e-3, 3e-3, 1e-2), train=train_in_process, progress=print)

Every arm runs with the first seed at each learning rate; the rate with the lowest validation loss is used for the
other seeds, and the checkpoints of the other rates are deleted. A run is an ordinary run folder, made by `redline
train`: if the study is killed, the same call resumes it, and `redline report` draws it. The result is written to
okadfa.json. No torch.
"""

import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redline.config.recipe import Recipe
from redline.errors import ConfigError, Say, TrainingError
from redline.record.files import write_atomic
from redline.record.read import Run
from redline.record.units import DASH
from redline.tune import race
from redline.tune.quality import final
from redline.tune.race import Train, trained

RESULT = "okadfa.json"


@dataclass(frozen=True)
class Arm:
    name: str
    title: str
    kernel: bool = True
    orthogonal: bool = False
    rule: dict[str, Any] | None = None
    """Fields of the `dfa` table; None: back-propagation."""

    def of(self, recipe: Recipe, lr: float, seed: int) -> Recipe:
        weight = (recipe.train.orthogonality or 1e-4) if self.orthogonal else 0.0
        train = replace(recipe.train, lr=lr, seed=seed, orthogonality=weight)
        train = replace(train, rule="backprop" if self.rule is None else "dfa")
        model = replace(recipe.model, attention="favor" if self.kernel else "softmax")
        top = {"top_blocks": recipe.model.num_layers // 2} if self.name == "A6" else {}
        error = "logits" if recipe.dfa.error == "residual" else recipe.dfa.error
        dfa = replace(recipe.dfa, **{"error": error, **(self.rule or {}), **top})
        return replace(recipe, name=f"okadfa-{self.name}", model=model, train=train, dfa=dfa)


ARMS = (
    Arm("A0", "softmax, back-propagation", kernel=False),
    Arm("A1", "kernel attention, back-propagation"),
    Arm("A2", "A1 with orthogonality", orthogonal=True),
    Arm("A3", "kernel attention, feedback to every layer", rule={"depth": "layer"}),
    Arm("A4", "A3 with orthogonality", orthogonal=True, rule={"depth": "layer"}),
    Arm("A5", "hybrid: feedback to every block; orthogonality", orthogonal=True, rule={"depth": "block"}),
    Arm("A6", "A5 with the upper half of the blocks by back-propagation", orthogonal=True, rule={"depth": "block"}),
    Arm("A7", "A5 with the gradient of the residual stream instead of random feedback", orthogonal=True, rule={"depth": "block", "error": "residual"}),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What an arm reached at its best learning rate."""

    name: str
    title: str
    lr: float
    searched: dict[str, float | None]
    """Validation loss of the first seed at every learning rate; None: it diverged."""
    losses: list[float]
    """Validation loss at the end, one for each seed that did not diverge."""
    curve: list[tuple[int, float]]
    """Tokens and mean validation loss, validation by validation, until the first seed ended (early, by the clock)."""
    tokens: int
    seconds: float
    """Training time of a run, the median of the seeds."""
    memory_bytes: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> str:
        """Standard deviation over the seeds, if there are several."""
        return f"{statistics.stdev(self.losses):.3f}" if len(self.losses) > 1 else DASH


def study(
    recipe: Recipe,
    hardware: str,
    folder: Path,
    *,
    arms: Sequence[str] = (),
    seeds: int,
    lrs: Sequence[float],
    train: Train,
    progress: Say,
) -> list[Row]:
    """Every arm, or those named. A run that fails ends the study, except for one that diverges."""
    known = {arm.name: arm for arm in ARMS}
    if odd := [name for name in arms if name not in known]:
        raise ConfigError(f"no arm {odd[0]!r}: the arms are {', '.join(known)}")
    if recipe.workload != "pretrain" or not recipe.train.eval_every:
        raise ConfigError(f"{recipe.name}: the study needs a pretrain recipe with train.eval_every above 0")
    rows = []
    for arm in [known[name] for name in arms] or ARMS:
        rows.append(_row(arm, recipe, folder, seeds, lrs, train, progress))
        progress(brief(rows[-1]))
        said = {"recipe": recipe.name, "fingerprint": recipe.fingerprint, "hardware": hardware}
        result = {**said, "seeds": seeds, "lrs": list(lrs), "rows": [asdict(row) for row in rows]}
        write_atomic(folder / RESULT, json.dumps(result, indent=1) + "\n")
    return rows


def _row(
    arm: Arm, recipe: Recipe, folder: Path, seeds: int, lrs: Sequence[float], train: Train, progress: Say
) -> Row:
    def place(lr: float, seed: int) -> Path:
        return folder / arm.name / f"lr-{lr:g}-seed-{seed}"

    def run(lr: float, seed: int) -> Run | None:
        """A finished run; None: it diverged."""
        racing = race.Arm(arm.name, arm.of(recipe, lr, seed))
        found = trained(racing, place(lr, seed), seed, train, resume=True)
        if isinstance(found, str) and "is nan" not in found and "is inf" not in found:
            raise TrainingError(found)
        return None if isinstance(found, str) else found

    first = recipe.train.seed
    searched: dict[float, float | None] = {}
    for lr in lrs:
        progress(f"{arm.name}, lr {lr:g}: training")
        ended = run(lr, first)
        searched[lr] = final(ended) if ended else None
        outcome = f"validation loss {searched[lr]:.4f}" if ended else "diverged"
        progress(f"{arm.name}, lr {lr:g}: {outcome}")
    reached = {lr: loss for lr, loss in searched.items() if loss is not None}
    if not reached:
        raise TrainingError(f"{arm.name} diverged at every learning rate ({lrs}): give lower ones")
    best = min(reached, key=lambda lr: reached[lr])
    for lr in set(lrs) - {best}:  # eight arms at 124M would leave 36 GB
        shutil.rmtree(place(lr, first) / "checkpoints", ignore_errors=True)
    runs = [found for seed in range(first, first + seeds) if (found := run(best, seed)) is not None]
    validated = [[line for line in run.metrics if "valid_loss" in line] for run in runs]
    curve = [
        (lines[0]["tokens"], statistics.fmean(line["valid_loss"] for line in lines))
        for lines in zip(*validated, strict=False)
    ]
    return Row(
        name=arm.name,
        title=arm.title,
        lr=best,
        searched={f"{lr:g}": loss for lr, loss in searched.items()},
        losses=[lines[-1]["valid_loss"] for lines in validated],
        curve=curve,
        tokens=curve[-1][0],
        seconds=statistics.median(run.metrics[-1]["elapsed_s"] for run in runs),
        memory_bytes=max((line.get("memory_bytes") or 0 for r in runs for line in r.metrics), default=None),
    )


def brief(row: Row) -> str:
    spread = f" ± {row.spread}" if row.spread != DASH else ""
    return f"{row.name}: {row.mean:.3f}{spread} at lr {row.lr:g}, {row.seconds:.0f} s"


COLUMNS = ("arm", "what", "lr", "loss", "± seeds", "perplexity", "at 1/4", "at 1/2", "tokens", "seconds")


def cells(row: Row) -> tuple[str, ...]:
    quarter, half = (row.curve[max(0, round(len(row.curve) * part) - 1)][1] for part in (0.25, 0.5))
    return (
        row.name, row.title, f"{row.lr:g}", f"{row.mean:.3f}", row.spread, f"{math.exp(row.mean):,.1f}",
        f"{quarter:.3f}", f"{half:.3f}", f"{row.tokens:,}", f"{row.seconds:,.0f}",
    )  # fmt: skip
