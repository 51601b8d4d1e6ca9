"""The local engine against naive full forwards and exact probabilities; seeds, stops, limits, refilling,
streams."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from precision import CLOSE_FP32

from redline.config.recipe import ModelConfig
from redline.engine import reference
from redline.engine.local import STEPS, LocalEngine, fitting_slots
from redline.engine.request import Completion, Request, Sampling
from redline.engine.state import STOP_IDS, make_slots
from redline.engine.uniform import uniforms
from redline.errors import ConfigError, MachineError
from redline.model.attention.state import Room
from redline.model.transformer import Transformer, build_model

CONFIG = ModelConfig(
    vocab_size=37, num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_size=32, context_length=60,
    init_std=0.3,
    qk_norm=True, tie_embeddings=False,
)  # fmt: skip
LEARNED = ModelConfig(
    vocab_size=37, num_layers=2, hidden_size=24, num_heads=4, ffn_size=32, context_length=60, init_std=0.3,
    positions="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=False,
)  # fmt: skip


class Words:
    """A tokenizer whose tokens are numbers."""

    def encode_prompt(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)

    def decode_batch(self, texts: list[list[int]]) -> list[str]:
        return [self.decode(ids) for ids in texts]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_model(CONFIG, device="cpu", seed=0).eval()


def make(model: Transformer, slots: int = 8, **options) -> LocalEngine:
    return LocalEngine(
        model, Words(), **{"slots": slots, "max_prompt_tokens": 40, "max_new_tokens": 40, **options}
    )


def by_sample(completions) -> dict[tuple[object, int], Completion]:
    found = list(completions)
    named = {(c.request.tag, c.sample): c for c in found}
    assert len(named) == len(found), "no sample twice"
    return named


def assert_greedy(model: Transformer, prompt: tuple[int, ...], completion: Completion) -> None:
    """By one forward of the training's model over the whole text: each token has the greatest logit, or one
    that differs from it by no more than rounding, and the log-probability that it was given."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *completion.tokens]]))[0, len(prompt) - 1 : -1].double()
    tokens_T1, rounding = torch.tensor(completion.tokens)[:, None], CLOSE_FP32 * float(logits_TV.abs().max())
    assert (logits_TV.max(-1).values - logits_TV.gather(-1, tokens_T1)[:, 0]).max() <= rounding
    logprobs = logits_TV.log_softmax(-1).gather(-1, tokens_T1)[:, 0]
    assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=rounding)


PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(0, 37, 1 + 5 * i % 31)) for i in range(9)]


@pytest.mark.numerics
@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rope", "learned"])
@pytest.mark.parametrize("slots", [3, 32])
def test_greedy_tokens_and_log_probabilities_are_those_of_the_training_forward(config, slots):
    model = build_model(config, device="cpu", seed=0)
    requests = [
        Request(
            prompt=p,
            samples=1 + i % 3,
            sampling=Sampling(temperature=0, max_new_tokens=3 + 7 * i % 22),
            tag=i,
        )
        for i, p in enumerate(PROMPTS)
    ]
    with make(model, slots) as engine:
        found = by_sample(engine.run(requests))
        assert len(found) == sum(request.samples for request in requests) == engine.stats.completions
        assert engine.stats.prefill_tokens == sum(map(len, PROMPTS)), (
            "each prompt is read once, whatever its samples"
        )
    seen = set()
    for (tag, _), completion in found.items():
        assert_greedy(model, PROMPTS[tag], completion)
        assert len(completion.tokens) == requests[tag].sampling.max_new_tokens
        assert completion.finish == "length"
        assert completion.text == Words().decode(list(completion.tokens))
        seen |= set(completion.tokens)
    assert len(seen) > 10, "a constant continuation would hide a mistake"


LOGITS = torch.tensor([1.5, -0.5, 2.0, -4.0, 1.0, 0.0, 0.5, -1.0])
DRAWS = 6000


