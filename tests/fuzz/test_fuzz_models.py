"""Foreign models: whatever their files say, a model or one line, and nothing is built or allocated first.

Memory is limited while a file is read, so that an allocation by what a file claims is an error here and not the end
of somebody's machine.
"""

import json
import resource
import shutil
import struct
from pathlib import Path

import gguf
import numpy
import pytest
import safetensors.torch
import torch
from hostile import answer, contents, each_crafted, put, values
from hypothesis import given
from hypothesis import strategies as st

from redline.config.recipe import ModelConfig
from redline.errors import CheckpointError, MachineError
from redline.model.huggingface_out import write_folder
from redline.model.lora import LoraConfig, add_lora
from redline.model.transformer import build_model
from redline.model.weights import Loaded
from redline.train.adapter import write_adapter
from redline.train.restore import open_weights

SMALL = ModelConfig(vocab_size=64, num_layers=2, hidden_size=16, num_heads=2, ffn_size=32, context_length=32)
GPT2 = ModelConfig(
    **(SMALL.__dict__ | {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True})
)
ALLOWED_BYTES = 4 << 30

numbers = st.integers(-3, 3) | st.sampled_from([10**6, 2**31, 2**62, 10**30]) | st.floats()
anything = numbers | values


@pytest.fixture(autouse=True)
def limited():
    """At most ALLOWED_BYTES more than there are now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ALLOWED_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def written(folder: Path, config: ModelConfig) -> Path:
    weights = {name: p.detach() for name, p in build_model(config, device="cpu", seed=0).named_parameters()}
    write_folder(folder, Loaded(config=config, weights=weights, eos_ids=[1]), torch.float32)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {"llama": written(root / "llama", SMALL), "gpt2": written(root / "gpt2", GPT2)}
    model = build_model(SMALL, device="cpu", seed=0)
    add_lora(model, LoraConfig(rank=2), seed=0)
    write_adapter(root / "adapter", model, base=str(made["llama"]))
    write_gguf(root / "model.gguf")
    return made | {"adapter": root / "adapter", "gguf": root / "model.gguf"}


def write_gguf(path: Path, **facts: object) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    said = {
        "embedding_length": 16,
        "block_count": 1,
        "attention.head_count": 2,
        "feed_forward_length": 32,
        "context_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in (said | facts).items():
        kind = gguf.GGUFValueType.get_type(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**31:
            kind = gguf.GGUFValueType.INT64
        writer.add_key_value(f"llama.{key}", value, kind)
    rows = {"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (16, 16), "attn_v": (16, 16)}
    rows |= {"attn_output": (16, 16), "ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32)}
    shapes = {f"blk.0.{name}": shape for name, shape in rows.items()}
    for name, shape in (shapes | {"token_embd": (64, 16), "output_norm": (16,)}).items():
        writer.add_tensor(f"{name}.weight", numpy.zeros(shape, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def changed(folder: Path, name: str, change: dict[str, object]) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def copy(models: dict[str, Path], kind: str, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(models[kind], to))


def test_the_models_open_as_they_are(models):
    for path in models.values():
        open_weights(path)


@given(data=st.data(), kind=st.sampled_from(["llama", "gpt2"]))
def test_a_configuration_of_anything(models, tmp_path, data, kind):
    folder = copy(models, kind, tmp_path / "model")
    keys = [*json.loads((folder / "config.json").read_text()), "rope_scaling", "layer_types", "n_inner"]
    changed(
        folder,
        "config.json",
        data.draw(st.dictionaries(st.sampled_from(keys), anything, min_size=1, max_size=3)),
    )
    opened = answer(lambda: open_weights(folder))
    if opened is not None:
        answer(lambda: opened.build("cpu"))


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("llama", {"num_hidden_layers": 1_000_000}, "1,000,000 layers"),
        ("llama", {"hidden_size": 2**31 - 2}, "parameters"),
        ("gpt2", {"n_positions": 2**30}, "parameters"),
        ("llama", {"max_position_embeddings": 2**31}, r"below 2\^31"),
        ("llama", {"num_attention_heads": 0}, "num_heads must be greater than 0"),
        ("llama", {"head_dim": "64"}, "head_dim must be a whole number"),
        ("llama", {"rope_theta": [1]}, "rope_theta must be a number"),
        ("llama", {"architectures": 7}, "architectures must name"),
        ("llama", {"eos_token_id": ["end"]}, "eos_token_id must be"),
    ],
)
def test_sizes_are_those_of_the_weights(models, tmp_path, kind, change, why):
    folder = copy(models, kind, tmp_path / "model")
    changed(folder, "config.json", change)
    if "eos_token_id" in change:
        changed(folder, "generation_config.json", change)
    with pytest.raises(CheckpointError, match=why):
        open_weights(folder)


@pytest.mark.parametrize(
    "change", [{"context_length": 2_000_000_000}, {"num_layers": 10**9}, {"hidden_size": 2**30}]
)
def test_a_model_that_no_machine_holds_is_refused_before_it_is_built(change):
    with pytest.raises(MachineError, match="make it smaller"):
        build_model(ModelConfig(**(SMALL.__dict__ | change)), device="cpu", seed=0)


@given(raw=contents)
@each_crafted
def test_every_file_of_a_folder(models, tmp_path, raw):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        folder = copy(models, "llama", tmp_path / "model")
        put(folder / name, raw)
        answer(lambda folder=folder: open_weights(folder), names=folder)


@given(index=anything)
def test_an_index_of_anything(models, tmp_path, index):
    folder = copy(models, "llama", tmp_path / "model")
    for table in (index, {"weight_map": index}, {"weight_map": {"lm_head.weight": index}}):
        put(folder / "model.safetensors.index.json", json.dumps(table).encode())
        answer(lambda: open_weights(folder))


def test_an_index_names_files_beside_it_alone(models, tmp_path):
    folder = copy(models, "llama", tmp_path / "model")
    for table in ({}, {"weight_map": {"lm_head.weight": "../llama/model.safetensors"}}):
        put(folder / "model.safetensors.index.json", json.dumps(table).encode())
        with pytest.raises(CheckpointError, match="weight_map"):
            open_weights(folder)


@given(data=st.data())
def test_tensors_of_any_shape(models, tmp_path, data):
    kind = data.draw(st.sampled_from(["llama", "gpt2", "adapter"]))
    folder = copy(models, kind, tmp_path / "model")
    path = next(folder.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(path)
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensors[name] = torch.zeros(data.draw(st.lists(st.integers(0, 40), max_size=4)))
    safetensors.torch.save_file(tensors, path)
    answer(lambda: open_weights(folder))


@given(
    raw=st.binary(max_size=40),
    at=st.integers(0, 3000),
    size=st.integers(0, 4000),
    kind=st.sampled_from(["llama", "adapter"]),
)
def test_weights_with_bytes_changed(models, tmp_path, raw, at, size, kind):
    folder = copy(models, kind, tmp_path / "model")
    path = next(folder.glob("*.safetensors"))
    whole = bytearray(path.read_bytes())
    whole[at : at + len(raw)] = raw
    put(path, bytes(whole[: size or None]))
    answer(lambda: open_weights(folder))


@given(
    change=st.dictionaries(
        st.sampled_from(
            ["r", "lora_alpha", "target_modules", "base_model_name_or_path", "bias", "peft_type"]
        ),
        anything,
        min_size=1,
    )
)
def test_an_adapter_of_anything(models, tmp_path, change):
    folder = copy(models, "adapter", tmp_path / "adapter")
    changed(folder, "adapter_config.json", change)
    answer(lambda: open_weights(folder))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"r": 10**9}, "its weights have 2"),
        ({"r": 2.5}, "r must be a whole number"),
        ({"target_modules": [["q_proj"]]}, "target_modules must be"),
        ({"base_model_name_or_path": "ITSELF"}, "names itself"),
        ({"base_model_name_or_path": "a\0b"}, "no such path"),
    ],
)
def test_adapters_that_lie(models, tmp_path, change, why):
    folder = copy(models, "adapter", tmp_path / "adapter")
    if change.get("base_model_name_or_path") == "ITSELF":
        change = {"base_model_name_or_path": str(folder)}
    changed(folder, "adapter_config.json", change)
    with pytest.raises(CheckpointError, match=why):
        open_weights(folder)


@given(
    facts=st.dictionaries(
        st.sampled_from(
            [
                "block_count",
                "context_length",
                "embedding_length",
                "feed_forward_length",
                "attention.head_count",
                "attention.key_length",
                "attention.head_count_kv",
                "rope.freq_base",
            ]
        ),
        st.sampled_from(
            [0, -1, 1, 3, 2**31, 2**62, 1.5, float("nan"), float("inf"), "text", True, [1, 2], ["a"]]
        ),
        min_size=1,
        max_size=2,
    )
)
def test_a_gguf_file_that_says_anything(tmp_path, facts):
    write_gguf(tmp_path / "model.gguf", **facts)
    opened = answer(lambda: open_weights(tmp_path / "model.gguf"))
    if opened is not None:
        answer(lambda: opened.build("cpu"))


@given(data=st.data())
def test_a_gguf_file_with_bytes_changed(models, tmp_path, data):
    whole = bytearray(models["gguf"].read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 900))
        patch = data.draw(
            st.binary(min_size=1, max_size=12)
            | st.sampled_from([struct.pack("<q", n) for n in (2**40, -1, 2**62)])
        )
        whole[at : at + len(patch)] = patch
    answer(lambda: open_weights(put(tmp_path / "model.gguf", bytes(whole))))


def test_a_list_that_a_gguf_file_does_not_hold_is_not_gone_through(models, tmp_path):
    """2^60 numbers that are not there: the library alone would go through them one by one."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("llama.list", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    whole = (tmp_path / "model.gguf").read_bytes()
    name = whole.index(b"llama.list") + len("llama.list") + 8
    put(tmp_path / "model.gguf", whole[:name] + struct.pack("<q", 2**60) + whole[name + 8 :])
    with pytest.raises(CheckpointError, match="ends too soon"):
        open_weights(tmp_path / "model.gguf")
