"""A run folder opened for one recipe: made, resumed, extended or forked; refused where it holds another run.

    with open_run(recipe, plan, Path("runs/nano"), process, observers=...) as opened:
        ...                      # opened.folder is None on all processes but the first

A run is extended when only `train.steps`, `epochs`, `max_hours` or `early_stop_evals` changed: it continues from
its last checkpoint, and the event `extended` says so. With `fork` another run's checkpoint is where this one
begins, with whatever values it has: the event `forked` names it and lists them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.config.differences import differences, lasting, refusal
from redline.config.load import from_toml, to_toml
from redline.config.recipe import Recipe
from redline.errors import CheckpointError, ConfigError
from redline.plan.plan import Plan, save
from redline.record.files import read_text, write_atomic
from redline.record.observe import Observer, Observers
from redline.record.run import RunFolder, failures_recorded, read_lines
from redline.train.places import resolve, step_folders

if TYPE_CHECKING:
    from redline.train.process import Process

Watching = Callable[[int], Sequence[Observer]]
"""Makes the observers, given the step that the run resumes from."""


@dataclass(frozen=True)
class OpenRun:
    """Where a run is kept and who watches; by default nowhere and nobody."""

    run: Path | None = None
    """The run folder, the same on every process; None: nothing is kept."""
    folder: RunFolder | None = None
    """The same, on the first process; None on the others, which write only checkpoint shards."""
    observers: Sequence[Observer] = ()
    fork: Path | None = None
    """A checkpoint of another run, from which this one continues with other values."""

    @functools.cached_property
    def watching(self) -> Observers:
        return Observers(self.observers)

    def check_fork(self, step: int, steps: int) -> None:
        """A fork keeps counting from its checkpoint: refuse one that would train nothing."""
        if step >= steps:
            raise ConfigError(
                f"{self.fork} is at step {step:,}, but this run ends at step {steps:,}: give it more train.steps"
                " or train.epochs"
            )

    def event(self, kind: str, **facts: Any) -> None:
        if self.folder is not None:
            self.folder.event(kind, **facts)
        self.watching.event(kind, facts)


@contextlib.contextmanager
def open_run(
    recipe: Recipe,
    plan: Plan,
    run: Path,
    process: "Process",
    *,
    observers: Watching = lambda resume_step: (),
    fork: Path | None = None,
) -> Iterator[OpenRun]:
    """Own the folder (on the first process) while the block lasts. Errors are written into its events."""
    begins_with = _fork_point(run, fork) if fork is not None else None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder(run)) if process.is_first else None
        if folder is not None:
            with failures_recorded(run, "refused"):  # the run that the folder holds has not failed
                adopt(folder, recipe, fork=begins_with)
            save(plan, folder.plan_path)
        stack.enter_context(failures_recorded(run))  # once the folder is ours
        step = max(step_folders(folder.checkpoints_path), default=0) if folder is not None else 0
        opened = OpenRun(run, folder, observers(step) if folder is not None else (), begins_with)
        stack.callback(opened.watching.close)
        yield opened


def _fork_point(run: Path, fork: Path) -> Path:
    """The checkpoint that this run begins with. A run that was killed before its own first checkpoint begins with the same
    one again: its parent may have gone on since."""
    folder = RunFolder(run)
    told = [event for event in read_lines(folder.events_path) if event["event"] == "forked"]
    if not told or not folder.has_begun() or step_folders(folder.checkpoints_path):
        return resolve(fork)
    name = Path(str(told[-1]["source"])).name
    try:
        return resolve(fork, name)
    except CheckpointError as error:
        gone = f"{run} began with {name} of {fork}, which is gone"
        raise CheckpointError(f"{gone}: give another folder with --run") from error


def adopt(folder: RunFolder, recipe: Recipe, *, fork: Path | None = None) -> None:
    """Make the folder this recipe's, unless it holds the beginnings of another run."""
    changed = changes(folder, recipe)
    if changed:  # said first: once the recipe is replaced nothing shows the change
        folder.event_once("extended", changed={key: list(values) for key, values in changed.items()})
    write_atomic(folder.recipe_path, to_toml(recipe))
    if fork is not None and not folder.has_begun():
        parent = recipe_of(fork.parent.parent)
        others = differences(parent, recipe) if parent is not None else {}
        listed = {key: list(values) for key, values in others.items()}
        folder.event_once("forked", source=str(fork), changed=listed)


def changes(folder: RunFolder, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """What this recipe changes of the run in the folder, before and now; refused where that would be another run."""
    before = recipe_of(folder.path) if folder.has_begun() else None
    changed = differences(before, recipe) if before is not None else {}
    if _same_round(*changed.get("sample.sampler", (None, None)), folder.path):
        changed.pop("sample.sampler")
    if others := lasting(changed):
        raise ConfigError(refusal(str(folder.path), others))
    return changed


def _same_round(before: str | None, now: str | None, run: Path) -> bool:
    """Whether both name the RFT round beside this one, in a run that was moved."""
    name = Path(before or "").name
    moved = now is not None and Path(now).resolve() == run.resolve().with_name(name or "none")
    return moved and name.startswith("round-")


def recipe_of(run: Path) -> Recipe | None:
    """The recipe in a run folder; None where there is none."""
    path = RunFolder(run).recipe_path
    return from_toml(read_text(path, error=ConfigError), where=str(path)) if path.exists() else None
