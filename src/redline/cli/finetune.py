"""Fine-tune a model on your own examples: LoRA, or all weights with --full.

redline finetune HuggingFaceTB/SmolLM2-135M-Instruct chats.jsonl
redline finetune model.gguf pairs.json --run runs/mine --set train.epochs=1 --set lora.rank=8
redline finetune runs/gpt2 texts.jsonl --full --set prompt.mode=text

The model is a run folder, a Hugging Face or PEFT folder, a .gguf file, or a name on the Hugging Face Hub. A row of
the file (JSON, JSONL, Parquet) holds messages, a prompt and a completion, or [question, answer]; docs/finetune.md
shows all forms. The result is RUN/adapter (RUN/model after --full), which `redline generate RUN` reads. If the run is
killed, run the same command again and it resumes.
"""

import argparse
import json
from pathlib import Path

from redline.cli.arguments import JSON
from redline.cli.options import recipe_of
from redline.cli.train import RUN, check_options, train
from redline.data.examples import find_examples
from redline.errors import ConfigError
from redline.model.hub import is_hub_name

ARGUMENTS = f"""
MODEL                      the model to start from
EXAMPLES                   a file or folder of examples, or a data set on the Hugging Face Hub
--full                     train all weights instead of an adapter
--recipe RECIPE            a recipe of workload finetune (default finetune)
--set TABLE.KEY=VALUE...   override a value, e.g. train.lr=1e-4
{RUN}
{JSON}
"""


def run(options: argparse.Namespace) -> int:
    check_options(options)
    if not is_hub_name(options.examples):
        find_examples(Path(options.examples).expanduser())
    named = [f"model.init_from={json.dumps(options.model)}", f"data.source={json.dumps(options.examples)}"]
    recipe = recipe_of(options, *named, *(["lora=none"] if options.full else []))
    if recipe.workload != "finetune":
        raise ConfigError(
            f"{options.recipe} is a recipe of workload {recipe.workload}: give one of workload finetune"
        )
    options.run = options.run or Path("runs") / f"finetune-{Path(options.model).stem}"
    return train(options, recipe)
