"""Hugging Face folders: what we write transformers reads alike, and what we cannot compute is refused by
name."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from precision import CLOSE_FP32, assert_close
from reference_models import CONFIGS, reference, tokens_BT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from redline.config.recipe import ModelConfig
from redline.errors import CheckpointError, ConfigError, StorageError
from redline.model import huggingface_out
from redline.model.huggingface import architecture, read_config, read_folder
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.model.weights import Loaded, load_weights, shapes

LLAMA = ModelConfig(
    vocab_size=96, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=40, context_length=32
)
GPT2 = ModelConfig(
    vocab_size=96, num_layers=2, hidden_size=32, num_heads=4, ffn_size=40, context_length=32,
    norm="layernorm", positions="learned", activation="gelu", bias=True,
)  # fmt: skip


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes(config).items()}


def a_tokenizer() -> str:
    """A byte-level BPE of 300 tokens, smaller than it could be, with GPT-2's splitting rule."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat , the hat . and the 1234 bats don't chat"] * 3, trainer)
    return tokenizer.to_str()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama as we write it."""
    write_folder(tmp_path / "llama", Loaded(config=LLAMA, weights=random_weights(LLAMA)), torch.float32)
    return tmp_path / "llama"


def change(folder: Path, **values: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if value != "absent"})
    )


def change_tensors(folder: Path, **values: torch.Tensor | None) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()} | {
        k.replace("__", "."): v for k, v in values.items()
    }
    safetensors.torch.save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors"
    )


@pytest.mark.numerics
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPT2, id="gpt2"),
        pytest.param(replace(GPT2, tie_embeddings=False), id="gpt2-untied"),
        pytest.param(LLAMA, id="llama"),
        pytest.param(
            replace(LLAMA, tie_embeddings=False, head_dim=12, rope_theta=500.0, norm_eps=1e-3),
            id="llama-untied-head-dim",
        ),
        pytest.param(replace(LLAMA, bias=True), id="llama-biased"),
        pytest.param(replace(LLAMA, qkv_bias=True, num_kv_heads=None), id="qwen2"),
        pytest.param(replace(LLAMA, qkv_bias=True, head_dim=12), id="qwen2-head-dim"),
        pytest.param(
            replace(LLAMA, qk_norm=True, head_dim=16, hidden_size=30, tie_embeddings=False), id="qwen3"
        ),
    ],
)
def test_transformers_loads_what_we_write_and_gives_the_same_logits(config, tmp_path):
    weights = random_weights(config)
    model = build_model(config, device="cpu", seed=0)
    load_weights(model, weights)
    write_folder(tmp_path / "out", Loaded(config=config, weights=weights), torch.float32)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    assert theirs.generation_config.eos_token_id is None, "not the id of another tokenizer's end"
    assert_close(model(tokens_BT()), theirs.eval()(tokens_BT()).logits, close=CLOSE_FP32)
    again = read_folder(tmp_path / "out")
    assert again.config == config
    assert again.weights.keys() == weights.keys()
    assert all(torch.equal(again.weights[name], weights[name]) for name in weights)


@pytest.mark.parametrize("family", CONFIGS)
def test_their_folder_read_and_written_again_is_the_same(family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path / "in")
    loaded = read_folder(tmp_path / "in")
    write_folder(
        tmp_path / "out",
        Loaded(config=loaded.config, weights=loaded.weights, eos_ids=loaded.eos_ids),
        torch.float32,
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(again) is type(theirs)
    assert again.config.eos_token_id == theirs.config.eos_token_id
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(again.eval()(tokens_BT()).logits, theirs(tokens_BT()).logits)


def test_tokenizer_template_and_end_travel_with_a_padded_vocabulary(tmp_path):
    config, tokenizer_json = replace(LLAMA, vocab_size=320), a_tokenizer()
    tokenizer = Tokenizer.from_str(tokenizer_json)
    template = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
    weights = random_weights(config)
    write_folder(
        tmp_path / "out",
        Loaded(
            config=config,
            weights=weights,
            tokenizer_json=tokenizer_json,
            chat_template=template,
            eos_ids=(0,),
        ),
        torch.bfloat16,
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the cat , don't chat . 1234  é\n\t你<|endoftext|> the"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (0, 32)
    assert (
        theirs.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
        == "the cat<|endoftext|>"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.dtype, model.generation_config.eos_token_id) == (torch.bfloat16, 0)
    loaded = read_folder(tmp_path / "out")
    assert (loaded.tokenizer_json, loaded.chat_template, loaded.eos_ids) == (tokenizer_json, template, (0,))
    assert all(torch.equal(loaded.weights[name], weights[name].bfloat16()) for name in weights), (
        "stored dtype, exactly"
    )


def test_a_large_model_is_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_out, "SHARD_BYTES", 20_000)
    weights = random_weights(LLAMA)
    write_folder(tmp_path / "out", Loaded(config=LLAMA, weights=weights), torch.float32)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "out" / file).stat().st_size < 21_000 for file in files)
    again = read_folder(tmp_path / "out").weights
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(theirs.state_dict()["model.norm.weight"], weights["norm.weight"])
    (tmp_path / "out" / files[1]).unlink()
    with pytest.raises(CheckpointError, match=files[1]):
        read_folder(tmp_path / "out")


def test_a_folder_of_transformers_4_is_read(folder):
    change(
        folder,
        rope_parameters="absent",
        rope_theta=500.0,
        rope_scaling=None,
        head_dim="absent",
        torch_dtype="float32",
    )
    assert read_config(folder) == replace(LLAMA, rope_theta=500.0)
    change(folder, num_key_value_heads="absent", tie_word_embeddings="absent", rope_theta="absent")
    assert read_config(folder) == replace(LLAMA, num_kv_heads=None, tie_embeddings=False)


def test_the_first_gpt2_checkpoints_are_read(tmp_path):
    """Names without `transformer.`, and the causal mask stored beside the weights."""
    weights = random_weights(GPT2)
    write_folder(tmp_path / "out", Loaded(config=GPT2, weights=weights), torch.float32)
    file = tmp_path / "out" / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    safetensors.torch.save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}, file)
    again = read_folder(tmp_path / "out").weights
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "architectures must name one of .* got 'MixtralForCausalLM'",
        ),
        ({"architectures": "absent"}, "got None"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            "rope_type must be absent or default.*llama3",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type must be .*linear"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor.*0.5",
        ),
        ({"attention_bias": True}, "mlp_bias must be True.*got False"),
        ({"mlp_bias": True}, "mlp_bias must be absent or False.*got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu.*got 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config must be absent"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1},
            "sliding window",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True},
            "attention_bias must be absent or False",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": "absent"}, "head_dim must be given"),
        ({"hidden_size": "absent"}, "'hidden_size' is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"vocab_size": 0}, "vocab_size must be greater than 0 and below 2\\^31, got 0"),
        ({"num_key_value_heads": 3}, "4 heads must be a multiple of 3"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused(folder, values, message):
    change(folder, **values)
    with pytest.raises(CheckpointError, match=message):
        read_folder(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"activation_function": "gelu"},
            "activation_function must be gelu_new or gelu_pytorch_tanh.*got 'gelu'",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
    ],
)
def test_a_gpt2_that_differs_is_refused(tmp_path, values, message):
    write_folder(tmp_path / "out", Loaded(config=GPT2, weights=random_weights(GPT2)), torch.float32)
    change(tmp_path / "out", **values)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path / "out")


def test_a_window_that_no_layer_uses_is_no_obstacle(folder):
    """As Qwen2.5 ships it: a window is configured and switched off, or begins above the last layer."""
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}
    change(folder, **qwen, use_sliding_window=False, max_window_layers=1)
    assert read_config(folder).qkv_bias
    change(folder, **qwen, use_sliding_window=True, max_window_layers=2)
    assert read_config(folder).qkv_bias


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model__norm__weight": None}, "missing: model.norm.weight"),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(32)},
            "not expected: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            {"model__layers__1__self_attn__k_proj__weight": torch.zeros(32, 32)},
            r"k_proj.weight \(32, 32\) instead of \(16, 32\)",
        ),
        (
            {"model__norm__weight": torch.zeros(32, dtype=torch.int8)},
            "model.norm.weight must be fp32, bf16 or fp16, got torch.int8",
        ),
        ({"lm_head__weight": torch.zeros(96, 32)}, "tie_word_embeddings is true, yet lm_head.weight differs"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, values, message):
    change_tensors(folder, **values)
    with pytest.raises(CheckpointError, match=message):
        read_folder(folder)


def test_a_head_stored_beside_its_equal_embedding_is_no_obstacle(folder):
    embedding = safetensors.torch.load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lm_head__weight=embedding.clone())
    assert "head.weight" not in read_folder(folder).weights


def test_broken_folders_are_refused(folder, tmp_path):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated or altered"):
        read_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="fetch them again"):
        read_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"pickled.*convert them to safetensors"):
        read_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_config(folder)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(LLAMA, activation="relu2"), "activation = relu2"),
        (replace(LLAMA, norm="layernorm"), "norm = layernorm"),
        (replace(LLAMA, qk_norm=True, qkv_bias=True), "qkv_bias = True"),
        (replace(LLAMA, hidden_size=30, head_dim=8), "hidden_size = 30"),
        (replace(GPT2, bias=False), "bias = False"),
        (replace(GPT2, num_kv_heads=2), "kv_heads = 2"),
        (replace(GPT2, head_dim=16), "head_size = 16"),
    ],
)
def test_a_model_without_an_equivalent_is_refused_by_field(config, field, tmp_path):
    with pytest.raises(ConfigError, match=f"model.{field} has no equivalent in transformers"):
        write_folder(tmp_path / "out", Loaded(config=config, weights=random_weights(config)), torch.float32)
    assert not list(tmp_path.iterdir())


def test_the_architecture_follows_the_switches():
    assert architecture(GPT2) == "GPT2LMHeadModel"
    assert architecture(LLAMA) == "LlamaForCausalLM"
    assert architecture(replace(LLAMA, qkv_bias=True)) == "Qwen2ForCausalLM"
    assert architecture(replace(LLAMA, qk_norm=True)) == "Qwen3ForCausalLM"


def test_a_folder_is_never_replaced_and_never_half_there(folder, tmp_path, monkeypatch):
    with pytest.raises(StorageError, match="needs a new folder, but"):
        write_folder(folder, Loaded(config=LLAMA, weights=random_weights(LLAMA)), torch.float32)
    assert read_folder(folder).config == LLAMA

    def fail(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", fail)
        with pytest.raises(StorageError, match="No space left"):
            write_folder(tmp_path / "out", Loaded(config=LLAMA, weights=random_weights(LLAMA)), torch.float32)
    assert not (tmp_path / "out").exists()
    write_folder(tmp_path / "out", Loaded(config=LLAMA, weights=random_weights(LLAMA)), torch.float32)
    assert sorted(os.listdir(tmp_path)) == ["llama", "out"], "what the failed attempt left is gone"
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "weights are as readable as the rest"
    shutil.rmtree(tmp_path / "out")


def test_weights_are_loaded_strictly():
    model, weights = build_model(LLAMA, device="cpu", seed=0), random_weights(LLAMA)
    before = model.norm.weight
    load_weights(model, {name: weight.bfloat16() for name, weight in weights.items()})
    assert model.norm.weight is before
    assert torch.equal(model.norm.weight, weights["norm.weight"].bfloat16().float())
    with pytest.raises(CheckpointError, match=r"missing: norm\.weight"):
        load_weights(model, {name: weight for name, weight in weights.items() if name != "norm.weight"})
    with pytest.raises(CheckpointError, match=r"not expected: head\.weight"):
        load_weights(model, weights | {"head.weight": weights["embed.weight"]})
    with pytest.raises(CheckpointError, match=r"norm.weight \(3,\) instead of \(32,\)"):
        load_weights(model, weights | {"norm.weight": torch.zeros(3)})
