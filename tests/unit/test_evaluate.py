"""Held-out loss against a mean of per-token losses, whatever the batches and processes."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from precision import CLOSE

from redline.config.load import load_recipe
from redline.config.recipe import ModelConfig
from redline.data.shards import TokenDataset
from redline.data.tokenizer import train_bpe
from redline.errors import ConfigError
from redline.evaluate import HeldOut, Text, evaluate_opened, held_out_loss, text_of
from redline.model.transformer import Transformer, build_model
from redline.train.process import Process

CONFIG = ModelConfig(
    vocab_size=37, num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_size=32, context_length=40,
    init_std=0.3,
    qk_norm=True, tie_embeddings=False,
)  # fmt: skip


@pytest.fixture
def model() -> Transformer:
    return build_model(CONFIG, device="cpu", seed=0).eval()


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


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 64])
@pytest.mark.parametrize("sequences", [1, 10, 1000])
def test_held_out_loss_is_the_mean_over_tokens_whatever_the_batches(model, micro_batch, sequences):
    dataset = data(10 * 16 + 5)
    expected = token_losses(model, dataset, 16, sequences)
    found = held_out_loss(
        model, dataset, seq_len=16, sequences=sequences, micro_batch=micro_batch, process=ALONE
    )
    assert found.tokens == len(expected) == 16 * min(sequences, 10)
    assert found.loss == pytest.approx(sum(expected) / len(expected), rel=CLOSE)
    assert found.bytes_per_token == 3.0
    assert model.loss_chunks == 1, "left as it was"


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_two_processes_with_an_odd_number_of_windows_count_each_once(model):
    """Run one after the other, each with the other's sum: rank 1 is one window short and fills up with
    IGNORED."""
    dataset = data(7 * 16 + 1)
    expected = token_losses(model, dataset, 16, 7)
    parts = [
        held_out_loss(
            model,
            dataset,
            seq_len=16,
            sequences=7,
            micro_batch=2,
            process=_Part(rank, 2, torch.device("cpu")),
        )
        for rank in (0, 1)
    ]
    assert [part.tokens for part in parts] == [4 * 16, 3 * 16]
    total = sum(part.loss * part.tokens for part in parts)
    assert total / 112 == pytest.approx(sum(expected) / len(expected), rel=CLOSE)


class _Part(Process):
    """A rank of two whose sums are its own, so that its part can be looked at."""

    def sum(self, value: float) -> float:
        return value


def test_bits_per_byte_and_perplexity_by_hand():
    metrics = HeldOut(loss=2 * math.log(2), tokens=10, bytes_per_token=4.0).metrics()
    assert metrics == {
        "valid_loss": 2 * math.log(2),
        "valid_perplexity": pytest.approx(4.0),
        "valid_bits_per_byte": pytest.approx(0.5),
    }
    assert HeldOut(loss=1e6, tokens=1, bytes_per_token=1.0).metrics()["valid_perplexity"] < math.inf


def test_perplexity_per_word_is_the_same_for_any_tokenizer():
    """12 nats of text in 3 words, whether they are 4 tokens or 6."""
    few, many = (HeldOut(loss=12 / n, tokens=n, bytes_per_token=1.0, words=3).metrics() for n in (4, 6))
    assert few["valid_word_perplexity"] == pytest.approx(math.exp(4))
    assert many["valid_word_perplexity"] == pytest.approx(math.exp(4))
    assert few["valid_perplexity"] == pytest.approx(math.exp(3))


def test_the_bytes_of_a_loss_are_those_of_its_text(model):
    how = {"seq_len": 16, "sequences": 3, "micro_batch": 2, "process": ALONE}
    found = held_out_loss(model, data(10 * 16), **how, text=Text(words=7, size_bytes=96))
    assert (found.words, found.bytes_per_token) == (7, 2.0), "the split has 3 bytes a token"


def test_words_and_bytes_are_those_of_the_targets_and_of_nothing_else():
    """Every token is a byte, so a window of 16 cuts words and characters, and a document may begin inside it. The rest of
    the split is denser, so its mean bytes per token would be wrong."""
    tokenizer = train_bpe(iter(["a"]), vocab_size=257)
    texts = ["A Привет, мир: one two.", "three", "четыре пять\nsix  seven eight nine ten"]
    documents = tokenizer.encode_documents(texts)
    assert [len(ids) for ids in documents] == [len(text.encode()) + 1 for text in texts]
    ids = np.concatenate([np.concatenate(documents)[: 1 + 5 * 16], np.full(60, documents[0][0])])
    dataset = TokenDataset("made up", [ids[:40], ids[40:]], vocab_size=257, bytes_of_text=9 * len(ids))
    told = b"\n".join(text.encode() for text in texts)[1 : 1 + 5 * 16]
    text = text_of(dataset, tokenizer, seq_len=16, sequences=5)
    assert text.words == len(told.decode(errors="replace").split())
    assert text.size_bytes == len(told) - 2, "two documents end"


def test_a_checkpoint_of_fine_tuning_has_no_validation_split_of_its_own(model):
    """It was refused for a sequence length of 0 that nobody had given."""
    opened = SimpleNamespace(recipe=load_recipe("finetune"))
    with pytest.raises(ConfigError, match="give --data SOURCE"):
        evaluate_opened(opened, model, source=None, text_field="text", seq_len=None, sequences=None)
