"""GGUF files: written here with the gguf package from tiny models of transformers, read back, and compared
with those models."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
import transformers
from precision import CLOSE_FP32, assert_close
from reference_models import reference, tokens_BT
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from redline.errors import CheckpointError
from redline.model.gguf import read_gguf
from redline.model.huggingface import read_folder
from redline.model.transformer import build_model
from redline.model.weights import load_weights

ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "smollm2": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TEXT = "In 1969 don't  panic: 12345 cafés,\t 你好 <|im_start|>user\n\n  x_y(); e\u0301<|im_end|>\r\n the end"


def permuted(rows: numpy.ndarray, heads: int) -> numpy.ndarray:
    """As llama.cpp's converter does for the architecture llama."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    architecture: str,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: dict[str, Any] | None = None,
    extra: dict[str, int] | None = None,
) -> None:
    config = model.config
    heads, kv_heads = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", config.num_attention_heads),
    )
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(kv_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if architecture == "qwen3":
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
    for key, value in (extra or {}).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    if tokenizer is not None:
        add_tokenizer(writer, **tokenizer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = numpy.ascontiguousarray(array.T)
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = permuted(array, heads if "q_proj" in name else kv_heads)
        quantised = array.ndim == 2 and array.shape[1] % 32 == 0
        stored = gguf.quants.quantize(array, kind) if quantised else array
        writer.add_tensor(
            names.get_name(name, (".weight", ".bias")), stored, raw_dtype=kind if quantised else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(
    writer: gguf.GGUFWriter, tokens: list[str], kinds: list[int], merges: list[str], pre: str
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")


def a_tokenizer(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A trained tokenizer with the splitting rule of that name as Hugging Face writes it, and what a GGUF
    file says of it."""
    tokenizer = Tokenizer(models.BPE())
    # Trained without a rule on words that each rule would split, so that every rule makes a difference.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT.replace("<|", "< |")] * 3, trainer)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    elif pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = transformers.Qwen2Tokenizer(
            vocab={}, merges=[]
        ).backend_tokenizer.pre_tokenizer
    else:
        tokenizer.pre_tokenizer = byte_level
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    unused = ["[PAD320]", "[PAD321]"]
    kinds = [3, 3] + [1] * (len(tokens) - 2) + [5, 5]
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    return tokenizer, {"tokens": tokens + unused, "kinds": kinds, "merges": merges, "pre": pre}


@pytest.mark.numerics
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_gives_the_model_it_was_made_from(family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", theirs, ARCHITECTURES[family])
    loaded, folder = read_gguf(tmp_path / "model.gguf"), read_folder(tmp_path)
    assert loaded.config == folder.config
    assert all(torch.equal(loaded.weights[name], weight) for name, weight in folder.weights.items())
    assert (loaded.tokenizer_json, loaded.chat_template, loaded.eos_ids) == (None, None, ())
    ours = build_model(loaded.config, device="cpu", seed=0)
    load_weights(ours, loaded.weights)
    assert_close(ours(tokens_BT()), theirs(tokens_BT()).logits, close=CLOSE_FP32)


@pytest.mark.parametrize(("kind", "levels"), [("Q8_0", 254), ("Q4_1", 15)])
def test_quantised_weights_come_back_within_half_a_level(kind, levels, tmp_path):
    theirs = reference("llama")
    theirs.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", theirs, "llama", kind=gguf.GGMLQuantizationType[kind])
    loaded, whole = read_gguf(tmp_path / "model.gguf"), read_folder(tmp_path).weights
    for name, weight in whole.items():
        got = loaded.weights[name]
        assert got.dtype == torch.float32
        if weight.dim() == 1 or weight.shape[1] % 32:
            assert torch.equal(got, weight), name
        else:
            blocks, error = weight.view(-1, 32), (got - weight).view(-1, 32).abs().amax(1)
            span = 2 * blocks.abs().amax(1) if kind == "Q8_0" else blocks.amax(1) - blocks.amin(1)
            # Scale and offset are 16-bit floats, hence the second term.
            assert bool((error <= 0.5 * span / levels + 2e-3 * blocks.abs().amax(1)).all()), name
            assert bool((error > 0).any()), name


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2"])
def test_the_tokenizer_is_rebuilt(pre, tmp_path):
    tokenizer, about = a_tokenizer(pre)
    write(tmp_path / "model.gguf", reference("llama"), "llama", tokenizer=about)
    loaded = read_gguf(tmp_path / "model.gguf")
    assert loaded.tokenizer_json is not None
    again = Tokenizer.from_str(loaded.tokenizer_json)
    ids = again.encode(TEXT).ids
    assert ids == tokenizer.encode(TEXT).ids
    assert {0, 1} < set(ids), "control tokens are read as such"
    assert again.decode(ids) == tokenizer.decode(ids)
    assert again.get_vocab() == tokenizer.get_vocab(), "without the rows that only pad the embedding"
    assert (loaded.eos_ids, loaded.chat_template) == ((1,), "{{ messages }}")


def test_what_cannot_be_read_exactly_is_refused(tmp_path):
    model, path = reference("llama"), tmp_path / "model.gguf"
    _, about = a_tokenizer("gpt-2")
    write(path, model, "llama", tokenizer=about | {"pre": "deepseek-llm"})
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre must be one of .* got 'deepseek-llm'"):
        read_gguf(path)
    write(path, model, "llama", tokenizer=about | {"merges": ["a nosuchtoken"]})
    with pytest.raises(CheckpointError, match="every merge"):
        read_gguf(path)
    write(path, model, "llama", extra={"expert_count": 8})
    with pytest.raises(CheckpointError, match=r"llama\.expert_count must be 0 .*got 8"):
        read_gguf(path)
    write(path, reference("llama-biased"), "llama")
    with pytest.raises(CheckpointError, match=r"not expected: blk\.0\.attn_k\.bias"):
        read_gguf(path)


def test_broken_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match="No such file"):
        read_gguf(path)
    write(path, reference("smollm2"), "llama", tokenizer=a_tokenizer("smollm")[1])
    whole = path.read_bytes()
    for length in (0, 3, 4, 17, 100, 1_000, 5_000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="not a GGUF file, or it is truncated"):
            read_gguf(path)
    path.write_bytes(b"no" + whole)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_gguf(path)


@pytest.mark.skipif(
    "REDLINE_SMOLLM2_GGUF" not in os.environ,
    reason="REDLINE_SMOLLM2_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf",
)
def test_smollm2_knows_the_capital_of_france():
    loaded = read_gguf(Path(os.environ["REDLINE_SMOLLM2_GGUF"]))
    assert (loaded.config.num_layers, loaded.config.norm_eps, loaded.config.rope_theta) == (
        30,
        1e-5,
        100_000.0,
    )
    assert loaded.eos_ids == (2,)
    model = build_model(replace(loaded.config, context_length=512), device="cpu", seed=0)
    load_weights(model, loaded.weights)
    assert loaded.tokenizer_json is not None
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json)
    tokens = torch.tensor([tokenizer.encode("The capital of France is").ids])
    with torch.no_grad():
        assert tokenizer.decode([int(model(tokens)[0, -1].argmax())]) == " Paris"
