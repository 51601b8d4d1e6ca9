"""Validation loss, perplexity and bits per byte of a run, a checkpoint, a Hugging Face folder or a GGUF file.

redline evaluate runs/nano                     on the run's own validation split
redline evaluate hf-folder --data corpus.txt   on any text, JSONL, Parquet or data folder
"""

import argparse

HELP = "validation loss, perplexity and bits per byte"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.generate import add_model
    from redline.cli.options import add_json

    add_model(command)
    command.add_argument(
        "--data", metavar="SOURCE", help="text files or a data folder (default: the run's validation split)"
    )
    command.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help="tokens in a sequence (default: the run's, else the model's context)",
    )
    command.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="sequences to read (default: as the run validates, else 256)",
    )
    command.add_argument(
        "--text-field", default="text", help="field of a JSONL or Parquet row (default text)"
    )
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from redline.cli.generate import check_model
    from redline.cli.options import check_least, print_json
    from redline.data.read import find_source

    check_model(options)
    check_least("--seq-len", options.seq_len)
    check_least("--sequences", options.sequences)
    if options.data is not None:
        find_source(options.data)
    from redline.evaluate import evaluate_opened
    from redline.train.restore import open_on

    opened, model = open_on(options.model, options.checkpoint, options.device)
    found = evaluate_opened(
        opened,
        model,
        source=options.data,
        text_field=options.text_field,
        seq_len=options.seq_len,
        sequences=options.sequences,
    )
    result = {"model": str(opened.source), "tokens": found.tokens, **found.metrics()}
    if options.json:
        print_json(result)
        return
    print(f"{opened.source}: {found.tokens:,} tokens")
    print(
        f"loss {found.loss:.4f} nats/token   perplexity {result['valid_perplexity']:.3f}   "
        f"{result['valid_bits_per_byte']:.4f} bits/byte ({found.bytes_per_token:.2f} bytes/token)"
    )