def exact(*, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> list[float]:
    """The distribution by its definition, in plain Python: divide, keep the likeliest k, keep the smallest
    set of mass p."""
    weights = {i: math.exp(float(logit) / temperature) for i, logit in enumerate(LOGITS)}
    likeliest = sorted(weights, key=lambda i: -weights[i])[:top_k]
    total, mass, kept = sum(weights[i] for i in likeliest), 0.0, []
    for i in likeliest:
        if mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    return [weights[i] / sum(weights[j] for j in kept) if i in kept else 0.0 for i in weights]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 5, "top_p": 0.8, "temperature": 1.7},
    ],
)
def test_samples_follow_the_exact_distribution(how):
    tiny = ModelConfig(vocab_size=8, num_layers=1, hidden_size=2, num_heads=1, ffn_size=2, context_length=8)
    room = Room(slots=DRAWS, prompts=1, max_prompt_tokens=1, max_new_tokens=1)
    slots = make_slots(tiny, room, torch.device("cpu"))
    slots.count.zero_()
    slots.open.fill_(1)
    slots.temperature.fill_(how.get("temperature", 1.0))
    slots.top_k.fill_(how.get("top_k", 8))
    slots.top_p.fill_(how.get("top_p", 1.0))
    slots.uniform[:DRAWS] = torch.from_numpy(uniforms(np.full(DRAWS, 7), np.arange(DRAWS), 1))
    rows, logits = torch.arange(DRAWS, dtype=torch.int32), LOGITS.expand(DRAWS, -1)
    reference.pick(logits, slots, rows, reference.cutoff(logits, slots, rows))
    counts, expected = Counter(slots.tokens[:DRAWS, 0].tolist()), exact(**how)
    assert sum(counts.values()) == DRAWS
    for token, probability in enumerate(expected):
        if probability == 0.0:
            assert counts[token] == 0, "a token that was cut off"
    chi_square = sum((counts[i] - DRAWS * p) ** 2 / (DRAWS * p) for i, p in enumerate(expected) if p > 0)
    assert chi_square < 30, f"{chi_square:.1f}: with up to 7 degrees of freedom, one in 10,000 seeds"
    for token in counts:  # of the model as it is, whatever the temperature and the filters
        logprob = slots.logprobs[slots.tokens == token][0]
        assert float(logprob) == pytest.approx(float(LOGITS.double().log_softmax(-1)[token]), abs=1e-6)


def test_uniform_numbers_are_uniform_and_independent():
    seeds, samples = (axis.ravel() for axis in np.meshgrid(np.arange(50), np.arange(40)))
    u = uniforms(seeds, samples, 30).astype(np.float64)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert len(np.unique(u)) > 0.99 * u.size
    counts, _ = np.histogram(u, bins=100, range=(0, 1))
    assert ((counts - u.size / 100) ** 2 / (u.size / 100)).sum() < 170, "chi square, 99 degrees of freedom"
    # the next sample, token, seed
    for other in (np.roll(u, 1, axis=0), np.roll(u, 1, axis=1), np.roll(u, 40, axis=0)):
        assert abs(np.corrcoef(u.ravel(), other.ravel())[0, 1]) < 0.015
    assert np.array_equal(
        uniforms(np.array([-3]), np.array([2]), 5), uniforms(np.array([-3]), np.array([2]), 30)[:, :5]
    )


GREEDY = Sampling(temperature=0, max_new_tokens=12)
WARM = Sampling(temperature=1.0, max_new_tokens=12)


def test_the_same_request_gives_the_same_text_whatever_shares_the_batch(model):
    mixed = [
        Request(
            prompt=p,
            samples=4,
            seed=5,
            sampling=Sampling(temperature=0.5 + i / 4, top_p=0.9 if i % 2 else 1.0, max_new_tokens=12),
            tag=i,
        )
        for i, p in enumerate(PROMPTS)
    ]
    with make(model, 64) as engine:
        together = by_sample(engine.run(mixed))
        for i in (0, 3, 8):
            for other in (make(model, 64), make(model, 2), make(model, 5, reproducible=True)):
                alone = by_sample(other.run([mixed[i]]))
                assert {key: c.tokens for key, c in alone.items()} == {
                    (i, s): together[i, s].tokens for s in range(4)
                }
        assert by_sample(engine.run(mixed[::-1])).keys() == together.keys()
    assert len({c.tokens for c in together.values()}) > 30, "samples, prompts and seeds differ"


