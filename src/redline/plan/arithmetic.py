"""Counting: parameters, FLOPs per token, bytes of memory and time, from the recipe alone. No torch.

Parameter counts and matmul FLOPs are exact (a test holds them equal to the real model on the meta device for every shipped
recipe). Memory and attainable speed are models of what the compiler does; `docs/decisions.md` says how well they were seen to hold.
"""

from dataclasses import dataclass

from redline.config.recipe import ModelConfig, Recompute, TrainConfig

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of one activation in each precision; FP8 holds its activations in bf16 and converts at the matrix products."""


@dataclass(frozen=True)
class Parameters:
    total: int
    matmul: int
    """Weights that multiply activations: everything but norms, biases, positions and an untied input embedding."""
    hidden: int
    """Weights of the matrices inside the blocks: those that Muon updates and FP8 multiplies."""


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
    total = model.num_layers * block + embedding * (1 if model.tie_embeddings else 2) + positions + norm
    return Parameters(total=total, matmul=model.num_layers * matrices + embedding, hidden=model.num_layers * matrices)


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Training FLOPs of one token, PaLM convention: 6 per matmul weight, and 12 L d T for attention, causal or not."""
    return 6 * parameters(model).matmul + 12 * model.num_layers * model.num_heads * model.head_size * seq_len


@dataclass(frozen=True)
class Memory:
    """Predicted peak bytes on one GPU, part by part."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.workspace


def memory(
    model: ModelConfig,
    train: TrainConfig,
    *,
    seq_len: int,
    micro_batch: int,
    precision: str,
    recompute: Recompute,
    loss_chunks: int,
    world_size: int,
    compiled: bool,
) -> Memory:
    """Peak bytes of one process: weights, gradients and optimiser state are sharded, activations are its own."""
    count = parameters(model)
    tokens = micro_batch * seq_len
    states = 8 * (count.total - count.hidden) + 4 * count.hidden if train.optimizer == "muon" else 8 * count.total
    per_token = activation_bytes(model, precision, recompute, compiled)
    return Memory(
        weights=4 * count.total // world_size,
        gradients=4 * count.total // world_size,
        optimizer=states // world_size,
        activations=tokens * per_token,
        logits=_logit_bytes(model, tokens, precision, loss_chunks, compiled),
        workspace=_workspace_bytes(model, precision, world_size),
    )


def activation_bytes(model: ModelConfig, precision: str, recompute: Recompute, compiled: bool) -> int:
    """Bytes that one token keeps alive between forward and backward, over all layers."""
    a, D, F, C = BYTES[precision], model.hidden_size, model.ffn_size, model.head_size
    width, kv_width = model.num_heads * C, model.kv_heads * C
    block_input = a * D
    if recompute == "full":
        return model.num_layers * block_input
    inner = F * (2 if model.activation == "swiglu" else 1)
    # What the backward of each matrix product and of attention reads: inputs of four products, q/k/v, attention's output and
    # its log-sum-exp, and the pre-activation; the two residual sums are kept for the norms.
    matmul_outputs = a * (width + 2 * kv_width + width + D + inner) + 4 * model.num_heads
    if recompute == "selective":
        return model.num_layers * (block_input + matmul_outputs)
    # The compiler recomputes the activation function from its input instead of keeping its output; eager mode keeps both, and
    # the inner products of the gated ones and of RMSNorm besides.
    norm_outputs = a * 2 * D
    activated = a * F if compiled else a * F * (3 if model.activation == "swiglu" else 2)
    return model.num_layers * (block_input + matmul_outputs + norm_outputs + activated)


def _logit_bytes(model: ModelConfig, tokens: int, precision: str, chunks: int, compiled: bool) -> int:
    """Logits and their gradient; the loss upcasts to fp32, which the compiler folds away and eager mode materialises."""
    a = BYTES[precision]
    copies = 2 * a if compiled else 2 * a + 8
    return -(-tokens // chunks) * model.vocab_size * copies


def _workspace_bytes(model: ModelConfig, precision: str, world_size: int) -> int:
    """The compute-dtype copy of the weights in use, and with several processes the gathered weights of the largest part."""
    count = parameters(model)
    block = count.hidden // model.num_layers
    head = model.vocab_size * model.hidden_size
    casts = BYTES[precision] * max(block, head) if precision in ("bf16", "fp16", "fp8") else 0
    return casts + (4 * 2 * max(block, head) if world_size > 1 else 0)
