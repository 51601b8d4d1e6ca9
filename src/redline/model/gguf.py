"""GGUF files in: Llama, Qwen2, Qwen3 and GPT-2, de-quantised to fp32, with the tokenizer that the file carries.

    loaded = read_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    load_weights(model, loaded.weights)

Needs the `gguf` extra. The tokenizer is rebuilt as a `tokenizer.json` from the tokens and merges in the file; its
splitting rule is known there only by name, so a name that we cannot match exactly is refused. Left out: writing,
SentencePiece tokenizers, rope scaling, mixtures of experts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.errors import CheckpointError, need
from redline.model.weights import Loaded, Table, check_sizes, join, read_facts

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
# kinds of token; the others (unknown, unused, byte) are not part of a byte-level BPE
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a file says about its model; its keys have dots where these have underscores."""

    embedding_length: int
    block_count: int
    attention_head_count: int
    attention_head_count_kv: int | None = None
    attention_key_length: int | None = None
    attention_layer_norm_epsilon: float | None = None
    attention_layer_norm_rms_epsilon: float | None = None
    feed_forward_length: int
    context_length: int
    rope_freq_base: float = 10_000.0


@dataclass(frozen=True, kw_only=True)
class _TokenizerFacts:
    ggml_model: str
    ggml_pre: str = "gpt-2"
    ggml_add_bos_token: bool = False
    ggml_tokens: tuple[str, ...]
    ggml_token_type: tuple[int, ...]
    ggml_merges: tuple[str, ...]
    ggml_eos_token_id: int | None = None
    ggml_eot_token_id: int | None = None
    chat_template: str | None = None


def read_gguf(path: Path) -> Loaded:
    """Everything that a GGUF file says about a model; weights in fp32."""
    gguf = need("gguf", extra="gguf")
    about, stored = _read_file(path, gguf)
    name, config, sizes = _shape(path, about, stored)
    spoken = _named(about, "tokenizer")
    facts = read_facts(_TokenizerFacts, spoken, where=str(path)) if "ggml_model" in spoken else None
    named = (facts.ggml_eos_token_id, facts.ggml_eot_token_id) if facts else ()
    ends = tuple(end for end in dict.fromkeys(named) if end is not None)
    check_sizes(config, sizes, ends, where=str(path))
    tensors = {each: _unpacked(path, gguf, tensor) for each, tensor in stored.items()}
    if name == "llama":
        for each in tensors:
            if each.endswith((".attn_q.weight", ".attn_k.weight")):
                tensors[each] = _half_rotation(tensors[each], config.head_size)
    table = _GPT2_TABLE if config.positions == "learned" else _TABLE
    return Loaded(
        config=config,
        weights=join(config, table, tensors, where=str(path)),
        tokenizer_json=_tokenizer_json(path, facts) if facts else None,
        chat_template=facts.chat_template if facts else None,
        eos_ids=ends,
    )


def read_gguf_config(path: Path) -> ModelConfig:
    """The shape of the model in a GGUF file; its weights are not read."""
    about, stored = _read_file(path, need("gguf", extra="gguf"))
    return _shape(path, about, stored)[1]


def _shape(
    path: Path, about: dict[str, Any], stored: dict[str, Any]
) -> tuple[str, ModelConfig, dict[str, list[int]]]:
    """The architecture, its shape, and the sizes of the tensors by name."""
    name = about.get("general.architecture")
    if name not in ("llama", "qwen2", "qwen3", "gpt2"):
        raise CheckpointError(
            f"{path}: the architecture must be llama, qwen2, qwen3 or gpt2, got {name!r:.80}"
        )
    sizes = {each: [int(size) for size in tensor.shape] for each, tensor in stored.items()}
    return name, _config(path, name, _named(about, name), sizes), sizes


