"""What only a GPU does around its kernels, on a machine without one (pretended_gpu.py): an update captured as a CUDA graph
leaves the same weights as one that is launched kernel by kernel, and the engine generates what it does on a CPU. Each in a
process of its own, as in test_interpreted."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="torch for CPUs comes without it; `make kernels` brings it")

from pretended_gpu import Graph, let_loops_run, pretending

from redline.config.recipe import LoraConfig, ModelConfig, TrainConfig
from redline.data.candidates import draw
from redline.data.loader import Batch
from redline.engine import kernels as choice
from redline.engine import one_row
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.model import lora
from redline.model.attention import cache_kernels
from redline.model.transformer import Transformer, build_model, redraw_when_due
from redline.train import packed
from redline.train.graph import Captured
from redline.train.objective import Capturable, Eager, Sequences
from redline.train.optimizer import make_optimizers
from redline.train.orthogonality import penalty
from redline.train.packed import Example, ExampleBatch, Packed
from redline.train.process import Process
from redline.train.step import Learner

CONFIG = ModelConfig(
    vocab_size=64, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_size=48, context_length=32
)
# Numbers that fp32 holds exactly: a graph reads its rates and momenta in fp32, an eager update in double precision.
TRAIN = TrainConfig(lr=2**-9, muon_lr=2**-6, weight_decay=2**-4, optimizer="muon", batch_size=4, steps=4)
MOMENTA = 0.875, 0.75


@pytest.mark.parametrize(
    "cases", [("waits", "pretraining"), ("kernel_attention",), ("adapters",), ("decoding",)], ids=" and ".join
)
def test_a_graph_does_what_its_launches_do(cases: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, __file__, *cases],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def pretraining() -> None:
    """Muon and AdamW, a fused loss over candidates, queries and keys normalised with their rotation; two passes; sequences
    that become longer, which takes a second graph."""
    generator = torch.Generator().manual_seed(0)

    def batch(number: int, rows: int, length: int) -> Batch:
        tokens = torch.randint(64, (rows, length + 1), generator=generator)
        words = draw(tokens[:, 1:].flatten().numpy(), size=48, vocab_size=64, seed=number)
        return Batch(tokens[:, :-1], tokens[:, 1:], {"row": number}, torch.from_numpy(words))

    def made() -> Transformer:
        return build_model(replace(CONFIG, qk_norm=True, activation="relu2"), device="cpu", seed=0)

    batches = [batch(0, 8, 2), batch(1, 8, 2), batch(2, 2, 8), batch(3, 2, 8)]
    told = check_captured(made, Sequences(pass_size=1, share=2), batches)
    assert [one["rows_tokens"] for one in told] == [[8], [8]]


def kernel_attention() -> None:
    """Random features that are redrawn between two updates."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (3, 2, 5), generator=generator)
    batches = [Batch(rows[:, :-1], rows[:, 1:], {"row": number}) for number, rows in enumerate(tokens)]
    config = replace(CONFIG, attention="favor", features=24, redraw_every=2)
    (told,) = check_captured(
        lambda: build_model(config, device="cpu", seed=0), Sequences(pass_size=2, share=2), batches
    )
    assert told["graphs"] == 1


def adapters() -> None:
    """Packed examples, with a workspace: gradients on a second stream, casts and scales of all adapters in one kernel."""
    generator = torch.Generator().manual_seed(0)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 64, (number,), generator=generator).tolist())

    def made() -> Transformer:
        model = build_model(CONFIG, device="cpu", seed=0)
        model.compute_dtype = torch.float16
        lora.add_lora(model, LoraConfig(rank=8, alpha=16), seed=0)
        torch.manual_seed(0)
        for p in lora.adapters(model).values():
            torch.nn.init.normal_(p, std=0.1)
        return model

    updates = [[Example(tokens(3 + i), tokens(2 + i)) for i in range(4)] for _ in range(2)]
    with ExitStack() as stack:  # short rows: the interpreter takes a millisecond for a program
        for step in ("TOKENS_STEP", "ANSWERS_STEP", "LONGEST_STEP"):
            stack.enter_context(patch.object(packed, step, 16))
        objective = Packed(updates, pass_size=4, batch_size=4, context_length=32, static=True)
    batches = [ExampleBatch(examples, done) for done, examples in enumerate(updates, 1)]
    (told,) = check_captured(made, objective, batches, optimizer="adamw")
    assert told["one_piece"]


