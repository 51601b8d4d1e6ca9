"""`redline chat`: what the model is asked with, and what a user sees of it."""

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rft_model import CHAT_TEMPLATE, CONFIG

from redline.cli.chat import Conversation, answer
from redline.cli.main import main
from redline.data.tokenizer import Tokenizer, train_bpe
from redline.engine.request import Request, Sampling
from redline.errors import ConfigError
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.model.weights import Loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(iter(["user system assistant"]), 280)


def opened(tokenizer: Tokenizer, template: str | None) -> SimpleNamespace:
    loaded = Loaded(
        config=CONFIG, weights={}, tokenizer_json=tokenizer.text, chat_template=template, eos_ids=()
    )
    return SimpleNamespace(loaded=loaded, tokenizer=tokenizer)


def test_a_conversation_goes_through_the_template_with_all_that_was_said(tokenizer):
    talk = Conversation(opened(tokenizer, CHAT_TEMPLATE), "Be brief.", 10_000)
    talk.ask("One?")
    talk.answered("1")
    ids, forgotten = talk.ask("Two?")
    text = tokenizer.decode(list(ids))
    places = [text.index(part) for part in ("Be brief.", "One?", "1", "Two?")]
    assert places == sorted(places)
    assert forgotten == 0
    talk.reset()
    fresh = tokenizer.decode(list(talk.ask("Two?")[0]))
    assert "One?" not in fresh
    assert "Be brief." in fresh


def test_the_oldest_messages_are_forgotten_when_there_is_no_more_room(tokenizer):
    talk = Conversation(opened(tokenizer, CHAT_TEMPLATE), "Be brief.", 120)
    forgotten = 0
    for number in range(8):
        ids, dropped = talk.ask(f"Question {number}?")
        assert len(ids) <= 120
        forgotten += dropped
        talk.answered("Yes.")
    assert forgotten == 16 - len(talk.messages) > 0
    text = tokenizer.decode(list(ids))
    assert "Question 7?" in text
    assert "Be brief." in text
    assert "Question 0?" not in text


def test_without_a_template_the_text_is_continued(tokenizer):
    talk = Conversation(opened(tokenizer, None), None, 30)
    talk.ask("user")
    talk.answered(" system")
    ids, _ = talk.ask("assistant")
    assert tokenizer.decode(list(ids)) == "user system\nassistant"
    ids, forgotten = talk.ask("x" * 100)
    assert (len(ids), tokenizer.decode(list(ids))) == (30, "x" * 30)
    assert forgotten > 70
    with pytest.raises(ConfigError, match="--system needs a model with a chat template"):
        Conversation(opened(tokenizer, None), "Be brief.", 30)


def test_what_a_terminal_would_obey_is_shown(tokenizer, capsys):
    def stream(asked, say):
        say("\x1b[2J")
        return SimpleNamespace(finish="stop", text="\x1b[2J", new_tokens=1)

    talk = Conversation(opened(tokenizer, CHAT_TEMPLATE), None, 1000)
    answer(SimpleNamespace(stream=stream), talk, "Hi", Request(prompt="", sampling=Sampling()))
    assert capsys.readouterr().out == "\\x1b[2J\n"
    assert talk.messages[-1] == {"role": "assistant", "content": "\x1b[2J"}


def test_a_message_that_does_not_fit_is_left_out(tokenizer, capsys):
    talk = Conversation(opened(tokenizer, CHAT_TEMPLATE), None, 60)
    answer(None, talk, "x" * 100, Request(prompt="", sampling=Sampling()))
    assert "tokens, but only 60 fit: shorten it" in capsys.readouterr().err
    assert talk.messages == []
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    talk.messages = said.copy()
    answer(None, talk, "x" * 100, Request(prompt="", sampling=Sampling()))
    assert talk.messages == said, "the conversation so far is kept"


def test_lines_from_a_pipe_are_answered(tokenizer, capsys, monkeypatch, tmp_path: Path):
    config = replace(CONFIG, vocab_size=tokenizer.vocab_size)
    weights = {name: p.detach() for name, p in build_model(config, device="cpu", seed=0).named_parameters()}
    write_folder(
        tmp_path / "model",
        Loaded(config=config, weights=weights, tokenizer_json=tokenizer.text, chat_template=CHAT_TEMPLATE),
        torch.float32,
    )

    def said(lines: str | bytes) -> str:
        piped = io.BytesIO(lines if isinstance(lines, bytes) else lines.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, "utf-8", "surrogateescape"))
        assert main(["chat", str(tmp_path / "model"), "--max-new-tokens", "6", "--temperature", "0"]) == 0
        return capsys.readouterr().out

    first = said("Hi\n")
    assert said("Hi\n\n/reset\nHi\n/quit\nHi\n") == 2 * first
    assert said("") == ""
    assert said(b"\xff\n") == said("\ufffd\n"), "a byte that is not UTF-8"
