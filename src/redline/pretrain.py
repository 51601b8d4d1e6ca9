"""The pre-training workload: a recipe and a plan become a run folder.

    with join(plan.hardware.kind) as process:
        outcome = pretrain(recipe, plan, Path("runs/nano"), process)

Run again with the same arguments it resumes where it stopped. The first process owns the folder; the others
follow it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from redline.config.recipe import PIECES, ModelConfig, Recipe, fingerprint_of
from redline.data.build import Progress, prepare, tokenizer_for
from redline.data.loader import Loader
from redline.data.remote import is_mirror
from redline.data.shards import Manifest, TokenDataset, check_vocab
from redline.data.stream import TokenStream
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.errors import ConfigError
from redline.evaluate import held_out_loss, text_of
from redline.model.transformer import Transformer
from redline.model.weights import load_weights
from redline.plan.arithmetic import attention_flops
from redline.plan.plan import Plan
from redline.record import startup
from redline.record.run import RunFolder
from redline.train.execution import build, check_device
from redline.train.instruments import limit_shares
from redline.train.loop import Outcome, Trainer
from redline.train.objective import Job, Position, Sequences
from redline.train.open_run import OpenRun, Watching, open_run
from redline.train.process import Process
from redline.train.restore import open_weights

HASHED_BYTES = 4 * 2**30
"""Shards up to this size are hashed when a run starts, in seconds; larger ones by `redline data info --verify`."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    train: TokenDataset | TokenStream
    valid: TokenDataset | None
    tokenizer: Tokenizer
    fingerprint: str
    """Changes with the tokens (a stream's: with its files' names or sizes); a run resumes only with the same."""
    unhashed_bytes: int = 0
    """Shards too large to be hashed at every start."""


def pretrain(
    recipe: Recipe,
    plan: Plan,
    run: Path,
    process: Process,
    *,
    observers: Watching = lambda resume_step: (),
    progress: Progress | None = None,
    fork: Path | None = None,
) -> Outcome:
    """Train in the run folder. The first process calls `observers(resume_step)` once the folder is open."""
    check_device(plan)
    with open_run(recipe, plan, run, process, observers=observers, fork=fork) as opened:
        corpus = open_corpus(recipe, run, process, progress)
        startup.mark("data")
        if opened.folder is not None and not opened.folder.tokenizer_path.exists():
            corpus.tokenizer.save(opened.folder.tokenizer_path)
        if corpus.unhashed_bytes:
            facts = {"size_bytes": corpus.unhashed_bytes, "to_check": "redline data info --verify"}
            opened.event("shards_not_hashed", **facts)
        return Trainer(job_of(recipe, plan, corpus, process, opened), process).run()


