"""Prompts: chat templates rendered as transformers renders them, special tokens recognised in prompts and
nowhere else."""

from dataclasses import replace

import pytest
import tokenizers
from rft_model import CHAT_TEMPLATE, CONFIG

from redline.config.recipe import PromptConfig
from redline.data.tokenizer import Tokenizer, train_bpe
from redline.engine import template
from redline.engine.prompt import answer_text, ask, end_id, stop_ids
from redline.engine.template import fill
from redline.errors import ConfigError, DataError
from redline.model.weights import Loaded
from redline.tasks.registry import load_task
from redline.tasks.task import STOP, prompt_messages, prompt_text

SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(train_bpe(iter(["user system assistant"]), 280).text)
    inner.add_special_tokens(SPECIAL)
    return Tokenizer(inner.to_str(), "test")


@pytest.fixture(scope="module")
def loaded(tokenizer: Tokenizer) -> Loaded:
    (end,) = tokenizer.encode_prompt("<|im_end|>")
    return Loaded(
        config=CONFIG, weights={}, tokenizer_json=tokenizer.text, chat_template=CHAT_TEMPLATE, eos_ids=(end,)
    )


def test_special_tokens_are_recognised_in_prompts_and_are_text_in_documents(tokenizer):
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = tokenizer.encode_prompt(text)
    assert (ids[0], ids[-1]) == (tokenizer.vocab_size - 2, tokenizer.vocab_size - 1)
    assert not set(ids[:1] + ids[-1:]) & set(tokenizer.encode([text])[0])
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode([text])[0]) == text
    plain = "How many h is 2 days?"
    assert tokenizer.encode_prompt(plain) == tokenizer.encode([plain])[0]


LOOPS = (
    "{%- for m in messages %}{%- if loop.index > 3%}{% break %}{%- endif %}\n  {%- if m.role == 'system'"
    " -%}\n[{{ m.content | trim }}]{%- else %}<{{ m.role }}>{{ m.content | tojson }}{% endif %}\n{% endfor"
    " %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LOOPS])
@pytest.mark.parametrize("shots", [0, 1, None])
def test_a_chat_template_is_rendered_as_transformers_does(tokenizer, loaded, template, shots):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.text), chat_template=template
    )
    task = load_task("units")
    question = task.questions("valid", 1, 0)[0]
    how = PromptConfig(mode="chat", shots=shots)
    _, text, ids, stops = ask(task, question, replace(loaded, chat_template=template), tokenizer, how)
    messages = prompt_messages(task, question, shots)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert list(ids) == theirs(text, add_special_tokens=False)["input_ids"]
    assert stops == ()


def test_a_model_without_a_template_continues_text(tokenizer, loaded):
    task = load_task("units")
    question = task.questions("valid", 1, 0)[0]
    bare = replace(loaded, chat_template=None)
    asked = ask(task, question, bare, tokenizer, PromptConfig(mode="text", shots=1))
    assert (asked.text, asked.stops) == (prompt_text(task, question, 1), (STOP,))
    with pytest.raises(ConfigError, match=r"prompt\.mode=text"):
        ask(task, question, bare, tokenizer, PromptConfig(mode="chat", shots=1))


def test_an_answer_ends_as_a_turn_ends_or_as_a_document(tokenizer, loaded):
    assert end_id(loaded, tokenizer, "chat") == loaded.eos_ids[0] != tokenizer.eot_id
    assert end_id(loaded, tokenizer, "text") == tokenizer.eot_id
    assert stop_ids(loaded, tokenizer) == (loaded.eos_ids[0], tokenizer.eot_id)
    assert (answer_text(" 3 * 4\n", "chat"), answer_text("3 * 4", "text")) == ("3 * 4", " 3 * 4")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "bos_token"),
        ("{% for m in messages %}", "chat template"),
        ("{{ raise_exception('only tools here') }}", "only tools here"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "chat template"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ '%s %s' % 1 }}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ '\ud800' }}", "surrogates not allowed"),
        ("{{ 'a' * 5000000 }}", "5,000,000 characters"),
        ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tokenizer, loaded, template, message):
    task, how = load_task("units"), PromptConfig(mode="chat", shots=0)
    with pytest.raises(DataError, match=message) as caught:
        ask(task, task.questions("valid", 1, 0)[0], replace(loaded, chat_template=template), tokenizer, how)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended_and_the_next_one_is_rendered(monkeypatch, template):
    monkeypatch.setattr("redline.engine.template.PROCESSOR_S", 1)
    monkeypatch.setattr("redline.engine.template._process", None)
    with pytest.raises(DataError, match="it took more than 1 s"):
        fill(template)
    assert fill("{{ a }}", a="next") == "next"


def test_a_prompt_after_an_interrupted_one_is_its_own():
    """Ctrl-C comes while the process has the first prompt."""
    assert fill("{{ a }}", a="before") == "before"
    process = template._process
    assert process is not None

    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

    waiting, process.stdout = process.stdout, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        fill("{{ a }}", a="first")
    process.stdout = waiting
    assert fill("{{ a }}", a="second") == "second"
