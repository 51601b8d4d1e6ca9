"""The arms of `redline bench generate`, each a process: `python -m redline.bench.generate_arms redline full`.
A line of JSON per row.

`transformers`   its `generate` with rising batches, then its continuous batching; the same weights, bf16 on a
                 GPU.
`redline`        our engine with rising numbers of sequences, with shared and with distinct prompts; the time
                 to the first token; mixed
                 lengths; and its greedy texts beside those of `transformers`.

No sequence ends before its length, so that every arm does the same work. A row is timed after a run of the
same work that warms it up.
"""

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from redline.bench.generate import HEADLINE, SETTINGS, TEMPERATURE, Setting, mixed_lengths
from redline.config.recipe import ModelConfig
from redline.data.tokenizer import END_OF_TEXT, Tokenizer
from redline.engine.local import LocalEngine
from redline.engine.request import Completion, Request, Sampling
from redline.errors import need
from redline.model.huggingface import config_json, to_huggingface
from redline.model.transformer import Transformer, build_model

WARM_TOKENS = 4
"""New tokens of the run that warms up a batch of `transformers`: it compiles nothing, so a short one loads
all kernels."""


def main(arm: str, name: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    {"transformers": _transformers, "redline": _redline}[arm](SETTINGS[name])


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype() -> torch.dtype:
    return torch.bfloat16 if _device().type == "cuda" else torch.float32


def _prompts(setting: Setting, count: int) -> list[list[int]]:
    """Random tokens; the first prompts are the same whatever the count."""
    random = np.random.default_rng(0)
    return [
        random.integers(0, setting.model.vocab_size, setting.prompt_tokens).tolist() for _ in range(count)
    ]


# ---- rows ----


def _emit(row: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"row": row, **facts}) + "\n")
    sys.stdout.flush()


def _seconds(work: Callable[[], Any]) -> float:
    _synchronize()
    started_s = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - started_s


def _repeat(work: Callable[[], Any], times: int, patience_s: float = float("inf")) -> list[float]:
    """Seconds of each run: as often as asked, or until another would pass the patience."""
    seconds = [_seconds(work)]
    while len(seconds) < times and sum(seconds) + seconds[-1] <= patience_s:
        seconds.append(_seconds(work))
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _empty() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory_bytes() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


# ---- transformers ----


def _theirs(config: ModelConfig, model: Transformer) -> Any:
    """Its model with our weights, in the compute dtype."""
    transformers = need("transformers", extra="hf")
    about = {key: value for key, value in config_json(config).items() if key != "architectures"}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with torch.device(_device()):  # or it would draw all its weights on the CPU, for seconds
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**about, **ids), attn_implementation="sdpa", dtype=_dtype()
        )
    missing, unexpected = theirs.load_state_dict(
        to_huggingface(config, dict(model.named_parameters())), strict=False
    )
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    return theirs.eval()


def _transformers(setting: Setting) -> None:
    model = build_model(setting.model, device=_device(), seed=0)
    theirs = _theirs(setting.model, model)
    del model
    fastest = 0.0
    for number, (prompts, samples) in enumerate(setting.batches):
        speed = _generate(theirs, setting, prompts, samples)
        if number >= HEADLINE and speed < fastest:
            break
        fastest = max(fastest, speed)
    _empty()
    _continuous(theirs, setting)


def _sampled(new_tokens: int, samples: int) -> Any:
    transformers = need("transformers", extra="hf")
    return transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        num_return_sequences=samples,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )


def _generate(theirs: Any, setting: Setting, prompts: int, samples: int) -> float:
    """Measure a batch; tokens/s, or 0 where it does not fit."""
    input_ids = torch.tensor(_prompts(setting, prompts), device=_device())

    def work(new_tokens: int = setting.new_tokens) -> Tensor:
        found: Tensor = theirs.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=_sampled(new_tokens, samples),
        )
        assert found.shape == (prompts * samples, setting.prompt_tokens + new_tokens), found.shape
        return found

    facts = {"prompts": prompts, "samples": samples, "sequences": prompts * samples}
    _empty()
    try:
        first_run_s = _seconds(lambda: work(WARM_TOKENS))
        seconds = _repeat(work, setting.repeats, setting.patience_s)
    except torch.OutOfMemoryError as error:
        _emit("generate", **facts, failed=f"out of memory: {str(error).splitlines()[0][:150]}")
        return 0.0
    tokens = prompts * samples * setting.new_tokens
    _emit(
        "generate",
        **facts,
        tokens=tokens,
        seconds=seconds,
        first_run_s=first_run_s,
        memory_bytes=_memory_bytes(),
    )
    return tokens / min(seconds)


