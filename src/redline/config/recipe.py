"""The Recipe: what a run computes. Frozen tables; every field has its meaning, unit and default.

`workload` decides which tables count (TABLES): pre-training reads `model`, `data` and `train`; fine-tuning adds `lora` and
`prompt`; rejection-sampling fine-tuning (RFT) adds `task`, `sample` and `test`; reinforcement learning (`rl`) reads `rl`,
`prompt` and `test` besides the model and its training. `redline.config.load` reads a recipe from TOML,
`redline.config.rules` checks it. The fingerprint is the hash of everything that defines the training. Not part of it: how
often something is evaluated or saved (CADENCE), what is tested (`test`) and how it is executed (`plan`).
Left out on purpose: what a plan derives and what a run measures.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from redline.config.dfa import DfaConfig
from redline.config.rft import SampleConfig, TaskConfig, TestConfig
from redline.config.rl import REINFORCING, RlConfig
from redline.errors import ConfigError, nearest

Norm = Literal["rmsnorm", "layernorm"]
Optimizer = Literal["adamw", "muon"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Compile = Literal["off", "default", "max-autotune-no-cudagraphs"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "flash", "cudnn", "efficient", "math"]
CrossEntropy = Literal["torch", "fused", "fp8"]
UpdateKernels = Literal["fused", "foreach", "loop"]
PromptMode = Literal["chat", "text"]

IGNORED = -100
"""A target that the loss ignores; torch's cross entropy ignores this value by default."""
PIECES = 4
"""Pieces that a sequence is cut into while the sequence length ramps up."""
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer. With `init_from` the shape is read from the weights and may be left out."""

    vocab_size: int = 0
    """Rows of the embedding, at least the tokenizer's vocabulary. Multiples of 64 run faster."""
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    ffn_size: int = 0
    """Inner width of the feed-forward part (each of the two halves, for SwiGLU)."""
    context_length: int = 0
    """Longest sequence that the model accepts; for learned positions, the size of their table."""
    num_kv_heads: int | None = None
    """Key/value heads; fewer than `num_heads` is grouped-query attention. Not given: `num_heads`."""
    head_dim: int | None = None
    """Width of a head; not given: hidden_size / num_heads."""
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    activation: Literal["swiglu", "gelu", "relu2"] = "swiglu"
    bias: bool = False
    """Biases in every linear layer and in LayerNorm (GPT-2)."""
    qkv_bias: bool = False
    """Biases in the query/key/value projection only (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (Qwen3)."""
    tie_embeddings: bool = True
    """The output head is the embedding matrix."""
    attention: Literal["softmax", "favor"] = "softmax"
    """`favor`: kernel attention, which estimates softmax attention from random features at linear cost."""
    features: int = 256
    """Random features per key/value head, for `favor`: the error falls with their square root."""
    redraw_every: int = 0
    """Updates between two draws of the features; 0: drawn once."""
    init_std: float = 0.02
    zero_init: bool = False
    """Start the blocks' contributions to the residual stream at 0: the model first passes its embeddings on."""
    init_from: str | None = None
    """The weights to start from: a run folder, a checkpoint, a Hugging Face or PEFT folder, a .gguf file, a shipped
    model (`demo`), or a name on the Hugging Face Hub (org/name, org/name@revision)."""

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def own(self) -> str | None:
        """The value that only our format can hold, as `name value`."""
        return None if self.attention == "softmax" else f"model.attention {self.attention}"

    @property
    def is_shaped(self) -> bool:
        """Whether the shape is known, from the recipe or from the weights."""
        return self.num_layers > 0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = ""
    """Pre-training: `tinyshakespeare` (shipped), a folder made by `redline data build`, on disk or in an object store
    (s3://bucket/corpus, gs://bucket/corpus), text, JSONL or Parquet files or a folder of them; from the Hugging Face Hub `wikitext-2`, `wikitext-103`, `wikipedia`, or
    hf://datasets/org/name/folder. Files named train* and valid* are the splits. Fine-tuning: a JSON, JSONL or Parquet
    file of examples (docs/finetune.md)."""
    seq_len: int = 0
    """Tokens in a sequence. Fine-tuning: longer examples are left out; 0: the model's context."""
    tokenizer: str = "bpe"
    """`bpe` trains a byte-level BPE of `model.vocab_size` on the source; else a `tokenizer.json` or a folder with one.
    Fine-tuning uses the model's own tokenizer."""
    text_field: str = "text"
    """The field of a JSONL or Parquet row that holds the text."""
    valid_fraction: float = 0.01
    """Share of the documents held out for validation, chosen by a hash of each document."""
    stream: bool = False
    """Tokenise while training instead of building shards first."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the weights move. A step is an optimiser update; a batch is counted over all processes."""

    batch_size: int
    """Sequences or examples in one update, over all micro-batches and processes."""
    lr: float
    """Peak learning rate (of AdamW's parameters under Muon)."""
    length_ramp_steps: int = 0
    """Initial updates on sequences cut into four, each piece read from position 0; 0: none."""
    steps: int = 0
    """Updates in the run; fine-tuning may give `epochs` instead."""
    epochs: int = 0
    """Passes of fine-tuning over its examples."""
    max_hours: float | None = None
    """Limit in hours of training; the schedule follows whichever of steps and hours ends first."""
    rule: Literal["backprop", "dfa"] = "backprop"
    """Source of the gradients: back-propagation, or direct feedback alignment (table `dfa`)."""
    optimizer: Optimizer = "adamw"
    muon_lr: float = 0.02
    """Peak learning rate of the hidden matrices under Muon."""
    muon_warmup_steps: int = 0
    """Updates in which Muon's momentum rises from 0.85 to 0.95."""
    muon_normalize: bool = False
    """Whether to scale all rows of Muon's updates to one size, by a running average (NorMuon)."""
    softmax_candidates: int = 0
    """Tokens in the softmax of an update: all its targets, and a uniform sample of the others that stands
    for the rest; 0: the whole vocabulary, as in every validation."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    warmup_fraction: float = 0.0
    """Share of the updates spent warming up; give this or `warmup_steps`."""
    decay_fraction: float = 0.2
    """Share of the run after its warm-up that is spent decaying, for the schedule `wsd`."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the run, as a share of the peak."""
    orthogonality: float = 0.0
    """Weight of a penalty that keeps the query and key maps of each head orthonormal; 0: none."""
    orthogonality_warmup_steps: int = 0
    """Updates over which that weight rises from 0."""
    orthogonality_values: bool = False
    """Whether the penalty covers the value maps too."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    seed: int = 0
    """Seeds the weights or adapters, the order of the data, and what is sampled."""
    eval_every: int = 0
    """Updates between validations; 0: only at the end."""
    eval_sequences: int = 64
    """Sequences in one validation."""
    early_stop_evals: int = 0
    """Stop after this many validations in a row without a better loss; 0: never."""
    target_loss: float | None = None
    """Stop once the validation loss is this low; the schedule ignores it. Needs `eval_every`."""
    diagnose_every: int | None = None
    """Updates between comparisons of feedback alignment with back-propagation, and of kernel attention with exact
    attention; not given: as often as 2% of the time allows; 0: never."""
    checkpoint_every: int = 0
    """Updates between checkpoints; 0: only at the end (and on Ctrl-C)."""
    keep_checkpoints: int = 2
    """Checkpoints to keep: the newest ones, and always the best."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, which alone are trained. A recipe without this table trains all weights."""

    rank: int = 16
    alpha: float = 64.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = LORA_TARGETS
    """Any of q, k, v, o, gate, up, down; `gate` is ignored by a model without one."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank must be at least 1, got {self.rank}")
        if not 0 < self.alpha < 1e30:  # it is held in fp32
            raise ConfigError(f"lora.alpha must be greater than 0 and below 1e30, got {self.alpha}")
        for name in self.targets:
            if name not in LORA_TARGETS:
                known, near = ", ".join(LORA_TARGETS), nearest(name, LORA_TARGETS)
                raise ConfigError(f"lora.targets must be among {known}, got {name!r}{near}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"lora.targets must name at least one, none twice; got {list(self.targets)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    mode: PromptMode = "text"
    """`chat`: through the model's chat template; `text`: for models that continue text."""
    shots: int | None = None
    """Examples before the question, when sampling and in the test before training; not given: all."""
    trained_shots: int | None = None
    """The same when training and in the test after it; not given: the same as `shots`."""

    def shots_of(self, *, trained: bool) -> int | None:
        return self.trained_shots if trained and self.trained_shots is not None else self.shots


