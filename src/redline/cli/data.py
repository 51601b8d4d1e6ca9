"""Build token shards from text, JSONL(.gz, .xz), Parquet or a folder of them; inspect a folder that was
built.

redline data build corpus.jsonl.gz --out data/corpus --tokenizer gpt2/tokenizer.json
redline data build wikitext-2 --out data/wikitext            from the Hugging Face Hub, with its own validation split
redline data info data/corpus --verify
redline data build corpus.jsonl.gz --out s3://bucket/corpus  built here and uploaded; gs:// too
redline data build corpus/ --out data/corpus --part 3/8      one part of eight, on any machine; the last to finish joins them
"""

import argparse
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redline.cli.options import byte_progress, print_json, status
from redline.data.build import build, build_part
from redline.data.remote import folder_at, is_remote
from redline.data.shards import Manifest, TokenDataset, check_tokenizer
from redline.errors import ConfigError, RedlineError, need
from redline.record.units import counted, format_bytes

ARGUMENTS = {
    "build": """tokenise a corpus into memory-mapped shards; if it is killed, run it again and it resumes
SOURCE...                a file, a folder, tinyshakespeare, wikitext-2, wikipedia or hf://datasets/org/name; several are joined into one corpus
--out PLACE              the data folder to write, on disk or as s3://bucket/corpus (required)
--tokenizer TOKENIZER    a tokenizer.json or a folder with one (default bpe: a byte-level BPE trained on the source)
--vocab-size N           vocabulary of the trained BPE (default: 32768)
--text-field FIELD       field of a JSONL or Parquet row that holds the text (default text)
--valid-fraction SHARE   share of the documents held out (default 0.01)
--workers N              threads (default: all cores); with --on ray, tasks (default: one per CPU)
--part K/N               build the K-th of N parts (default: in a SLURM array, the part of this task)
--on {ray}               build as tasks of a Ray cluster whose machines share --out (default: in this process)
--ray-address ADDRESS    address of the cluster (default: RAY_ADDRESS, one started on this machine, or a new local one)
@JSON""",
    "info": """what a data folder holds
PLACE      the data folder, on disk or as s3://bucket/corpus
--verify   read every shard and check its hash and the tokenizer's
@JSON""",
}


def run(options: argparse.Namespace) -> None:
    if options.verb == "build":
        if (manifest := _build(options)) is not None:
            _print(options.out, manifest, options.json)
    else:
        folder = folder_at(options.place)
        manifest = Manifest.load(folder)
        for split in ("train", "valid"):
            TokenDataset.open(folder, split, verify=options.verify)
        if options.verify:
            check_tokenizer(folder, manifest)
        _print(options.place, manifest, options.json, verified=options.verify)


def _build(options: argparse.Namespace) -> Manifest | None:
    how = {name: getattr(options, name) for name in ("tokenizer", "text_field", "valid_fraction")}
    how["vocab_size"] = options.vocab_size or (32768 if options.tokenizer == "bpe" else None)
    if options.on is None and options.ray_address is not None:
        raise ConfigError("--ray-address is for a build on Ray: add --on ray")
    if options.on == "ray" and options.part is not None:
        raise ConfigError("--on ray builds all parts: leave out --part")
    part, manifest = _part(options), None
    if (part or options.on == "ray") and is_remote(options.out):
        raise ConfigError(f"parts share a folder, which {options.out} is not: build into one, then upload it")
    if options.tokenizer == "bpe":
        status("first training a byte-level BPE on the source, on at most 64 MiB of it")
    if options.on == "ray":
        manifest = _build_on_ray(options, how)
    else:
        how |= {"workers": options.workers, "progress": byte_progress("tokenising")}
        if part is None:
            manifest = build(options.source, options.out, **how)
        elif (manifest := build_part(*part, options.source, Path(options.out), **how)) is None:
            status(f"part {part[0]}/{part[1]} is done; the last part to finish joins them all")
            return None
    if options.valid_fraction > 0 and not manifest.valid:
        status("note: the validation split is empty: build into a new folder with a larger --valid-fraction")
    return manifest


def _part(options: argparse.Namespace) -> tuple[int, int] | None:
    if options.part is not None:
        numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.part)
        if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
            raise ConfigError(f"--part must be K/N with K from 1 to N, got {options.part}")
        return int(numbers[1]), int(numbers[2])
    task, parts, first, step = (
        int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", 0)) for name in ("ID", "COUNT", "MIN", "STEP")
    )
    if parts < 2 or options.on == "ray":
        return None
    part = (task - first) // max(1, step) + 1
    if part > parts:
        raise ConfigError(f"task {task} of a SLURM array of {parts} with gaps: give --part K/N")
    status(f"task {task} of a SLURM array of {parts}: building --part {part}/{parts} (--part 1/1: all of it)")
    return part, parts


def _build_on_ray(options: argparse.Namespace, how: dict[str, Any]) -> Manifest:
    """Build the parts as Ray tasks. If a worker is lost, Ray runs its task again, and it resumes."""
    ray = need("ray", extra="ray")
    from redline.engine.ray import connect

    ours = connect(options.ray_address)
    parts = options.workers or int(ray.cluster_resources()["CPU"])
    status(f"building {parts} parts on Ray")
    # a worker may run in another folder
    sources = [str(Path(source).resolve()) if Path(source).exists() else source for source in options.source]
    task, out = ray.remote(num_cpus=1)(build_part), Path(options.out).resolve()
    try:
        ray.get([task.remote(k + 1, parts, sources, out, workers=1, **how) for k in range(parts)])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RedlineError):
            raise error.cause from error
        raise
    finally:
        if ours:
            ray.shutdown()
    return build(sources, out, **how)  # the last task joined the parts; if it died, this does


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
        print(f"  {split:<5}  {size}  {ratio}  {counted(len(shards), 'shard')}")
    if manifest.skipped:
        print(f"  left out, because they hold no text: {counted(manifest.skipped, 'row')}")
    if verified:
        print("  verified: every shard and the tokenizer match what was built")
