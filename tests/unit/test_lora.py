"""LoRA: PEFT on the transformers model is the truth for outputs, gradients and files; merging is exact both
ways."""

import dataclasses
import json
import math
import resource
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from precision import CLOSE_FP32, assert_close
from reference_models import reference, tokens_BT

from redline.config.recipe import ModelConfig
from redline.errors import CheckpointError, ConfigError, StorageError
from redline.model.huggingface import from_huggingface, read_config
from redline.model.huggingface_out import write_folder
from redline.model.lora import (
    LoraConfig,
    LoraLinear,
    adapters,
    add_lora,
    lora_layers,
    merge,
    merged,
    merged_weights,
    unmerge,
)
from redline.model.transformer import Transformer, build_model
from redline.model.weights import Loaded, load_weights
from redline.train.adapter import peft_tensors, read_adapter, write_adapter

FAMILIES = ("llama", "llama-biased", "smollm2", "qwen2", "qwen3")
CONFIG = ModelConfig(
    vocab_size=96,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=40,
    context_length=32,
    tie_embeddings=False,
)


def ours(family: str, folder: Path) -> tuple[Transformer, transformers.PreTrainedModel]:
    theirs = reference(family)
    theirs.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [type(theirs).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_config(folder)
    model = build_model(shape, device="cpu", seed=0)
    load_weights(model, from_huggingface(shape, theirs.state_dict(), where=family))
    return model, theirs


@torch.no_grad()
def stir(model: Transformer) -> None:
    """Adapters as if trained: B no longer zero, where it may be."""
    generator = torch.Generator().manual_seed(3)
    for layer in lora_layers(model).values():
        layer.lora_b.normal_(0.0, 0.1, generator=generator).mul_(layer.scale_b / layer.config.scale)


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_our_adapter_and_computes_the_same_logits_and_gradients(
    family: str, tmp_path: Path
) -> None:
    model, theirs = ours(family, tmp_path)
    plain = model(tokens_BT())
    add_lora(model, LoraConfig(rank=4, alpha=8), seed=0)
    assert_close(model(tokens_BT()), plain, what="B is zero, so nothing changes")
    stir(model)
    write_adapter(tmp_path / "adapter", model, base=family)
    wrapped = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"), is_trainable=True)
    logits = wrapped(tokens_BT()).logits
    assert (logits - plain).abs().max() > 0.1, "the adapters do something"
    assert_close(model(tokens_BT()), logits)
    weights_BTV = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (model(tokens_BT()) * weights_BTV).sum().backward()
    (logits * weights_BTV).sum().backward()
    found = {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}
    assert {name.replace(".default", "") for name in found} == peft_tensors(model).keys()
    gradients = gradient_views(model)
    for name, gradient in found.items():
        assert_close(gradients[name.replace(".default", "")], gradient, what=name)


def gradient_views(model: Transformer) -> dict[str, torch.Tensor]:
    """The gradients by PEFT's names; what lies outside the blocks of B must be zero."""
    kept = {name: p.data for name, p in adapters(model).items()}
    for layer in lora_layers(model).values():
        assert layer.lora_b.grad is not None
        assert not layer.lora_b.grad[layer.scale_b == 0].any()
    for p in adapters(model).values():
        p.data = p.grad
    views = {name: tensor.detach().clone() for name, tensor in peft_tensors(model).items()}
    for name, p in adapters(model).items():
        p.data = kept[name]
    return views


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_what_peft_writes_we_read(tmp_path: Path) -> None:
    model, theirs = ours("smollm2", tmp_path)
    wanted = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    wrapped = peft.get_peft_model(theirs, wanted)
    wrapped.save_pretrained(str(tmp_path / "peft"))
    config = read_adapter(tmp_path / "peft", model)
    assert config == LoraConfig(rank=3, alpha=5, targets=("q", "v", "down"))
    assert_close(model(tokens_BT()), wrapped(tokens_BT()).logits)


def test_an_adapter_survives_the_folder(tmp_path: Path) -> None:
    first, second = (build_model(CONFIG, device="cpu", seed=0) for _ in range(2))
    add_lora(first, LoraConfig(rank=2, alpha=3, targets=("k", "up")), seed=4)
    stir(first)
    write_adapter(tmp_path / "a", first)
    read_adapter(tmp_path / "a", second)
    read_adapter(tmp_path / "a", second)  # into adapters of the same kind
    for name, p in adapters(first).items():
        assert torch.equal(adapters(second)[name], p), name
    with pytest.raises(StorageError, match="needs a new folder, but"):
        write_adapter(tmp_path / "a", first)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_adapter_that_the_disk_refuses_is_one_error_and_nothing_is_left(tmp_path: Path) -> None:
    """No file may grow beyond the size of the configuration: the weights do not fit."""
    model = build_model(CONFIG, device="cpu", seed=0)
    add_lora(model, LoraConfig(rank=2), seed=0)
    write_adapter(tmp_path / "whole", model)
    (config, weights) = sorted((tmp_path / "whole").iterdir())
    assert config.stat().st_size < weights.stat().st_size
    assert config.stat().st_mode == weights.stat().st_mode, "weights are as readable as the rest"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (config.stat().st_size, hard))
    try:
        with pytest.raises(
            StorageError, match=rf"adapter_model\.safetensors could not be written to {tmp_path} "
        ):
            write_adapter(tmp_path / "run", model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    write_adapter(tmp_path / "run", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"]


def test_merging_keeps_the_memory_and_unmerging_the_bits() -> None:
    model = build_model(CONFIG, device="cpu", seed=0)
    model.compute_dtype = torch.bfloat16
    add_lora(model, LoraConfig(rank=4), seed=0)
    stir(model)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with merged(model):
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name][1])}
        assert changed == {f"{name}.weight" for name in lora_layers(model)}
        for layer in lora_layers(model).values():
            truth = (
                layer.original.double() + layer.lora_b.double() @ layer.lora_a.double() * layer.config.scale
            )
            torch.testing.assert_close(layer.weight.double(), truth, rtol=2**-8, atol=1e-4)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == {
        name: at for name, (at, _) in before.items()
    }
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_a_merge_that_memory_ends_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(CONFIG, device="cpu", seed=0)
    add_lora(model, LoraConfig(rank=4), seed=0)
    stir(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    delta, left = LoraLinear.delta, [1]

    def one_delta(layer: LoraLinear) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError
        left.pop()
        return delta(layer)

    with monkeypatch.context() as patched:
        patched.setattr(LoraLinear, "delta", one_delta)
        with pytest.raises(torch.OutOfMemoryError), merged(model):
            pass
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with merged(model):
        assert all(layer.original is not None for layer in lora_layers(model).values())


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_a_merged_model_computes_what_the_adapted_one_does(tmp_path: Path) -> None:
    model = build_model(CONFIG, device="cpu", seed=0)
    add_lora(model, LoraConfig(rank=4), seed=0)
    stir(model)
    logits = model(tokens_BT())
    merge(model)
    assert_close(model(tokens_BT()), logits)
    exported = {name: tensor.clone() for name, tensor in merged_weights(model).items()}
    unmerge(model)
    assert exported.keys() == merged_weights(model).keys()
    for name, tensor in merged_weights(model).items():
        assert_close(tensor, exported[name], what=name)
    write_folder(tmp_path / "hf", Loaded(config=CONFIG, weights=merged_weights(model)), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_close(theirs(tokens_BT()).logits, logits)


def test_a_is_drawn_like_pefts_and_only_from_the_seed_and_its_own_name() -> None:
    some, all_ = (build_model(CONFIG, device="cpu", seed=0) for _ in range(2))
    add_lora(some, LoraConfig(targets=("k", "down")), seed=1)
    add_lora(all_, LoraConfig(), seed=1)
    few, many = peft_tensors(some), peft_tensors(all_)
    assert few.keys() < many.keys()
    assert all(torch.equal(tensor, many[name]) for name, tensor in few.items())
    drawn = [tensor for name, tensor in many.items() if "lora_A" in name]
    assert len({tensor.sum().item() for tensor in drawn}) == len(drawn), "no two alike"
    for tensor in drawn:
        bound = 1 / math.sqrt(tensor.shape[1])
        assert 0.9 * bound < tensor.abs().max() <= bound
        assert abs(tensor.std() * math.sqrt(3) / bound - 1) < 0.1
    assert not any(tensor.any() for name, tensor in many.items() if "lora_B" in name)


def test_the_model_is_frozen_and_held_in_its_compute_dtype() -> None:
    model = build_model(dataclasses.replace(CONFIG, tie_embeddings=True), device="cpu", seed=0)
    model.compute_dtype = torch.bfloat16
    add_lora(model, LoraConfig(), seed=0)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == adapters(model).keys()
    assert {p.dtype for p in adapters(model).values()} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if name not in learning} == {torch.bfloat16}
    assert model.rope_cos.dtype == torch.float32
    assert model.head.weight is model.embed.weight


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute: Any) -> None:
    """Adding the adapter's product in place would change what selective recomputation keeps."""
    model = build_model(CONFIG, device="cpu", seed=0)
    add_lora(model, LoraConfig(rank=4), seed=0)
    stir(model)
    found = []
    for how in ("none", recompute):
        for block in model.blocks:
            block.recompute = how
        loss = model(tokens_BT() % 96, tokens_BT() % 96)
        found.append((loss, *torch.autograd.grad(loss, list(adapters(model).values()))))
    for got, want in zip(*found, strict=True):
        assert_close(got, want)


