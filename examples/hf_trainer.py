"""Hugging Face's Trainer under Redline's instruments: a small GPT-2 learns to count.

    python examples/hf_trainer.py runs/hf-trainer && redline report runs/hf-trainer

The arguments have a common fault, on purpose: gradient checkpointing, which computes every block twice to
save memory, for a model that fits many times over. The findings at the end say so.
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from redline.observe import RedlineCallback


class Counting(torch.utils.data.Dataset):
    """Rows of 64 numbers that go up by one, from anywhere, and begin again after 199."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(64) + 7 * index) % 200
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def main(folder: str) -> None:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=200, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    with tempfile.TemporaryDirectory() as checkpoints:
        args = TrainingArguments(
            checkpoints,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            max_steps=40,
            logging_steps=10,
            save_strategy="no",
            gradient_checkpointing=True,
            report_to="none",
        )
        Trainer(model, args, train_dataset=Counting(), callbacks=[RedlineCallback(folder)]).train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/hf-trainer")
