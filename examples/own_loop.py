"""A plain PyTorch loop under Redline's instruments: learn to add two numbers, character by character.

    python examples/own_loop.py runs/own-loop && redline report runs/own-loop

The loop has a common fault, on purpose: every row is padded to 48 characters, and a sum has about 12. The
findings at the end say so.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import redline

ALPHABET = "_0123456789+=;"  # the first is padding
LENGTH = 48


class Adder(nn.Module):
    """Two causal transformer blocks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.blocks(x, mask=causal, is_causal=True))


def collate(rows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    texts = [f"{a}+{b}={a + b};".ljust(LENGTH, "_") for a, b in rows]
    ids = torch.tensor([[ALPHABET.index(c) for c in text] for text in texts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def main(folder: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [tuple(pair) for pair in torch.randint(0, 1000, (2560, 2)).tolist()]
    loader = DataLoader(rows, batch_size=32, shuffle=True, collate_fn=collate)
    model = Adder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    with redline.watch(folder, model=model) as run:
        for batch in run.batches(loader):
            with run.phase("copy"):
                ids = batch["input_ids"].to(device, non_blocking=True)
            with run.phase("forward"):
                logits = model(ids[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
            with run.phase("backward"):
                loss.backward()
            with run.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop")
