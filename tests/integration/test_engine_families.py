"""The local engine on every model family, fp32 on a CPU: greedy tokens as `transformers`, log-probabilities
as the training forward.

More sequences than slots, prompts of different lengths and several samples of each, so that slots are
refilled and prompts shared.
"""

from typing import Any

import pytest
import torch
import transformers
from precision import CLOSE_FP32

from redline.config.recipe import ModelConfig
from redline.data.tokenizer import Tokenizer, train_bpe
from redline.engine.local import LocalEngine
from redline.engine.request import Completion, Request, Sampling
from redline.model.huggingface_out import config_json, to_huggingface
from redline.model.transformer import Transformer, build_model

SIZES: dict[str, Any] = {"vocab_size": 300, "num_layers": 2, "ffn_size": 40, "context_length": 64}
FAMILIES = {
    "gpt2": ModelConfig(
        **SIZES,
        hidden_size=24,
        num_heads=3,
        positions="learned",
        norm="layernorm",
        norm_eps=1e-3,
        activation="gelu",
        bias=True,
    ),
    "llama": ModelConfig(
        **SIZES, hidden_size=32, num_heads=4, num_kv_heads=2, rope_theta=500.0, tie_embeddings=False
    ),
    "llama-biased": ModelConfig(**SIZES, hidden_size=32, num_heads=4, bias=True, tie_embeddings=False),
    "smollm2": ModelConfig(**SIZES, hidden_size=48, num_heads=3, num_kv_heads=1),
    "qwen2": ModelConfig(
        **SIZES, hidden_size=32, num_heads=4, num_kv_heads=2, qkv_bias=True, tie_embeddings=False
    ),
    "qwen3": ModelConfig(**SIZES, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True),
}
ARCHITECTURES = {"GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
LENGTHS = (1, 5, 17, 3, 40, 9)
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(iter(["to be or not to be"]), 300)


def random_model(config: ModelConfig) -> Transformer:
    """Norms and biases are random too: ones and zeros would hide a mistake."""
    model = build_model(config, device="cpu", seed=0).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(
                mean, 0.3 if parameter.dim() == 1 or name.startswith("embed") else 0.6, generator=random
            )
    return model


def prompts() -> list[tuple[int, ...]]:
    random = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(300, (length,), generator=random).tolist()) for length in LENGTHS]


def complete(model: Transformer, tokenizer: Tokenizer, sampling: Sampling, samples: int) -> list[Completion]:
    requests = [Request(prompt=ids, sampling=sampling, samples=samples, seed=5) for ids in prompts()]
    with LocalEngine(
        model, tokenizer, slots=5, max_prompt_tokens=max(LENGTHS), max_new_tokens=NEW_TOKENS
    ) as engine:
        found = list(engine.run(requests))
    assert len(found) == samples * len(LENGTHS)
    return found


def theirs(config: ModelConfig, model: Transformer) -> Any:
    auto = transformers.AutoConfig
    about = {key: value for key, value in config_json(config).items() if key != "architectures"}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    reference = transformers.AutoModelForCausalLM.from_config(
        auto.for_model(**about, **ids), attn_implementation="eager"
    )
    missing, unexpected = reference.load_state_dict(
        to_huggingface(config, dict(model.named_parameters())), strict=False
    )
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    return reference.eval()


def logits_of(model: Any, completion: Completion) -> torch.Tensor:
    """Where the model of transformers or of the training reads the whole text: for each new token those that
    it was chosen by, and how far they may differ from the engine's."""
    tokens = torch.tensor([[*completion.request.prompt, *completion.tokens]])
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)[0, len(completion.request.prompt) - 1 : -1]


def chosen(scores_TV: torch.Tensor, completion: Completion) -> torch.Tensor:
    return scores_TV.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]


def assert_training_logprobs(model: Transformer, completion: Completion) -> None:
    logits_TV = logits_of(model, completion)
    expected_T = chosen(logits_TV.log_softmax(-1), completion)
    difference = (torch.tensor(completion.logprobs) - expected_T).abs().max()
    assert difference <= CLOSE_FP32 * logits_TV.abs().max()


def test_every_architecture_is_here() -> None:
    assert {config_json(config)["architectures"][0] for config in FAMILIES.values()} == ARCHITECTURES


@pytest.mark.numerics
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tokenizer: Tokenizer) -> None:
    """Each has the greatest logit, or one that differs from it by no more than rounding."""
    model = random_model(FAMILIES[family])
    reference = theirs(FAMILIES[family], model)
    greedy = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0)
    found = complete(model, tokenizer, greedy, samples=2)
    for completion in found:
        logits_TV = logits_of(reference, completion)
        short_of_T = logits_TV.max(-1).values - chosen(logits_TV, completion)
        assert short_of_T.max() <= CLOSE_FP32 * logits_TV.abs().max()
        assert_training_logprobs(model, completion)
    assert len({token for completion in found for token in completion.tokens}) > 20, (
        "constant texts would hide a mistake"
    )


@pytest.mark.numerics
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_have_the_log_probabilities_of_the_training_forward(
    family: str, tokenizer: Tokenizer
) -> None:
    """Under the model as it is, whatever the temperature and the filters that chose them."""
    model = random_model(FAMILIES[family])
    sampled = complete(
        model, tokenizer, Sampling(max_new_tokens=NEW_TOKENS, temperature=0.7, top_k=20, top_p=0.9), samples=3
    )
    for completion in sampled:
        assert_training_logprobs(model, completion)
    assert len({completion.tokens for completion in sampled}) > len(LENGTHS), "samples of a prompt differ"
