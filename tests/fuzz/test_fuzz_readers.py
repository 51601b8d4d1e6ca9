"""Every file of ours, with anything in it: what it says, or one line. And recipes with anything in them."""

import json
from pathlib import Path

import pytest
from hostile import answer, contents, each_crafted, put, values
from hypothesis import given
from hypothesis import strategies as st

from redline.config.load import load_recipe
from redline.data.examples import read_chats
from redline.errors import ConfigError
from redline.machine.facts import read_facts
from redline.machine.store import cache_path, cached
from redline.plan.plan import load
from redline.record.read import read_run
from redline.train.checkpoint_files import verify
from redline.train.places import read_best
from redline.tune.store import tuned_plan

FACTS = read_facts()
READERS = {
    "plan.json": lambda path: load(path),
    "best.json": lambda path: read_best(path.parent),
    "state.json": lambda path: verify(path.parent),
    "chats.jsonl": lambda path: read_chats(path),
    "chats.json": lambda path: read_chats(path),
    "result.json": lambda path: tuned_plan(path.parent, load_recipe("nano")),
    "recipe.toml": lambda path: load_recipe(str(path)),
    "events.jsonl": lambda path: read_run(path.parent),
    "metrics.jsonl": lambda path: read_run(path.parent),
    "evaluations.jsonl": lambda path: read_run(path.parent),
}


@pytest.mark.parametrize("name", READERS)
@given(raw=contents)
@each_crafted
def test_a_file_of_anything(tmp_path, name, raw):
    path = put(tmp_path / "place" / name, raw)
    answer(lambda: READERS[name](path), names=path.parent)


@given(raw=contents)
@each_crafted
def test_ceilings_that_cannot_be_read_are_measured_again(tmp_path_factory, raw):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        put(cache_path(FACTS), raw)
        told: list[str] = []
        assert cached(FACTS, told.append) is None
        assert "will be measured again" in told[0]


@given(row=values)
def test_examples_of_anything(tmp_path, row):
    rows = [
        row,
        {"messages": row},
        {"prompt": row, "completion": row},
        {"messages": [{"role": row, "content": row}]},
    ]
    path = put(tmp_path / "chats.jsonl", b"\n".join(json.dumps(each).encode() for each in rows))
    if (chats := answer(lambda: read_chats(path))) is not None:
        json.dumps(chats.rows, ensure_ascii=False).encode()


KEYS = [
    "train.steps",
    "train.lr",
    "model.num_layers",
    "data.source",
    "data.seq_len",
    "plan.prefetch",
    "plan.slots",
]


@given(
    overrides=st.lists(
        st.builds(
            "{}={}".format, st.sampled_from([*KEYS, "name", "model", "nothing.at", "train.steps.x"]), values
        )
        | st.text(max_size=20),
        max_size=3,
    )
)
def test_overrides_of_anything(overrides):
    answer(lambda: load_recipe("nano", overrides))


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/x",
        "a/../../b",
        "",
        ".",
        ".hidden",
        "a" * 101,
        "a\0b",
        "a\x1b[2Jb",
        "a\nb",
        "a/b/c/d",
        "a//b",
    ],
)
def test_a_name_names_a_folder_under_runs(name):
    with pytest.raises(ConfigError, match="name must be"):
        load_recipe("nano", [f"name={json.dumps(name)}"])


def test_the_recipes_that_ship_have_good_names():
    for name in ("nano", "seeds/000", "rft/demo"):
        assert Path("runs", load_recipe(name).name).resolve().is_relative_to(Path("runs").resolve())
