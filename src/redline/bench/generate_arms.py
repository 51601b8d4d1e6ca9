"""The arms of `redline bench generate`, each a function that yields rows in a separate process.

`transformers`   its `generate` with growing batches, then its continuous batching; the same weights, bf16 on a GPU.
`redline`        our engine with more and more sequences, with shared and with distinct prompts; mixed lengths; and its
                 greedy texts beside those of `transformers`.

No sequence ends before its length, so every arm does the same work. A row is timed after a warm-up of the same work.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from redline.bench.generate import HEADLINE, TEMPERATURE, WORKS, GenerationWork, mixed_lengths
from redline.bench.results import BenchRow
from redline.bench.theirs import batching_options, model_of, prompts_of
from redline.config.recipe import ModelConfig
from redline.engine.local import LocalEngine
from redline.engine.request import Completion, Request, Sampling
from redline.errors import need
from redline.measure.child import device, empty, half, peak_bytes, timed
from redline.measure.generation import words_tokenizer
from redline.model.transformer import Transformer, build_model

WARM_TOKENS = 4
"""New tokens of a batch's warm-up with `transformers`: it compiles nothing, so a short one loads all kernels."""


def _timed(work: Callable[[], Any], times: int, patience_s: float = float("inf")) -> list[float]:
    """Seconds of each run: as many as asked, or until another would exceed the patience."""
    seconds = [timed(1, work)]
    while len(seconds) < times and sum(seconds) + seconds[-1] <= patience_s:
        seconds.append(timed(1, work))
    return seconds


# ---- transformers ----


def transformers(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    theirs = _theirs(work.model, build_model(work.model, device=device(), seed=0))
    fastest = 0.0
    for number, (prompts, samples) in enumerate(work.batches):
        row = _generate(theirs, work, prompts, samples)
        yield row
        speed = row["tokens"] / min(row["seconds"]) if "seconds" in row else 0.0
        if number >= HEADLINE and speed < fastest:
            break
        fastest = max(fastest, speed)
    empty()
    yield _continuous(theirs, work)


def _theirs(config: ModelConfig, model: Transformer) -> Any:
    """Its model with our weights, in the compute dtype."""
    return model_of(config, dict(model.named_parameters()), device=device(), dtype=half()).eval()


def _sampled(new_tokens: int, samples: int) -> Any:
    hf = need("transformers", extra="hf")
    return hf.GenerationConfig(
        max_new_tokens=new_tokens,
        num_return_sequences=samples,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )


def _generate(theirs: Any, work: GenerationWork, prompts: int, samples: int) -> BenchRow:
    """A batch; `failed` where it does not fit."""
    input_ids = torch.tensor(prompts_of(work, prompts), device=device())

    def run(new_tokens: int = work.new_tokens) -> None:
        found: Tensor = theirs.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=_sampled(new_tokens, samples),
        )
        assert found.shape == (prompts * samples, work.prompt_tokens + new_tokens), found.shape

    row = _row("generate", work, prompts, samples)
    empty()
    try:
        row["first_run_s"] = timed(1, lambda: run(WARM_TOKENS))
        row["seconds"] = _timed(run, work.repeats, work.patience_s)
    except torch.OutOfMemoryError as error:
        return row | {"failed": f"out of memory: {str(error).splitlines()[0][:150]}"}
    return row | {"memory_bytes": peak_bytes()}


def _row(name: str, work: GenerationWork, prompts: int, samples: int) -> BenchRow:
    sequences = prompts * samples
    facts = {"prompts": prompts, "samples": samples, "sequences": sequences}
    return {"row": name, **facts, "tokens": sequences * work.new_tokens}


def _continuous(theirs: Any, work: GenerationWork) -> BenchRow:
    """With its own choice of attention or, if that fails, with paged SDPA and no CUDA graphs, which the row notes."""
    hf = need("transformers", extra="hf")
    small = batching_options()
    row, failures = _row("continuous", work, *work.continuous), list[str]()
    for note, attention, options in (
        ("", "sdpa", small),
        ("paged SDPA, no CUDA graphs", "paged|sdpa", {**small, "use_cuda_graph": False}),
    ):
        empty()
        try:
            theirs.set_attn_implementation(attention)
            config = hf.ContinuousBatchingConfig(**options)
            row["seconds"], row["first_run_s"] = _continuous_run(theirs, work, config)
        except Exception as error:  # noqa: BLE001  (a peer's row: whatever it raises is its result)
            said = str(error).splitlines()[0][:150] if str(error) else ""
            failures.append(f"{type(error).__name__}: {said}")
            theirs.destroy_cached_continuous_batching_manager()
            continue
        why = f"{note}; its default failed: {failures[0]}" if failures else note
        return row | {"memory_bytes": peak_bytes(), "note": why}
    return row | {"failed": "; then ".join(failures)}


def _continuous_run(theirs: Any, work: GenerationWork, config: Any) -> tuple[list[float], float]:
    prompts, samples = work.continuous
    inputs = [ids for ids in prompts_of(work, prompts) for _ in range(samples)]

    def run(new_tokens: int) -> None:
        found = theirs.generate_batch(
            inputs=inputs,
            generation_config=_sampled(work.new_tokens, 1),
            continuous_batching_config=config,
            persistent_manager=True,  # else every call allocates its cache and captures its graphs again
            max_new_tokens=new_tokens,
        )
        lengths = {len(output.generated_tokens) for output in found.values()}
        # if it fails inside, it returns what it has
        if len(found) != len(inputs) or lengths != {new_tokens}:
            texts = f"{len(found)} of {len(inputs)} texts"
            raise RuntimeError(f"{texts}, of {lengths} instead of {new_tokens} tokens")

    # the first call sizes the manager: as many texts as the timed ones, whose tokens its blocks of 256 hold too
    first_run_s = timed(1, lambda: run(WARM_TOKENS))
    seconds = _timed(lambda: run(work.new_tokens), work.repeats, work.patience_s)
    theirs.destroy_cached_continuous_batching_manager()
    return seconds, first_run_s