def _read_file(path: Path, gguf: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts and the tensors of a file, by name."""

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, **rest: Any) -> Any:
            """Refuse to read beyond the end of the file, where numpy would return an empty array."""
            if int(offset) + int(count) * numpy.dtype(dtype).itemsize > len(self.data):
                raise ValueError("the file ends too soon")
            return super()._get(offset, dtype, count, **rest)

    try:
        reader = Reader(path)
        about = {name: field.contents() for name, field in reader.fields.items()}
        return about, {tensor.name: tensor for tensor in reader.tensors}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give another path") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is not a GGUF file, or it is truncated ({error!r:.200}); fetch it again"
        ) from error


def _named(about: dict[str, Any], first: str) -> dict[str, Any]:
    """The facts whose names begin with `first.`, by the rest of the name."""
    return {
        key.removeprefix(f"{first}.").replace(".", "_"): value
        for key, value in about.items()
        if key.startswith(f"{first}.")
    }


def _config(path: Path, name: str, known: dict[str, Any], sizes: dict[str, list[int]]) -> ModelConfig:
    facts, gpt2 = read_facts(_Facts, known, where=str(path)), name == "gpt2"
    eps = facts.attention_layer_norm_epsilon if gpt2 else facts.attention_layer_norm_rms_epsilon
    embedding = sizes.get("token_embd.weight", [])
    hidden, heads = facts.embedding_length, facts.attention_head_count
    if eps is None or len(embedding) != 2 or heads < 1:
        raise CheckpointError(
            f"{path} must give its layer norm's epsilon and its number of heads and hold token_embd.weight, but it"
            " does not; fetch it again"
        )
    head_dim, kv_heads = facts.attention_key_length or hidden // heads, facts.attention_head_count_kv or heads
    for key, values in {
        "attention_value_length": (None, head_dim),
        "rope_dimension_count": (None, head_dim),
        "rope_scaling_type": (None, "none"),
        "attention_sliding_window": (None, 0),
        "expert_count": (None, 0),
    }.items():
        if (got := known.get(key)) not in values:
            raise CheckpointError(
                f"{path}: {name}.{key} must be {values[1]} for a model that we compute exactly, got {got!r:.80}"
            )
    return ModelConfig(
        vocab_size=embedding[1],
        num_layers=facts.block_count,
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=facts.feed_forward_length,
        context_length=facts.context_length,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=None if head_dim * heads == hidden else head_dim,
        norm="layernorm" if gpt2 else "rmsnorm",
        norm_eps=_decimal(eps),
        positions="learned" if gpt2 else "rope",
        rope_theta=_decimal(facts.rope_freq_base),
        activation="gelu" if gpt2 else "swiglu",
        bias=gpt2,
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        tie_embeddings="output.weight" not in sizes,
    )


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
    """Llama's files rotate neighbours (2i, 2i+1) of a head; we rotate (i, i + C/2), as Hugging Face does."""
    if rows.dim() != 2 or rows.shape[0] % head_size:
        return rows  # the wrong shape, which `join` reports
    return rows.view(-1, head_size // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _tokenizer_json(path: Path, facts: _TokenizerFacts) -> str:
    if facts.ggml_model != "gpt2" or facts.ggml_add_bos_token:
        raise CheckpointError(
            f"{path}: the tokenizer must be a byte-level BPE (gpt2) without a token at the start, got"
            f" {facts.ggml_model!r:.80}"
        )
    if len(facts.ggml_tokens) != len(facts.ggml_token_type):
        raise CheckpointError(f"{path}: some tokens of the tokenizer have no type; fetch it again")
    listed = list(zip(facts.ggml_tokens, range(len(facts.ggml_tokens)), facts.ggml_token_type, strict=True))
    vocab = {token: i for token, i, of in listed if of in (_NORMAL, _CONTROL, _USER_DEFINED)}
    merges = [tuple(merge.split(" ")) for merge in facts.ggml_merges]
    if any(len(m) != 2 or any(token not in vocab for token in (*m, "".join(m))) for m in merges):
        raise CheckpointError(
            f"{path}: every merge of the tokenizer must join two of its tokens; fetch it again"
        )
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split, unsplit = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), {"use_regex": False}
    splits = {
        "gpt-2": [plain],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), plain],
        "qwen2": [split, pre_tokenizers.ByteLevel(add_prefix_space=False, **unsplit)],
    }
    rule = facts.ggml_pre
    if rule not in splits:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre must be one of {', '.join(splits)}, whose splitting we know, got"
            f" {rule!r:.80}"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[rule])
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, _, of in listed:
        if of in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=of == _CONTROL)])
    return tokenizer.to_str()
