"""The Recipe: what a run computes. Five frozen tables, every field with its meaning, unit and default.

A recipe is read from TOML by `redline.config.load`. The tables `model`, `data` and `train` define the
training and make up the fingerprint; `plan` pins execution values (how, not what) and never enters it: two
speeds compare only under one fingerprint. Left out on purpose: anything that a plan derives, and anything
that a run measures.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from redline.errors import ConfigError

Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned"]
Activation = Literal["swiglu", "gelu", "relu2"]
Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Compile = Literal["off", "default", "max-autotune-no-cudagraphs"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "flash", "cudnn", "efficient", "math"]
CrossEntropy = Literal["torch", "fused"]
UpdateKernels = Literal["fused", "foreach", "loop"]

IGNORED = -100
"""A target that counts for nothing; the value that torch's cross entropy takes by default."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer."""

    vocab_size: int
    """Rows of the embedding; at least the tokenizer's vocabulary. Multiples of 64 run faster and are part of
    the model."""
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    """Inner width of the feed-forward part (each of the two halves, for SwiGLU)."""
    context_length: int
    """Longest sequence the model accepts; the size of the table when positions are learned."""
    num_kv_heads: int | None = None
    """Key/value heads, fewer than `num_heads` for grouped-query attention; not given: as many as
    `num_heads`."""
    head_dim: int | None = None
    """Width of a head; not given: hidden_size / num_heads."""
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    activation: Activation = "swiglu"
    bias: bool = False
    """Biases in every linear layer and in LayerNorm (GPT-2)."""
    qkv_bias: bool = False
    """Biases in the query/key/value projection alone (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (Qwen3)."""
    tie_embeddings: bool = True
    """The output head is the embedding matrix."""
    init_std: float = 0.02
    init_from: str | None = None
    """A Hugging Face folder or GGUF file whose weights the run starts from; the other model fields must agree
    with it."""

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    source: str
    """`tinyshakespeare` (ships with the package), a folder made by `redline data build`, or text / JSONL /
    Parquet files."""
    seq_len: int
    """Tokens that the model reads in one sequence."""
    tokenizer: str = "bpe"
    """`bpe` trains a byte-level BPE of `model.vocab_size` on the source; otherwise a `tokenizer.json` or a
    folder with one."""
    text_field: str = "text"
    """The field of a JSONL or Parquet row that holds the text."""
    valid_fraction: float = 0.01
    """Share of the documents held out for validation, chosen by a hash of each document."""
    stream: bool = False
    """Tokenise while training instead of building shards first."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the weights move. Steps are optimiser updates; a batch is counted in sequences over all
    processes."""

    batch_size: int
    """Sequences in one update, over all micro-batches and processes."""
    steps: int
    """Updates in the run."""
    lr: float
    """Peak learning rate (of AdamW's parameters under Muon)."""
    max_hours: float | None = None
    """Wall-clock bound of the run, in hours of training; the schedule follows whichever of steps and hours
    ends first."""
    optimizer: Optimizer = "adamw"
    muon_lr: float = 0.02
    """Peak learning rate of the hidden matrices under Muon."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    """Share of the run after its warm-up that is spent decaying, for the warm-up-stable-decay schedule
    (`wsd`)."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the run, as a share of the peak."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    seed: int = 0
    """Seeds the weights and the order of the data."""
    eval_every: int = 0
    """Updates between validations; 0: only at the end."""
    eval_sequences: int = 64
    """Validation sequences read each time."""
    early_stop_evals: int = 0
    """Stop after this many validations in a row without a better loss; 0: never."""
    checkpoint_every: int = 0
    """Updates between checkpoints; 0: only at the end (and on Ctrl-C)."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, beside the best one."""


@dataclass(frozen=True, kw_only=True)
class PlanPins:
    """Execution values that the planner must take as given. Not given: the planner decides and says why."""

    precision: Precision | None = None
    micro_batch: int | None = None
    """Sequences in one forward and backward pass on one process."""
    compile: Compile | None = None
    recompute: Recompute | None = None
    """Activation checkpointing."""
    attention: Attention | None = None
    cross_entropy: CrossEntropy | None = None
    update: UpdateKernels | None = None
    """How AdamW changes the weights: one kernel for many tensors, an operation at a time over lists of them,
    or tensor by tensor."""
    loss_chunks: int | None = None
    """Pieces in which the output head and the loss are computed; more pieces, less memory."""
    loader_threads: int | None = None
    prefetch: int | None = None
    """Batches prepared ahead of the step."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete run: model, data, training, and the execution values that its author pinned."""

    name: str
    about: str = ""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    plan: PlanPins = field(default_factory=PlanPins)

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.data.seq_len

    @property
    def fingerprint(self) -> str:
        """Hash of everything that defines the training; equal fingerprints mean that speeds may be
        compared."""
        what = {"model": asdict(self.model), "data": asdict(self.data), "train": asdict(self.train)}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Recipe, now: Recipe) -> list[str]:
    """What makes two fingerprints differ, as `table.key (value before, value now)`."""
    found = []
    for table in ("model", "data", "train"):
        old, new = asdict(getattr(before, table)), asdict(getattr(now, table))
        found += [f"{table}.{key} ({old[key]} before, {new[key]} now)" for key in new if old[key] != new[key]]
    return found


def check(recipe: Recipe) -> Recipe:
    """Return the recipe, or raise the first rule it breaks."""
    for holds, rule in _rules(recipe):
        if not holds:
            raise ConfigError(f"recipe {recipe.name}: {rule}")
    return recipe


