"""Tiny models of transformers with random weights, the independent truth for the tests of `redline.model`."""

import torch
import transformers

_SIZES = {"vocab_size": 96, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 32}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3}

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=24, n_layer=2, n_head=3, n_inner=40, layer_norm_epsilon=1e-3
    ),
    "gpt2-untied": lambda: transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=24, n_layer=1, n_head=3, tie_word_embeddings=False
    ),
    "llama": lambda: transformers.LlamaConfig(
        **_SIZES, **_ROPE, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    ),
    "llama-biased": lambda: transformers.LlamaConfig(
        **_SIZES,
        **_ROPE,
        hidden_size=32,
        num_attention_heads=4,
        head_dim=12,
        attention_bias=True,
        mlp_bias=True,
    ),
    "smollm2": lambda: transformers.LlamaConfig(
        **_SIZES,
        **_ROPE,
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **_SIZES, **_ROPE, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **_SIZES,
        **_ROPE,
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    ),
}


def reference(family: str) -> transformers.PreTrainedModel:
    """The family's model in fp32. Its norms and biases are random too: ones and zeros would hide a
    mistake."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[family](), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.5, 0.5)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def tokens_BT(rows: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(1))
