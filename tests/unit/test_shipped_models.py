"""Models that come with the package: small, opened by name, made by the recipe that stands beside them."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

from redline.config.differences import differences
from redline.config.load import from_toml, load_recipe
from redline.config.recipe import ModelConfig
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.model.weights import Loaded
from redline.train.places import shipped_models
from redline.train.restore import open_on, open_weights

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from demo_corpus import documents

MOST_BYTES = 12_000_000


@pytest.mark.parametrize("name", shipped_models())
def test_a_model_is_small_and_says_how_it_was_made(name: str) -> None:
    folder = shipped_models()[name]
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= MOST_BYTES
    recipe = from_toml((folder / "recipe.toml").read_text(encoding="utf-8"), where=name)
    assert [
        change
        for change in differences(load_recipe(f"{name}-base"), recipe)
        if not change.startswith("data.source")
    ] == []
    assert open_weights(Path(name)).config == recipe.model
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["step"] == recipe.train.steps


def test_a_name_is_the_shipped_model_unless_the_user_has_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(
        vocab_size=16, num_layers=1, hidden_size=8, num_heads=2, ffn_size=8, context_length=8
    )
    shipped, own = tmp_path / "package" / "demo", tmp_path / "cwd" / "demo"
    own.parent.mkdir()
    write_folder(
        shipped,
        Loaded(config=config, weights=dict(build_model(config, device="cpu", seed=0).named_parameters())),
        torch.bfloat16,
    )
    monkeypatch.setattr("redline.train.places.shipped_models", lambda: {"demo": shipped})
    monkeypatch.chdir(own.parent)
    assert open_weights(Path("demo")).source == shipped
    shutil.copytree(shipped, own)
    assert open_weights(Path("./demo")).source == Path("demo")


def test_the_demo_model_has_learnt_its_corpus() -> None:
    opened, model = open_on(Path("demo"), device="cpu")
    ids = [
        token
        for tokens in opened.tokenizer.encode_documents(list(documents(200, seed=12345)))
        for token in tokens.tolist()
    ]
    tokens_BT = torch.tensor(ids[: 16 * 257]).view(16, 257)
    with torch.no_grad():
        loss = float(model(tokens_BT[:, :-1], tokens_BT[:, 1:])) / tokens_BT[:, 1:].numel()
    assert loss < 0.2 * math.log(model.config.vocab_size)