def test_reproducible_samples_have_the_same_bits_beside_any_others(model):
    """Beside longer and shorter ones too: a request that comes late joins rows that are further along."""
    asked = [Request(prompt=p, samples=2, seed=5, sampling=WARM, tag=i) for i, p in enumerate(PROMPTS)]
    late = [each for request in asked for each in (None, request)]
    with make(model, 4, reproducible=True) as engine:
        together, apart = by_sample(engine.run(asked)), by_sample(engine.run(late))
        assert together == apart
        assert by_sample(engine.run(asked[3:4])) == {(3, s): together[3, s] for s in range(2)}


def test_a_later_request_for_more_samples_goes_on_where_the_first_ended(model):
    with make(model) as engine:
        many = by_sample(engine.run([Request(prompt=(3, 1, 4), samples=7, sampling=WARM, seed=5)]))
        part = by_sample(
            engine.run([Request(prompt=(3, 1, 4), samples=2, first_sample=4, sampling=WARM, seed=5)])
        )
        other = by_sample(engine.run([Request(prompt=(3, 1, 4), samples=7, sampling=WARM, seed=6)]))
    assert {key: c.tokens for key, c in part.items()} == {(None, s): many[None, s].tokens for s in (4, 5)}
    assert not {c.tokens for c in other.values()} & {c.tokens for c in many.values()}


def test_a_stop_token_ends_its_own_sample(model):
    request = Request(prompt=(3, 1, 4), samples=5, sampling=WARM)
    with make(model) as engine:
        free = by_sample(engine.run([request]))
    stop = free[None, 2].tokens[4]
    with make(model, eos_ids=(stop,)) as engine:
        stopped = by_sample(engine.run([request]))
    for key, completion in stopped.items():
        whole = free[key].tokens
        expected = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert completion.tokens == expected
        assert completion.finish == ("stop" if stop in whole else "length")
        assert completion.text == Words().decode([t for t in expected if t != stop])
        assert len(completion.logprobs) == len(expected)
    assert stopped[None, 2].finish == "stop"


@pytest.mark.parametrize("place", [0, 3, 9, 25, 38], ids=str)
def test_a_stop_string_cuts_the_text_wherever_it_falls(model, place):
    long = Sampling(temperature=1.0, max_new_tokens=40)
    with make(model) as engine:
        free = by_sample(engine.run([Request(prompt=(3, 1, 4), samples=6, sampling=long)]))
        tokens = free[None, 3].tokens
        stop = Words().decode(list(tokens[place : place + 2])) + " "
        cutting = Sampling(temperature=1.0, max_new_tokens=40, stop_strings=(stop.rstrip(), "never"))
        for key, completion in by_sample(
            engine.run([Request(prompt=(3, 1, 4), samples=6, sampling=cutting)])
        ).items():
            whole = free[key].text
            cut = whole.find(stop.rstrip())
            assert completion.text == (whole if cut < 0 else whole[:cut])
            assert completion.finish == ("length" if cut < 0 else "stop")
            assert completion.tokens == free[key].tokens[: len(completion.tokens)]
            assert stop.rstrip() in Words().decode(list(completion.tokens)) or cut < 0
            assert cut < 0 or stop.rstrip() not in Words().decode(list(completion.tokens[:-1])), (
                "no token more than it took"
            )
        again = by_sample(engine.run([Request(prompt=(3, 1, 4), samples=6, sampling=long)]))
    assert {k: c.tokens for k, c in again.items()} == {k: c.tokens for k, c in free.items()}, (
        "the slots were left in order"
    )


def test_slots_are_refilled_at_once(model):
    lengths = np.random.default_rng(0).integers(4, 41, 60)
    requests = [
        Request(prompt=(1, 2), sampling=Sampling(temperature=1.0, max_new_tokens=int(n)), seed=i)
        for i, n in enumerate(lengths)
    ]
    with make(model, slots=6) as engine:
        assert sum(len(c.tokens) for c in engine.run(requests)) == lengths.sum() == engine.stats.new_tokens
        assert engine.stats.occupancy > 0.75
        assert engine.stats.decode_steps < lengths.sum() / 6 * 1.35


