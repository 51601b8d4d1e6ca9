"""Validation loss, perplexity and bits per byte of a run, a checkpoint, a Hugging Face folder or a GGUF file.

redline evaluate runs/nano                     on the run's own validation split
redline evaluate hf-folder --data corpus.txt   on any text, JSONL, Parquet or data folder
"""

import argparse

from redline.cli.options import answer, find_model
from redline.data.read import find_source
from redline.errors import ConfigError
from redline.record.words import told_validation
from redline.train.places import step_folders

ARGUMENTS = """
@MODEL
@DEVICE
--data SOURCE        text files or a data folder (default: the run's validation split)
--seq-len N          tokens in a sequence (default: the run's, else the model's context)
--sequences N        sequences to read (default: as many as the run validates on, else 256)
--text-field FIELD   field of a JSONL or Parquet row (default text)
@JSON
"""


def run(options: argparse.Namespace) -> None:
    model = find_model(options)
    if options.data is not None:
        find_source(options.data)
    elif model not in step_folders(model.parent).values():
        raise ConfigError(f"{model} has no validation split of its own: give --data SOURCE")
    from redline.evaluate import evaluate_opened
    from redline.train.restore import open_on

    opened, built = open_on(model, options.checkpoint, options.device)
    how = {name: getattr(options, name) for name in ("text_field", "seq_len", "sequences")}
    found = evaluate_opened(opened, built, source=options.data, **how)
    result = {"model": str(opened.source), "tokens": found.tokens, **found.metrics()}
    told = ", ".join(told_validation(found.metrics()))
    losses = f"loss {found.loss:.4f} nats/token, {told} ({found.bytes_per_token:.2f} bytes/token)"
    answer(options, result, lambda: print(f"{opened.source}: {found.tokens:,} tokens\n{losses}"))
