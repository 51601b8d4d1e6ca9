"""PCGrad against the paper's loop on whole vectors, on one process and on two; and what goes wrong without the
exchange between them."""

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from precision import CLOSE, assert_close, in_double
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.transformer import Transformer, build_model
from redline.train import pcgrad
from redline.train.pcgrad import Mode, PCGrad, Place, projection_weights
from redline.train.process import Process, full, join, shard
from redline.train.step import Learner, Numbers, Pass, Sum, backpropagated, update

CONFIG = ModelConfig(vocab_size=61, num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, context_length=12)
ALONE = Process(0, 1, torch.device("cpu"))
GROUPS = ("maths", "code", "logic")
SEED, STEP = 3, 5
TARGETS = 3 * 4 * 12


def tokens_of(group: int) -> tuple[Tensor, Tensor]:
    """Four rows; the last group's are the first's."""
    generator = torch.Generator().manual_seed(group % 2)
    inputs_BT, targets_BT = (torch.randint(61, (4, 12), generator=generator) for _ in range(2))
    return inputs_BT, targets_BT


def passes(model: Transformer, process: Process, *, against: bool) -> list[Pass]:
    """Two passes a group, shared by the processes. `against`: the last group unlearns half of what the first learns,
    as a negative advantage does."""
    made = []
    for k, group in enumerate(GROUPS):
        sign = -0.5 if against and k == len(GROUPS) - 1 else 1.0
        inputs_BT, targets_BT = (t[process.rank :: process.world_size] for t in tokens_of(k))
        for x_BT, y_BT in zip(
            inputs_BT.chunk(2 // process.world_size), targets_BT.chunk(2 // process.world_size), strict=True
        ):
            made.append(
                backpropagated(lambda x_BT=x_BT, y_BT=y_BT, sign=sign: sign * model(x_BT, y_BT), group=group)
            )
    return made


def gradients(
    model: Transformer,
    process: Process,
    mode: Mode | None,
    *,
    against: bool = True,
    place: Place = "device",
    only: Sequence[str] = GROUPS,
) -> tuple[dict[str, Tensor], Numbers]:
    """What an update would apply, and what it reports. No mode: the plain sum."""
    found: dict[str, Tensor] = {}
    learner = Learner(model, [], process, clip_norm=0.0)
    if mode is not None:
        learner.combine = PCGrad(
            learner, groups=GROUPS, mode=mode, seed=SEED, updates_done=lambda: STEP, place=place
        )

    def look() -> None:
        found.update({n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None})

    learner.before_update = look
    chosen = [one for one in passes(model, process, against=against) if one.group in only]
    numbers = update(learner, chosen, targets=TARGETS).numbers
    model.zero_grad(set_to_none=True)
    return found, numbers


def vectors(model: Transformer, name: str | None = None) -> list[Tensor]:
    """Each group's gradient, of all weights or of one tensor, as one vector."""
    found = []
    for group in GROUPS:
        whole, _ = gradients(model, ALONE, None, only=(group,))
        found.append(torch.cat([whole[n].flatten() for n in whole if name in (None, n)]))
    return found


def of_the_paper(vectors: Sequence[Tensor], *drawn: int) -> Tensor:
    """Algorithm 1 on whole vectors, with the order that the seed gives."""
    order = np.random.default_rng([SEED, STEP, *drawn])
    total = torch.zeros_like(vectors[0])
    for i, vector in enumerate(vectors):
        projected = vector.clone()
        for j in order.permutation([k for k in range(len(vectors)) if k != i]):
            inner = projected @ vectors[j]
            if inner < 0:
                projected -= inner / (vectors[j] @ vectors[j]) * vectors[j]
        total += projected
    return total


def test_weights_by_hand():
    """g1 = (1, 0), g2 = (-1, 1). Projected: g1 + g2/2 = (1/2, 1/2) and g2 + g1 = (0, 1)."""
    gram = np.array([[1.0, -1.0], [-1.0, 2.0]])
    assert projection_weights(gram, np.random.default_rng(0)).tolist() == [2.0, 1.5]


@pytest.mark.parametrize("mode", ["global", "tensor"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_without_a_conflict_it_is_the_plain_sum_to_the_last_bit(mode, place):
    """All groups learn the same rows, so no tensor's gradients are against each other; two passes a group, so that
    another order of additions would show."""
    model = build_model(CONFIG, device="cpu", seed=0)
    same = tokens_of(0)
    with patch(f"{__name__}.tokens_of", lambda group: same):
        expected, _ = gradients(model, ALONE, None, against=False)
        found, numbers = gradients(model, ALONE, mode, against=False, place=place)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert float(numbers["cosine.maths.code"]) == pytest.approx(1.0)
    assert float(numbers["conflict.maths.logic"]) == 0.0


def test_watching_leaves_the_gradient_alone_and_reports_every_pair():
    model = build_model(CONFIG, device="cpu", seed=0)
    expected, _ = gradients(model, ALONE, None)
    found, numbers = gradients(model, ALONE, "watch")
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    pairs = {"maths.code", "maths.logic", "code.logic"}
    told = {name for name in numbers if name not in ("loss", "grad_norm")}
    assert told == {f"{what}.{pair}" for what in ("cosine", "conflict") for pair in pairs}
    assert float(numbers["cosine.maths.logic"]) == pytest.approx(-1.0), "the same rows, unlearnt"
    assert float(numbers["conflict.maths.logic"]) == 1.0


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("place", ["device", "host"])
def test_it_is_the_papers_loop_on_whole_vectors(place, monkeypatch):
    monkeypatch.setattr(pcgrad, "CHUNK", 100)  # tensors of several chunks, the last one short
    model = build_model(CONFIG, device="cpu", seed=0)
    found, numbers = gradients(model, ALONE, "global", place=place)
    flat = vectors(model)
    assert_close(torch.cat([g.flatten() for g in found.values()]), of_the_paper(flat))
    cosine = float(flat[0] @ flat[1] / (flat[0].norm() * flat[1].norm()))
    assert float(numbers["cosine.maths.code"]) == pytest.approx(cosine)
    plain, _ = gradients(model, ALONE, None)
    assert any((found[name] - plain[name]).abs().max() > 1e-3 for name in plain), "it did something"


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_tensor_by_tensor_it_is_the_papers_loop_on_each():
    model = build_model(CONFIG, device="cpu", seed=0)
    found, _ = gradients(model, ALONE, "tensor")
    for n, name in enumerate(found):
        assert_close(found[name].flatten(), of_the_paper(vectors(model, name), n), what=name)


@pytest.mark.parametrize("only", [("maths",), ("maths", "logic"), ("code",), ("logic",), ()])
def test_groups_that_are_missing_from_an_update_add_nothing(only):
    model = build_model(CONFIG, device="cpu", seed=0)
    found, numbers = gradients(model, ALONE, "global", only=only)
    expected, _ = gradients(model, ALONE, None, only=only)
    if len(only) < 2:
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
        assert {float(numbers[name]) for name in numbers if name.startswith(("cosine", "conflict"))} == {0.0}
    else:  # g and -g/2: each is projected onto nothing
        assert all(gradient.abs().max() < 1e-6 for gradient in found.values())
        assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


def test_an_update_that_was_broken_off_leaves_nothing_behind():
    model = build_model(CONFIG, device="cpu", seed=0)
    expected, _ = gradients(model, ALONE, "global")
    learner = Learner(model, [], ALONE, clip_norm=0.0)
    learner.combine = PCGrad(learner, groups=GROUPS, mode="global", seed=SEED, updates_done=lambda: STEP)
    first, *_ = passes(model, ALONE, against=True)
    first.run(1.0, learner.mark)
    learner.combine.keep("maths")
    model.zero_grad(set_to_none=True)
    learner.combine.restart()
    found: dict[str, Tensor] = {}
    learner.before_update = lambda: found.update(
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    )
    update(learner, passes(model, ALONE, against=True), targets=TARGETS)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert isinstance(Learner(model, [], ALONE, 0.0).combine, Sum), "off unless asked for"


# ---- two processes ----


def on_two(folder: Path) -> None:
    """Runs in a process of its own, which becomes two: the gradients of both modes, and of inner products that were
    not exchanged."""
    rank = 0 if (child := os.fork()) else 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    with in_double(), join("cpu") as process:
        model = build_model(
            CONFIG, device="cpu", seed=0, shape=lambda model: shard(model, process, torch.float32)
        )
        results = {}
        for name in ("global", "tensor", "unshared"):
            alone = patch.object(pcgrad.dist, "all_reduce") if name == "unshared" else nullcontext()
            with alone:
                mode: Mode = "tensor" if name == "tensor" else "global"
                results[name] = gradients(model, process, mode)
    if rank:
        os._exit(0)
    for name, (found, numbers) in results.items():
        save_file(found, folder / f"{name}.safetensors")
        told = {key: float(value) for key, value in numbers.items()}
        (folder / f"{name}.json").write_text(json.dumps(told))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    program = f"import test_pcgrad as t; from pathlib import Path; t.on_two(Path({str(folder)!r}))"
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **place, "PYTHONPATH": path}, timeout=300
    )
    assert done.returncode == 0
    return folder


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("mode", ["global", "tensor"])
def test_two_processes_project_as_one(two: Path, mode: Mode):
    model = build_model(CONFIG, device="cpu", seed=0)
    expected, numbers = gradients(model, ALONE, mode)
    found = load_file(two / f"{mode}.safetensors")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, what=name)
    told = json.loads((two / f"{mode}.json").read_text())
    assert told == pytest.approx({name: float(value) for name, value in numbers.items()}, rel=CLOSE)


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_inner_products_of_one_shard_alone_give_another_gradient(two: Path):
    """As public versions compute them: every process decides by its own shard."""
    model = build_model(CONFIG, device="cpu", seed=0)
    expected, _ = gradients(copy.deepcopy(model), ALONE, "global")
    wrong = load_file(two / "unshared.safetensors")
    off = max(float((wrong[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())
    assert off > 1e6 * CLOSE, "far beyond rounding"
