"""Where weights lie: names of checkpoints, the result of a run, models that ship, names on the Hub. No torch, so
that a path is checked before it is imported.

    find(Path("runs/nano"), "best")      # .../checkpoints/step-00000080
    find(Path("demo"))                   # a Hugging Face folder in the package
"""

import re
from importlib import resources
from pathlib import Path

from redline.data.hub import fetch_model, is_hub_name
from redline.errors import CheckpointError
from redline.record.files import read_json

BEST = "best.json"
OLD = ".old"


def find(path: Path, which: str = "last") -> Path:
    """A GGUF file, a Hugging Face or PEFT folder, or a run's checkpoint: `which` is last, best or step-N."""
    path = locate(path)
    configs = (path / "adapter_config.json", path / "config.json")
    if path.suffix == ".gguf" or any(file.is_file() for file in configs):
        if which != "last":
            raise CheckpointError(
                f"--checkpoint {which} is for pre-training runs, but {path} is a finished model: leave it out"
            )
        return path
    return resolve(path, which)


def locate(path: Path) -> Path:
    """The path itself, the result of a fine-tuning run (RFT: of the last round), a shipped model, or a Hub
    download."""
    if not path.exists():  # Path("./demo") is Path("demo"), so a folder of the user's must come first
        path = shipped_models().get(str(path), path)
    if is_hub_name(str(path)):
        return fetch_model(str(path))
    if not path.exists():
        raise CheckpointError(
            f"no such path: {path}; give a run folder, a checkpoint, a Hugging Face folder, a .gguf file, demo, or"
            " org/name on the Hugging Face Hub"
        )
    numbers = sorted(int(n) for p in path.glob("round-*") if (n := p.name.removeprefix("round-")).isdecimal())
    for run in (*(path / f"round-{number}" for number in reversed(numbers)), path):
        for result in (run / "adapter", run / "model"):
            if (result / "adapter_config.json").is_file() or (result / "config.json").is_file():
                return result
    return path


def shipped_models() -> dict[str, Path]:
    """Names of the models that come with the package, each a Hugging Face folder."""
    root = Path(str(resources.files("redline"))) / "models"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def resolve(path: Path, which: str = "last") -> Path:
    """The step folder meant by a run, checkpoints or step folder; `which` is last, best or step-N. Not verified."""
    if re.fullmatch(r"step-\d+", path.name) and path.is_dir():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = step_folders(folder)
    if not found and any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path} holds weights but no config.json: fetch the whole Hugging Face folder again"
        )
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}: give a run, checkpoints or step folder")
    there = f"{folder} has {', '.join(f'step-{step}' for step in found)}"
    if which == "last":
        return found[max(found)]
    if which == "best":
        if (best := read_best(folder)) is None:
            raise CheckpointError(f"no checkpoint has been marked as the best: {there}")
        return found[best]
    match = re.fullmatch(r"step-(\d+)", which)
    if not match or int(match[1]) not in found:
        raise CheckpointError(f"a checkpoint is chosen by last, best or step-N, got {which}: {there}")
    return found[int(match[1])]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_folders(folder: Path) -> dict[int, Path]:
    """Every committed checkpoint, oldest step first."""
    found: dict[int, Path] = {}
    # In reverse order `step-N.old` comes before `step-N`, which then takes its place.
    for path in sorted(folder.glob("step-*"), reverse=True):
        if match := re.fullmatch(rf"step-(\d+)({re.escape(OLD)})?", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_best(folder: Path) -> int | None:
    """The step of the best checkpoint, if it has been marked and is still there."""
    if not (folder / BEST).exists():
        return None
    step = read_json(folder / BEST, dict, error=CheckpointError).get("step")
    if not isinstance(step, int):
        raise CheckpointError(f"{folder / BEST} is damaged: remove it; the next best is marked again")
    return step if step in step_folders(folder) else None