def test_looks_are_half_as_frequent_once_every_request_has_its_slots(model, monkeypatch):
    sampling = Sampling(temperature=1.0, max_new_tokens=1 + 5 * STEPS)
    rounds = []
    with make(model, slots=4, max_new_tokens=sampling.max_new_tokens) as engine:
        launch = engine.decoder.launch
        monkeypatch.setattr(
            engine.decoder, "launch", lambda at, **how: rounds.append(how["steps"]) or launch(at, **how)
        )
        assert len(list(engine.run(Request(prompt=p, sampling=sampling) for p in PROMPTS[:4]))) == 4
    assert rounds == [STEPS, 2 * STEPS, 2 * STEPS], "the first could not know that no request follows"


def test_a_step_while_the_host_looks_changes_no_text(model):
    """Samples that end by their length, by a token, by a string, in that step and in others, with refilled slots."""
    requests = [
        Request(
            prompt=p,
            samples=4,
            tag=i,
            sampling=Sampling(
                temperature=1.0,
                max_new_tokens=1 + (7 * i + STEPS) % 40,
                stop_strings=(" 7", " 2 1") if i % 2 else (),
            ),
        )
        for i, p in enumerate(PROMPTS)
    ]
    found, steps = [], []
    for goes_on in (False, True):
        with make(model, slots=12, eos_ids=(5,), reproducible=True) as engine:
            engine.decoder.goes_on = goes_on
            found.append(by_sample(engine.run(requests)))
            steps.append(engine.stats.decode_steps)
    assert found[0] == found[1], "to the last bit of the log-probabilities"
    assert {c.finish for c in found[0].values()} == {"stop", "length"}
    assert steps[0] != steps[1], "steps were added"


def test_requests_are_asked_for_only_when_there_is_room(model):
    taken, done = [], 0

    def feed() -> Iterator[Request | None]:
        for i in range(12):
            taken.append(i)
            if i == 6 and done < 4:
                taken.pop()
                yield None  # nothing yet: it waits for what is under way
            yield Request(
                prompt=(1, 2),
                samples=2,
                sampling=Sampling(temperature=1.0, max_new_tokens=STEPS + 3),
                seed=i,
                tag=i,
            )

    with make(model, slots=4) as engine:
        for completion in engine.run(feed()):
            done += 1
            assert len(taken) <= done // 2 + 4 + 1, "a generator can decide by what it has seen"
            assert completion.request.tag in taken
    assert done == 24


def test_a_stream_that_is_dropped_leaves_the_engine_usable(model):
    requests = [Request(prompt=p, samples=3, sampling=WARM, tag=i) for i, p in enumerate(PROMPTS)]
    with make(model, slots=4) as engine:
        whole = by_sample(engine.run(requests))
        for count in (1, 2, 5):
            stream = engine.run(requests)
            for _ in range(count):
                next(stream)
            stream.close()
        again = by_sample(engine.run(requests))
    assert {k: c.tokens for k, c in again.items()} == {k: c.tokens for k, c in whole.items()}


