"""Counting: parameters, FLOPs per token, bytes of memory and time, from the recipe alone. No torch.

Parameter counts and matmul FLOPs are exact (a test holds them equal to the real model on the meta device for
every shipped recipe). Memory and attainable speed are models of what torch does; LOG.md says how well they
were seen to hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redline.config.dfa import DfaConfig
from redline.config.recipe import LoraConfig, ModelConfig, Recipe, Recompute

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an activation; FP8 holds its activations in bf16 and converts at the matrix products."""
FAVOR_CHUNK = 64
"""Tokens that kernel attention takes at a time: quadratic within a chunk, recurrent between chunks. The scores of a
chunk and its output fit a program's registers."""


@dataclass(frozen=True)
class Parameters:
    total: int
    matmul: int
    """Weights that multiply activations: all but norms, biases, positions and an untied input embedding."""
    hidden: int
    """Weights of the matrices inside the blocks: those that Muon updates and FP8 multiplies."""
    blocks: int
    """All parameters of the blocks, norms and biases too."""


def parameters(model: ModelConfig) -> Parameters:
    D, F, C = model.hidden_size, model.ffn_size, model.head_size
    width, kv_width = model.num_heads * C, model.kv_heads * C
    qkv, inner = width + 2 * kv_width, F * (2 if model.activation == "swiglu" else 1)
    matrices = D * qkv + width * D + D * inner + F * D
    biases = (qkv + D + inner + D) if model.bias else (qkv if model.qkv_bias else 0)
    norm = D * (2 if model.norm == "layernorm" and model.bias else 1)
    block = matrices + biases + 2 * norm + (2 * C if model.qk_norm else 0)
    embedding = model.vocab_size * D
    positions = model.context_length * D if model.positions == "learned" else 0
    blocks, hidden = model.num_layers * block, model.num_layers * matrices
    total = blocks + embedding * (1 if model.tie_embeddings else 2) + positions + norm
    return Parameters(total=total, matmul=hidden + embedding, hidden=hidden, blocks=blocks)


def adapter_parameters(model: ModelConfig, lora: LoraConfig) -> int:
    """Weights of the adapters: rank x (inputs + outputs) of every matrix that has one."""
    D, F, C = model.hidden_size, model.ffn_size, model.head_size
    width, kv_width = model.num_heads * C, model.kv_heads * C
    sides = {
        "q": D + width, "k": D + kv_width, "v": D + kv_width, "o": width + D, "gate": D + F, "up": D + F,
        "down": F + D,
    }  # fmt: skip
    if model.activation != "swiglu":
        sides.pop("gate")
    return model.num_layers * lora.rank * sum(sides[name] for name in lora.targets if name in sides)


def flops_per_token(
    model: ModelConfig,
    seq_len: int,
    lora: LoraConfig | None = None,
    dfa: DfaConfig | None = None,
    candidates: int = 0,
) -> int:
    """Training FLOPs of one token, PaLM convention: 6 per matmul weight (4 if only adapters learn) and 12 L d T for
    attention. Of the output head only the rows of `candidates` count, if it has some. Feedback alignment adds the products
    with its matrices; running its blocks twice does not count."""
    attention = attention_flops(model, seq_len) + (2 * feedback_weights(model, dfa) if dfa else 0)
    if lora is None:
        left_out = (model.vocab_size - candidates) * model.hidden_size if candidates else 0
        return 6 * (parameters(model).matmul - left_out) + attention
    return 4 * parameters(model).matmul + 6 * adapter_parameters(model, lora) + attention


def attention_flops(model: ModelConfig, seq_len: int) -> int:
    """Training FLOPs of one token in attention, all layers. Kernel attention: its features, its sums, what queries read
    from them, and the quadratic part within a chunk."""
    H, K, C, M = model.num_heads, model.kv_heads, model.head_size, model.features
    if model.attention == "softmax":
        return 12 * model.num_layers * H * C * seq_len
    forward = 4 * M * C * (H + K) + 2 * min(FAVOR_CHUNK, seq_len) * (M + C) * H
    return 3 * model.num_layers * forward


def feedback_widths(model: ModelConfig, dfa: DfaConfig, place: int) -> tuple[int, ...]:
    """Sizes of the signals at a place (0: the embedding, else a block): of its output, then of its layers."""
    if place == 0 or dfa.depth == "block":
        return (model.hidden_size,)
    return (model.num_heads * model.head_size, model.hidden_size, model.ffn_size, model.hidden_size)


def feedback_blocks(model: ModelConfig, dfa: DfaConfig) -> int:
    """Blocks that learn from feedback."""
    return max(0, model.num_layers - dfa.top_blocks)


