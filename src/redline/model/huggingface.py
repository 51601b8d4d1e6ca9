"""Hugging Face folders in: GPT-2, Llama (SmolLM2), Qwen2 and Qwen3.

    loaded = read_folder(Path("SmolLM2-135M"))          # config.json, *.safetensors, tokenizer.json
    load_weights(model, loaded.weights)

Weights are read in the dtype they are stored in (half the memory of fp32 for bf16, and copying them into a
model is exact). Whatever we would compute differently from transformers is refused with its name and value,
never ignored. Left out: pickled weights, rope scaling, dropout (which changes training and not the
model), mixtures of experts, quantised checkpoints. `huggingface_out` writes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.errors import CheckpointError, ConfigError
from redline.model.weights import SIZES, Loaded, Table, check_sizes, join, read_facts
from redline.record.files import read_json, read_text

_GPT2: Table = {
    "embed": ("transformer.wte",),
    "positions": ("transformer.wpe",),
    "blocks.{i}.attn_norm": ("transformer.h.{i}.ln_1",),
    "blocks.{i}.attn.qkv": ("transformer.h.{i}.attn.c_attn",),
    "blocks.{i}.attn.out": ("transformer.h.{i}.attn.c_proj",),
    "blocks.{i}.ffn_norm": ("transformer.h.{i}.ln_2",),
    "blocks.{i}.ffn.up": ("transformer.h.{i}.mlp.c_fc",),
    "blocks.{i}.ffn.down": ("transformer.h.{i}.mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}
_LLAMA: Table = {
    "embed": ("model.embed_tokens",),
    "blocks.{i}.attn_norm": ("model.layers.{i}.input_layernorm",),
    "blocks.{i}.attn.qkv": tuple(f"model.layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    "blocks.{i}.attn.q_norm": ("model.layers.{i}.self_attn.q_norm",),
    "blocks.{i}.attn.k_norm": ("model.layers.{i}.self_attn.k_norm",),
    "blocks.{i}.attn.out": ("model.layers.{i}.self_attn.o_proj",),
    "blocks.{i}.ffn_norm": ("model.layers.{i}.post_attention_layernorm",),
    "blocks.{i}.ffn.up": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
    "blocks.{i}.ffn.down": ("model.layers.{i}.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2 stores these (in, out)
# constants that old checkpoints carry along
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


_SHARED = {
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
GPT2_KEYS = _SHARED | {
    "num_layers": "n_layer", "hidden_size": "n_embd", "num_heads": "n_head", "ffn_size": "n_inner",
    "context_length": "n_positions", "norm_eps": "layer_norm_epsilon",
}  # fmt: skip
LLAMA_KEYS = _SHARED | {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn_size": "intermediate_size",
    "context_length": "max_position_embeddings", "norm_eps": "rms_norm_eps",
}  # fmt: skip
"""Our names, and those of config.json (Llama, Qwen2 and Qwen3 share theirs)."""


@dataclass(frozen=True, kw_only=True)
class _More:
    """What else config.json may say, with the defaults of transformers."""

    rope_theta: float | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: tuple[str, ...] = ()


def read_folder(folder: Path) -> Loaded:
    """Everything that a Hugging Face folder says about a model."""
    config, tensors = read_config(folder), _map_tensors(_files(folder))
    tokenizer, template = folder / "tokenizer.json", folder / "chat_template.jinja"
    about, generation = folder / "tokenizer_config.json", folder / "generation_config.json"
    chat = _json(about).get("chat_template") if about.is_file() else None
    chat = read_text(template, error=CheckpointError) if template.is_file() else chat
    eos = _json(generation if generation.is_file() else folder / "config.json").get("eos_token_id")
    ends = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(end) is int for end in ends):
        raise CheckpointError(f"{folder}: eos_token_id must be a whole number or a list, got {eos!r:.80}")
    check_sizes(config, {name: tensor.shape for name, tensor in tensors.items()}, ends, where=str(folder))
    return Loaded(
        config=config,
        weights=from_huggingface(config, tensors, where=str(folder)),
        tokenizer_json=read_text(tokenizer, error=CheckpointError) if tokenizer.is_file() else None,
        chat_template=chat if isinstance(chat, str) else None,
        eos_ids=ends,
    )


def read_config(folder: Path) -> ModelConfig:
    """The model of `config.json`; refused if we would compute it differently. Its sizes are not checked yet."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face folder: it has no config.json; give another")
    raw = _json(path)
    readers = {
        "GPT2LMHeadModel": _read_gpt2,
        "LlamaForCausalLM": _read_llama,
        "Qwen2ForCausalLM": _read_llama,
        "Qwen3ForCausalLM": _read_llama,
    }
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in readers:
        raise CheckpointError(
            f"{path}: architectures must name one of {', '.join(readers)}, got {name!r:.80}"
        )
    _accept(path, raw, "quantization_config", None)
    return readers[name](path, name, raw)


