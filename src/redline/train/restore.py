"""A trained model from wherever it lies: a run folder (RFT too), a checkpoint, a Hugging Face or PEFT folder,
a GGUF file, the package.

opened = open_weights(Path("runs/nano"))             # weights, tokenizer, config
opened, model = open_on(Path("runs/nano"), "best")   # and the model on this machine's GPU, or CPU
"""

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from redline.config.load import from_toml
from redline.config.recipe import ModelConfig, Recipe
from redline.data.tokenizer import Tokenizer
from redline.errors import CheckpointError, ConfigError, DataError, MachineError
from redline.model.gguf import read_gguf
from redline.model.huggingface import read_folder
from redline.model.lora import merged_weights
from redline.model.transformer import Transformer, build_model
from redline.model.weights import Loaded, load_weights
from redline.record.files import read_text
from redline.record.run import RunFolder
from redline.train.adapter import adapter_base, peft_tensors, read_adapter
from redline.train.checkpoint import read_tensors, resolve


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter as it was read, and where the model below it lies, whose weights are not kept: they are as
    large as the merged ones."""

    base: Path
    tensors: dict[str, Tensor]
    """By the names that PEFT gives them."""
    scale: float


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model's weights with what belongs to them; `recipe` where it was trained here."""

    loaded: Loaded
    recipe: Recipe | None
    source: Path
    adapter: Adapter | None = None
    """What was merged into the weights."""

    @property
    def config(self) -> ModelConfig:
        return self.loaded.config

    @property
    def tokenizer(self) -> Tokenizer:
        if self.loaded.tokenizer_json is None:
            raise DataError(f"{self.source} has no tokenizer.json: put one beside the weights")
        return Tokenizer(self.loaded.tokenizer_json, name=str(self.source))

    def build(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Transformer:
        model = build_model(self.config, device=device, seed=0)
        load_weights(model, self.loaded.weights)
        model.compute_dtype = dtype
        return model.eval()


def open_on(path: Path, which: str = "last", device: str | None = None) -> tuple[Opened, Transformer]:
    """Open weights and build the model: bf16 on a GPU that has it, fp32 elsewhere."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"the device must be cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise MachineError("torch sees no CUDA device: use --device cpu, or check the driver")
    opened = open_weights(path, which)
    dtype = (
        torch.bfloat16
        if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        else torch.float32
    )
    return opened, opened.build(device, dtype)


def shipped_models() -> dict[str, Path]:
    """Names of the models that come with the package, each a Hugging Face folder."""
    root = Path(str(resources.files("redline"))) / "models"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def open_weights(path: Path, which: str = "last", *, above: tuple[Path, ...] = ()) -> Opened:
    """Read weights and tokenizer; `which` is last, best or step-N, for a run. `above`: the adapters that are to be
    merged into them."""
    if not path.exists():  # Path("./demo") is Path("demo"), so a folder of the user's must come first
        path = shipped_models().get(str(path), path)
    if path.suffix == ".gguf":
        return Opened(loaded=read_gguf(path), recipe=None, source=path)
    if (path / "adapter_config.json").is_file():
        return _open_adapted(path, above)
    if (path / "config.json").is_file():
        return Opened(loaded=read_folder(path), recipe=None, source=path)
    if not path.exists():
        raise CheckpointError(
            f"no such path: {path}; give a run folder, a checkpoint, a Hugging Face folder, a .gguf file or"
            " demo"
        )
    if rounds := sorted(
        path.glob("round-*/adapter"), key=lambda adapter: int(adapter.parent.name.removeprefix("round-"))
    ):
        return _open_adapted(rounds[-1], above)  # of an RFT run in rounds, the last
    if (path / "adapter" / "adapter_config.json").is_file():
        return _open_adapted(path / "adapter", above)
    if (path / "model" / "config.json").is_file():  # an RFT run that trained the whole model
        return Opened(loaded=read_folder(path / "model"), recipe=None, source=path / "model")
    step = resolve(path, which)
    run = RunFolder(step.parent.parent)
    if not run.recipe_path.is_file():
        raise CheckpointError(f"{step} belongs to no run: {run.recipe_path} is missing")
    recipe = from_toml(read_text(run.recipe_path), where=str(run.recipe_path))
    tokenizer_json = read_text(run.tokenizer_path) if run.tokenizer_path.is_file() else None
    eos = (Tokenizer(tokenizer_json, name=str(run.tokenizer_path)).eot_id,) if tokenizer_json else ()
    loaded = Loaded(
        config=recipe.model,
        weights=read_tensors(step, "model."),
        tokenizer_json=tokenizer_json,
        chat_template=None,
        eos_ids=eos,
    )
    return Opened(loaded=loaded, recipe=recipe, source=step)


def _open_adapted(folder: Path, above: tuple[Path, ...]) -> Opened:
    """A base model with an adapter merged into its weights; the adapter's own file names the base."""
    base = adapter_base(folder)
    if base is None:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} names no base model: merge the adapter with the program that"
            " made it"
        )
    if folder.resolve() in above:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} names itself as its base model: name the model below"
        )
    opened = open_weights(Path(base), above=(*above, folder.resolve()))
    model = opened.build("cpu")
    config = read_adapter(folder, model)
    adapter = Adapter(
        base=Path(base),
        tensors={name: part.detach() for name, part in peft_tensors(model).items()},
        scale=config.scale,
    )
    return replace(
        opened,
        loaded=replace(opened.loaded, weights=dict(merged_weights(model))),
        source=folder,
        adapter=adapter,
    )
