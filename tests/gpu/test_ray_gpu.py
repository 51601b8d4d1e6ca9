"""A worker on Ray with a GPU writes what the local engine writes there, before and after new adapters are published."""

from typing import Any

import pytest
import torch

from redline.config.recipe import LoraConfig, ModelConfig
from redline.data.tokenizer import train_bpe
from redline.engine.local import LocalEngine
from redline.engine.ray import OnRay, RayEngine
from redline.engine.request import Request, Sampling
from redline.model.lora import adapters, add_lora, merged
from redline.model.transformer import build_model

ray = pytest.importorskip("ray")
CONFIG = ModelConfig(
    vocab_size=300,
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=512,
    context_length=128,
)


def test_a_worker_with_a_gpu_is_the_local_engine():
    tokenizer = train_bpe(iter(["a few words"]), CONFIG.vocab_size)
    model = build_model(CONFIG, device="cuda", seed=0)
    model.compute_dtype = torch.bfloat16
    add_lora(model, LoraConfig(rank=4, alpha=8), seed=0)
    warm = Sampling(max_new_tokens=32, temperature=1.0)
    asked = [Request(prompt=(n, 6, 7), sampling=warm, samples=8, seed=n, tag=n) for n in range(20)]
    room: dict[str, Any] = {"slots": 64, "max_prompt_tokens": 8, "max_new_tokens": 32, "reproducible": True}

    def named(completions):
        return {(one.request.tag, one.sample): (one.tokens, one.logprobs) for one in completions}

    def local():
        with merged(model), LocalEngine(model, tokenizer, **room) as engine:
            return named(engine.run(asked))

    ray.init("local", num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with RayEngine(model, tokenizer, place=OnRay(workers=1), **room) as engine:
            first = named(engine.run(asked))
            assert first == local()
            for adapter in adapters(model).values():
                adapter.data += 0.01
            engine.publish(model)
            second = named(engine.run(asked))
            assert second == local() != first
    finally:
        ray.shutdown()