# ---- our engine ----


def redline(setting: dict[str, str]) -> Iterator[BenchRow]:
    work = WORKS[setting["name"]]
    model = build_model(work.model, device=device(), seed=0).eval()
    model.compute_dtype = half()
    for sequences in work.sequences:
        with _engine(model, work, slots=sequences, max_new_tokens=work.new_tokens) as engine:
            for samples in (work.samples, 1) if sequences > 1 else (1,):
                yield _ours(engine, work, sequences, samples)
    yield _mixed(model, work)
    yield _greedy(model, work)


@contextlib.contextmanager
def _engine(
    model: Transformer, work: GenerationWork, *, slots: int, max_new_tokens: int
) -> Iterator[LocalEngine]:
    empty()
    tokenizer, longest = words_tokenizer(work.model.vocab_size), work.prompt_tokens
    with LocalEngine(
        model, tokenizer, slots=slots, max_prompt_tokens=longest, max_new_tokens=max_new_tokens
    ) as engine:
        yield engine


def _requests(work: GenerationWork, sequences: int, samples: int, sampling: Sampling) -> list[Request]:
    """As many prompts as needed; the last has fewer samples if they do not divide evenly."""
    prompts = prompts_of(work, -(-sequences // samples))
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


def _run(engine: LocalEngine, requests: Sequence[Request], times: int) -> dict[str, Any]:
    first_run_s = timed(1, lambda: _complete(engine, requests))
    seconds = _timed(lambda: _complete(engine, requests), times)
    return {"first_run_s": first_run_s, "seconds": seconds, "memory_bytes": peak_bytes()}


def _ours(engine: LocalEngine, work: GenerationWork, sequences: int, samples: int) -> BenchRow:
    sampling = Sampling(max_new_tokens=work.new_tokens, temperature=TEMPERATURE)
    requests = _requests(work, sequences, samples, sampling)
    facts = {"prompts": len(requests), "samples": samples, "sequences": sequences, "slots": sequences}
    tokens = sequences * work.new_tokens
    return {"row": "redline", **facts, "tokens": tokens, **_run(engine, requests, work.repeats)}


def _mixed(model: Transformer, work: GenerationWork) -> BenchRow:
    """Sequences of different lengths, several times as many as slots: how well slots are refilled."""
    lengths, slots = mixed_lengths(work), work.mixed_slots
    requests = [
        Request(prompt=tuple(ids), sampling=Sampling(max_new_tokens=length, temperature=TEMPERATURE))
        for ids, length in zip(prompts_of(work, len(lengths)), lengths, strict=True)
    ]
    with _engine(model, work, slots=slots, max_new_tokens=work.mixed_lengths[1]) as engine:
        found = _run(engine, requests, work.repeats)
        runs, stats = 1 + len(found["seconds"]), engine.stats  # all of them do the same
        steps, rows = stats.decode_steps // runs, stats.slot_steps // runs
    decoded, count = sum(lengths) - len(lengths), len(lengths)
    return {
        "row": "redline_mixed", "prompts": count, "samples": 1, "sequences": count, "slots": slots,
        "tokens": sum(lengths), **found, "decode_steps": steps, "occupancy": decoded / (slots * steps),
        "row_occupancy": decoded / rows,
    }  # fmt: skip


@torch.no_grad()
def _greedy(model: Transformer, work: GenerationWork) -> BenchRow:
    """The likeliest tokens of both, and log-probabilities of ours by `transformers`."""
    (count, new_tokens), at = work.greedy, device()
    with _engine(model, work, slots=count, max_new_tokens=new_tokens) as engine:
        sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0)
        ours = {c.request.prompt: c for c in _complete(engine, _requests(work, count, 1, sampling))}
    prompts = torch.tensor(prompts_of(work, count), device=at)
    theirs = _theirs(work.model, model)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    texts = theirs.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **settings)
    prefixes, differences = [], []
    for ids, text_T in zip(prompts, texts[:, work.prompt_tokens :], strict=True):
        mine = ours[tuple(ids.tolist())]
        mine_T = torch.tensor(mine.tokens, device=at)
        prefixes.append(int((mine_T == text_T).int().cumprod(0).sum()))
        logits_TV = theirs(torch.cat([ids, mine_T])[None]).logits[0, work.prompt_tokens - 1 : -1].float()
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, mine_T[:, None])[:, 0]
        differences.append((logprobs_T - torch.tensor(mine.logprobs, device=at)).abs())
    difference = torch.cat(differences)
    return {
        "row": "greedy", "prompts": count, "tokens": new_tokens, "dtype": str(half()).removeprefix("torch."),
        "equal": sum(length == new_tokens for length in prefixes),
        "prefix_share": sum(prefixes) / (count * new_tokens),
        "logprob_difference": float(difference.mean()), "logprob_difference_most": float(difference.max()),
    }  # fmt: skip
