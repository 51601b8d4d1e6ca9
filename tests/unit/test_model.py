"""The transformer against transformers: logits, loss and the gradient of every parameter, family by
family."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from precision import assert_close
from reference_models import CONFIGS, reference, tokens_BT
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from redline.config.recipe import IGNORED, ModelConfig
from redline.model.huggingface import from_huggingface, read_folder
from redline.model.transformer import Block, Transformer, build_model
from redline.model.weights import load_weights
from redline.plan.arithmetic import recomputed_weights

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("double")]

CONFIG = ModelConfig(
    vocab_size=64, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, context_length=32
)


def loss_and_gradients(
    model: Transformer, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_loss_and_gradients_equal_transformers(family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    loaded = read_folder(tmp_path)
    ours = build_model(loaded.config, device="cpu", seed=0)
    load_weights(ours, loaded.weights)

    tokens, targets = tokens_BT(), tokens_BT().roll(-1, dims=1)
    targets[0, :5] = IGNORED
    logits = theirs(tokens).logits
    assert_close(ours(tokens), logits)

    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    expected.backward()
    loss, gradients = loss_and_gradients(ours, tokens, targets)
    assert_close(loss, expected.detach())
    named = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in from_huggingface(loaded.config, named, where="gradients").items():
        assert_close(gradients.pop(name), gradient, what=name)
    assert not gradients, "parameters that transformers does not have"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_recomputation_and_chunks_change_nothing(recompute, loss_chunks):
    model = build_model(CONFIG, device="cpu", seed=0)
    tokens, targets = tokens_BT() % 64, tokens_BT().roll(-1, dims=1) % 64
    targets[1, 3:9] = IGNORED
    loss, gradients = loss_and_gradients(model, tokens, targets)
    model.loss_chunks = loss_chunks
    for block in model.blocks:
        block.recompute = recompute
    again_loss, again = loss_and_gradients(model, tokens, targets)
    assert_close(again_loss, loss)
    assert again.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(again[name], gradient, what=name)


def test_blocks_that_leave_their_last_addition_to_the_next_norm_change_no_bit():
    model = build_model(CONFIG, device="cpu", seed=0)
    tokens, targets = tokens_BT() % 64, tokens_BT().roll(-1, dims=1) % 64
    loss, gradients = loss_and_gradients(model, tokens, targets)
    model.apart = True
    with patch.object(Block, "forward", side_effect=AssertionError("a whole block ran")):
        again_loss, again = loss_and_gradients(model, tokens, targets)
    assert torch.equal(again_loss, loss)
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_losses_one_by_one_and_summed_equal_plain_torch(loss_chunks):
    """With gradients, through an objective that is not linear in the losses, as a policy ratio is."""
    model = build_model(CONFIG, device="cpu", seed=0)
    model.loss_chunks = loss_chunks
    tokens, targets = tokens_BT() % 64, tokens_BT().roll(-1, dims=1) % 64
    targets[1, 3:9] = IGNORED
    weights = torch.randn(targets.shape, generator=torch.Generator().manual_seed(0))
    picked = model(tokens).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(targets != IGNORED, -picked, 0.0)

    losses = model(tokens, targets, reduction="none")
    assert_close(losses, expected)
    assert not losses[targets == IGNORED].any()
    for objective, truth in (
        (model(tokens, targets), expected.sum()),
        (((1 - losses).exp() * weights).sum(), ((1 - expected).exp() * weights).sum()),
    ):
        assert_close(objective, truth)
        found, wanted = (
            torch.autograd.grad(of, list(model.parameters()), retain_graph=True) for of in (objective, truth)
        )
        for gradient, want in zip(found, wanted, strict=True):
            assert_close(gradient, want)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_saves_activations(recompute):
    """What autograd keeps for the backward pass, counted: the point of recomputing."""

    def kept_bytes(kind: str) -> int:
        model = build_model(CONFIG, device="cpu", seed=0)
        for block in model.blocks:
            block.recompute = kind  # type: ignore[assignment]
        storages: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.hidden(tokens_BT() % 64, None)
        return sum(storages.values())

    assert kept_bytes(recompute) < 0.5 * kept_bytes("none")


def test_full_recomputation_multiplies_the_blocks_again_but_for_their_last_product():
    """Counted by torch, against the arithmetic that `diagnose` and the roofline predict by."""
    products = {}
    for kind in ("none", "full"):
        model = build_model(CONFIG, device="cpu", seed=0)
        for block in model.blocks:
            block.recompute = kind
        with FlopCounterMode(display=False) as counter:
            model.hidden(tokens_BT() % 64, None).sum().backward()
        products[kind] = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert products["full"] - products["none"] == 2 * tokens_BT().numel() * recomputed_weights(CONFIG)


def test_weights_are_drawn_from_the_seed_and_their_name_alone():
    small = dict(build_model(CONFIG, device="cpu", seed=3).named_parameters())
    deep = dict(
        build_model(ModelConfig(**{**vars(CONFIG), "num_layers": 3}), device="cpu", seed=3).named_parameters()
    )
    for name, weight in small.items():
        # these shrink with depth: std / sqrt(2 layers)
        residual = name.endswith(("attn.out.weight", "ffn.down.weight"))
        assert_close(weight, deep[name] * (3 / 2) ** 0.5 if residual else deep[name], what=name)
    other = dict(build_model(CONFIG, device="cpu", seed=4).named_parameters())
    drawn = [name for name in small if "norm" not in name]
    assert all(not torch.equal(small[name], other[name]) for name in drawn)
    assert not torch.equal(small["blocks.0.ffn.up.weight"], small["blocks.1.ffn.up.weight"])
    assert float(small["embed.weight"].detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(small["blocks.0.ffn.down.weight"].detach().std()) == pytest.approx(0.02 / 4**0.5, rel=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_built_model_ties_its_embeddings_as_configured(tied):
    model = build_model(ModelConfig(**{**vars(CONFIG), "tie_embeddings": tied}), device="cpu", seed=0)
    assert (model.head.weight is model.embed.weight) == tied
    assert ("head.weight" in dict(model.named_parameters())) != tied