def feedback_error_size(model: ModelConfig, dfa: DfaConfig) -> int:
    """Numbers per token that random matrices multiply."""
    return {"logits": model.vocab_size, "hidden": model.hidden_size, "residual": 0}[dfa.error]


def feedback_source(dfa: DfaConfig, place: int) -> int:
    """The place whose matrices this place uses."""
    return min(place, 1 if dfa.depth == "layer" else 0) if dfa.shared else place


def feedback_weights(model: ModelConfig, dfa: DfaConfig) -> int:
    """Numbers in the random matrices, each of which multiplies the error once per pass."""
    blocks = feedback_blocks(model, dfa)
    places = {feedback_source(dfa, place) for place in range(blocks + 1 if blocks else 0)}
    return feedback_error_size(model, dfa) * sum(sum(feedback_widths(model, dfa, p)) for p in places)


SHORT_ROW = 128
"""The longest packed sequence of our attention kernel: its 128 x 128 fp32 scores fill the registers."""


def favor_fits(head_size: int, features: int) -> bool:
    """Whether the Triton kernels of kernel attention take these sizes (in bf16 on a GPU)."""
    return head_size in (16, 32, 64, 128) and features % 32 == 0


def slot_bytes(model: ModelConfig, *, tokens: int, precision: str) -> int:
    """Bytes of a sequence in generation: its keys and values (or fp32 sums), and its fp32 logits twice."""
    heads = model.num_layers * model.kv_heads
    if model.attention == "favor":
        kept = 2 * heads * model.features * (model.head_size + 2) * 4
    else:
        kept = tokens * heads * 2 * model.head_size * BYTES[precision]
    return kept + 2 * model.vocab_size * 4


def recomputed_weights(model: ModelConfig) -> int:
    """Matmul weights that full recomputation multiplies twice: the blocks', except for the last product of each."""
    return parameters(model).hidden - model.num_layers * model.ffn_size * model.hidden_size


@dataclass(frozen=True)
class Traffic:
    """What one process receives in an update, in bytes, and in how many collectives."""

    gathered: int
    scattered: int
    """Bytes received by reduce-scatter."""
    reduced: int
    """Bytes received by all-reduce."""
    gathers: int
    scatters: int
    reductions: int

    @property
    def total(self) -> int:
        return self.gathered + self.scattered + self.reduced


def traffic(
    model: ModelConfig,
    lora: LoraConfig | None = None,
    *,
    precision: str,
    accumulation: int,
    shards: int,
    replicas: int = 1,
) -> Traffic:
    """Weights spread over `shards` processes, `replicas` times; one shard is plain data parallelism. In every pass FSDP
    gathers the blocks' weights twice in the compute dtype and the others once in fp32, reduces all gradients in fp32 to
    their shards, and then those of a shard over its replicas. Left out: the rows that FSDP pads a tensor with if `shards`
    does not divide them."""
    count, units = parameters(model), model.num_layers + 1
    learning = count.total if lora is None else adapter_parameters(model, lora)
    blocks, rest = count.blocks + (learning if lora else 0), count.total - count.blocks
    spread, copied = shards > 1, replicas > 1
    whole = 2 * BYTES[precision] * blocks + 4 * rest
    return Traffic(
        gathered=accumulation * whole * (shards - 1) // shards,
        scattered=accumulation * 4 * learning * (shards - 1) // shards,
        reduced=accumulation * 2 * 4 * learning * (replicas - 1) // (replicas * shards),
        gathers=accumulation * (2 * units - 1) * spread,
        scatters=accumulation * (units - (lora is not None)) * spread,
        reductions=accumulation * (units - (lora is not None)) * copied,
    )


@dataclass(frozen=True)
class Memory:
    """Predicted peak bytes on one GPU, part by part."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int
    generation: int = 0
    """Slots of an engine that stays open during training, and the weights that it needs in another form."""
    companions: int = 0
    """Models besides the one that learns: a frozen reference, a critic with its optimiser."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


FEEDBACK_PIECE_BYTES = 16 * 2**20
"""Bytes of a random matrix that feedback alignment draws at a time, in fp32."""
FEEDBACK_LOGITS = 2**25
"""Logits whose error feedback alignment computes at a time, in fp32."""
VALIDATION_CHUNKS = 8
"""Pieces in which a validation computes its logits, at least: in fp32 they must not take more memory than training."""
MUON_STACK = 2**25
"""Elements of matrices that Muon updates together: 128 MiB in fp32, so that the stack stays small compared with the model."""
MUON_STACK_BYTES = 10
"""Bytes per element of such a stack, at most: two and a half copies in fp32 (a test counts them)."""
CUBLAS_BYTES = 64 * 2**20
"""Workspaces that cuBLAS takes from torch's allocator on Hopper."""


