"""From a question to what the model reads: through its chat template, or as text to be continued.

    asked = ask(task, question, loaded, tokenizer, recipe.prompt)     # its text, token ids, what ends an answer
    answer = [*tokenizer.encode([answer_text(reasoning, mode)])[0], end_id(loaded, tokenizer, mode)]     # to train on

Templates are rendered by `template`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from redline.config.recipe import PromptConfig, PromptMode
from redline.data.tokenizer import Tokenizer
from redline.engine.template import fill
from redline.errors import ConfigError
from redline.model.weights import Loaded
from redline.tasks.task import STOP, Question, Task, prompt_messages, prompt_text


class Asked(NamedTuple):
    """A question as a model reads it."""

    question: Question
    text: str
    prompt: tuple[int, ...]
    """The text as token ids."""
    stops: tuple[str, ...]
    """Texts that end an answer."""


def ask(
    task: Task,
    question: Question,
    loaded: Loaded,
    tokenizer: Tokenizer,
    prompt: PromptConfig,
    *,
    trained: bool = False,
) -> Asked:
    """The question as the recipe presents it; `trained`: as training and what follows it do."""
    shots = prompt.shots_of(trained=trained)
    stops: tuple[str, ...] = ()  # a chat model ends its turn with a token
    if prompt.mode == "text":
        text, stops = prompt_text(task, question, shots), (STOP,)
    else:
        text = chat_prompt(loaded, prompt_messages(task, question, shots))
    return Asked(question, text, tuple(tokenizer.encode_prompt(text)), stops)


def chat_prompt(loaded: Loaded, messages: list[dict[str, str]], *, unanswered: bool = True) -> str:
    """A conversation as the model's chat template puts it, up to where the answer begins if one is to follow."""
    if loaded.chat_template is None:
        raise ConfigError(
            "a chat prompt needs a model with a chat template, but this one has none: set prompt.mode=text,"
            " or leave out --chat"
        )
    return fill(loaded.chat_template, messages=messages, add_generation_prompt=unanswered, tools=None)


def answer_text(text: str, mode: PromptMode) -> str:
    """An answer as it is trained on after its prompt: a text prompt ends with 'Answer:', so a space follows."""
    return text.strip() if mode == "chat" else f" {text.strip()}"


def end_id(loaded: Loaded, tokenizer: Tokenizer, mode: PromptMode) -> int:
    """The token after an answer: what the template puts at the end of a turn, or the end of a document."""
    if mode == "text":
        return tokenizer.eot_id
    mark = "Redline's answer"
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
    after = tokenizer.encode_prompt(chat_prompt(loaded, turn, unanswered=False).rpartition(mark)[2])
    return after[0] if after and after[0] in loaded.eos_ids else tokenizer.eot_id


def tokenized(
    loaded: Loaded, tokenizer: Tokenizer, mode: PromptMode, chats: Sequence[list[dict[str, str]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and answer (the last message) of each conversation as token ids. In mode `text` the messages before the
    answer are lines of the prompt."""
    end = end_id(loaded, tokenizer, mode)
    if mode == "chat":
        prompts = [chat_prompt(loaded, chat[:-1]) for chat in chats]
        answers = [chat[-1]["content"].strip() for chat in chats]
    else:
        prompts = ["\n".join(message["content"] for message in chat[:-1]) for chat in chats]
        answers = [chat[-1]["content"] for chat in chats]
    ids = tokenizer.encode(answers)
    return [
        (tuple(tokenizer.encode_prompt(prompt)), (*answer, end))
        for prompt, answer in zip(prompts, ids, strict=True)
    ]


def stop_ids(loaded: Loaded, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*loaded.eos_ids, tokenizer.eot_id)))