def _continuous(theirs: Any, setting: Setting) -> None:
    """With its own choice of attention, and where that fails with paged SDPA and no CUDA graphs, which is
    said in the row."""
    transformers = need("transformers", extra="hf")
    # On a CPU its defaults take most of the memory for the cache.
    small = {} if _device().type == "cuda" else {"num_blocks": 64, "max_batch_tokens": 64}
    prompts, samples = setting.continuous
    facts = {"prompts": prompts, "samples": samples, "sequences": prompts * samples}
    failures = []
    for note, attention, options in (
        ("", "sdpa", small),
        ("paged SDPA, no CUDA graphs", "paged|sdpa", {**small, "use_cuda_graph": False}),
    ):
        _empty()
        try:
            theirs.set_attn_implementation(attention)
            config = transformers.ContinuousBatchingConfig(**options)
            seconds, first_run_s = _continuous_run(theirs, setting, config)
        except Exception as error:  # noqa: BLE001  (a peer's row: whatever it raises is its result)
            failures.append(
                f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
            )
            theirs.destroy_cached_continuous_batching_manager()
            continue
        why = f"{note}; its default failed: {failures[0]}" if failures else note
        tokens = prompts * samples * setting.new_tokens
        _emit(
            "continuous",
            **facts,
            tokens=tokens,
            seconds=seconds,
            first_run_s=first_run_s,
            memory_bytes=_memory_bytes(),
            note=why,
        )
        return
    _emit("continuous", **facts, failed="; then ".join(failures))


def _continuous_run(theirs: Any, setting: Setting, config: Any) -> tuple[list[float], float]:
    prompts, samples = setting.continuous
    inputs = [ids for ids in _prompts(setting, prompts) for _ in range(samples)]

    def work(new_tokens: int) -> None:
        found = theirs.generate_batch(
            inputs=inputs,
            generation_config=_sampled(setting.new_tokens, 1),
            continuous_batching_config=config,
            persistent_manager=True,  # else every call allocates its cache and captures its graphs anew
            max_new_tokens=new_tokens,
        )
        lengths = {len(output.generated_tokens) for output in found.values()}
        # it returns what it has when it fails inside
        if len(found) != len(inputs) or lengths != {new_tokens}:
            raise RuntimeError(
                f"{len(found)} of {len(inputs)} texts, of {lengths} instead of {new_tokens} tokens"
            )

    # The manager is sized for the first call: as many texts as the timed ones, and blocks of 256 tokens hold
    # theirs too.
    first_run_s = _seconds(lambda: work(WARM_TOKENS))
    seconds = _repeat(lambda: work(setting.new_tokens), setting.repeats, setting.patience_s)
    theirs.destroy_cached_continuous_batching_manager()
    return seconds, first_run_s


# ---- our engine ----


def _redline(setting: Setting) -> None:
    model = build_model(setting.model, device=_device(), seed=0).eval()
    model.compute_dtype = _dtype()
    tokenizer = _tokenizer(setting.model.vocab_size)
    for sequences in setting.sequences:
        with _engine(model, tokenizer, setting, slots=sequences, max_new_tokens=setting.new_tokens) as engine:
            for samples in (setting.samples, 1) if sequences > 1 else (1,):
                _ours(engine, setting, sequences, samples)
            if sequences in setting.first_token:
                _first_token(engine, setting, sequences)
    _mixed(model, tokenizer, setting)
    _greedy(model, tokenizer, setting)


@contextlib.contextmanager
def _engine(
    model: Transformer, tokenizer: Tokenizer, setting: Setting, *, slots: int, max_new_tokens: int
) -> Any:
    _empty()
    with LocalEngine(
        model, tokenizer, slots=slots, max_prompt_tokens=setting.prompt_tokens, max_new_tokens=max_new_tokens
    ) as engine:
        yield engine


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Every id has a text of a few letters, so that turning tokens into text costs what it costs with a real
    vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = (
        f"{letters[i // 17576 % 26]}{letters[i // 676 % 26]}{letters[i // 26 % 26]}{letters[i % 26]}"
        for i in range(vocab_size)
    )
    vocab = {token: id_ for id_, token in enumerate([END_OF_TEXT, *alphabet, *words][:vocab_size])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, []))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner.to_str(), "the benchmark's tokenizer")


