"""Build token shards from text, JSONL(.gz, .xz), Parquet or a folder of them; inspect a folder that was
built.

redline data build corpus.jsonl.gz --out data/corpus --tokenizer gpt2/tokenizer.json
redline data build wikitext-2 --out data/wikitext            from the Hugging Face Hub, with its own validation split
redline data info data/corpus --verify
redline data build corpus.jsonl.gz --out s3://bucket/corpus  built here and uploaded; gs:// too
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from redline.cli.arguments import JSON
from redline.cli.options import byte_progress, check_least, print_json, status
from redline.data.build import build
from redline.data.remote import folder_at
from redline.data.shards import Manifest, TokenDataset, check_tokenizer
from redline.record.units import format_bytes

ARGUMENTS = {
    "build": f"""tokenise a corpus into memory-mapped shards; after a kill, run it again and it resumes
SOURCE...                a file, a folder, tinyshakespeare, wikitext-2, wikipedia or hf://datasets/org/name; several make one corpus
--out PLACE              the data folder to write, on disk or as s3://bucket/corpus (required)
--tokenizer TOKENIZER    a tokenizer.json or a folder with one (default bpe: a byte-level BPE trained on the source)
--vocab-size N           vocabulary of the trained BPE (default: 32768)
--text-field FIELD       field of a JSONL or Parquet row that holds the text (default text)
--valid-fraction SHARE   share of the documents held out (default 0.01)
--workers N              threads (default: all cores)
{JSON}""",
    "info": f"""what a data folder holds
PLACE      the data folder, on disk or as s3://bucket/corpus
--verify   read every shard and compare its hash and the tokenizer's
{JSON}""",
}


def run(options: argparse.Namespace) -> None:
    if options.verb == "build":
        _print(options.out, _build(options), options.json)
    else:
        manifest = _inspect(folder_at(options.place), options.verify)
        _print(options.place, manifest, options.json, verified=options.verify)


def _build(options: argparse.Namespace) -> Manifest:
    if options.tokenizer == "bpe":
        status("training a byte-level BPE on the source first, at most 64 MiB of it")
    check_least("--workers", options.workers)
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
    if options.valid_fraction > 0 and not manifest.valid:
        status(
            "note: no document fell into the validation split; for one, build into a new folder with a"
            " larger --valid-fraction"
        )
    return manifest


def _inspect(folder: Path, verify: bool) -> Manifest:
    manifest = Manifest.load(folder)
    for split in ("train", "valid"):
        TokenDataset.open(folder, split, verify=verify)
    if verify:
        check_tokenizer(folder, manifest)
    return manifest


def _print(folder: str, manifest: Manifest, as_json: bool, *, verified: bool = False) -> None:
    if as_json:
        print_json(asdict(manifest) | {"verified": verified})
        return
    made = f"vocabulary {manifest.vocab_size:,} ({manifest.dtype}), tokenizer {manifest.tokenizer[:12]}"
    print(f"{folder}: {made}")
    for split in ("train", "valid"):
        shards = manifest.shards(split)
        tokens, text = sum(s.tokens for s in shards), sum(s.bytes_of_text for s in shards)
        ratio = f"{text / tokens:.2f} bytes/token" if tokens else "empty"
        size = f"{tokens:>14,} tokens  {format_bytes(text):>9} of text"
        print(f"  {split:<5}  {size}  {ratio}  {len(shards)} shard(s)")
    if manifest.skipped:
        print(f"  {manifest.skipped:,} row(s) without text were left out")
    if verified:
        print("  verified: every shard and the tokenizer are what was built")
