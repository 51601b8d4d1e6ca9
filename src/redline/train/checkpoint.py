"""Checkpoints: saved while training continues, committed whole or not at all, loaded on any number of processes.

    checkpoints = Checkpoints(run / "checkpoints", keep=2)      # on every rank
    stalled_s = checkpoints.save(step, tensors, state)          # returns when the values are safe to change
    checkpoints.copy_done()                                     # before the next optimiser update
    checkpoints.wait()                                          # before leaving
    state = load(resolve(run), tensors)

Tensors are a flat dict of plain tensors (the same on every rank) and DTensors (each rank writes its shard); everything
else is a JSON-like `state`. A save copies the values into one host buffer, on CUDA during the next forward and backward,
which only read parameters; a thread then writes, hashes, syncs and renames. Loading goes through DCP's planner, which
reshards, and its safetensors reader, which un-pickles nothing. docs/decisions.md says why DCP does not write.
"""

import json
import shutil
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from redline.errors import CheckpointError, StorageError
from redline.record.files import storage_errors, write_atomic
from redline.train.checkpoint_files import (
    TEMPORARY,
    Entry,
    commit,
    discard,
    tidy,
    verify,
    write_shard,
    write_state,
)
from redline.train.places import BEST, read_best, step_folders, step_name
from redline.train.process import exchange, is_spread

Piece = tuple[Entry, Tensor]
"""What one rank writes for one tensor: its name in the file, and the values."""


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, and the best. Every rank calls every method that writes."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        # a group that nobody else uses: its thread exchanges messages while the others train
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        if self._rank == 0:
            with storage_errors("checkpoints", folder):
                tidy(folder)
        self._exchange({})  # nobody writes before rank 0 has tidied

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        before_commit: Callable[[], None] | None = None,
    ) -> float:
        """Take a snapshot and let a thread write it; return the seconds for which the caller was held up.

        Waits for the save before it, and raises what went wrong there. `before_commit` is called on rank 0 by
        the thread when everything is on the disk but nothing has its name yet: if it raises, the checkpoint
        is discarded.
        """
        started_s = time.perf_counter()
        self.wait()
        text = json.dumps(state)  # now, because the caller keeps changing it
        pieces, data = self._snapshot(tensors)
        # The thread keeps `pieces` alive: memory that the copy on the side stream still reads must not be given away.
        self._jobs.append(self._thread.submit(self._write, step, pieces, data, text, before_commit))
        return time.perf_counter() - started_s

    def copy_done(self) -> None:
        """Make the current CUDA stream, not the host, wait until the last snapshot has been taken."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the last save is committed, and raise what went wrong in it."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def idle(self) -> bool:
        """Whether nothing is being written: `wait` would return, or raise, immediately."""
        return all(job.done() for job in self._jobs)

    def close(self) -> None:
        """Let a save in progress end, well or not, and stop the thread. `wait` raises what went wrong."""
        self._thread.shutdown(wait=True)

    def mark_best(self, step: int, loss: float) -> None:
        """Mark a saved step as the best, which is not pruned. Takes effect when its save is committed."""
        if self._rank == 0:
            self._jobs.append(self._thread.submit(self._write_best, step, loss))

    def steps(self) -> list[int]:
        return list(step_folders(self.folder))

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        return read_best(self.folder)

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> tuple[list[Piece], memoryview]:
        """Copy what this rank writes into the buffer, which is then the data part of its file."""
        # Wide types first, so that every tensor is aligned to its own width.
        pieces = list(_pieces(tensors, self._rank))
        pieces.sort(key=lambda piece: (-piece[0].dtype.itemsize, piece[0].name))
        on_cuda = any(local.is_cuda for _, local in pieces)
        size_bytes = sum(entry.size_bytes for entry, _ in pieces)
        if self._buffer.numel() < size_bytes:
            self._buffer = _host_buffer(size_bytes, pinned=on_cuda)
        if on_cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _copy(pieces, self._buffer)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(self._stream)
        else:
            _copy(pieces, self._buffer)
        return pieces, self._buffer.numpy()[:size_bytes].data

    def _write(
        self,
        step: int,
        pieces: list[Piece],
        data: memoryview,
        state: str,
        before_commit: Callable[[], None] | None,
    ) -> None:
        """What the thread does on every rank: write this rank's shard. Rank 0 then commits all shards or none."""
        if self._copied is not None:
            self._copied.synchronize()
        temporary = self.folder / (TEMPORARY + step_name(step))
        reports = self._exchange(self._write_own_shard(temporary, [entry for entry, _ in pieces], data))
        outcome = {"error": f"rank 0 could not commit the checkpoint of step {step}; its message says why"}
        try:
            if self._rank == 0:
                self._commit(step, temporary, reports, json.loads(state), before_commit)
            outcome = {}
        finally:  # whatever rank 0 raises, the others must not wait for it forever
            outcome = self._exchange(outcome)[0]
        if outcome:
            errors = [report["error"] for report in reports if "error" in report]
            raise StorageError([*errors, outcome["error"]][0])

    def _write_own_shard(self, temporary: Path, entries: list[Entry], data: memoryview) -> dict[str, Any]:
        """The file's name, size and hash, or the error: raising here would leave the other ranks waiting."""
        if not entries:
            return {}
        path = temporary / f"shard-{self._rank + 1:05d}-model-00001-of-00001.safetensors"
        try:
            with storage_errors("a checkpoint", temporary):
                temporary.mkdir(exist_ok=True)
                return {path.name: write_shard(path, entries, data)}
        except StorageError as error:
            return {"error": str(error)}
        except OSError as error:
            return {"error": f"a checkpoint could not be written to {path}: {error.strerror}"}

    def _commit(
        self,
        step: int,
        temporary: Path,
        reports: list[dict[str, Any]],
        state: Any,
        before_commit: Callable[[], None] | None,
    ) -> None:
        try:
            for report in reports:
                if "error" in report:
                    raise StorageError(report["error"])
            with storage_errors("a checkpoint", temporary):
                temporary.mkdir(exist_ok=True)
                files = {name: file for report in reports for name, file in report.items()}
                write_state(temporary, step=step, state=state, files=files)
            if before_commit is not None:
                before_commit()
            with storage_errors("a checkpoint", self.folder):
                commit(temporary, self.folder / step_name(step))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after a commit it is no longer there
        self._prune(step)

    def _prune(self, committed: int) -> None:
        folders = step_folders(self.folder)
        # The step just committed may be older than others, when a run was resumed from an earlier one.
        kept = {*list(folders)[-self.keep :], committed, self.best()}
        with storage_errors("a checkpoint", self.folder):
            for step, folder in folders.items():
                if step not in kept:
                    discard(folder)

    def _write_best(self, step: int, loss: float) -> None:
        if step not in self.steps():
            raise CheckpointError(f"step {step} cannot be the best: save it; {self.folder} does not have it")
        write_atomic(self.folder / BEST, json.dumps({"step": step, "loss": loss}))

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return [message] if self._group is None else exchange(message, self._group)


