"""Hugging Face's side of the benchmarks: its model with our weights, the prompts of both sides, the settings of its
Trainer, and a clock.
Needs the extra `hf`.

    model = model_of(config, dict(ours.named_parameters()), device=device)
    trainer = transformers.Trainer(model, arguments(scratch, max_steps=61), callbacks=[clock(warm_up=1, per_block=5)])
"""

import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.errors import need
from redline.measure.child import synchronize
from redline.model.huggingface_out import config_json, to_huggingface


def prompts_of(work: Any, count: int) -> list[list[int]]:
    """Random tokens, none of which ends a text; a longer list begins with the shorter one."""
    random = np.random.default_rng(0)
    return [random.integers(1, work.model.vocab_size, work.prompt_tokens).tolist() for _ in range(count)]


def model_of(
    config: ModelConfig,
    weights: Mapping[str, Tensor] | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A model of our shape; with random weights where none are given."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hf = need("transformers", extra="hf")
    about = {key: value for key, value in config_json(config).items() if key != "architectures"}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with device:  # otherwise it would spend seconds drawing its weights on the CPU
        model = hf.AutoModelForCausalLM.from_config(
            hf.AutoConfig.for_model(**about, **ids), attn_implementation="sdpa", dtype=dtype
        )
    if weights is not None:
        missing, unexpected = model.load_state_dict(to_huggingface(config, weights), strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    return model


def batching_options() -> dict[str, int]:
    """Settings of its continuous batching, whose default cache takes most of a CPU's memory."""
    return {} if torch.cuda.is_available() else {"num_blocks": 64, "max_batch_tokens": 64}


def arguments(scratch: str, **own: Any) -> Any:
    """Settings of its Trainer that keep it from doing anything but train."""
    hf = need("transformers", extra="hf")
    return hf.TrainingArguments(
        output_dir=scratch, logging_steps=10**6, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), **own,
    )  # fmt: skip


def clock(*, warm_up: int, per_block: int) -> Any:
    """A callback that times the first update and blocks of updates after the warm-up, waiting at their edges only."""

    class Clock(need("transformers", extra="hf").TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.started_s, self.first_step_s = time.perf_counter(), 0.0
            self.edges_s: list[float] = []

        @property
        def blocks_s(self) -> list[float]:
            return [end - start for start, end in itertools.pairwise(self.edges_s)]

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            past = state.global_step - warm_up
            edge = past >= 0 and past % per_block == 0
            if state.global_step == 1 or edge:
                synchronize()
            if state.global_step == 1:
                self.first_step_s = time.perf_counter() - self.started_s
            if edge:
                self.edges_s.append(time.perf_counter())

    return Clock()