def check_captured(
    make: Callable[[], Transformer], objective: Capturable, batches: Iterable[Any], **train: Any
) -> list[dict[str, Any]]:
    """Trains two models, one captured, and compares them after every update; returns what was said of the captures."""
    told: list[dict[str, Any]] = []
    learners = []
    for _ in range(2):
        model = make()
        model.compute_dtype, model.cross_entropy, model.apart = torch.float16, "fused", True
        optimizers = make_optimizers(model, replace(TRAIN, **train), captured=True)
        learner = Learner(model, optimizers, Process(0, 1, torch.device("cpu")), 1.0)
        if not lora.adapters(model):
            learner.penalise = penalty(model, replace(TRAIN, orthogonality=2**-6), lambda: 0)
        learners.append(learner)
    with pretending():
        eager = Eager(learners[0], objective)
        captured = Captured(learners[1], objective, lambda _, **facts: told.append(facts))
        for number, batch in enumerate(batches):
            for learner in learners:  # what the loop changes before an update
                for group in (group for optimizer in learner.optimizers for group in optimizer.param_groups):
                    group |= {"momentum": MOMENTA[number % 2]} if "momentum" in group else {}
                redraw_when_due(learner.model, 0, number, lambda: None)
            given = {"targets": float(batch.targets), "lr_factor": 1.0 / 2 ** (number % 2)}
            one, other = (executor.take(batch, **given).numbers for executor in (eager, captured))
            torch.testing.assert_close(other, one)
            torch.testing.assert_close(learned(learners[1].model), learned(learners[0].model))
    return told


def learned(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


class Count:
    """No text: the number of tokens."""

    def decode_batch(self, texts: list[list[int]]) -> list[str]:
        return [str(len(ids)) for ids in texts]


def decoding() -> None:
    """Slots that are refilled, steps and prompts as graphs, a cut-off; and the kernels of a step of one row, in fp32 here."""
    for slots, sampling in (
        (2, Sampling(max_new_tokens=3, temperature=1.0, top_p=0.9)),
        (1, Sampling(max_new_tokens=3, temperature=0.0)),
    ):
        ours, theirs = (generated(slots, sampling, on_gpu=on_gpu) for on_gpu in (True, False))
        assert ours.keys() == theirs.keys()
        for sample, (tokens, logprobs) in ours.items():
            assert tokens == theirs[sample][0]
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(theirs[sample][1]))


def generated(
    slots: int, sampling: Sampling, *, on_gpu: bool
) -> dict[tuple[Any, int], tuple[tuple[int, ...], tuple[float, ...]]]:
    model = build_model(replace(CONFIG, init_std=0.2, qk_norm=True), device="cpu", seed=0)
    tokenizer: Any = Count()
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    asked = [
        Request(prompt=(3, 4, 5 + i), sampling=sampling, samples=2, seed=i, tag=i)
        for i in range(4)  # two, and two more, which a graph reads
    ]
    with pretending() if on_gpu else nullcontext():
        engine = LocalEngine(model, tokenizer, slots=slots, max_prompt_tokens=3, max_new_tokens=3)
        decoder: Any = engine.decoder
        if on_gpu:
            decoder.cuda = decoder.graphs = decoder.goes_on = True
            decoder.ops, decoder.forward.state._kernels = choice, cache_kernels
            decoder.forward.one_row = one_row if slots == 1 else None
        found = [one for half in (asked[:2], asked[2:]) for one in engine.run(half)]
        assert not on_gpu or (decoder._captured and any(decoder._reads.values()))
    assert len(found) == 8
    return {(one.request.tag, one.sample): (one.tokens, one.logprobs) for one in found}


def waits() -> None:
    """A capture that reads a number on the host is refused, and what it had written is as before."""
    with pretending():
        total = torch.zeros(2)

        def read_too_early() -> None:
            with torch.cuda.graph(Graph()):
                total.add_(1).sum().item()

        with pytest.raises(AssertionError, match="cannot wait"):
            read_too_early()
        with torch.cuda.graph(graph := Graph()):
            total.add_(1)
        assert not total.any()
        graph.replay()
        assert total.tolist() == [1, 1]


if __name__ == "__main__":
    let_loops_run()
    for case in sys.argv[1:]:
        globals()[case]()
