"""Generate text from a run, a checkpoint, a Hugging Face folder or a GGUF file.

redline generate runs/nano --prompt "ROMEO:" --samples 2
"""

import argparse
import os
from pathlib import Path

HELP = "generate text from a trained model"


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", type=Path, help="a run folder, a checkpoint, a Hugging Face folder or a .gguf file")
    command.add_argument("--checkpoint", default="last", metavar="WHICH", help="of a run: last, best or step-N (default last)")
    command.add_argument("--device", default=None, help="cuda or cpu (default: cuda where there is one)")


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    add_model(command)
    command.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times (default: a new document)")
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate at most (default 128)")
    command.add_argument("--samples", type=int, default=1, metavar="N", help="texts per prompt (default 1)")
    command.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    command.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens of this total probability")
    command.add_argument("--seed", type=int, default=0, help="the same seed gives the same texts (default 0)")
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from redline.cli.options import print_json, status
    from redline.engine.simple import Sampling, generate_all
    from redline.machine.facts import read_facts
    from redline.plan.hardware import hardware_here
    from redline.plan.planner import samples_at_once
    from redline.train.restore import open_on

    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        samples=options.samples,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    opened, model = open_on(options.model, options.checkpoint, options.device)
    at_once = samples_at_once(model.config, hardware_here(read_facts(), None).memory_bytes, os.environ)
    texts: list[dict[str, str | int]] = []
    for prompt in options.prompt or [""]:
        room = model.config.context_length - max(1, len(opened.tokenizer.encode([prompt])[0]))
        if 0 < room < sampling.max_new_tokens:
            status(f"note: the model's context of {model.config.context_length} leaves room for {room} new tokens")
        for sample, text in enumerate(generate_all(model, opened.tokenizer, prompt, sampling, at_once=at_once)):
            if not options.json:
                divider = "----\n" if texts else ""
                print(f"{divider}{prompt}{text}", flush=True)
            texts.append({"prompt": prompt, "sample": sample, "text": text})
    if options.json:
        print_json(texts)
