"""Weights under other names: our fused matrices are made of, and split into, the tensors of a foreign file.

    weights = join(config, TABLE, tensors, where="model.safetensors")   # theirs -> ours, names and shapes checked
    tensors = split(config, TABLE, weights)                             # ours -> theirs
    load_weights(model, weights)                                        # strict, in place

A table maps a module of ours to the modules of theirs whose rows, one after the other, make up our matrix; `{i}` is the
layer. `huggingface` and `gguf` each bring their tables and return `Loaded`. What makes a layout special (GPT-2's
transposed matrices, the permuted heads of Llama GGUF files) is undone there, before `join`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from redline.config.load import build
from redline.config.recipe import ModelConfig
from redline.errors import CheckpointError, ConfigError
from redline.model.transformer import Transformer, weights_of, write_part
from redline.plan.arithmetic import parameters

T = TypeVar("T")

Table = Mapping[str, tuple[str, ...]]
SIZES = ("vocab_size", "num_layers", "hidden_size", "num_heads", "ffn_size", "context_length")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model read from a foreign folder or file, with what is needed to speak to it."""

    config: ModelConfig
    weights: dict[str, Tensor]
    """Tensors by the names of our parameters; no `head.weight` when the embeddings are tied."""
    tokenizer_json: str | None = None
    """The text of a `tokenizer.json`."""
    chat_template: str | None = None
    """Jinja, as transformers renders it."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a generation."""


def read_facts(kind: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """The facts of a foreign file that `kind` names, with their types checked; other keys and nulls are ignored."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {key: value for key, value in table.items() if key in known and value is not None}
    try:
        return build(kind, given, where=where)
    except ConfigError as error:
        raise CheckpointError(f"{error}; fetch the file again, or correct it") from error


def check_sizes(
    config: ModelConfig, sizes: Mapping[str, Sequence[int]], eos_ids: Sequence[int], *, where: str
) -> None:
    """Refuse sizes that no model has or that do not fit these tensors: what a foreign file says is allocated."""
    for name in (*SIZES, "kv_heads", "head_size"):
        if not 0 < (size := getattr(config, name)) < 2**31:
            raise CheckpointError(f"{where}: {name} must be greater than 0 and below 2^31, got {size}")
    c, described, held = config, parameters(config).total, sum(math.prod(size) for size in sizes.values())
    positive = 0 < c.norm_eps < 1 and 0 < c.rope_theta < math.inf and 0 <= c.init_std < math.inf
    model = f"a model of {c.num_layers:,} layers and {described:,} parameters"
    rules = {
        f"{c.num_heads} heads must be a multiple of {c.kv_heads} key/value heads": c.num_heads % c.kv_heads
        == 0,
        f"hidden_size {c.hidden_size} must be a multiple of {c.num_heads} heads": (
            c.head_dim is not None or c.hidden_size % c.num_heads == 0
        ),
        f"a head must have an even width for rope, got {c.head_size}": (
            c.positions == "learned" or c.head_size % 2 == 0
        ),
        f"norm_eps {c.norm_eps}, rope_theta {c.rope_theta}, init_std {c.init_std} must be positive": positive,
        # transformers writes GPT-2's, 50256, for smaller vocabularies too
        f"end tokens must be from 0 to below 2^31, got {list(eos_ids)}": all(0 <= e < 2**31 for e in eos_ids),
        # Tensors that are merely missing are named later, by `join`.
        f"it describes {model}, but its weights are {len(sizes):,} tensors of {held:,}": (
            described <= 2 * held and c.num_layers <= len(sizes)
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise CheckpointError(f"{where}: {rule}; fetch it again")


def shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Name and shape of every parameter of the model."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in weights_of(Transformer(config)).items()}


def join(
    config: ModelConfig, table: Table, tensors: Mapping[str, Tensor], *, where: str
) -> dict[str, Tensor]:
    """Our weights made of theirs; a tensor that is missing, left over or misshapen is refused by name."""
    ours = shapes(config)
    expected = _parts(config, table, ours)
    check({p: (n, *ours[name][1:]) for name, parts in expected.items() for p, n in parts}, tensors, where)
    return {
        name: tensors[parts[0][0]] if len(parts) == 1 else torch.cat([tensors[part] for part, _ in parts])
        for name, parts in expected.items()
    }


def split(config: ModelConfig, table: Table, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors, as views of ours."""
    ours, tensors = shapes(config), {}
    check(ours, weights)
    for name, parts in _parts(config, table, ours).items():
        pieces = weights[name].split([rows for _, rows in parts])
        tensors.update({part: piece for (part, _), piece in zip(parts, pieces, strict=True)})
    return tensors


@torch.no_grad()
def load_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Copy every weight into the model in place, sharded or not; names and shapes must fit exactly."""
    own = weights_of(model)
    check({name: weight.shape for name, weight in own.items()}, weights)
    for name, weight in own.items():
        write_part(weight, weights[name])


def check(
    expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor], where: str = "the weights"
) -> None:
    """Raise unless the weights have exactly the expected names and shapes."""
    _refuse(where, "missing", expected.keys() - weights.keys())
    _refuse(where, "not expected", weights.keys() - expected.keys())
    bad = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(want)}"
        for name, want in expected.items()
        if weights[name].shape != want
    ]
    _refuse(where, "of another shape", bad)


def _parts(
    config: ModelConfig, table: Table, ours: Mapping[str, torch.Size]
) -> dict[str, list[tuple[str, int]]]:
    """For each of our parameters, the names of theirs and the rows that each one brings."""
    kv_width = config.kv_heads * config.head_size
    rows_of = {
        "blocks.{i}.attn.qkv": [config.num_heads * config.head_size, kv_width, kv_width],
        "blocks.{i}.ffn.up": [config.ffn_size, config.ffn_size],
    }
    parts = {}
    for name, shape in ours.items():
        module, leaf = name.rsplit(".", 1)
        layer = module.split(".")[1] if module.startswith("blocks.") else ""
        key = module.replace(f"blocks.{layer}.", "blocks.{i}.", 1)
        theirs = [f"{part.format(i=layer)}.{leaf}" for part in table[key]]
        parts[name] = list(zip(theirs, rows_of[key] if len(theirs) > 1 else [shape[0]], strict=True))
    return parts


def _refuse(where: str, what: str, names: Iterable[str]) -> None:
    first = sorted(names)
    if first:
        more = f" and {len(first) - 3} more" if len(first) > 3 else ""
        raise CheckpointError(
            f"{where}: every tensor must fit the model that its configuration describes; {what}:"
            f" {', '.join(first[:3])}{more}"
        )