def _read_gpt2(path: Path, name: str, raw: dict[str, Any]) -> ModelConfig:
    _accept(path, raw, "activation_function", *_TANH_GELU)
    _accept(path, raw, "scale_attn_weights", None, True)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        _accept(path, raw, key, None, False)
    width = raw.get("n_embd")
    sized = {"n_inner": 4 * width} if type(width) is int and not raw.get("n_inner") else {}
    fixed = {"norm": "layernorm", "positions": "learned", "activation": "gelu", "bias": True}
    return _config(path, {**raw, **sized}, GPT2_KEYS, {"tie_embeddings": True}, fixed)


def _read_llama(path: Path, name: str, raw: dict[str, Any]) -> ModelConfig:
    _accept(path, raw, "hidden_act", "silu")
    more, thetas = read_facts(_More, raw, where=str(path)), []
    for rope in (raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}, raw):
        if not isinstance(rope, dict):
            raise CheckpointError(
                f"{path}: rope_scaling and rope_parameters must be tables, got {rope!r:.80}"
            )
        _accept(path, rope, "rope_type" if "rope_type" in rope else "type", None, "default")
        _accept(path, rope, "partial_rotary_factor", None, 1.0)
        thetas.append(read_facts(_More, rope, where=str(path)).rope_theta)
    needed = {
        "Qwen2ForCausalLM": ("num_key_value_heads",),
        "Qwen3ForCausalLM": ("num_key_value_heads", "head_dim"),
    }
    if absent := [key for key in needed.get(name, ()) if raw.get(key) is None]:
        raise CheckpointError(f"{path}: {absent[0]} must be given for {name}, but it is not; fetch it again")
    fixed = {
        "rope_theta": next((theta for theta in thetas if theta is not None), 10_000.0), "bias": more.attention_bias,
        "qkv_bias": name == "Qwen2ForCausalLM", "qk_norm": name == "Qwen3ForCausalLM",
    }  # fmt: skip
    config = _config(path, raw, LLAMA_KEYS, {"tie_embeddings": False, "norm_eps": 1e-6}, fixed)
    windows = more.use_sliding_window and raw.get("sliding_window", 4096) is not None
    windowed = windows and more.max_window_layers < config.num_layers
    kinds = more.layer_types or (("sliding_attention",) if windowed else ())
    if any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"{path}: some layers have a sliding window, but none may have one")
    if name == "LlamaForCausalLM":
        # Our models have all biases or none, so the two switches must agree.
        _accept(path, raw, "mlp_bias", *((True,) if more.attention_bias else (None, False)))
    else:
        _accept(path, raw, "attention_bias", None, False)
    kv_heads = None if config.kv_heads == config.num_heads else config.num_kv_heads
    usual = config.head_dim is not None and config.head_dim * config.num_heads == config.hidden_size
    return replace(config, num_kv_heads=kv_heads, head_dim=None if usual else config.head_dim)


