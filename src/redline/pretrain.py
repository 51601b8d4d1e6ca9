"""The pre-training workload: a recipe and a plan become a run folder.

    with join(plan.hardware.kind) as process:
        outcome = pretrain(recipe, plan, Path("runs/nano"), process)

Run again with the same arguments it goes on where it stopped. The first process owns the folder; the others
follow it.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from redline.config.load import from_toml, to_toml
from redline.config.recipe import ModelConfig, Recipe, differences
from redline.data.build import Progress, prepare, tokenizer_for
from redline.data.shards import Manifest, TokenDataset, check_vocab
from redline.data.stream import TokenStream
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.errors import ConfigError
from redline.evaluate import held_out_loss
from redline.model.transformer import Transformer
from redline.model.weights import load_weights
from redline.plan.plan import Plan, save
from redline.record.files import write_atomic
from redline.record.observe import Observer
from redline.record.run import RunFolder, failures_recorded
from redline.train.checkpoint_files import step_folders
from redline.train.execution import check_device
from redline.train.loop import Job, Outcome, Trainer
from redline.train.process import Process
from redline.train.restore import open_weights

HASHED_BYTES = 4 * 2**30
"""Shards up to this size are hashed whenever a run starts, a few seconds; of larger ones sizes and ids are
checked, and `redline data info --verify` hashes them."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a run trains and validates on."""

    train: TokenDataset | TokenStream
    valid: TokenDataset | None
    tokenizer: Tokenizer
    fingerprint: str
    """Changes when the tokens do (for a stream: when names or sizes of its files do); a run does not go on
    with others."""
    unhashed_bytes: int = 0
    """Shards too large to be hashed at every start."""


def pretrain(
    recipe: Recipe,
    plan: Plan,
    run: Path,
    process: Process,
    *,
    observers: Callable[[int], Sequence[Observer]] = lambda resume_step: (),
    progress: Progress | None = None,
) -> Outcome:
    """Train the recipe in the run folder. `observers(resume_step)` is called once on the first process, when
    the folder is open."""
    check_device(plan)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder(run)) if process.is_first else None
        if folder is not None:
            with failures_recorded(run, "refused"):  # the run that the folder holds has not failed
                _adopt(folder, recipe)
        stack.enter_context(failures_recorded(run))  # once the folder is ours
        corpus = open_corpus(recipe, run, process, progress)
        watching: Sequence[Observer] = ()
        if folder is not None:
            save(plan, folder.plan_path)
            if not folder.tokenizer_path.exists():
                corpus.tokenizer.save(folder.tokenizer_path)
            watching = observers(max(step_folders(folder.checkpoints_path), default=0))
            for observer in watching:
                stack.callback(observer.close)
            if corpus.unhashed_bytes:
                folder.event(
                    "shards_not_hashed",
                    size_bytes=corpus.unhashed_bytes,
                    to_check="redline data info --verify",
                )
                for observer in watching:
                    observer.event(
                        "shards_not_hashed",
                        {"size_bytes": corpus.unhashed_bytes, "to_check": "redline data info --verify"},
                    )
        job = Job(
            recipe=recipe,
            plan=plan,
            source=corpus.train,
            data_fingerprint=corpus.fingerprint,
            run=run,
            folder=folder,
            validate=_validation(recipe, corpus.valid, process),
            initial_weights=_initial_weights(recipe.model),
            observers=watching,
        )
        return Trainer(job, process).run()


def _adopt(folder: RunFolder, recipe: Recipe) -> None:
    """Make the folder this recipe's, unless it holds the beginnings of another run."""
    if any((folder.path / name).exists() for name in ("samples.db", "evaluations.jsonl")):
        raise ConfigError(
            f"{folder.path} holds an RFT run, whose recipe would be lost: give another folder with --run"
        )
    if folder.has_begun() and folder.recipe_path.exists():
        before = from_toml(folder.recipe_path.read_text(encoding="utf-8"), where=str(folder.recipe_path))
        if changed := differences(before, recipe):
            more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
            raise ConfigError(
                f"{folder.path} holds a run of another recipe: {', '.join(changed[:2])}{more}; give another"
                " folder with --run, or the recipe it was made with"
            )
    write_atomic(folder.recipe_path, to_toml(recipe))


def open_corpus(recipe: Recipe, run: Path, process: Process, progress: Progress | None) -> Corpus:
    """Build what must be built (once, by the first process), then open it on every process; refuses what
    cannot be trained on."""
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
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.bin"))
    hashed = size_bytes <= HASHED_BYTES
    train, valid = (
        TokenDataset.open(folder, split, verify=hashed and process.is_first) for split in ("train", "valid")
    )
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
    fingerprint = hashlib.sha256(json.dumps([tokenizer.fingerprint, sizes]).encode()).hexdigest()[:16]
    return Corpus(train=stream, valid=valid, tokenizer=tokenizer, fingerprint=fingerprint)


def _validation(
    recipe: Recipe, valid: TokenDataset | None, process: Process
) -> Callable[[Transformer, int], dict[str, float]] | None:
    if valid is None:
        return None

    def validate(model: Transformer, micro_batch: int) -> dict[str, float]:
        found = held_out_loss(
            model,
            valid,
            seq_len=recipe.data.seq_len,
            sequences=recipe.train.eval_sequences,
            micro_batch=micro_batch,
            process=process,
        )
        return found.metrics()

    return validate


def _initial_weights(config: ModelConfig) -> Callable[[Transformer], None] | None:
    """Copies the weights that the recipe names into the model, when a run begins; they must be of the
    recipe's very model."""
    if config.init_from is None:
        return None
    path = Path(config.init_from)

    def copy(model: Transformer) -> None:
        opened = open_weights(path)
        for field in fields(ModelConfig):
            # given, or their default
            name = {"num_kv_heads": "kv_heads", "head_dim": "head_size"}.get(field.name, field.name)
            ours, theirs = getattr(config, name), getattr(opened.config, name)
            if ours != theirs and name not in ("init_from", "init_std", "context_length"):
                raise ConfigError(
                    f"model.{field.name} is {ours} and the weights at {path} have {theirs}: correct the"
                    " recipe"
                )
        load_weights(model, opened.loaded.weights)

    return copy
