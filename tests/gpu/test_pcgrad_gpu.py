"""PCGrad on a real GPU: kept on the device or in the host's memory, the projected gradient is the paper's."""

import numpy as np
import pytest
import torch

from redline.config.recipe import ModelConfig
from redline.model.transformer import Transformer, build_model
from redline.train.pcgrad import PCGrad
from redline.train.process import Process
from redline.train.step import Learner, Pass, backpropagated, update

GROUPS = ("maths", "code")
CONFIG = ModelConfig(
    vocab_size=2048, num_layers=2, hidden_size=192, num_heads=6, ffn_size=512, context_length=64
)
PROCESS = Process(0, 1, torch.device("cuda", 0))


def passes(model: Transformer) -> list[Pass]:
    """The second group unlearns half of what the first learns, and learns something else."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x_BT, y_BT, z_BT = (torch.randint(2048, (4, 64), generator=generator, device="cuda") for _ in range(3))
    return [
        backpropagated(lambda: model(x_BT, y_BT), "maths"),
        backpropagated(lambda: model(x_BT, z_BT) - 0.5 * model(x_BT, y_BT), "code"),
    ]


def gradient(model: Transformer, chosen: list[Pass], learner: Learner) -> torch.Tensor:
    found: list[torch.Tensor] = []
    learner.before_update = lambda: found.extend(
        p.grad.flatten().double() for p in model.parameters() if p.grad is not None
    )
    update(learner, chosen, targets=256)
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


@pytest.mark.parametrize("place", ["device", "host"])
def test_it_is_the_papers(place) -> None:  # type: ignore[no-untyped-def]
    model = build_model(CONFIG, device=PROCESS.device, seed=0)
    g1, g2 = (gradient(model, [one], Learner(model, [], PROCESS, 0.0)) for one in passes(model))
    inner = g1 @ g2
    assert inner < 0
    expected = g1 + g2 - inner / (g2 @ g2) * g2 - inner / (g1 @ g1) * g1
    learner = Learner(model, [], PROCESS, 0.0)
    learner.combine = PCGrad(
        learner, groups=GROUPS, mode="global", seed=0, updates_done=lambda: 0, place=place
    )
    found = gradient(model, passes(model), learner)
    # fp32 sums of both groups, weighted by at most 1 + |g1|/|g2|; atomics add in another order every time
    weight = float(1 + torch.maximum(g1.norm() / g2.norm(), g2.norm() / g1.norm()))
    assert float((found - expected).norm() / expected.norm()) < 2**-24 * np.sqrt(2) * 2**10 * weight