@pytest.mark.slow
def test_a_compiled_layer_computes_what_the_eager_one_does() -> None:
    """The compiler of torch 2.13 loses the factor of an addition to a product, silently."""
    model = build_model(CONFIG, device="cpu", seed=0)
    add_lora(model, LoraConfig(rank=4), seed=0)
    stir(model)
    layer = model.blocks[0].attn.qkv
    x_ND = torch.randn(16, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = []
    for forward in (layer.forward, torch.compile(layer.forward, fullgraph=True)):
        y = forward(x_ND)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x_ND, layer.lora_a, layer.lora_b])))
    for eager, compiled in zip(*found, strict=True):
        assert_close(compiled, eager, close=CLOSE_FP32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"alpha": 0.0}, "alpha must be greater than 0"),
        ({"alpha": math.inf}, "alpha must be greater than 0"),
        ({"targets": ()}, "at least one"),
        ({"targets": ("q", "q")}, "none twice"),
        ({"targets": ("q_proj",)}, "got 'q_proj'"),
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**wrong)


def test_adapters_are_not_put_on_twice_nor_where_there_is_nothing() -> None:
    model = build_model(dataclasses.replace(CONFIG, activation="gelu"), device="cpu", seed=0)
    with pytest.raises(ConfigError, match="layers that the model has"):
        add_lora(model, LoraConfig(targets=("gate",)), seed=0)
    add_lora(model, LoraConfig(), seed=0)
    with pytest.raises(ConfigError, match="adapters already"):
        add_lora(model, LoraConfig(), seed=0)


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = build_model(CONFIG, device="cpu", seed=0)
    with pytest.raises(ConfigError, match="no adapters"):
        write_adapter(tmp_path / "a", model)
    add_lora(model, LoraConfig(rank=2), seed=0)
    write_adapter(tmp_path / "a", model)
    larger = build_model(dataclasses.replace(CONFIG, num_layers=3), device="cpu", seed=0)
    with pytest.raises(CheckpointError, match="does not fit the model: base_model"):
        read_adapter(tmp_path / "a", larger)
    path = tmp_path / "a" / "adapter_config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": ["c_attn"]}, "c_attn"),
        ({"peft_type": "IA3"}, "LORA"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=message):
            read_adapter(tmp_path / "a", model)
    path.write_text(json.dumps(config))
    weights = tmp_path / "a" / "adapter_model.safetensors"
    safetensors.torch.save_file({"other": torch.zeros(1)}, weights)
    with pytest.raises(CheckpointError, match="its weights have none"):
        read_adapter(tmp_path / "a", model)
    weights.write_bytes(b"half")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_adapter(tmp_path / "a", model)
    gpt2 = dataclasses.replace(
        CONFIG, norm="layernorm", positions="learned", activation="gelu", bias=True, num_kv_heads=None
    )
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        read_adapter(tmp_path / "a", build_model(gpt2, device="cpu", seed=0))