def memory(
    recipe: Recipe, values: Mapping[str, Any], *, tokens: int, accumulation: int, fused: bool
) -> Memory:
    """Peak bytes of one process in passes of so many tokens under the values of a plan: weights, gradients and optimiser
    state are sharded, activations are its own.

    The peak is in the head (all activations, the logits and their gradient) or in the backward of the last block (all
    activations and its temporaries). With a single pass gradients appear while activations go, so the larger of the two
    counts. Small passes may need less than Muon's update. `fused`: norms, gates and rotations keep no copies (`fuses`).
    Feedback alignment (`dfa`) has its peak in the head, where it holds what the first block reads, or in the second run of
    its last block, with all gradients."""
    model, lora, dfa, count = recipe.model, recipe.lora, recipe.feedback, parameters(recipe.model)
    precision, recompute, shards = values["precision"], values["recompute"], values["shards"]
    learning = count.total if lora is None else adapter_parameters(model, lora)
    states = 8 * learning - (4 * count.hidden if recipe.train.optimizer == "muon" and lora is None else 0)
    fused_loss = values["cross_entropy"] != "torch"  # in FP8, two copies of half the size
    head = _head_bytes(
        model, tokens, precision, values["loss_chunks"], fused_loss, recipe.train.softmax_candidates
    )
    block = tokens * _block_temporaries(model, precision, recompute, fused)
    below = feedback_blocks(model, dfa) if dfa else 0
    activations = tokens * (model.num_layers - below) * kept_bytes(model, precision, recompute, fused)
    gradients = 4 * learning // shards
    fixed = _workspace_bytes(model, precision, recompute, shards, model.num_layers - below)
    counted = gradients if accumulation > 1 else max(0, gradients - activations - head)
    temporaries = max(0, block - head)
    if dfa is not None and below:
        # alignment.py holds the gradients twice
        second = max(_second_run_bytes(model, dfa, tokens, precision, fused), gradients)
        over = max(0, second + (gradients if accumulation == 1 else 0) - activations - head)
        counted = gradients if accumulation > 1 else min(gradients, over)
        temporaries = feedback_bytes(model, dfa, precision) + over - (counted if accumulation == 1 else 0)
        activations += tokens * BYTES[precision] * model.hidden_size
    if recipe.train.optimizer == "muon" and lora is None:
        changing = gradients + muon_bytes(model) + CUBLAS_BYTES
        temporaries += max(0, changing - counted - activations - head - fixed - temporaries)
    return Memory(
        weights=4 * (count.total + (learning if lora else 0)) // shards,
        gradients=counted,
        optimizer=states // shards,
        activations=activations,
        logits=head,
        workspace=fixed + temporaries,
    )


def muon_bytes(model: ModelConfig) -> int:
    """Bytes that Muon needs besides weights, gradients and momenta while it changes one stack of matrices."""
    qkv = (model.num_heads + 2 * model.kv_heads) * model.head_size
    inner = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    matrix = model.hidden_size * max(qkv, inner)
    return MUON_STACK_BYTES * min(model.num_layers * matrix, max(MUON_STACK, matrix))


def feedback_bytes(model: ModelConfig, dfa: DfaConfig, precision: str) -> int:
    """The random matrices, or the piece of them that is drawn at a time."""
    dense = BYTES[precision] * feedback_weights(model, dfa)
    return dense if dfa.feedback == "dense" else FEEDBACK_PIECE_BYTES


def _second_run_bytes(model: ModelConfig, dfa: DfaConfig, tokens: int, precision: str, fused: bool) -> int:
    """One block of feedback alignment, forward and backward, with error and signals; or the making of the error.
    Shared feedback keeps only the signals."""
    a, making = BYTES[precision], 0
    error = a * tokens * feedback_error_size(model, dfa)
    if dfa.error == "logits":
        making = (8 + a) * min(tokens * model.vocab_size, FEEDBACK_LOGITS)
        error = 0 if dfa.shared else error
    signals = a * tokens * sum(feedback_widths(model, dfa, 1))
    block = tokens * (_block_temporaries(model, precision, "full", fused) + 2 * a * model.hidden_size)
    return error + max(making, signals + block)


def fuses(*, compiled: bool, cuda: bool, precision: str) -> bool:
    """Whether norms, gates and rotations are fused: by a compiler, or in half precision on a GPU by our kernels."""
    return compiled or (cuda and BYTES[precision] == 2)


