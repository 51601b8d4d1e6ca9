"""Checkpoints over two gloo processes with real FSDP2 and AdamW: saved on one and loaded on two, and the
reverse, exactly.

One pair of processes, forks of the warm one, does everything that needs two, because starting them is what takes
the time. Parameters with three, seven and one rows over two ranks are uneven shards, and one rank holds nothing of
the last.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from warm import Fault, Warm

from redline.errors import StorageError
from redline.train.checkpoint import Checkpoints, load, read_tensors, verify
from redline.train.places import resolve


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)).pow(2).mean() * self.gain.sum()


def trained(model: nn.Module, steps: int) -> torch.optim.AdamW:
    """AdamW has state only after its first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(2, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        tensors |= {f"optim.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return tensors


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def two(rank: int, folder: str | Path) -> None:
    folder = Path(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    torch.manual_seed(1)  # other weights than those in the checkpoint
    model = Uneven()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = trained(model, 1)
    tensors = tensors_of(model, optimizer)
    assert tensors["model.gain"].to_local().numel() == 1 - rank

    assert load(resolve(folder / "one"), tensors) == {"step": 1}
    assert_equal(whole(tensors), load_file(folder / "one.safetensors"))

    model(torch.ones(2, 5)).backward()
    optimizer.step()
    checkpoints = Checkpoints(folder / "two", keep=2)
    checkpoints.save(2, tensors, {"step": 2})
    expected = whole(tensors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    checkpoints.wait()
    if rank == 0:
        save_file(expected, folder / "two.safetensors")

    # A rank that cannot write makes the save fail everywhere; the checkpoint before it stays, and the next
    # save works.
    shard = folder / "two" / ".tmp-step-00000003" / "shard-00002-model-00001-of-00001.safetensors"
    if rank == 1:
        shard.mkdir(parents=True)
    checkpoints.save(3, tensors, {"step": 3})
    with pytest.raises(StorageError, match=r"cannot be written to .*Is a directory"):
        checkpoints.wait()
    assert checkpoints.steps() == [2]

    def refuse() -> None:
        raise ZeroDivisionError

    checkpoints.save(3, tensors, {"step": 3}, before_commit=refuse)
    with pytest.raises((ZeroDivisionError, StorageError)[rank]):
        checkpoints.wait()
    checkpoints.save(4, tensors, {"step": 4})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4]
    dist.barrier()
    dist.destroy_process_group()


def test_saved_on_one_loads_on_two_and_the_reverse(warm: Warm, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Uneven()
    tensors = tensors_of(model, trained(model, 2))
    checkpoints = Checkpoints(tmp_path / "one", keep=1)
    checkpoints.save(1, tensors, {"step": 1})
    checkpoints.wait()
    save_file(whole(tensors), tmp_path / "one.safetensors")

    place = "test_checkpoint_reshard:two"
    ranks = [
        warm.start(fault=Fault("instead", place=place, rank=rank, folder=str(tmp_path))) for rank in (0, 1)
    ]
    for done in [rank.wait() for rank in ranks]:
        assert done.code == 0, done.err

    expected = load_file(tmp_path / "two.safetensors")
    folder = resolve(tmp_path / "two", "step-2")
    assert verify(folder) == {"step": 2}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load(folder, targets) == {"step": 2}
    assert_equal(targets, expected)
    assert_equal(read_tensors(folder, ""), expected)
    assert not torch.equal(expected["model.gain"], tensors["model.gain"])
    # What every rank holds is written once: the shards together are hardly larger than the tensors.
    shards = [load_file(shard) for shard in sorted(folder.glob("*.safetensors"))]
    assert [("rng" in shard, "model.gain" in shard, "model.outer.weight" in shard) for shard in shards] == [
        (True, True, True),
        (False, False, True),
    ]
    assert [len(shard["model.outer.weight"]) for shard in shards] == [2, 1]