def job_of(recipe: Recipe, plan: Plan, corpus: Corpus, process: Process, opened: OpenRun) -> Job:
    train, seq_len = recipe.train, recipe.data.seq_len
    some = (train.softmax_candidates, recipe.model.vocab_size) if train.softmax_candidates else None

    def source(position: Position | None, done: int) -> Loader:
        return Loader(
            corpus.train,
            batch_size=train.batch_size,
            seq_len=seq_len,
            seed=train.seed,
            rank=process.rank,
            world_size=process.world_size,
            position=position,
            threads=plan.loader_threads,
            prefetch=plan.prefetch,
            pin_memory=process.device.type == "cuda",
            candidates=some,
            cut=train.length_ramp_steps - done,
        )

    def derived(line: dict[str, Any]) -> dict[str, Any]:
        """Pieces of sequences take fewer FLOPs per token."""
        if line["step"] > train.length_ramp_steps:
            return {}
        piece, whole = (attention_flops(recipe.model, length) for length in (seq_len // PIECES, seq_len))
        return limit_shares(line, 1 - (whole - piece) / plan.prediction.flops_per_token)

    return Job(
        recipe=recipe,
        plan=plan,
        steps=train.steps,
        model=build(recipe, plan, process),
        source=source,
        objective=Sequences(pass_size=plan.micro_batch, share=train.batch_size // process.world_size),
        data_fingerprint=corpus.fingerprint,
        opened=opened,
        validate=_validation(recipe, corpus, process),
        derived=derived,
        initial_weights=_initial_weights(recipe.model),
    )


def open_corpus(recipe: Recipe, run: Path, process: Process, progress: Progress | None) -> Corpus:
    """Build what is missing (the first process) and open it on every one; refuses what cannot train."""
    data, seq_len = recipe.data, recipe.data.seq_len
    if data.stream:
        corpus = _stream(recipe, run, process)
    else:
        corpus = _shards(recipe, process, progress)
    if data.valid_fraction == 0:
        return replace(corpus, valid=None)
    assert corpus.valid is not None
    corpus.valid.need_window(
        seq_len,
        or_else="hold out more when the data is built, or train without validation: data.valid_fraction=0",
    )
    return corpus


def _shards(recipe: Recipe, process: Process, progress: Progress | None) -> Corpus:
    data, vocab_size = recipe.data, recipe.model.vocab_size
    if process.is_first:
        folder = prepare(data, vocab_size, progress=progress)
    process.barrier()
    if not process.is_first:
        folder = prepare(data, vocab_size)
    remote = is_mirror(folder)  # its shards are hashed when they are fetched
    size_bytes = 0 if remote else sum(path.stat().st_size for path in folder.glob("*.bin"))
    hashed = size_bytes <= HASHED_BYTES
    verify = hashed and process.is_first and not remote
    train, valid = (TokenDataset.open(folder, split, verify=verify) for split in ("train", "valid"))
    train.need_window(data.seq_len)
    return Corpus(
        train=train,
        valid=valid,
        tokenizer=load_tokenizer(folder),
        fingerprint=Manifest.load(folder).fingerprint,
        unhashed_bytes=0 if hashed else size_bytes,
    )


def _stream(recipe: Recipe, run: Path, process: Process) -> Corpus:
    kept = RunFolder(run).tokenizer_path
    if process.is_first and not kept.exists():
        tokenizer_for(recipe.data, recipe.model.vocab_size).save(kept)
    process.barrier()
    tokenizer = load_tokenizer(kept)
    check_vocab(tokenizer.vocab_size, recipe.model.vocab_size)
    stream = TokenStream(recipe.data, tokenizer)
    valid = stream.head("valid", tokens=recipe.train.eval_sequences * recipe.data.seq_len + 1)
    sizes = [[path.name, path.stat().st_size] for path in stream.corpus.paths]
    fingerprint = fingerprint_of([tokenizer.fingerprint, sizes])
    return Corpus(train=stream, valid=valid, tokenizer=tokenizer, fingerprint=fingerprint)


def _validation(
    recipe: Recipe, corpus: Corpus, process: Process
) -> Callable[[Transformer, int], dict[str, float]] | None:
    if (valid := corpus.valid) is None:
        return None
    read = {"seq_len": recipe.data.seq_len, "sequences": recipe.train.eval_sequences}
    text = cache(lambda: text_of(valid, corpus.tokenizer, **read))  # every validation reads the same

    def validate(model: Transformer, micro_batch: int) -> dict[str, float]:
        found = held_out_loss(model, valid, **read, micro_batch=micro_batch, process=process, text=text())
        return found.metrics()

    return validate


FREE = ("init_from", "init_std", "zero_init", "context_length", "redraw_every")
"""What a model may have otherwise than the weights that it begins with."""


def _initial_weights(config: ModelConfig) -> Callable[[Transformer], None] | None:
    """Copies the weights that the recipe names into the model when a run begins; they must be of that model."""
    if config.init_from is None:
        return None
    path = Path(config.init_from)

    def copy(model: Transformer) -> None:
        opened = open_weights(path)
        for field in fields(ModelConfig):
            # given, or their default
            name = {"num_kv_heads": "kv_heads", "head_dim": "head_size"}.get(field.name, field.name)
            ours, theirs = getattr(config, name), getattr(opened.config, name)
            if ours != theirs and name not in FREE:
                raise ConfigError(
                    f"model.{field.name} is {ours} and the weights at {path} have {theirs}: correct the"
                    " recipe"
                )
        load_weights(model, opened.loaded.weights)

    return copy
