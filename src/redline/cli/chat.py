"""Talk to a model: each line is a message, and the answer appears as it is generated. A model with a chat template
answers in a conversation; one without continues the text so far, yours and its own. Lines may come from a pipe.

redline chat demo
redline chat SmolLM2-135M-Instruct.gguf --system "Answer briefly."
echo "ROMEO:" | redline chat runs/nano --max-new-tokens 100

/reset forgets the conversation; /quit or Ctrl-D ends it.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from redline.cli.options import find_model, status
from redline.engine.request import Request, Sampling
from redline.errors import ConfigError
from redline.record.units import visible

if TYPE_CHECKING:
    from redline.engine.local import LocalEngine
    from redline.train.restore import Opened

ARGUMENTS = """
@MODEL
@DEVICE
--system TEXT          system message; needs a chat template
--max-new-tokens N     most tokens of an answer (default 256)
--temperature NUMBER   0 is greedy (default 0.7)
--seed N               the same seed gives the same answers (default 0)
"""
MOST_HISTORY = 8192
"""Most tokens of a conversation to keep, even if the model's context holds more: keys and values take memory."""


class Conversation:
    """The messages so far, and the prompt they make."""

    def __init__(self, opened: "Opened", system: str | None, most_tokens: int) -> None:
        self.loaded, self.tokenizer, self.most_tokens = opened.loaded, opened.tokenizer, most_tokens
        self.chats = self.loaded.chat_template is not None
        if system is not None and not self.chats:
            raise ConfigError("--system needs a model with a chat template, but this one has none: omit it")
        self.system = [{"role": "system", "content": system}] if system is not None else []
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.text = ""

    def ask(self, message: str) -> tuple[tuple[int, ...], int]:
        """The prompt's token ids, and how many messages (tokens, for plain text) were dropped to make it fit."""
        if not self.chats:
            self.text += f"\n{message}" if self.text else message
            ids = tuple(self.tokenizer.encode([self.text])[0])
            return ids[-self.most_tokens :], max(0, len(ids) - self.most_tokens)
        self.messages.append({"role": "user", "content": message})
        forgotten = 0
        while len(ids := self._ids()) > self.most_tokens and len(self.messages) > 1:
            del self.messages[:2]  # a question with its answer
            forgotten += 2
        return ids, forgotten

    def answered(self, text: str) -> None:
        self.text += text
        self.messages.append({"role": "assistant", "content": text})

    def _ids(self) -> tuple[int, ...]:
        from redline.engine.prompt import chat_prompt

        return tuple(self.tokenizer.encode_prompt(chat_prompt(self.loaded, [*self.system, *self.messages])))


def run(options: argparse.Namespace) -> None:
    sampling = Sampling(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    asked = Request(prompt="", sampling=sampling, seed=options.seed)
    path = find_model(options)
    from redline.engine.local import LocalEngine
    from redline.engine.prompt import stop_ids
    from redline.train.restore import open_on

    opened, model = open_on(path, options.checkpoint, options.device)
    context = model.config.context_length
    new = min(options.max_new_tokens, max(1, context // 2))
    talk = Conversation(opened, options.system, min(context - new, MOST_HISTORY))
    asked = replace(asked, sampling=replace(sampling, max_new_tokens=new))
    stops = stop_ids(opened.loaded, opened.tokenizer)
    if sys.stdin.isatty():
        kind = "a chat template" if talk.chats else "no chat template: it continues your text"
        status(f"{opened.source} has {kind}. /reset forgets the conversation; /quit or Ctrl-D ends it.")
    sizes = {"slots": 1, "max_prompt_tokens": talk.most_tokens, "max_new_tokens": new}
    with LocalEngine(model, opened.tokenizer, **sizes, eos_ids=stops) as engine:
        for number, message in enumerate(_messages(talk)):
            answer(engine, talk, message, replace(asked, seed=asked.seed + number))


def _messages(talk: Conversation) -> Iterator[str]:
    """Yield the lines meant for the model."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # no tokenizer accepts what Python makes of bytes that are not UTF-8
        sys.stdin.reconfigure(errors="replace")
    if terminal := sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() its editing and its history
    while True:
        try:
            line = input("> ") if terminal else next(sys.stdin).removesuffix("\n")
        except (EOFError, StopIteration):
            break
        if line.strip() == "/quit":
            break
        if line.strip() == "/reset":
            talk.reset()
        elif line.strip():
            yield line
    if terminal:
        print()


def answer(engine: "LocalEngine", talk: Conversation, message: str, asked: Request) -> None:
    before = talk.messages.copy()
    ids, forgotten = talk.ask(message)
    if len(ids) > talk.most_tokens:
        status(f"your message has {len(ids)} tokens, but only {talk.most_tokens} fit: shorten it")
        talk.messages = before
        return
    if forgotten:
        status(f"(dropped the first {forgotten} {'messages' if talk.chats else 'tokens'} to make room)")
    asked = replace(asked, prompt=ids)
    completion = engine.stream(asked, lambda piece: print(visible(piece), end="", flush=True))
    print(flush=True)
    if completion.finish == "length" and talk.chats:
        status(f"(cut off at {completion.new_tokens} tokens, the limit of --max-new-tokens)")
    talk.answered(completion.text)
