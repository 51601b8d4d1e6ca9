"""Build token shards from text, JSONL(.gz, .xz), Parquet or a folder of them; look at a folder that was
built; make the demo's corpus.

redline data build corpus.jsonl.gz --out data/corpus --tokenizer gpt2/tokenizer.json
redline data info data/corpus --verify
redline data demo-corpus demo-corpus.jsonl
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redline.data.shards import Manifest

HELP = "build token shards from text, or look at them"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    verbs = command.add_subparsers(dest="verb", metavar="VERB", required=True)
    build = verbs.add_parser(
        "build", help="tokenise a corpus into memory-mapped shards; run it again to resume after a kill"
    )
    build.add_argument(
        "source", nargs="+", help="a file, a folder, or `tinyshakespeare`; several make one corpus"
    )
    build.add_argument("--out", type=Path, required=True, help="the data folder to write")
    build.add_argument(
        "--tokenizer",
        default="bpe",
        help="a tokenizer.json or a folder with one; default: train a byte-level BPE on the source",
    )
    build.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary of the trained BPE (default 32768)"
    )
    build.add_argument(
        "--text-field",
        default="text",
        help="field of a JSONL or Parquet row that holds the text (default text)",
    )
    build.add_argument(
        "--valid-fraction", type=float, default=0.01, help="share of the documents held out (default 0.01)"
    )
    build.add_argument("--workers", type=int, help="threads (default: all cores)")
    add_json(build)
    info = verbs.add_parser("info", help="what a data folder holds")
    info.add_argument("folder", type=Path)
    info.add_argument(
        "--verify", action="store_true", help="read every shard and compare its hash and the tokenizer's"
    )
    add_json(info)
    demo = verbs.add_parser(
        "demo-corpus", help="write the text that the demo's base model learns from, for the recipe demo-base"
    )
    demo.add_argument("out", type=Path, metavar="OUT.jsonl")
    demo.add_argument(
        "--documents", type=int, default=500_000, metavar="N", help="how many (default 500000, some 70 MB)"
    )


def run(options: argparse.Namespace) -> None:
    if options.verb == "demo-corpus":
        _write_demo_corpus(options)
    else:
        _build_or_look(options)


def _write_demo_corpus(options: argparse.Namespace) -> None:
    from redline.cli.options import status
    from redline.record.units import format_bytes
    from redline.tasks.units_corpus import write_corpus

    def progress(done: int, total: int) -> None:
        if done % 100_000 == 0:
            status(f"{done:,} of {total:,} documents")

    write_corpus(options.out, options.documents, seed=0, progress=progress)
    print(f"{options.out}: {options.documents:,} documents, {format_bytes(options.out.stat().st_size)}")


def _build_or_look(options: argparse.Namespace) -> None:
    from redline.cli.options import byte_progress, status
    from redline.data.build import build
    from redline.data.shards import Manifest, TokenDataset, check_tokenizer
    from redline.errors import ConfigError

    if options.verb == "build":
        if options.tokenizer == "bpe":
            status("training a byte-level BPE on the source first, at most 64 MiB of it")
        if options.workers is not None and options.workers < 1:
            raise ConfigError(f"--workers must be at least 1, got {options.workers}")
        manifest = build(
            options.source,
            options.out,
            tokenizer=options.tokenizer,
            vocab_size=options.vocab_size or (32768 if options.tokenizer == "bpe" else None),
            text_field=options.text_field,
            valid_fraction=options.valid_fraction,
            workers=options.workers,
            progress=byte_progress("tokenising"),
        )
        folder = options.out
        if options.valid_fraction > 0 and not manifest.valid:
            status(
                "note: no document fell into the validation split; for one, build into a new folder with a"
                " larger --valid-fraction"
            )
    else:
        folder = options.folder
        manifest = Manifest.load(folder)
        for split in ("train", "valid"):
            TokenDataset.open(folder, split, verify=options.verify)
        if options.verify:
            check_tokenizer(folder, manifest)
    _print(folder, manifest, options.json, verified=options.verb == "info" and options.verify)


def _print(folder: Path, manifest: "Manifest", as_json: bool, *, verified: bool) -> None:
    from dataclasses import asdict

    from redline.cli.options import print_json
    from redline.record.units import format_bytes

    if as_json:
        print_json(asdict(manifest) | {"verified": verified})
        return
    print(
        f"{folder}: vocabulary {manifest.vocab_size:,} ({manifest.dtype}), tokenizer"
        f" {manifest.tokenizer[:12]}"
    )
    for split in ("train", "valid"):
        shards = manifest.shards(split)
        tokens, text = sum(s.tokens for s in shards), sum(s.bytes_of_text for s in shards)
        ratio = f"{text / tokens:.2f} bytes/token" if tokens else "empty"
        print(
            f"  {split:<5}  {tokens:>14,} tokens  {format_bytes(text):>9} of text  {ratio}  {len(shards)}"
            " shard(s)"
        )
    if manifest.skipped:
        print(f"  {manifest.skipped:,} row(s) without text were left out")
    if verified:
        print("  verified: every shard and the tokenizer are what was built")
