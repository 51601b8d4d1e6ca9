"""A trained model from wherever it lies: a run folder, a checkpoint, a Hugging Face folder or a GGUF file.

opened = open_weights(Path("runs/nano"))             # weights, tokenizer, config
opened, model = open_on(Path("runs/nano"), "best")   # and the model on this machine's GPU, or CPU
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from redline.config.load import from_toml
from redline.config.recipe import ModelConfig, Recipe
from redline.data.tokenizer import Tokenizer
from redline.errors import CheckpointError, ConfigError, DataError, MachineError
from redline.model.gguf import read_gguf
from redline.model.huggingface import read_folder
from redline.model.transformer import Transformer, build_model
from redline.model.weights import Loaded, load_weights
from redline.record.run import RunFolder
from redline.train.checkpoint import read_tensors, resolve


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model's weights with what belongs to them; `recipe` where it was trained here."""

    loaded: Loaded
    recipe: Recipe | None
    source: Path

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
    dtype = torch.bfloat16 if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return opened, opened.build(device, dtype)


def open_weights(path: Path, which: str = "last") -> Opened:
    """Read weights and tokenizer; `which` is last, best or step-N, for a run."""
    if path.suffix == ".gguf":
        return Opened(loaded=read_gguf(path), recipe=None, source=path)
    if (path / "config.json").is_file():
        return Opened(loaded=read_folder(path), recipe=None, source=path)
    if not path.exists():
        raise CheckpointError(f"no such path: {path}; give a run folder, a checkpoint, a Hugging Face folder or a .gguf file")
    step = resolve(path, which)
    run = RunFolder(step.parent.parent)
    if not run.recipe_path.is_file():
        raise CheckpointError(f"{step} belongs to no run: {run.recipe_path} is missing")
    recipe = from_toml(run.recipe_path.read_text(encoding="utf-8"), where=str(run.recipe_path))
    tokenizer_json = run.tokenizer_path.read_text(encoding="utf-8") if run.tokenizer_path.is_file() else None
    eos = (Tokenizer(tokenizer_json, name=str(run.tokenizer_path)).eot_id,) if tokenizer_json else ()
    loaded = Loaded(
        config=recipe.model, weights=read_tensors(step, "model."), tokenizer_json=tokenizer_json, chat_template=None, eos_ids=eos
    )
    return Opened(loaded=loaded, recipe=recipe, source=step)