def _requests(setting: Setting, sequences: int, samples: int, sampling: Sampling) -> list[Request]:
    """As many prompts as it takes; the last has fewer samples where they do not divide."""
    prompts = _prompts(setting, -(-sequences // samples))
    counts = [min(samples, sequences - number * samples) for number in range(len(prompts))]
    return [
        Request(prompt=tuple(ids), sampling=sampling, samples=count, seed=0)
        for ids, count in zip(prompts, counts, strict=True)
    ]


def _complete(engine: LocalEngine, requests: Sequence[Request]) -> list[Completion]:
    found = list(engine.run(requests))
    for completion in found:
        assert len(completion.tokens) == completion.request.sampling.max_new_tokens
    assert len(found) == sum(request.samples for request in requests)
    return found


def _ours(engine: LocalEngine, setting: Setting, sequences: int, samples: int) -> None:
    requests = _requests(
        setting, sequences, samples, Sampling(max_new_tokens=setting.new_tokens, temperature=TEMPERATURE)
    )
    first_run_s = _seconds(lambda: _complete(engine, requests))
    seconds = _repeat(lambda: _complete(engine, requests), setting.repeats)
    facts = {"prompts": len(requests), "samples": samples, "sequences": sequences, "slots": sequences}
    tokens = sequences * setting.new_tokens
    _emit(
        "redline",
        **facts,
        tokens=tokens,
        seconds=seconds,
        first_run_s=first_run_s,
        memory_bytes=_memory_bytes(),
    )


def _first_token(engine: LocalEngine, setting: Setting, sequences: int) -> None:
    """From asking to having the first token of every sequence: a request for one token."""
    requests = _requests(setting, sequences, 1, Sampling(max_new_tokens=1, temperature=TEMPERATURE))
    _complete(engine, requests)
    _emit(
        "first_token",
        sequences=sequences,
        first_token_s=_repeat(lambda: _complete(engine, requests), 3 * setting.repeats),
    )


def _mixed(model: Transformer, tokenizer: Tokenizer, setting: Setting) -> None:
    """Each sequence with a length of its own, several times more of them than slots: how well slots are
    refilled."""
    lengths, prompts = mixed_lengths(setting), _prompts(setting, len(mixed_lengths(setting)))
    requests = [
        Request(prompt=tuple(ids), sampling=Sampling(max_new_tokens=length, temperature=TEMPERATURE))
        for ids, length in zip(prompts, lengths, strict=True)
    ]
    with _engine(
        model, tokenizer, setting, slots=setting.mixed_slots, max_new_tokens=setting.mixed_lengths[1]
    ) as engine:
        first_run_s = _seconds(lambda: _complete(engine, requests))
        steps, rows = engine.stats.decode_steps, engine.stats.slot_steps
        seconds = _repeat(lambda: _complete(engine, requests), setting.repeats)
        runs, decoded = len(seconds), sum(lengths) - len(lengths)
        steps, rows = (engine.stats.decode_steps - steps) // runs, (engine.stats.slot_steps - rows) // runs
        _emit(
            "redline_mixed", prompts=len(lengths), samples=1, sequences=len(lengths),
            slots=setting.mixed_slots, tokens=sum(lengths),
            seconds=seconds, first_run_s=first_run_s, memory_bytes=_memory_bytes(), decode_steps=steps,
            occupancy=decoded / (setting.mixed_slots * steps), row_occupancy=decoded / rows,
        )  # fmt: skip


@torch.no_grad()
def _greedy(model: Transformer, tokenizer: Tokenizer, setting: Setting) -> None:
    """The likeliest tokens by both, and by `transformers` the log-probabilities of ours."""
    count, new_tokens = setting.greedy
    with _engine(model, tokenizer, setting, slots=count, max_new_tokens=new_tokens) as engine:
        found = _complete(
            engine, _requests(setting, count, 1, Sampling(max_new_tokens=new_tokens, temperature=0.0))
        )
    ours = {completion.request.prompt: completion for completion in found}
    prompts = _prompts(setting, count)
    theirs = _theirs(setting.model, model)
    input_ids = torch.tensor(prompts, device=_device())
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    texts = theirs.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **settings)[
        :, setting.prompt_tokens :
    ].tolist()
    prefixes, differences = [], []
    for ids, text in zip(prompts, texts, strict=True):
        mine = ours[tuple(ids)]
        prefixes.append(
            next(
                (
                    place
                    for place, pair in enumerate(zip(mine.tokens, text, strict=True))
                    if pair[0] != pair[1]
                ),
                new_tokens,
            )
        )
        logits_TV = (
            theirs(torch.tensor([[*ids, *mine.tokens]], device=_device()))
            .logits[0, setting.prompt_tokens - 1 : -1]
            .float()
        )
        chosen_T1 = torch.tensor(mine.tokens, device=_device())[:, None]
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, chosen_T1)[:, 0]
        differences.append((logprobs_T - torch.tensor(mine.logprobs, device=_device())).abs())
    difference = torch.cat(differences)
    _emit(
        "greedy", prompts=count, tokens=new_tokens, dtype=str(_dtype()).removeprefix("torch."),
        equal=sum(length == new_tokens for length in prefixes),
        prefix_share=sum(prefixes) / (count * new_tokens),
        logprob_difference=float(difference.mean()), logprob_difference_most=float(difference.max()),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