def _pieces(tensors: Mapping[str, Tensor], rank: int) -> Iterator[Piece]:
    """The parts of the tensors that this rank writes. What several ranks hold, the first of them writes."""
    for name, tensor in tensors.items():
        if is_spread(tensor):
            local = tensor.to_local().detach()
            coordinate = tensor.device_mesh.get_coordinate()
            first = coordinate is not None and all(
                placement.is_shard() or index == 0
                for placement, index in zip(tensor.placements, coordinate, strict=True)
            )
            offsets = tuple(tensor.__create_chunk_list__()[0].offsets)
        else:
            local, first, offsets = tensor.detach(), rank == 0, (0,) * tensor.dim()
        # A tensor with fewer rows than ranks leaves some of them with nothing to write.
        if first and (local.numel() or tensor.numel() == 0):
            yield Entry(name=name, dtype=local.dtype, shape=tuple(local.shape), offsets=offsets), local


def _copy(pieces: list[Piece], buffer: Tensor) -> None:
    start = 0
    for entry, local in pieces:
        end = start + entry.size_bytes
        buffer[start:end].view(entry.dtype).view(entry.shape).copy_(local, non_blocking=True)
        start = end


def _host_buffer(size_bytes: int, *, pinned: bool) -> Tensor:
    """Memory for the snapshot, page-locked for CUDA. Torch's pinned allocator would round up to a power of two."""
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    if pinned:
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), size_bytes, 0))
        weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer


def load(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Verify a step folder, fill the tensors in place, however many processes wrote it, and return the state."""
    state = verify(folder)
    saved = _saved(folder)
    wrong = [f"{name} is not in it" for name in tensors if name not in saved]
    wrong += [f"{name} is not expected" for name in saved if name not in tensors]
    for name, tensor in tensors.items():
        here = (tuple(tensor.shape), tensor.dtype)
        if name in saved and saved[name] != here:
            wrong.append(f"{name} is {_said(saved[name])} in it and {_said(here)} here")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"the checkpoint {folder} does not fit this recipe: {', '.join(wrong[:3])}{more}; use the recipe"
            " it was saved with"
        )
    _fill(folder, tensors)
    return state


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Verify a step folder and return whole CPU tensors: those named `prefix...`, without the prefix."""
    verify(folder)
    wanted = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in _saved(folder).items()
        if name.startswith(prefix)
    }
    _fill(folder, wanted)
    return {name.removeprefix(prefix): tensor for name, tensor in wanted.items()}


def _said(kind: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{list(kind[0])} {str(kind[1]).removeprefix('torch.')}"


def _saved(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every whole tensor in the checkpoint."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (tuple(meta.size), meta.properties.dtype)
        for name, meta in saved.items()
        if isinstance(meta, TensorStorageMetadata)
    }


def _fill(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        return
    # Here and above, because a run that begins reads none: a fifth of a second of its start.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    with warnings.catch_warnings():
        # Every rank reads what it needs by itself; DCP warns that there are no collectives, which is the point.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=HuggingFaceStorageReader(str(folder)),
            no_dist=True,
        )
