"""Checkpoints on the disk: the shard format, the commit, and the checks before anything is read. No pickle anywhere.

    <run>/checkpoints/
        best.json                      {"step": 80, "loss": 1.47}
        step-00000080/state.json       step, state, size and sha256 of every shard, and a sha256 of itself
        step-00000080/shard-00001-model-00001-of-00001.safetensors     one for each process with something to write
        .tmp-*                         being written or deleted; never read, removed at the next start
        step-00000080.old              set aside while step 80 is replaced; counts as step 80 until then

The shards have the layout of torch's `HuggingFaceStorageWriter(save_distributed=True)`, so DCP reads and reshards them.
They are written here in one pass that also hashes them, without a copy and without the GIL (docs/decisions.md). Left
out: folders that processes do not share, and several trainers in one folder.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.errors import CheckpointError
from redline.record.files import WAY_OUT, read_json, sync_path, write_atomic
from redline.train.places import OLD, step_folders

STATE = "state.json"
TEMPORARY = ".tmp-"
# Large enough to keep the calls rare, small enough to be written while it is still in the cache from hashing.
PIECE_BYTES = 4 * 2**20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor, or one process's part of it: `shape` elements that begin at `offsets` in the whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_shard(path: Path, entries: Sequence[Entry], data: memoryview) -> dict[str, Any]:
    """Write one safetensors file whose tensors lie in `data` in this order; return its size and hash."""
    header: dict[str, Any] = {}
    start = 0
    for entry in entries:
        end = start + entry.size_bytes
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
        start = end
    offsets = {entry.name: {"saved_offsets": entry.offsets} for entry in entries}
    header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    parts = [memoryview(len(text).to_bytes(8, "little") + text)]
    parts += [data[i : i + PIECE_BYTES] for i in range(0, start, PIECE_BYTES)]
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        size_bytes = file.tell()
    return {"bytes": size_bytes, "sha256": digest.hexdigest()}


def write_state(folder: Path, *, step: int, state: Any, files: dict[str, Any]) -> None:
    """Write state.json, the last file of a checkpoint, and make the names in the folder durable."""
    body = {"step": step, "state": state, "files": files}
    write_atomic(folder / STATE, json.dumps({**body, "sha256": _digest(body)}, indent=1))


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def commit(temporary: Path, final: Path) -> None:
    """Give a finished checkpoint its name. An older one of that name stays readable until then."""
    old = final.with_name(final.name + OLD)
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync_path(final.parent)
    if old.exists():
        discard(old)


def discard(folder: Path) -> None:
    """Delete a checkpoint; killed in the middle, it leaves nothing that looks like one."""
    doomed = folder.with_name(f"{TEMPORARY}delete-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Make the folder, and put right what a killed process left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"step-*{OLD}"):
        final = path.with_name(path.name.removesuffix(OLD))
        if final.exists():
            discard(path)
        else:
            os.rename(path, final)
    sync_path(folder)


def verify(folder: Path) -> dict[str, Any]:
    """Check size and sha256 of every file against state.json; return the state, or name a good checkpoint."""
    try:
        return _checked(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{str(error).removesuffix(f'; {WAY_OUT}')}; {_way_out(folder)}") from error


def _checked(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    body = read_json(path, dict, error=CheckpointError)
    try:
        expected, files, state = body.pop("sha256"), body["files"], body["state"]
    except KeyError as error:
        raise CheckpointError(f"checkpoint file {path} is damaged: {error} is missing") from error
    if (found := _digest(body)) != expected:
        raise CheckpointError(f"checkpoint file {path} is altered: sha256 {expected} expected, {found} found")
    # A shard that nobody listed would be read along with the others.
    if extra := {shard.name for shard in folder.glob("*.safetensors")} - set(files):
        raise CheckpointError(f"checkpoint file {folder / min(extra)} is not listed in {STATE}")
    with ThreadPoolExecutor(max_workers=min(8, len(files) or 1)) as pool:
        list(pool.map(lambda name: _check(folder / name, files[name]["bytes"], files[name]["sha256"]), files))
    return state


def _check(path: Path, size_bytes: int, sha256: str) -> None:
    try:
        with open(path, "rb") as file:
            there = os.fstat(file.fileno()).st_size
            found = hashlib.file_digest(file, "sha256").hexdigest() if there == size_bytes else ""
    except OSError as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
    if there != size_bytes:
        wrong = f"is truncated or altered: {size_bytes:,} bytes expected, {there:,} found"
        raise CheckpointError(f"checkpoint file {path} {wrong}")
    if found != sha256:
        raise CheckpointError(f"checkpoint file {path} is altered: sha256 {sha256} expected, {found} found")


def _way_out(bad: Path) -> str:
    """Which checkpoint to use instead of the bad one: the newest of the others that is whole."""
    for step, folder in reversed(step_folders(bad.parent).items()):
        if folder == bad:
            continue
        try:
            _checked(folder)
        except CheckpointError:
            continue
        age = "previous" if folder.name < bad.name else "newest"
        return f"the {age} good checkpoint is step {step}: remove {bad} to resume from it"
    return f"no other checkpoint in {bad.parent} is good: remove {bad} and start the run again"
