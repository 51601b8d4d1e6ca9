"""GGUF files in: Llama, Qwen2, Qwen3 and GPT-2, de-quantised to fp32, with the tokenizer that the file
carries.

    loaded = read_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    load_weights(model, loaded.weights)

Needs the `gguf` extra. The tokenizer is rebuilt as a `tokenizer.json` from the tokens and merges in the file;
its splitting rule is known there only by name, so a name that we cannot match exactly is refused. Left out:
writing, SentencePiece tokenizers, rope scaling, mixtures of experts.
"""

from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.errors import CheckpointError, need
from redline.model.weights import Loaded, Table, checked, join

_TABLE: Table = {
    "embed": ("token_embd",),
    "positions": ("position_embd",),
    "blocks.{i}.attn_norm": ("blk.{i}.attn_norm",),
    "blocks.{i}.attn.qkv": ("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"),
    "blocks.{i}.attn.q_norm": ("blk.{i}.attn_q_norm",),
    "blocks.{i}.attn.k_norm": ("blk.{i}.attn_k_norm",),
    "blocks.{i}.attn.out": ("blk.{i}.attn_output",),
    "blocks.{i}.ffn_norm": ("blk.{i}.ffn_norm",),
    "blocks.{i}.ffn.up": ("blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
    "blocks.{i}.ffn.down": ("blk.{i}.ffn_down",),
    "norm": ("output_norm",),
    "head": ("output",),
}
_GPT2_TABLE: Table = {
    **_TABLE,
    "blocks.{i}.attn.qkv": ("blk.{i}.attn_qkv",),
    "blocks.{i}.ffn.up": ("blk.{i}.ffn_up",),
}
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
# kinds of token; the others (unknown, unused, byte) are no part of a byte-level BPE
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def read_gguf(path: Path) -> Loaded:
    """Everything that a GGUF file says about a model; weights in fp32."""
    gguf = need("gguf", extra="gguf")
    try:
        reader = gguf.GGUFReader(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} must be a GGUF file, and it is not there; give another path"
        ) from error
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a GGUF file, or it is truncated ({error}); fetch it again"
        ) from error
    about = {name: field.contents() for name, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, about, {name: tensor.shape for name, tensor in stored.items()})
    tensors = {name: _unpacked(path, gguf, tensor) for name, tensor in stored.items()}
    if about["general.architecture"] == "llama":
        for name in tensors:
            if name.endswith((".attn_q.weight", ".attn_k.weight")):
                tensors[name] = _half_rotation(tensors[name], config.head_size)
    return Loaded(
        config=config,
        weights=join(
            config, _GPT2_TABLE if config.positions == "learned" else _TABLE, tensors, where=str(path)
        ),
        tokenizer_json=_tokenizer_json(path, about) if "tokenizer.ggml.model" in about else None,
        chat_template=about.get("tokenizer.chat_template"),
        eos_ids=tuple(dict.fromkeys(about[key] for key in _EOS_KEYS if key in about)),
    )


def _config(path: Path, about: dict[str, Any], shapes: dict[str, Any]) -> ModelConfig:
    name = about.get("general.architecture")
    if name not in ("llama", "qwen2", "qwen3", "gpt2"):
        raise CheckpointError(f"{path}: general.architecture must be llama, qwen2, qwen3 or gpt2, got {name}")
    known = {
        key.removeprefix(f"{name}."): value for key, value in about.items() if key.startswith(f"{name}.")
    }
    gpt2 = name == "gpt2"
    eps = "attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"
    needed = (
        "embedding_length",
        "block_count",
        "attention.head_count",
        "feed_forward_length",
        "context_length",
        eps,
    )
    absent = [f"{name}.{key}" for key in needed if key not in known] + ["token_embd.weight"] * (
        "token_embd.weight" not in shapes
    )
    if absent:
        raise CheckpointError(f"{path} must say {', '.join(absent)}, and it does not; fetch it again")
    hidden, heads = known["embedding_length"], known["attention.head_count"]
    head_dim = known.get("attention.key_length", hidden // heads)
    kv_heads = known.get("attention.head_count_kv", heads)
    for key, values in {
        "attention.value_length": (None, head_dim),
        "rope.dimension_count": (None, head_dim),
        "rope.scaling.type": (None, "none"),
        "attention.sliding_window": (None, 0),
        "expert_count": (None, 0),
    }.items():
        if (got := known.get(key)) not in values:
            raise CheckpointError(
                f"{path}: {name}.{key} must be {values[1]} for a model that we compute exactly, got {got}"
            )
    config = ModelConfig(
        vocab_size=int(shapes["token_embd.weight"][1]),
        num_layers=known["block_count"],
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=known["feed_forward_length"],
        context_length=known["context_length"],
        num_kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=None if head_dim * heads == hidden else head_dim,
        norm="layernorm" if gpt2 else "rmsnorm",
        norm_eps=_decimal(known[eps]),
        positions="learned" if gpt2 else "rope",
        rope_theta=_decimal(known.get("rope.freq_base", 10_000.0)),
        activation="gelu" if gpt2 else "swiglu",
        bias=gpt2,
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        tie_embeddings="output.weight" not in shapes,
    )
    return checked(config, where=str(path))


def _decimal(value: float) -> float:
    """The decimal number that was stored as a 32-bit float: 1e-05, not 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))


def _unpacked(path: Path, gguf: Any, tensor: Any) -> Tensor:
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: {tensor.name} has a quantisation that gguf cannot undo ({error}); take another file"
        ) from error
    # fp32 comes as a read-only view of the file
    return torch.from_numpy(numpy.require(values, numpy.float32, ["C", "W"]))


def _half_rotation(rows: Tensor, head_size: int) -> Tensor:
    """Llama's files pair neighbours (2i, 2i+1) of a head for the rotation; we, as Hugging Face does, pair (i,
    i + C/2)."""
    return rows.view(-1, head_size // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _tokenizer_json(path: Path, about: dict[str, Any]) -> str:
    kind, rule = about["tokenizer.ggml.model"], about.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or about.get("tokenizer.ggml.add_bos_token"):
        raise CheckpointError(
            f"{path}: the tokenizer must be a byte-level BPE (gpt2) without a token at the start, got {kind}"
        )
    kinds = about["tokenizer.ggml.token_type"]
    listed = [
        (token, i, of)
        for i, (token, of) in enumerate(zip(about["tokenizer.ggml.tokens"], kinds, strict=True))
    ]
    vocab = {token: i for token, i, of in listed if of in (_NORMAL, _CONTROL, _USER_DEFINED)}
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    if any(token not in vocab for merge in merges for token in (*merge, "".join(merge))):
        raise CheckpointError(
            f"{path}: every merge of the tokenizer must join two of its tokens, and some do not; fetch it"
            " again"
        )
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    splits = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ],
        "qwen2": [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if rule not in splits:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre must be one of {', '.join(splits)}, whose splitting we know, got"
            f" {rule}"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[rule])
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, _, of in listed:
        if of in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=of == _CONTROL)])
    return tokenizer.to_str()