@dataclass(frozen=True, kw_only=True)
class PlanPins:
    """Execution values fixed by the user. Not given: the planner decides and says why."""

    precision: Precision | None = None
    micro_batch: int | None = None
    """Sequences or examples in one forward and backward pass on one process."""
    compile: Compile | None = None
    graph: bool | None = None
    """The whole update as one CUDA graph, on one GPU."""
    recompute: Recompute | None = None
    """Activation checkpointing."""
    attention: Attention | None = None
    cross_entropy: CrossEntropy | None = None
    update: UpdateKernels | None = None
    """How AdamW runs: one kernel for many tensors, one operation at a time over a list, or tensor by tensor."""
    loss_chunks: int | None = None
    """Pieces in which output head and loss are computed; more pieces need less memory."""
    loader_threads: int | None = None
    prefetch: int | None = None
    """Batches prepared ahead of the step; further loader threads have one more each."""
    shards: int | None = None  # processes that hold one copy of the weights together
    slots: int | None = None
    """Sequences generated together."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete run: what it computes, and the execution values that its author pinned."""

    name: str
    about: str = ""
    workload: Literal["pretrain", "finetune", "rft", "rl"] = "pretrain"
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig
    dfa: DfaConfig = field(default_factory=DfaConfig)
    lora: LoraConfig | None = None
    task: TaskConfig | None = None
    prompt: PromptConfig = field(default_factory=PromptConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    test: TestConfig = field(default_factory=TestConfig)
    rl: RlConfig | None = None
    plan: PlanPins = field(default_factory=PlanPins)

    @property
    def tokens_per_step(self) -> int:
        """For pre-training, whose sequences all have the same length."""
        return self.train.batch_size * self.data.seq_len

    @property
    def feedback(self) -> DfaConfig | None:
        """How feedback alignment learns; None under back-propagation."""
        return self.dfa if self.train.rule == "dfa" else None

    @property
    def fingerprint(self) -> str:
        """Hash of everything that defines the training: equal fingerprints compute the same thing."""
        return fingerprint_of(self.defining())

    @property
    def identity(self) -> str:
        """Hash of what a resumed run may not change: the fingerprint, except for when the run ends."""
        tables = self.defining()
        tables["train"] = {name: value for name, value in tables["train"].items() if name not in ENDS}
        return fingerprint_of(tables)

    @property
    def work(self) -> str:
        """Hash of what decides the work of one update: if it is equal, speeds are comparable and a tuned plan holds."""
        free = ("init_from", "init_std", "zero_init", "norm_eps")
        model = {name: value for name, value in asdict(self.model).items() if name not in free}
        update = {name: getattr(self.train, name) for name in ("batch_size", "optimizer", "rule")}
        update |= asdict(self.feedback) if self.feedback else {}
        if self.train.orthogonality:  # more work, and a CUDA graph cannot repeat it while it warms up
            update["orthogonality_warms_up"] = self.train.orthogonality_warmup_steps > 0
        if self.train.softmax_candidates:
            update["softmax_candidates"] = self.train.softmax_candidates
        clips, lora = self.train.clip_norm > 0, asdict(self.lora) if self.lora else None
        data = {"seq_len": self.data.seq_len, "stream": self.data.stream}
        sized = ("algorithm", "group_size", "max_prompt_tokens", "max_new_tokens", "updates_per_rollout")
        rollout = (
            [{name: getattr(self.rl, name) for name in sized} | {"kl": self.rl.kl > 0}] if self.rl else []
        )
        return fingerprint_of([self.workload, model, data, update, clips, lora, *rollout])

    @property
    def rows_per_step(self) -> int:
        """Sequences, examples or sampled answers in one step."""
        return self.train.batch_size * (self.rl.group_size if self.rl else 1)

    @property
    def rows_per_update(self) -> int:
        """The same for one update: a rollout may be split into several."""
        return self.rows_per_step // (self.rl.updates_per_rollout if self.rl else 1)

    def with_rows(self, rows: int) -> Self:
        """The recipe with updates of another size, for a measurement."""
        if self.rl is None:
            return replace(self, train=replace(self.train, batch_size=rows))
        rl = replace(self.rl, group_size=rows, updates_per_rollout=1)
        return replace(self, rl=rl, train=replace(self.train, batch_size=1))

    @property
    def sampling(self) -> dict[str, Any]:
        """What decides the text of sample n of a question, besides the weights."""
        drawn = ("temperature", "top_p", "top_k", "max_new_tokens")
        task = {name: getattr(self.task, name) for name in ("name", "data", "split")}
        prompt = {"mode": self.prompt.mode, "shots": self.prompt.shots}
        drawing = {name: getattr(self.sample, name) for name in drawn}
        return {"seed": self.train.seed, **task, **prompt, **drawing}

    def defining(self) -> dict[str, Any]:
        """The tables that make this training what it is."""
        tables = {name: asdict(getattr(self, name) or LoraConfig()) for name in TABLES[self.workload]}
        if self.lora is None:
            tables.pop("lora", None)
        if self.feedback is None:
            tables.pop("dfa", None)
        for name in CADENCE:
            tables["train"].pop(name)
        return {"workload": self.workload, **tables}


TABLES: dict[str, tuple[str, ...]] = {
    "pretrain": ("model", "data", "train", "dfa"),
    "finetune": ("model", "data", "train", "dfa", "lora", "prompt"),
    "rft": ("model", "train", "lora", "task", "prompt", "sample"),
    "rl": ("model", "train", "lora", "prompt", "rl"),
}
"""The tables that define a workload's training. `plan` goes with every workload, `test` with RFT and RL."""
CADENCE = (
    "eval_every", "eval_sequences", "diagnose_every", "checkpoint_every", "keep_checkpoints", "target_loss",
)  # fmt: skip
"""Fields of `train` that say how often to evaluate or save, or at which loss to stop: they do not change
what an update computes, and may change when a run is resumed."""
ENDS = ("steps", "epochs", "max_hours", "early_stop_evals")
"""Fields of `train` that say when a run ends: a run resumed with other values is extended, and says so."""
FINETUNING: dict[str, Any] = {
    "batch_size": 32, "lr": 2e-4, "epochs": 3, "warmup_fraction": 0.1, "min_lr_ratio": 0.0, "weight_decay": 0.0,
    "beta2": 0.999, "checkpoint_every": 50, "keep_checkpoints": 1,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "finetune": {"train": FINETUNING, "data": {"valid_fraction": 0.05}, "prompt": {"mode": "chat"}},
    "rft": {"train": FINETUNING},
    "rl": {"train": REINFORCING},
}
"""Where a workload's defaults differ from those written above."""


def fingerprint_of(what: Any) -> str:
    """A short hash of JSON values."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def later_round(recipe: Recipe, before: str) -> Recipe:
    """The recipe of the next round: the model trained in that folder writes the samples, prompted as it was trained."""
    own = recipe.sample
    sample = replace(own, sampler=before, server=None, server_model=None, temperature=own.later_temperature)
    prompt = replace(recipe.prompt, shots=recipe.prompt.shots_of(trained=True))
    return replace(recipe, sample=sample, prompt=prompt)
