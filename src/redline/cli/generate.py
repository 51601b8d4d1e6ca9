"""Generate text from a run, a checkpoint, a Hugging Face folder or a GGUF file.

redline generate runs/nano --prompt "ROMEO:" --samples 2
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from redline.cli.options import find_model, print_json, status
from redline.engine.request import Request, Sampling
from redline.plan.bounds import Outside, bounded_slots
from redline.plan.plan import Why
from redline.record.units import visible

if TYPE_CHECKING:
    from redline.train.restore import Opened

ARGUMENTS = """
@MODEL
@DEVICE
--prompt TEXT...       a prompt (default: a new document)
--chat                 put each prompt through the model's chat template, as a user's message
--max-new-tokens N     tokens to generate at most (default 128)
--samples N            texts per prompt (default 1)
--temperature NUMBER   0 is greedy (default 0.8)
--top-k K              sample from the K likeliest tokens
--top-p NUMBER         sample from the likeliest tokens of this total probability (default 1)
--seed N               the same seed gives the same texts (default 0)
@JSON
"""


def run(options: argparse.Namespace) -> None:
    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    sampling = Sampling(**{name: getattr(options, name) for name in names})
    asked = Request(prompt="", sampling=sampling, samples=options.samples, seed=options.seed)
    path = find_model(options)
    from redline.engine.local import LocalEngine, fitting_slots
    from redline.engine.prompt import stop_ids
    from redline.train.restore import open_on

    opened, model = open_on(path, options.checkpoint, options.device)
    prompts = options.prompt or [""]
    ids = _prompt_ids(prompts, opened, chat=options.chat)
    context, longest = model.config.context_length, max(map(len, ids))
    # reserve memory for what fits, not for what was asked
    new = min(sampling.max_new_tokens, max(1, context - min(map(len, ids))))
    sampling = replace(sampling, max_new_tokens=new)
    requests = [replace(asked, prompt=one, sampling=sampling, tag=number) for number, one in enumerate(ids)]
    if 0 < context - longest < options.max_new_tokens:
        status(f"note: the model's context of {context} leaves room for {context - longest} new tokens")
    longest, stops = min(longest, context), stop_ids(opened.loaded, opened.tokenizer)
    fitting = fitting_slots(model, max_prompt_tokens=longest, max_new_tokens=new)
    wanted = min(fitting, len(prompts) * options.samples), Why(reason="", source="rule")
    slots, _ = bounded_slots(wanted, Outside(environment=os.environ))
    ready: dict[tuple[int, int], str] = {}
    texts: list[dict[str, str | int]] = []
    sizes = {"slots": slots, "max_prompt_tokens": longest, "max_new_tokens": new}
    with LocalEngine(model, opened.tokenizer, **sizes, eos_ids=stops) as engine:
        for completion in engine.run(requests):
            ready[completion.request.tag, completion.sample] = completion.text
            # print in the order asked for, each as soon as it is there
            while (at := divmod(len(texts), options.samples)) in ready:
                texts.append({"prompt": prompts[at[0]], "sample": at[1], "text": ready.pop(at)})
                if not options.json:
                    divider = "----\n" if len(texts) > 1 else ""
                    text = f"{divider}{prompts[at[0]]}{' → ' if options.chat else ''}{texts[-1]['text']}"
                    print(visible(text), flush=True)
    if options.json:
        print_json(texts)


def _prompt_ids(prompts: Sequence[str], opened: "Opened", *, chat: bool) -> list[tuple[int, ...]]:
    """An empty prompt begins a new document."""
    from redline.engine.prompt import chat_prompt

    tokenizer = opened.tokenizer
    if chat:
        chats = ([{"role": "user", "content": prompt}] for prompt in prompts)
        return [tuple(tokenizer.encode_prompt(chat_prompt(opened.loaded, chat))) for chat in chats]
    return [tuple(tokenizer.encode([prompt])[0]) or (tokenizer.eot_id,) for prompt in prompts]
