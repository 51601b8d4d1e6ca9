"""Generation against naive full forwards and exact probabilities, seeds, limits; held-out loss against a mean of per-token losses."""

import copy
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.data.shards import TokenDataset
from redline.engine.simple import Sampling, generate, generate_all
from redline.errors import ConfigError
from redline.evaluate import HeldOut, held_out_loss
from redline.model.transformer import Transformer, build_model
from redline.train.process import Process

CONFIG = ModelConfig(
    vocab_size=37, num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_size=32, context_length=40, init_std=0.3,
    qk_norm=True, tie_embeddings=False,
)  # fmt: skip
LEARNED = ModelConfig(
    vocab_size=37, num_layers=2, hidden_size=24, num_heads=4, ffn_size=32, context_length=40, init_std=0.3,
    positions="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_model(CONFIG, device="cpu", seed=0).eval()


# ---- generation ----


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rope", "learned"])
def test_cached_greedy_equals_naive_full_forwards(config):
    model = build_model(config, device="cpu", seed=0)
    tokens = prompt = [3, 1, 4, 1, 5]
    with torch.no_grad():
        for _ in range(20):
            tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    found = generate(model, prompt, Sampling(max_new_tokens=20, temperature=0.0, samples=2))
    assert found == [tokens[len(prompt) :]] * 2
    assert len(set(found[0])) > 3, "a constant continuation would hide a mistake"


SAMPLES = 6000
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0])


