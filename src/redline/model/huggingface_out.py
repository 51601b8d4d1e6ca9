"""Hugging Face folders out: the configuration, the safetensors and the tokenizer that `transformers` loads.

write_folder(Path("export"), loaded, torch.bfloat16)
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.errors import StorageError
from redline.model.huggingface import CONV1D, GPT2_KEYS, LLAMA_KEYS, architecture, table_of
from redline.model.weights import Loaded, split
from redline.record.files import new_folder

SHARD_BYTES = 5_000_000_000
"""Largest weight file; a bigger model is written in several, with an index."""


def to_huggingface(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that transformers gives them, as views of ours."""
    conv1d = architecture(config) == "GPT2LMHeadModel"
    tensors = split(config, table_of(config), weights)
    turned = {name: tensor.t() for name, tensor in tensors.items() if conv1d and name.endswith(CONV1D)}
    return tensors | turned


def write_folder(folder: Path, loaded: Loaded, dtype: torch.dtype) -> None:
    """Write a new folder that transformers loads, complete or not at all."""
    tensors = to_huggingface(loaded.config, loaded.weights)
    with new_folder(folder, "a model") as temporary:
        for name, text in _texts(loaded, dtype).items():
            (temporary / name).write_text(text, encoding="utf-8")
        _write_weights(temporary, tensors, dtype)


def _texts(loaded: Loaded, dtype: torch.dtype) -> dict[str, str]:
    """Every file of the folder that is not weights."""
    config, eos_ids = loaded.config, loaded.eos_ids
    eos = None if not eos_ids else eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
    # Given even when null: the defaults of transformers are the ids of Llama's and GPT-2's own tokenizers.
    ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
    files: dict[str, object] = {
        "config.json": config_json(config) | ids | {"dtype": str(dtype).removeprefix("torch.")},
        "generation_config.json": ids,
    }
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in files.items()}
    if (tokenizer := loaded.tokenizer_json) is not None:
        tokens = {token["id"]: token["content"] for token in json.loads(tokenizer)["added_tokens"]}
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_length}
        about |= {"eos_token": tokens[eos_ids[0]]} if eos_ids and eos_ids[0] in tokens else {}
        # Without it, transformers 4 turns " ." into "." when it decodes.
        about |= {"clean_up_tokenization_spaces": False}
        texts |= {"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}
    if loaded.chat_template is not None:
        texts["chat_template.jinja"] = loaded.chat_template
    return texts


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What transformers reads about the model."""
    name = architecture(config)
    gpt2 = name == "GPT2LMHeadModel"
    model_type = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM").lower()
    keys = GPT2_KEYS if gpt2 else LLAMA_KEYS
    sized = replace(config, num_kv_heads=config.kv_heads, head_dim=config.head_size)
    said = {"architectures": [name], "model_type": model_type}
    said |= {theirs: getattr(sized, ours) for ours, theirs in keys.items()}
    if gpt2:
        # We train without dropout; transformers would add its own when the model is trained further.
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return said | {"activation_function": "gelu_new", **dropout}
    # Both spellings of rope: transformers 5 reads the first, transformers 4 the second.
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    biases = {"attention_bias": config.bias, "mlp_bias": config.bias} if name == "LlamaForCausalLM" else {}
    return said | {"hidden_act": "silu", **rope, "rope_theta": config.rope_theta, **biases}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], *, beside: str) -> None:
    """A safetensors file in a new folder, readable by whoever may read the file `beside` it."""
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise StorageError(
            f"{path.name} could not be written to {path.parent.parent} ({error}); free some space and try again"
        ) from error
    # safetensors leaves it readable by its owner alone
    shutil.copymode(path.with_name(beside), path)


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    shards: list[list[str]] = [[]]
    sizes_bytes = {name: tensor.numel() * dtype.itemsize for name, tensor in tensors.items()}
    for name, size_bytes in sizes_bytes.items():
        if shards[-1] and sum(sizes_bytes[other] for other in shards[-1]) + size_bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes_bytes.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file, names in zip(files, shards, strict=True):
        # One shard at a time, so that no second copy of the whole model is held.
        shard = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_tensors(folder / file, shard, beside="config.json")
