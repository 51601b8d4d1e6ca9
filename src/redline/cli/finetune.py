"""Fine-tune a model on your own examples: LoRA, or all weights with --full.

redline finetune HuggingFaceTB/SmolLM2-135M-Instruct chats.jsonl
redline finetune model.gguf pairs.json --run runs/mine --set train.epochs=1 --set lora.rank=8
redline finetune runs/gpt2 pairs.jsonl --full

The model is a run folder, a Hugging Face or PEFT folder, a .gguf file, or a name on the Hugging Face Hub. A row of
the file (JSON, JSONL, Parquet) holds messages, a prompt and a completion, or [question, answer]; docs/finetune.md
shows all forms. They go through the model's chat template; a model without one reads them as plain text
(prompt.mode=text). The result is RUN/adapter (RUN/model after --full), which `redline generate RUN` reads. If the run is
killed, run the same command again and it resumes.
"""

import argparse
import json
from pathlib import Path

from redline.cli.options import recipe_of, say_once
from redline.cli.train import check_options, train
from redline.data.examples import find_examples
from redline.data.hub import is_hub_name
from redline.errors import ConfigError
from redline.record.files import read_text
from redline.train.places import find, step_folders

ARGUMENTS = """
MODEL                      the model to start from
EXAMPLES                   a file or folder of examples, or a data set on the Hugging Face Hub
--full                     train all weights instead of an adapter
--recipe RECIPE            a recipe of workload finetune (default finetune)
--set TABLE.KEY=VALUE...   override a value, e.g. train.lr=1e-4
@RUN
@JSON
"""


def run(options: argparse.Namespace) -> int:
    check_options(options)
    if options.full and any(text.strip().startswith("lora.") for text in options.set):
        raise ConfigError("--full trains all weights and has no adapter: leave out --full or --set lora.*")
    if not is_hub_name(options.examples):
        find_examples(Path(options.examples).expanduser())
    named = [f"model.init_from={json.dumps(options.model)}", f"data.source={json.dumps(options.examples)}"]
    named += ["lora=none"] if options.full else []
    mode_given = any(text.strip().startswith("prompt.mode") for text in options.set)
    if options.recipe == "finetune" and not mode_given:
        named += _mode(options.model)
    recipe = recipe_of(options, *named, runs=("finetune",))
    options.run = options.run or Path("runs") / f"finetune-{Path(options.model).stem}"
    return train(options, recipe)


def _mode(model: str) -> list[str]:
    """Choose text mode for a run of ours or a Hugging Face folder that has no chat template."""
    folder = find(Path(model))
    ours = folder in step_folders(folder.parent).values()
    told = "chat_template" in read_text(folder / "tokenizer_config.json", missing="")
    chats = told or (folder / "chat_template.jinja").is_file()
    if ours or ((folder / "config.json").is_file() and not chats):
        say_once(f"{model} has no chat template: examples are read as plain text (prompt.mode=text)")
        return ["prompt.mode=text"]
    return []
