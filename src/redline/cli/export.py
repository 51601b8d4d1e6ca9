"""Write a run's weights as a Hugging Face folder that `transformers` loads.

redline export runs/nano out/nano-hf
"""

import argparse
from pathlib import Path

HELP = "write a run's weights as a Hugging Face folder"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", type=Path, help="a run folder, a checkpoint, a Hugging Face folder or a .gguf file"
    )
    command.add_argument("out", type=Path, help="the folder to write; must be new or empty")
    command.add_argument(
        "--checkpoint", default="last", metavar="WHICH", help="of a run: last, best or step-N (default last)"
    )
    command.add_argument(
        "--dtype",
        default="fp32",
        choices=["fp32", "bf16", "fp16"],
        help="dtype of the written weights (default fp32)",
    )


def run(options: argparse.Namespace) -> None:
    from redline.cli.generate import check_model
    from redline.record.files import check_vacant

    check_model(options)
    check_vacant(options.out, "a model")
    import torch

    from redline.model.huggingface import architecture
    from redline.model.huggingface_out import write_folder
    from redline.train.restore import open_weights

    loaded = (opened := open_weights(options.model, options.checkpoint)).loaded
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    write_folder(
        options.out,
        loaded.config,
        loaded.weights,
        loaded.tokenizer_json,
        dtype,
        chat_template=loaded.chat_template,
        eos_ids=loaded.eos_ids,
    )
    print(f"{opened.source} written to {options.out} as {architecture(loaded.config)} in {options.dtype}")
