"""The arms of `redline bench generate`, each a function that yields rows in a separate process.

`transformers`   its `generate` with growing batches, then its continuous batching; the same weights, bf16 on a GPU.
`redline`        our engine with more and more sequences, with shared and with distinct prompts; and mixed lengths.

No sequence ends before its length, so every arm does the same work. A row is timed after a warm-up of the same work.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from redline.bench.generate import HEADLINE, TEMPERATURE, WORKS, GenerationWork, mixed_lengths
from redline.bench.results import BenchRow
from redline.bench.theirs import batching_options, model_of, prompts_of
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
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
    fastest, theirs = 0.0, model_of(
        work.model,  # nothing keeps our weights, which would count in the peaks
        dict(build_model(work.model, device=device(), seed=0).named_parameters()),
        device=device(), dtype=half(),
    ).eval()  # fmt: skip
    for number, (prompts, samples) in enumerate(work.batches):
        row = _generate(theirs, work, prompts, samples)
        yield row
        speed = row["tokens"] / min(row["seconds"]) if "seconds" in row else 0.0
        if number >= HEADLINE and speed < fastest:
            break
        fastest = max(fastest, speed)
    yield _continuous(theirs, work)


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
    input_ids = torch.tensor(prompts_of(work, prompts), device=device())

    def run(new_tokens: int) -> None:
        found: Tensor = theirs.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=_sampled(new_tokens, samples),
        )
        assert found.shape == (prompts * samples, work.prompt_tokens + new_tokens), found.shape

    return _measured(_row("generate", work, prompts, samples, prompts * samples), work, run)


def _measured(row: BenchRow, work: GenerationWork, run: Callable[[int], None]) -> BenchRow:
    """The row with what a run of so many new tokens took, or `failed`."""
    empty()
    try:
        row["first_run_s"] = timed(1, lambda: run(WARM_TOKENS))
        row["seconds"] = _timed(lambda: run(work.new_tokens), work.repeats, work.patience_s)
    except Exception as error:  # noqa: BLE001  (a peer's row: whatever it raises is its result)
        said = str(error).splitlines()[0][:150] if str(error) else ""
        return row | {"failed": f"{type(error).__name__}: {said}"}
    return row | {"memory_bytes": peak_bytes()}


def _row(name: str, work: GenerationWork, prompts: int, samples: int, sequences: int) -> BenchRow:
    facts = {"prompts": prompts, "samples": samples, "sequences": sequences}
    return {"row": name, **facts, "tokens": sequences * work.new_tokens}


def _continuous(theirs: Any, work: GenerationWork) -> BenchRow:
    prompts, samples = work.continuous
    inputs = [ids for ids in prompts_of(work, prompts) for _ in range(samples)]
    config = need("transformers", extra="hf").ContinuousBatchingConfig(**batching_options())

    def run(new_tokens: int) -> None:
        found = theirs.generate_batch(
            inputs=inputs,
            generation_config=_sampled(work.new_tokens, 1),
            continuous_batching_config=config,
            persistent_manager=True,  # otherwise every call allocates its cache and captures its graphs again
            max_new_tokens=new_tokens,
        )
        lengths = {len(output.generated_tokens) for output in found.values()}
        # if it fails inside, it returns what it has
        if len(found) != len(inputs) or lengths != {new_tokens}:
            texts = f"{len(found)} of {len(inputs)} texts"
            raise RuntimeError(f"{texts}, of {lengths} instead of {new_tokens} tokens")

    # the first call sizes the manager: as many texts as the timed ones, whose tokens its blocks of 256 hold too
    row = _measured(_row("continuous", work, prompts, samples, len(inputs)), work, run)
    theirs.destroy_cached_continuous_batching_manager()
    return row


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


def _engine(model: Transformer, work: GenerationWork, *, slots: int, max_new_tokens: int) -> LocalEngine:
    empty()
    tokenizer, longest = words_tokenizer(work.model.vocab_size), work.prompt_tokens
    return LocalEngine(
        model, tokenizer, slots=slots, max_prompt_tokens=longest, max_new_tokens=max_new_tokens
    )


def _requests(work: GenerationWork, sequences: int, samples: int) -> list[Request]:
    """As many prompts as needed; the last has fewer samples if they do not divide evenly."""
    sampling = Sampling(max_new_tokens=work.new_tokens, temperature=TEMPERATURE)
    prompts = prompts_of(work, -(-sequences // samples))
    counts = [min(samples, sequences - number * samples) for number in range(len(prompts))]
    return [
        Request(prompt=tuple(ids), sampling=sampling, samples=count, seed=0)
        for ids, count in zip(prompts, counts, strict=True)
    ]


def _complete(engine: LocalEngine, requests: Sequence[Request]) -> None:
    found = list(engine.run(requests))
    for completion in found:
        assert len(completion.tokens) == completion.request.sampling.max_new_tokens
    assert len(found) == sum(request.samples for request in requests)


def _run(engine: LocalEngine, requests: Sequence[Request], times: int) -> dict[str, Any]:
    first_run_s = timed(1, lambda: _complete(engine, requests))
    seconds = _timed(lambda: _complete(engine, requests), times)
    return {"first_run_s": first_run_s, "seconds": seconds, "memory_bytes": peak_bytes()}


def _ours(engine: LocalEngine, work: GenerationWork, sequences: int, samples: int) -> BenchRow:
    requests = _requests(work, sequences, samples)
    row = _row("redline", work, len(requests), samples, sequences)
    return row | {"slots": sequences, **_run(engine, requests, work.repeats)}


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
    return _row("redline_mixed", work, count, 1, count) | {
        "slots": slots, "tokens": sum(lengths), **found, "decode_steps": steps,
        "occupancy": decoded / (slots * steps), "row_occupancy": decoded / rows,
    }  # fmt: skip