class Bytes(Words):
    """A tokenizer whose tokens are bytes, most of them of characters of several bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes([*b"ab", *"€日ü".encode(), *range(128, 255)][i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("words", [Words(), Bytes()], ids=["words", "bytes"])
def test_a_stream_says_the_text_in_pieces_and_no_half_characters(model, words):
    request = Request(prompt=PROMPTS[3], sampling=Sampling(temperature=1.0, max_new_tokens=40), seed=5)
    with make(model) as engine:
        engine.tokenizer = words
        (whole,) = engine.run([request])
        engine.eos_ids = (whole.tokens[-7],)
        (stopped,) = engine.run([request])
        for expected in (stopped, whole):
            pieces: list[str] = []
            assert engine.stream(request, pieces.append) == expected
            assert "".join(pieces) == expected.text
            assert len([piece for piece in pieces if piece]) > 1
            engine.eos_ids = ()
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


def test_generation_ends_where_the_context_does(model):
    with make(model, max_prompt_tokens=60) as engine:
        (completion,) = engine.run([Request(prompt=(1,) * 35, sampling=Sampling(max_new_tokens=40))])
        assert len(completion.tokens) == 60 - 35
        (completion,) = engine.run([Request(prompt=(1,) * 59, sampling=Sampling(max_new_tokens=40))])
        assert len(completion.tokens) == 1
        assert by_sample(engine.run([])) == {}


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ((), 4, "at least one token"),
        ((1, 10**6), 4, "below the vocabulary of 37, got 1 to 1000000"),
        ((1, 2**70), 4, f"below the vocabulary of 37, got 1 to {2**70}"),
        ((1,) * 60, 4, "has 60 tokens, and the model's context holds 60"),
        ((1,) * 41, 4, "has 41 tokens, but the engine was made for 40"),
        ((1,), 41, "wants 41 new tokens, but the engine was made for 40"),
    ],
)
def test_requests_that_do_not_fit_are_refused(model, prompt, new_tokens, message):
    """Also among others, of which the message says nothing; the engine goes on."""
    request_ = Request(prompt=prompt, sampling=Sampling(max_new_tokens=new_tokens))
    others = [Request(prompt=(i, 36), sampling=WARM) for i in (0, 2)]
    with make(model) as engine:
        for requests in ([request_], [others[0], request_, others[1]]):
            with pytest.raises(ConfigError, match=message):
                list(engine.run(requests))
        assert len(list(engine.run(others * 5))) == 10


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": t} for t in (-1.0, math.nan, math.inf, 1e-300)]
    + [{"top_p": p} for p in (0.0, 1.1, math.nan)]
    + [{name: n} for name in ("top_k", "max_new_tokens") for n in (0, -3)],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"^{name} must be .*, got {re.escape(str(value))}"):
        Sampling(**wrong)


def test_more_end_tokens_than_a_slot_holds_are_refused(model):
    with pytest.raises(ConfigError, match="at most 8 tokens that end a text"):
        make(model, eos_ids=range(STOP_IDS + 1))


@pytest.mark.parametrize(
    ("how", "plain"),
    [
        ({"temperature": 1e-5}, GREEDY),
        ({"top_k": 1}, GREEDY),
        ({"top_p": 1e-9}, GREEDY),
        ({"top_k": 1000}, WARM),
    ],
    ids=str,
)
def test_the_coldest_sampling_is_greedy_and_a_top_k_beyond_the_vocabulary_changes_nothing(model, how, plain):
    with make(model) as engine:
        found = [
            next(engine.run([Request(prompt=(3, 1, 4), sampling=sampling)])).tokens
            for sampling in (plain, replace(WARM, **how))
        ]
    assert found[0] == found[1]


def test_weights_that_training_changed_are_taken_up(model):
    changing, request = build_model(CONFIG, device="cpu", seed=0), Request(prompt=(3,), sampling=GREEDY)
    with make(changing) as engine:
        assert not engine.decoder.forward.copies(), "the trainer's own weights, not a copy"
        (before,) = engine.run([request])
        with torch.no_grad():
            for parameter in changing.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        engine.refresh()
        (after,) = engine.run([request])
    assert_greedy(changing, (3,), after)
    assert after.tokens != before.tokens


def test_half_precision_copies_what_it_must(model):
    half = build_model(CONFIG, device="cpu", seed=0)
    half.compute_dtype = torch.bfloat16
    with make(half) as engine:
        expected = sum(p.numel() for name, p in half.named_parameters() if name != "embed.weight") * 2
        assert sum(own.nbytes for _, own in engine.decoder.forward.copies()) == expected
        assert len(list(engine.run([Request(prompt=(3,), sampling=WARM)]))) == 1


def test_the_number_of_slots_follows_the_memory(model, monkeypatch):
    room = {"max_prompt_tokens": 20, "max_new_tokens": 20}
    # keys and values of 40 tokens in 2 layers of 2 heads of width 6, and two rows of 37 logits, all in fp32
    each = 4 * (40 * 2 * 2 * 2 * 6 + 2 * 37)
    for free_bytes, slots in ((each * 10, 8), (each * 10**6, 64)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free_bytes: SimpleNamespace(available=free))
        assert fitting_slots(model, **room) == slots
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=each))
    with pytest.raises(MachineError, match="shorten it"):
        fitting_slots(model, **room)