def _config(
    path: Path, raw: dict[str, Any], keys: Mapping[str, str], defaults: dict[str, Any], fixed: dict[str, Any]
) -> ModelConfig:
    """The values that config.json gives under its names, the defaults of transformers, and what a family fixes."""
    given = {ours: raw[theirs] for ours, theirs in keys.items() if raw.get(theirs) is not None}
    if absent := [keys[name] for name in SIZES if name not in given]:
        raise CheckpointError(f"{path}: {absent[0]!r} is missing; fetch the file again, or correct it")
    return read_facts(ModelConfig, {**defaults, **given, **fixed}, where=str(path))


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights, all of them there."""
    index = folder / "model.safetensors.index.json"
    names: set[str] = {"model.safetensors"}
    if index.is_file():
        named = _json(index).get("weight_map")
        if not isinstance(named, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in named.values()
        ):
            raise CheckpointError(f"{index} must map tensors to files beside it (weight_map); fetch it again")
        names = set(named.values())
    files = [folder / name for name in sorted(names)]
    if absent := [file.name for file in files if not file.is_file()]:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        convert = "its weights are pickled, which can run code: convert them to safetensors"
        way_out = convert if pickled else "fetch them again"
        raise CheckpointError(
            f"{folder} must hold its weights as safetensors, but {', '.join(absent[:3])} is missing;"
            f" {way_out}"
        )
    return files


def _map_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Tensors in the dtype they are stored in, mapped from the files."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= safetensors.torch.load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is truncated or altered ({error}); fetch it again") from error
    return tensors


def from_huggingface(config: ModelConfig, tensors: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """Our weights, from tensors by the names that transformers gives them."""
    family = architecture(config)
    # GPT-2's own checkpoints were saved from the model without its head, so their names lack the first part.
    bare = family == "GPT2LMHeadModel" and "wte.weight" in tensors
    theirs = {}
    for name, tensor in tensors.items():
        if name.endswith(_BUFFERS):
            continue
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(
                f"{where}: {name} must be fp32, bf16 or fp16, got {tensor.dtype}; nothing else is read"
            )
        full = f"transformer.{name}" if bare and name != "lm_head.weight" else name
        turned = family == "GPT2LMHeadModel" and full.endswith(CONV1D) and tensor.dim() == 2
        theirs[full] = tensor.t() if turned else tensor
    embedding, head = theirs.get(table_of(config)["embed"][0] + ".weight"), theirs.get("lm_head.weight")
    if config.tie_embeddings and embedding is not None and head is not None:
        if not torch.equal(embedding, head):
            raise CheckpointError(
                f"{where}: tie_word_embeddings is true, yet lm_head.weight differs; correct config.json"
            )
        del theirs["lm_head.weight"]
    return join(config, table_of(config), theirs, where=where)


def architecture(config: ModelConfig) -> str:
    """The class of transformers that computes this model; an unknown combination is refused by name."""
    if config.own is not None:
        raise ConfigError(
            f"{config.own} has no equivalent in transformers, nor in GGUF files: use the run folder itself (redline"
            " generate, redline chat, model.init_from)"
        )
    if config.positions == "learned":
        name = "GPT2LMHeadModel"
        needed = {"norm": "layernorm", "activation": "gelu", "bias": True, "qk_norm": False}
        needed |= {"kv_heads": config.num_heads, "head_size": config.hidden_size / config.num_heads}
    else:
        name = "LlamaForCausalLM"
        needed = {"norm": "rmsnorm", "activation": "swiglu"}
        if config.qk_norm:
            name = "Qwen3ForCausalLM"
            needed |= {"bias": False, "qkv_bias": False}
        elif config.qkv_bias and not config.bias:
            name = "Qwen2ForCausalLM"
    for field, want in needed.items():
        if (got := getattr(config, field)) != want:
            raise ConfigError(f"model.{field} = {got} has no equivalent in transformers: {name} needs {want}")
    if name == "LlamaForCausalLM" and config.hidden_size % config.num_heads:
        raise ConfigError(
            f"model.hidden_size = {config.hidden_size} has no equivalent in transformers: its {name} needs a"
            f" multiple of model.num_heads ({config.num_heads})"
        )
    return name


def table_of(config: ModelConfig) -> Table:
    return _GPT2 if architecture(config) == "GPT2LMHeadModel" else _LLAMA


def _accept(path: Path, raw: dict[str, Any], key: str, *values: object) -> None:
    if (got := raw.get(key)) not in values:
        wanted = " or ".join("absent" if value is None else str(value) for value in values)
        raise CheckpointError(
            f"{path}: {key} must be {wanted} for a model that we compute exactly, got {got!r:.80}"
        )


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, dict, error=CheckpointError)
