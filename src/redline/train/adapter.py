"""Adapters as PEFT keeps them: a folder with adapter_config.json and adapter_model.safetensors, which `peft`
loads, and back.

    write_adapter(Path("out/adapter"), model, base="HuggingFaceTB/SmolLM2-135M-Instruct")
    read_adapter(Path("out/adapter"), model)        # puts adapters on a plain model and fills them

A fused layer of ours is several modules there: its stacked A and block-diagonal B are cut into parts. GPT-2
is refused: its query, key and value are one module in transformers, which PEFT gives one A. Left out:
dropout, rsLoRA, DoRA, ranks by layer, trained biases.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from redline.config.recipe import LoraConfig, ModelConfig
from redline.errors import CheckpointError, ConfigError
from redline.model.huggingface import architecture
from redline.model.huggingface_out import save_tensors
from redline.model.lora import LoraLinear, add_lora, lora_layers
from redline.model.transformer import Transformer
from redline.model.weights import read_facts
from redline.record.files import check_vacant, new_folder, read_json
from redline.train.process import full

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_PLAIN = {
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
}
"""PEFT's options beyond W + B A alpha/r, at the values that do nothing."""
_UNSET: tuple[Any, ...] = (None, False, [], {}, "none")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: Path, model: Transformer, *, base: str | None = None, write: bool = True) -> None:
    """Write the adapters to a new folder, complete or not at all. All processes gather; one may `write`."""
    layers = list(lora_layers(model).values())
    if not layers:
        raise ConfigError("the model has no adapters to write: train with LoRA, or export the whole model")
    check_family(model.config)
    check_vacant(folder, "an adapter")
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in peft_tensors(model).items()
    }
    if not write:
        return
    text = json.dumps(_config_json(layers, base), indent=2) + "\n"
    with new_folder(folder, "an adapter") as temporary:
        (temporary / _CONFIG).write_text(text, encoding="utf-8")
        save_tensors(temporary / _WEIGHTS, tensors, beside=_CONFIG)


def adapter_base(folder: Path) -> str | None:
    """The model that the adapter was made for, as its file names it."""
    base = _read_json(folder / _CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


@torch.no_grad()
def read_adapter(folder: Path, model: Transformer) -> LoraConfig:
    """Put the folder's adapters on the model, which has none or the same kind; names and shapes are checked."""
    check_family(model.config)
    config = _read_config(folder / _CONFIG)
    try:
        tensors = safetensors.torch.load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / _WEIGHTS} cannot be read ({error}); write it again") from error
    # before adapters of that rank are put on the model, which takes memory
    ranks = {
        tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith(".lora_A.weight") and tensor.dim()
    }
    if ranks != {config.rank}:
        raise CheckpointError(
            f"{folder} says rank r = {config.rank}, but its weights have {', '.join(map(str, ranks)) or 'none'};"
            " write the adapter again"
        )
    present = next((layer.config for layer in lora_layers(model).values()), None)
    kinds = [(one.rank, one.alpha, set(one.targets)) for one in (present or config, config)]
    if present is None:
        add_lora(model, config, seed=0)
    elif kinds[0] != kinds[1]:
        raise CheckpointError(f"{folder} holds other adapters than the model has ({config}, not {present})")
    ours = peft_tensors(model)
    if wrong := sorted(ours.keys() ^ tensors.keys()) + [
        name for name in ours.keys() & tensors.keys() if ours[name].shape != tensors[name].shape
    ]:
        raise CheckpointError(
            f"{folder} does not fit the model: {', '.join(wrong[:3])}{' and more' if len(wrong) > 3 else ''}"
        )
    for name, tensor in ours.items():
        tensor.copy_(tensors[name])
    return config


def peft_tensors(model: Transformer) -> dict[str, Tensor]:
    """The adapters under PEFT's names, as views of ours; gathered if they are sharded."""
    tensors = {}
    for name, layer in lora_layers(model).items():
        lora_a, lora_b = full(layer.lora_a), full(layer.lora_b)
        for part, own in layer.blocks():
            prefix = f"base_model.model.model.layers.{name.split('.')[1]}.{MODULES[part.target]}"
            tensors[f"{prefix}.lora_A.weight"] = lora_a[own]
            tensors[f"{prefix}.lora_B.weight"] = lora_b[part.start : part.end, own]
    return tensors


def check_family(config: ModelConfig) -> None:
    """Refuse a model whose adapters PEFT's format cannot hold."""
    if (family := architecture(config)) == "GPT2LMHeadModel":
        raise ConfigError(
            f"adapters in PEFT's format are for Llama, Qwen2 and Qwen3, got {family}: fine-tune the whole"
            " model (leave out [lora]), or merge them and export it"
        )


def _config_json(layers: list[LoraLinear], base: str | None) -> dict[str, Any]:
    config = layers[0].config
    targets = sorted({MODULES[part.target].split(".")[1] for layer in layers for part in layer.parts})
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    shape = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": 0.0, "target_modules": targets}
    return {**kind, "inference_mode": True, **shape, **_PLAIN}


@dataclass(frozen=True, kw_only=True)
class _Facts:
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]


def _read_json(path: Path) -> dict[str, Any]:
    raw = read_json(path, dict, error=CheckpointError)
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} must describe a LoRA adapter (peft_type LORA)")
    return raw


def _read_config(path: Path) -> LoraConfig:
    raw = _read_json(path)
    for name in (*_PLAIN, "rank_pattern", "alpha_pattern", "layers_to_transform"):
        if raw.get(name) not in _UNSET:
            raise CheckpointError(
                f"{path}: {name} must not be set, got {raw[name]!r:.80}; merge this adapter with PEFT and use the"
                " merged model"
            )
    facts = read_facts(_Facts, raw, where=str(path))
    names = {module.split(".")[1]: target for target, module in MODULES.items()}
    if unknown := [module for module in facts.target_modules if module not in names]:
        raise CheckpointError(f"{path}: target_modules must be of {', '.join(names)}, got {unknown[0]!r:.80}")
    targets = tuple(target for name, target in names.items() if name in facts.target_modules)
    return LoraConfig(rank=facts.r, alpha=facts.lora_alpha, targets=targets)