def _rules(recipe: Recipe) -> list[tuple[bool, str]]:
    m, d, t, p = recipe.model, recipe.data, recipe.train, recipe.plan
    positive = [
        ("model.vocab_size", m.vocab_size),
        ("model.num_layers", m.num_layers),
        ("model.hidden_size", m.hidden_size),
        ("model.num_heads", m.num_heads),
        ("model.num_kv_heads", m.num_kv_heads),
        ("model.head_dim", m.head_dim),
        ("model.ffn_size", m.ffn_size),
        ("model.context_length", m.context_length),
        ("model.norm_eps", m.norm_eps),
        ("model.rope_theta", m.rope_theta),
        ("model.init_std", m.init_std),
        ("data.seq_len", d.seq_len),
        ("train.batch_size", t.batch_size),
        ("train.steps", t.steps),
        ("train.lr", t.lr),
        ("train.muon_lr", t.muon_lr),
        ("train.eps", t.eps),
        ("train.max_hours", t.max_hours),
        ("train.eval_sequences", t.eval_sequences),
        ("train.keep_checkpoints", t.keep_checkpoints),
        ("plan.micro_batch", p.micro_batch),
        ("plan.loss_chunks", p.loss_chunks),
        ("plan.loader_threads", p.loader_threads),
        ("plan.prefetch", p.prefetch),
    ]
    not_negative = [
        ("train.weight_decay", t.weight_decay),
        ("train.clip_norm", t.clip_norm),
        ("train.warmup_steps", t.warmup_steps),
        ("train.eval_every", t.eval_every),
        ("train.early_stop_evals", t.early_stop_evals),
        ("train.checkpoint_every", t.checkpoint_every),
        ("train.seed", t.seed),
    ]
    fractions = [
        ("train.beta1", t.beta1, 0.0, 1.0),
        ("train.beta2", t.beta2, 0.0, 1.0),
        ("train.min_lr_ratio", t.min_lr_ratio, 0.0, 1.0),
        ("train.decay_fraction", t.decay_fraction, 0.0, 1.0),
        ("data.valid_fraction", d.valid_fraction, 0.0, 0.9),
    ]
    rules = [(v is None or v > 0, f"{k} must be greater than 0, got {v}") for k, v in positive]
    rules += [(v >= 0, f"{k} must not be negative, got {v}") for k, v in not_negative]
    rules += [
        (low <= v <= high, f"{k} must lie between {low} and {high}, got {v}") for k, v, low, high in fractions
    ]
    rules += [
        (v < 1, f"{k} must be less than 1, got {v}")
        for k, v in [("train.beta1", t.beta1), ("train.beta2", t.beta2)]
    ]
    return rules if not all(holds for holds, _ in rules) else rules + _relations(recipe)


def _relations(recipe: Recipe) -> list[tuple[bool, str]]:
    """Rules between values that are each in range."""
    m, d, t, p = recipe.model, recipe.data, recipe.train, recipe.plan
    return [
        (
            m.num_heads % m.kv_heads == 0,
            f"model.num_heads ({m.num_heads}) must be a multiple of model.num_kv_heads ({m.kv_heads})",
        ),
        (
            m.head_dim is not None or m.hidden_size % m.num_heads == 0,
            (
                f"model.hidden_size ({m.hidden_size}) must be a multiple of model.num_heads ({m.num_heads});"
                " or give model.head_dim"
            ),
        ),
        (
            m.positions == "learned" or m.head_size % 2 == 0,
            f"model.head_dim must be even for rope, got {m.head_size}",
        ),
        (
            d.seq_len <= m.context_length,
            f"data.seq_len ({d.seq_len}) must not exceed model.context_length ({m.context_length})",
        ),
        (
            t.warmup_steps <= t.steps,
            f"train.warmup_steps ({t.warmup_steps}) must not exceed train.steps ({t.steps})",
        ),
        (
            not t.early_stop_evals or bool(t.eval_every),
            f"train.early_stop_evals ({t.early_stop_evals}) needs train.eval_every greater than 0",
        ),
        (
            t.eval_every == 0 or d.valid_fraction > 0,
            "train.eval_every needs a validation split: give data.valid_fraction greater than 0",
        ),
        (
            p.micro_batch is None or t.batch_size % p.micro_batch == 0,
            f"train.batch_size ({t.batch_size}) must be a multiple of plan.micro_batch ({p.micro_batch})",
        ),
        (
            p.precision != "fp8"
            or all(s % 16 == 0 for s in (m.hidden_size, m.ffn_size, m.head_size * m.kv_heads)),
            (
                "plan.precision fp8 needs matrix sides that are multiples of 16: hidden_size"
                f" {m.hidden_size}, ffn_size {m.ffn_size}, key/value width {m.head_size * m.kv_heads}"
            ),
        ),
        (
            p.precision != "fp8" or d.seq_len % 16 == 0,
            f"plan.precision fp8 needs data.seq_len to be a multiple of 16, got {d.seq_len}",
        ),
        (
            t.batch_size * d.seq_len <= 2**27,
            (
                "train.batch_size x data.seq_len must not exceed 2^27 tokens (the host holds several"
                f" batches), got {t.batch_size * d.seq_len}"
            ),
        ),
        (m.vocab_size < 2**31, f"model.vocab_size must be below 2^31, got {m.vocab_size}"),
    ]