def exact(*, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> list[float]:
    """The distribution by its definition, in plain Python: divide, keep the likeliest k, keep the smallest set of mass p."""
    weights = [math.exp(float(logit) / temperature) for logit in LOGITS]
    weights = [w if top_k is None or i < top_k else 0.0 for i, w in enumerate(weights)]
    total, kept, mass = sum(weights), [], 0.0
    for weight in weights:
        kept.append(weight if mass < top_p else 0.0)
        mass += weight / total
    return [w / sum(kept) for w in kept]


class FixedLogits(Transformer):
    """Says LOGITS whatever it reads."""

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, cache: Any = None) -> Tensor:
        super().forward(tokens_BT, cache=cache)
        return LOGITS.expand(*tokens_BT.shape, -1)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8, "temperature": 1.7}]
)
def test_samples_follow_the_exact_distribution(how):
    config = ModelConfig(vocab_size=8, num_layers=1, hidden_size=2, num_heads=1, ffn_size=2, context_length=8)
    fixed = FixedLogits(config)
    found = generate(fixed, [0], Sampling(**{"temperature": 1.0, **how}, max_new_tokens=4, samples=SAMPLES // 4, seed=7))
    counts, expected = Counter(token for text in found for token in text), exact(**how)
    assert sum(counts.values()) == SAMPLES
    for token, probability in enumerate(expected):
        if probability == 0.0:
            assert counts[token] == 0, "a token that was cut off"
    chi_square = sum((counts[i] - SAMPLES * p) ** 2 / (SAMPLES * p) for i, p in enumerate(expected) if p > 0)
    assert chi_square < 30, f"{chi_square:.1f}: with up to 7 degrees of freedom, one in 10,000 seeds"


def test_neighbouring_samples_and_seeds_are_not_alike(model):
    texts = generate(model, [3, 1, 4], Sampling(samples=20, max_new_tokens=12, temperature=1.0))
    other = generate(model, [3, 1, 4], Sampling(samples=20, max_new_tokens=12, temperature=1.0, seed=1))
    assert len({tuple(text) for text in texts + other}) == 40


def test_sample_i_is_the_same_whatever_the_number_of_samples(model):
    many = generate(model, [3, 1, 4], Sampling(samples=7, max_new_tokens=12, temperature=1.0, seed=5))
    for count in (1, 3):
        assert generate(model, [3, 1, 4], Sampling(samples=count, max_new_tokens=12, temperature=1.0, seed=5)) == many[:count]
    part = Sampling(samples=2, first_sample=4, max_new_tokens=12, temperature=1.0, seed=5)
    assert generate(model, [3, 1, 4], part) == many[4:6]


class Digits:
    """A tokenizer of two-digit numbers; 0 ends a document."""

    eot_id = 0

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_chunks_give_the_same_texts_and_the_end_of_text_stops(model):
    sampling = Sampling(samples=7, max_new_tokens=36, temperature=3.0, seed=5)
    whole = list(generate_all(model, Digits(), "3 1 4", sampling, at_once=None))
    for at_once in (1, 2, 3, 100):
        assert list(generate_all(model, Digits(), "3 1 4", sampling, at_once=at_once)) == whole
    assert all("0" not in text.split() for text in whole)
    assert any(len(text.split()) < 36 for text in whole), "one of them met the end of text"
    begun = list(generate_all(model, Digits(), "", sampling, at_once=None))
    assert begun == [Digits().decode(ids) for ids in generate(model, [0], Sampling(**{**vars(sampling), "stop_ids": (0,)}))]


def test_a_stop_token_ends_its_own_sample_and_is_left_out(model):
    free = generate(model, [3, 1, 4], Sampling(samples=5, max_new_tokens=12, temperature=1.0))
    stop = free[2][4]
    stopped = generate(model, [3, 1, 4], Sampling(samples=5, max_new_tokens=12, temperature=1.0, stop_ids=(stop,)))
    assert stopped == [text[: text.index(stop)] if stop in text else text for text in free]


def test_generation_ends_where_the_context_does(model):
    prompt = [1] * 35
    (text,) = generate(model, prompt, Sampling(max_new_tokens=100))
    assert len(text) == CONFIG.context_length - 35
    assert len(generate(model, [1] * 39, Sampling(max_new_tokens=100))[0]) == 1
    for tokens in (40, 41):
        with pytest.raises(ConfigError, match=f"the prompt has {tokens} tokens, and the model's context holds 40"):
            generate(model, [1] * tokens, Sampling())
    with pytest.raises(ConfigError, match="at least one token"):
        generate(model, [], Sampling())


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": t} for t in (-1.0, math.nan, math.inf, 1e-300)]
    + [{"top_p": p} for p in (0.0, 1.1, math.nan)]
    + [{name: n} for name in ("top_k", "max_new_tokens", "samples") for n in (0, -3)],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"^{name} must be .*, got {value}"):
        Sampling(**wrong)


@pytest.mark.parametrize("how", [{"temperature": 1e-5}, {"top_k": 1}, {"top_p": 1e-9}])
def test_the_coldest_sampling_is_greedy(model, how):
    greedy = generate(model, [3, 1, 4], Sampling(temperature=0.0, max_new_tokens=12))
    assert generate(model, [3, 1, 4], Sampling(**{"temperature": 1.0, **how}, max_new_tokens=12)) == greedy


def test_a_top_k_beyond_the_vocabulary_changes_nothing(model):
    free = Sampling(temperature=1.0, max_new_tokens=12)
    assert generate(model, [3], free) == generate(model, [3], Sampling(**{**vars(free), "top_k": 1000}))


# ---- evaluation ----

ALONE = Process(0, 1, torch.device("cpu"))


def data(tokens: int) -> TokenDataset:
    """Two arrays, so that windows cross a border; 3 bytes of text a token."""
    ids = np.random.default_rng(0).integers(0, 37, tokens)
    return TokenDataset("made up", [ids[:53], ids[53:]], vocab_size=37, bytes_of_text=3 * tokens)


def token_losses(model: Transformer, dataset: TokenDataset, seq_len: int, sequences: int) -> list[float]:
    """The loss of each token, one sequence at a time, by log-softmax in fp64."""
    losses: list[float] = []
    model = copy.deepcopy(model).double()
    model.compute_dtype = torch.float64
    with torch.no_grad():
        for window in range(min(sequences, dataset.windows(seq_len))):
            row = torch.from_numpy(dataset.read_windows(np.array([window]), seq_len))[0]
            logs = F.log_softmax(model(row[None, :-1])[0], dim=-1)
            losses += [-float(logs[i, target]) for i, target in enumerate(row[1:])]
    return losses


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 64])
@pytest.mark.parametrize("sequences", [1, 10, 1000])
def test_held_out_loss_is_the_mean_over_tokens_whatever_the_batches(model, micro_batch, sequences):
    dataset = data(10 * 16 + 5)
    expected = token_losses(model, dataset, 16, sequences)
    found = held_out_loss(model, dataset, seq_len=16, sequences=sequences, micro_batch=micro_batch, process=ALONE)
    assert found.tokens == len(expected) == 16 * min(sequences, 10)
    assert found.loss == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert found.bytes_per_token == 3.0
    assert model.loss_chunks == 1, "left as it was"


def test_two_processes_with_an_odd_number_of_windows_count_each_once(model):
    """Run one after the other, each with the other's sum: rank 1 is one window short and fills up with IGNORED."""
    dataset = data(7 * 16 + 1)
    expected = token_losses(model, dataset, 16, 7)
    parts = [
        held_out_loss(model, dataset, seq_len=16, sequences=7, micro_batch=2, process=_Part(rank, 2, torch.device("cpu")))
        for rank in (0, 1)
    ]
    assert [part.tokens for part in parts] == [4 * 16, 3 * 16]
    total = sum(part.loss * part.tokens for part in parts)
    assert total / 112 == pytest.approx(sum(expected) / len(expected), rel=1e-6)


class _Part(Process):
    """A rank of two whose sums are its own, so that its part can be looked at."""

    def sum(self, value: float) -> float:
        return value


def test_bits_per_byte_and_perplexity_by_hand():
    metrics = HeldOut(loss=2 * math.log(2), tokens=10, bytes_per_token=4.0).metrics()
    assert metrics == {"valid_loss": 2 * math.log(2), "valid_perplexity": pytest.approx(4.0), "valid_bits_per_byte": pytest.approx(0.5)}
    assert HeldOut(loss=1e6, tokens=1, bytes_per_token=1.0).metrics()["valid_perplexity"] < math.inf
