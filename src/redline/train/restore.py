"""A trained model from wherever it is: a run folder (RFT too), a checkpoint, a Hugging Face or PEFT folder,
a GGUF file, the package.

opened = open_weights(Path("runs/nano"))             # weights, tokenizer, config
opened, model = open_on(Path("runs/nano"), "best")   # and the model on this machine's GPU, or CPU
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from redline.config.recipe import ModelConfig, Recipe
from redline.config.rules import check
from redline.data.tokenizer import Tokenizer
from redline.errors import CheckpointError, ConfigError, DataError, MachineError
from redline.model.gguf import read_gguf, read_gguf_config
from redline.model.huggingface import read_config, read_folder
from redline.model.lora import merged_weights
from redline.model.transformer import Transformer, build_model
from redline.model.weights import Loaded, load_weights
from redline.record.files import read_text
from redline.record.run import RunFolder
from redline.train.adapter import adapter_base, peft_tensors, read_adapter
from redline.train.checkpoint import read_tensors
from redline.train.open_run import recipe_of
from redline.train.places import find


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter as it was read, and where its base model is; the base's weights are not kept."""

    base: Path
    tensors: dict[str, Tensor]
    """Tensors by the names that PEFT gives them."""
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
    half = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return opened, opened.build(device, torch.bfloat16 if half else torch.float32)


def read_shape(path: Path, *, above: tuple[Path, ...] = ()) -> ModelConfig:
    """The shape of the model at this path; its weights are not read."""
    path = find(path)
    if path.suffix == ".gguf":
        return read_gguf_config(path)
    if (path / "adapter_config.json").is_file():
        return read_shape(_base_of(path, above), above=(*above, path.resolve()))
    if (path / "config.json").is_file():
        return read_config(path)
    return _recipe_of(path).model


def with_shape(recipe: Recipe) -> Recipe:
    """The recipe with its model's shape, read from the weights where the recipe leaves it out."""
    start = recipe.model.init_from
    if recipe.model.is_shaped or start is None:
        return recipe
    found = replace(read_shape(Path(start)), init_from=start)
    given = {f.name: getattr(recipe.model, f.name) for f in fields(ModelConfig)}
    plain = {f.name: f.default for f in fields(ModelConfig)}
    if wrong := [name for name, value in given.items() if value not in (plain[name], getattr(found, name))]:
        name, has = wrong[0], getattr(found, wrong[0])
        raise ConfigError(f"model.{name} is {given[name]}; the weights in {start} have {has}")
    return check(replace(recipe, model=found))


def open_weights(path: Path, which: str = "last", *, above: tuple[Path, ...] = ()) -> Opened:
    """Read weights and tokenizer; `which` (last, best, step-N) is for a run. `above`: adapters to be merged in."""
    path = find(path, which)
    if path.suffix == ".gguf":
        return Opened(loaded=read_gguf(path), recipe=None, source=path)
    if (path / "adapter_config.json").is_file():
        return _open_adapted(path, above)
    if (path / "config.json").is_file():
        return Opened(loaded=read_folder(path), recipe=None, source=path)
    run, recipe = RunFolder(path.parent.parent), _recipe_of(path)
    tokenizer_json = read_text(run.tokenizer_path) if run.tokenizer_path.is_file() else None
    eos = (Tokenizer(tokenizer_json, name=str(run.tokenizer_path)).eot_id,) if tokenizer_json else ()
    weights = read_tensors(path, "model.")
    loaded = Loaded(config=recipe.model, weights=weights, tokenizer_json=tokenizer_json, eos_ids=eos)
    return Opened(loaded=loaded, recipe=recipe, source=path)


def _recipe_of(step: Path) -> Recipe:
    recipe = recipe_of(step.parent.parent)
    if recipe is None:
        raise CheckpointError(f"{step} belongs to no run: {step.parent.parent / 'recipe.toml'} is missing")
    if recipe.lora is not None:
        raise CheckpointError(f"{step.parent.parent} has not finished fine-tuning: run its command again")
    return recipe


def _base_of(folder: Path, above: tuple[Path, ...]) -> Path:
    """The model below an adapter, as the adapter's own file names it."""
    base = adapter_base(folder)
    if folder.resolve() in above:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} names itself as its base: name the model that it was trained on"
        )
    if base is None:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} names no base model: merge the adapter with the program that made it"
        )
    return Path(base)


def _open_adapted(folder: Path, above: tuple[Path, ...]) -> Opened:
    """A base model with an adapter merged into its weights."""
    base = _base_of(folder, above)
    opened = open_weights(base, above=(*above, folder.resolve()))
    model = opened.build("cpu")
    config = read_adapter(folder, model)
    tensors = {name: part.detach() for name, part in peft_tensors(model).items()}
    adapter = Adapter(base=base, tensors=tensors, scale=config.scale)
    loaded = replace(opened.loaded, weights=dict(merged_weights(model)))
    return replace(opened, loaded=loaded, source=folder, adapter=adapter)
