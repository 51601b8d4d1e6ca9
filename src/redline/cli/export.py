"""Write a run's weights as a Hugging Face folder that `transformers` loads.

redline export runs/nano out/nano-hf
"""

import argparse

from redline.cli.options import find_model
from redline.record.files import check_vacant

ARGUMENTS = """
@MODEL
OUT                        the folder to write; must be new or empty
--dtype {fp32,bf16,fp16}   dtype of the written weights (default fp32)
"""


def run(options: argparse.Namespace) -> None:
    model = find_model(options)
    check_vacant(options.out, "a model")
    import torch

    from redline.model.huggingface import architecture
    from redline.model.huggingface_out import write_folder
    from redline.train.restore import open_weights

    opened = open_weights(model, options.checkpoint)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    write_folder(options.out, opened.loaded, dtypes[options.dtype])
    family = architecture(opened.loaded.config)
    print(f"{opened.source} written to {options.out} as {family} in {options.dtype}")
