"""Checkpoints in one process: exact bits, atomic under kill -9, refused when damaged, pruned, asynchronous,
no pickle."""

import json
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from redline.errors import CheckpointError, StorageError, TrainingError
from redline.train.checkpoint import Checkpoints, load, read_tensors, verify
from redline.train.places import find, resolve


def all_kinds() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    integers = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    tensors = {
        f"model.{str(dtype)[6:]}": torch.randn(3, 5, generator=generator).to(dtype) for dtype in floats
    }
    tensors |= {
        f"model.{str(dtype)[6:]}": torch.randint(0, 100, (7,), generator=generator).to(dtype)
        for dtype in integers
    }
    tensors["model.bool"] = torch.tensor([True, False, True])
    tensors["model.transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["model.leaf"] = torch.nn.Parameter(torch.arange(4.0))
    tensors["model.special"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    tensors["model.empty"] = torch.empty(0, 4)
    tensors["optim.step"] = torch.tensor(17.0)
    tensors["rng"] = torch.get_rng_state()
    return tensors


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def numbered(value: float) -> dict[str, Tensor]:
    return {
        "model.a": torch.full((300, 40), float(value)),
        "optim.b": torch.tensor(float(value)),
        "model.c": torch.full((5,), int(value)),
    }


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, numbered(step), {"step": step})
    checkpoints.wait()
    return checkpoints


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child (a fresh interpreter would spend seconds importing torch); return its
    process id."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = all_kinds()
    state = {
        "step": 3,
        "best_loss": float("inf"),
        "lr": 0.1 + 0.2,
        "data": {"shard": 2, "offsets": [1, 2]},
        "none": None,
    }
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(3, tensors, state)
    checkpoints.wait()
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load(resolve(tmp_path), targets) == state
    for name, tensor in tensors.items():
        assert bits(targets[name]) == bits(tensor), name


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    tensors = all_kinds()
    saver = Checkpoints(tmp_path, keep=1)
    saver.save(1, tensors, {})
    saver.wait()
    (shard,) = resolve(tmp_path).glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(bits(file.get_tensor(name)) == bits(tensor) for name, tensor in tensors.items())


def test_int_keys_in_the_state_become_strings_and_still_verify(tmp_path: Path) -> None:
    saver = Checkpoints(tmp_path, keep=1)
    saver.save(1, numbered(1), {"by_rank": {2: "a", 10: "b"}})
    saver.wait()
    assert verify(resolve(tmp_path)) == {"by_rank": {"2": "a", "10": "b"}}


def test_read_tensors_takes_a_prefix(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    tensors = read_tensors(resolve(tmp_path), "model.")
    assert set(tensors) == {"a", "c"}
    assert torch.equal(tensors["a"], torch.full((300, 40), 4.0))
    assert read_tensors(resolve(tmp_path), "nothing.") == {}


def test_loading_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was un-pickled")

    saver = saved(tmp_path, 1)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    saver.save(2, numbered(2), {})
    saver.wait()
    assert load(resolve(tmp_path), numbered(0)) == {}
    assert set(read_tensors(resolve(tmp_path), "model.")) == {"a", "c"}


def test_a_save_returns_before_it_is_written_and_later_changes_do_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that advances while a save is held back; it is held back until the next one has begun."""
    checkpoints = saved(tmp_path, 1)
    next_begun, now_s = threading.Event(), 0.0

    def hold() -> None:
        nonlocal now_s
        assert next_begun.wait(60)
        now_s = 5.0

    def clock() -> float:
        read_s = now_s
        next_begun.set()
        return read_s

    tensors, state = numbered(2), {"step": 2}
    checkpoints.save(2, tensors, state, before_commit=hold)
    for tensor in tensors.values():
        tensor.fill_(99)
    state["step"] = 99
    assert checkpoints.steps() == [1]
    monkeypatch.setattr(time, "perf_counter", clock)
    assert checkpoints.save(3, numbered(3), {"step": 3}) == 5.0, "it waited for the one in flight"
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2, 3]
    targets = numbered(0)
    assert load(resolve(tmp_path, "step-2"), targets) == {"step": 2}
    assert all(bits(targets[name]) == bits(tensor) for name, tensor in numbered(2).items())


def test_before_commit_can_refuse(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)

    def refuse() -> None:
        raise TrainingError("the loss is not a number")

    checkpoints.save(2, numbered(2), {}, before_commit=refuse)
    with pytest.raises(TrainingError, match="not a number"):
        checkpoints.save(3, numbered(3), {})
    assert checkpoints.steps() == [1]
    assert not list(tmp_path.glob(".tmp-*"))
    checkpoints.save(4, numbered(4), {})
    checkpoints.wait()
    assert checkpoints.latest() == 4


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert (checkpoints.latest(), checkpoints.best()) == (None, None)
    for step in range(10, 60, 10):
        checkpoints.save(step, numbered(step), {})
        if step == 20:
            checkpoints.mark_best(20, 1.5)
    checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ([20, 40, 50], 50, 20)
    assert resolve(tmp_path, "best").name == "step-00000020"
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 20, "loss": 1.5}
    checkpoints.save(30, numbered(30), {})  # resumed from 20: the step just saved stays, though two are newer
    checkpoints.wait()
    assert checkpoints.steps() == [20, 30, 40, 50]
    assert {path.name for path in tmp_path.iterdir()} == {
        "best.json",
        *(f"step-000000{step}" for step in (20, 30, 40, 50)),
    }


def test_only_a_saved_step_can_be_the_best(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    checkpoints.mark_best(2, 1.0)
    with pytest.raises(CheckpointError, match="step 2 cannot be the best"):
        checkpoints.wait()
    with pytest.raises(CheckpointError, match="no checkpoint has been marked"):
        resolve(tmp_path, "best")


def test_weights_without_their_config_are_told_apart_from_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"holds weights but no config\.json"):
        find(tmp_path)
    saved(tmp_path / "checkpoints", 1)
    assert find(step := tmp_path / "checkpoints" / "step-00000001") == step
    assert find(tmp_path) == step, "a run keeps its checkpoints, whatever else somebody puts there"


def test_resolve_takes_a_run_a_folder_or_a_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        resolve(tmp_path)
    folder = tmp_path / "checkpoints"
    saved(folder, 1, 12)
    last = folder / "step-00000012"
    assert resolve(tmp_path) == resolve(folder) == resolve(last) == resolve(tmp_path, "step-12") == last
    with pytest.raises(CheckpointError, match=r"got step-7: .* has step-1, step-12"):
        resolve(tmp_path, "step-7")


def truncate(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)


def flip(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)


def remove(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def add(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    (folder / "shard-2.safetensors").write_bytes(shard.read_bytes())


def alter_state(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"step": 20', '"step": 21'))


def cut_state(folder: Path) -> None:
    os.truncate(folder / "state.json", 30)


def remove_state(folder: Path) -> None:
    (folder / "state.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, r"shard-\S+ is truncated or altered: 48,\d\d\d bytes expected, 48,\d\d\d found"),
        (flip, r"shard-\S+ is altered: sha256 [0-9a-f]{64} expected, [0-9a-f]{64} found"),
        (remove, r"shard-\S+ cannot be read: No such file"),
        (add, r"shard-2.safetensors is not listed in state.json"),
        (alter_state, r"state.json is altered: sha256 [0-9a-f]{64} expected"),
        (cut_state, r"state.json is damaged"),
        (remove_state, r"state.json cannot be read: No such file"),
    ],
)
def test_damage_is_refused_and_the_previous_good_one_is_offered(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    saved(tmp_path, 5, 10, 15, 20)
    truncate(tmp_path / "step-00000015")
    bad = resolve(tmp_path)
    damage(bad)
    offer = rf".*; the previous good checkpoint is step 10: remove {bad} to resume from it$"
    targets = numbered(0)
    for read in (verify, lambda folder: load(folder, targets), lambda folder: read_tensors(folder, "model.")):
        with pytest.raises(CheckpointError, match=said + offer):
            read(bad)
    assert all(not tensor.any() for tensor in targets.values())


def test_damage_without_another_checkpoint_says_so(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    flip(resolve(tmp_path))
    with pytest.raises(CheckpointError, match=r"no other checkpoint in .* is good"):
        verify(resolve(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.new": torch.zeros(1)}, "model.new is not in it"),
        ({"model.a": None}, "model.a is not expected"),
        (
            {"model.a": torch.zeros(300, 41)},
            r"model.a is \[300, 40\] float32 in it and \[300, 41\] float32 here",
        ),
        (
            {"optim.b": torch.zeros((), dtype=torch.bfloat16)},
            r"optim.b is \[\] float32 in it and \[\] bfloat16 here",
        ),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(
    tmp_path: Path, change: dict[str, Tensor | None], said: str
) -> None:
    saved(tmp_path, 1)
    tensors = {name: tensor for name, tensor in (numbered(0) | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=f"does not fit this recipe: {said}"):
        load(resolve(tmp_path), tensors)


def test_a_full_disk_is_a_storage_error_and_the_previous_checkpoint_is_intact(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)

    def fill() -> None:
        checkpoints = Checkpoints(tmp_path, keep=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        checkpoints.save(2, numbered(2), {})
        with pytest.raises(StorageError, match="cannot be written to"):
            checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert checkpoints.steps() == [1]
        # space again: it gets as far as the commit
        checkpoints.save(3, numbered(3), {}, before_commit=lambda: os._exit(7))
        checkpoints.wait()

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(fill), 0)[1]) == 7
    assert checkpoints.steps() == [1]
    assert verify(resolve(tmp_path)) == {"step": 1}
    assert Checkpoints(tmp_path, keep=1).steps() == [1]
    assert not list(tmp_path.glob(".tmp-*"))  # what the dead process left is gone


def test_replacing_a_step_never_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 7)
    seen: list[float] = []
    rename = os.rename

    def spy(source: Path, target: Path) -> None:
        rename(source, target)
        seen.append(float(read_tensors(resolve(tmp_path), "optim.")["b"]))

    monkeypatch.setattr(os, "rename", spy)
    checkpoints.save(7, numbered(8), {})
    checkpoints.wait()
    assert seen == [7.0, 8.0, 8.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_kill_between_the_two_renames_is_mended_at_the_next_start(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    (tmp_path / "step-00000007").rename(tmp_path / "step-00000007.old")
    assert Checkpoints(tmp_path, keep=1).steps() == [7]
    assert resolve(tmp_path).name == "step-00000007"
    assert verify(resolve(tmp_path)) == {"step": 7}


def die_after(calls: int) -> None:
    """SIGKILL when this many functions have been called or left, in all threads together."""

    def count(*_event: object) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


def test_killed_at_any_moment_the_newest_committed_checkpoint_is_whole(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    random_calls = random.Random(0)
    reader, writer = os.pipe()

    def train() -> None:
        die_after(calls)
        checkpoints = Checkpoints(tmp_path, keep=2)
        step = checkpoints.latest() or 0
        while True:
            step += 1
            checkpoints.save(step, numbered(step), {"step": step})
            checkpoints.wait()
            os.write(writer, step.to_bytes(8, "little"))
            if step % 3 == 0:  # re-reaches a step, as a run resumed at its last one does
                checkpoints.save(step, numbered(step), {"step": step})
            if step % 5 == 0:
                checkpoints.mark_best(step, 1.0)

    last, torn = 0, 0
    for _ in range(60):
        calls = random_calls.randrange(3000)  # a save makes some hundred
        _, status = os.waitpid(in_child(train), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        os.write(writer, bytes(8))
        while reported := int.from_bytes(os.read(reader, 8), "little"):
            last = reported
        torn += any(path.name.startswith(".tmp-") or path.suffix == ".old" for path in tmp_path.iterdir())
        folder = resolve(tmp_path)
        targets = numbered(0)
        step = load(folder, targets)["step"]
        assert step >= last
        assert all(bits(targets[name]) == bits(tensor) for name, tensor in numbered(step).items())
    assert torn > 10  # the kills did fall into saves