def kept_bytes(model: ModelConfig, precision: str, recompute: Recompute, fused: bool) -> int:
    """Bytes that one token keeps in one block between forward and backward (what torch.compile was seen to
    save).

    Without recomputation the inputs of all four matrix products and both norms are kept; selective
    recomputation (and FP8, which quantises its inputs again) keeps what the products and attention put out;
    full recomputation keeps the block's input.
    """
    a, D, F, C = BYTES[precision], model.hidden_size, model.ffn_size, model.head_size
    width, kv_width = model.num_heads * C, model.kv_heads * C
    inner = F * (2 if model.activation == "swiglu" else 1)
    if recompute == "full":
        return a * D
    rotated = width + kv_width if model.positions == "rope" else 0
    if model.qk_norm and rotated and fused and a == 2 and model.attention == "softmax":
        rotated += kv_width  # the kernel for both copies the values along
    attention = a * (width + 2 * kv_width + width) + 4 * model.num_heads  # q, k, v, output and log-sum-exp
    kernel = fused and precision in ("bf16", "fp8") and favor_fits(model.head_size, model.features)
    if model.attention == "favor" and recompute == "none" and not kernel:
        attention += _favor_bytes(model)
    if recompute == "selective" or precision == "fp8":
        return a * (2 * D + inner + (rotated if recompute == "none" else 0)) + attention
    kept = a * (4 * D + inner + F + rotated) + attention
    if fused:
        return kept
    # Else the gate's activation too, and what RMSNorm and rotation computed in fp32.
    gate = a * F if model.activation == "swiglu" else 0
    return kept + gate + (16 * D if model.norm == "rmsnorm" else 0) + (8 * rotated if a == 2 else 0)


def _favor_bytes(model: ModelConfig) -> int:
    """What plain PyTorch keeps for kernel attention per token, in fp32: features, squares and sums."""
    H, K, C, M, L = model.num_heads, model.kv_heads, model.head_size, model.features, FAVOR_CHUNK
    return 4 * (H * (M + L) + 2 * K * M + 2 * K * M * C // L)  # seen: within 9%


def _block_temporaries(model: ModelConfig, precision: str, recompute: Recompute, fused: bool) -> int:
    """Bytes a token needs while a block runs backward: gradients of its parts, and what is recomputed."""
    a, inner = BYTES[precision], model.ffn_size * (2 if model.activation == "swiglu" else 1)
    gradients = a * (inner + model.ffn_size + 2 * model.hidden_size)
    if model.attention == "favor":  # sums of each chunk and their gradients, beside those of q, k and v
        heads = model.num_heads + model.kv_heads
        sums = heads * model.features * (a * model.head_size + 8) // FAVOR_CHUNK
        gradients = max(gradients, sums + 2 * a * heads * model.head_size)
    return gradients + (0 if recompute == "none" else kept_bytes(model, precision, "none", fused))


def _head_bytes(
    model: ModelConfig, tokens: int, precision: str, chunks: int, fused: bool, candidates: int = 0
) -> int:
    """Logits and gradient (one copy if fused, else three, two in fp32), the last hidden states with gradients, and the
    head's weight with its own. The rows of candidates are gathered in fp32, and so is their gradient."""
    a, V, D = BYTES[precision], candidates or model.vocab_size, model.hidden_size
    logits = -(-tokens // chunks) * V * (a if fused else a + 8)
    gathered = 8 * V * D if candidates else 0
    return logits + tokens * D * 4 * a + (2 * a * V * D if a == 2 else 4 * V * D) + gathered


def validation_bytes(model: ModelConfig, values: Mapping[str, Any], tokens: int) -> int:
    """A pass without gradients, eager and with logits in pieces as evaluate.py has it: one block, or the head."""
    precision, fused = values["precision"], values["cross_entropy"] != "torch"
    block = tokens * kept_bytes(model, precision, "none", fused=False)
    return max(
        block, _head_bytes(model, tokens, precision, max(VALIDATION_CHUNKS, values["loss_chunks"]), fused)
    )


def _workspace_bytes(
    model: ModelConfig, precision: str, recompute: Recompute, world_size: int, layers: int
) -> int:
    """Weights cast for the backward of so many layers, gathered weights, and the directions of kernel attention."""
    hidden = parameters(model).hidden
    directions = model.num_layers * model.kv_heads * model.features * model.head_size
    cast = precision in ("bf16", "fp16") and recompute == "none" and world_size == 1
    casts = BYTES[precision] * hidden * layers // model.num_layers if cast else 0
    largest = max(hidden // model.num_layers, model.vocab_size * model.hidden_size)
    fixed = CUBLAS_BYTES + (4 * directions if model.attention == "favor" else 0)
    return fixed + casts + (2 * 4 * largest if world_size > 1 else 0)
