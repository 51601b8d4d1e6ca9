"""OKADFA: its diagnoses against what they say, its recipes against the sizes that they claim, and its study, which
makes every run once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_feedback import LLAMA, Told, learned, random_feedback, true_signals

from redline.cli import okadfa as command
from redline.cli.main import main
from redline.config.dfa import DfaConfig
from redline.config.load import load_recipe
from redline.config.recipe import ModelConfig
from redline.data.loader import Batch
from redline.errors import ConfigError, StorageError, TrainingError
from redline.machine.facts import read_facts
from redline.model.transformer import Transformer, build_model
from redline.plan.arithmetic import parameters
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.pretrain import pretrain
from redline.record.metrics import METRICS
from redline.train.alignment import Diagnosis
from redline.train.feedback import FeedbackAlignment
from redline.train.objective import Sequences
from redline.train.process import Process, join
from redline.train.step import BackPropagation, Learner
from redline.tune import okadfa
from redline.tune.okadfa import ARMS, study

TINY = [
    "model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "model.ffn_size=32", "model.features=8",
    "model.vocab_size=512", "train.batch_size=2", "train.steps=4", "train.eval_every=2", "train.eval_sequences=2",
    "train.checkpoint_every=0",
]  # fmt: skip


def batch_of(rows: int = 4) -> Batch:
    tokens = torch.randint(61, (rows, 13), generator=torch.Generator().manual_seed(3))
    return Batch(tokens[:, :-1], tokens[:, 1:], {})


def diagnosed(model: Transformer, rule: Any, *, recipe: str = "okadfa/nano") -> dict[str, float]:
    """Of 4 rows, of which 4 // 3 layers = 1 is looked at."""
    learner = Learner(model, [], Process(0, 1, torch.device("cpu")), 0.0, rule=rule)
    chosen = load_recipe(recipe)
    hardware = hardware_here(read_facts(), None)
    found = Diagnosis(replace(chosen, model=model.config), make_plan(chosen, hardware)).measure(
        learner, Sequences(pass_size=4, share=4), batch_of()
    )
    assert all(p.grad is None for p in model.parameters())
    return {name: float(value) for name, value in found.items()}


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_true_feedback_has_cosine_one_and_no_error():
    model, batch = build_model(LLAMA, device="cpu", seed=0), batch_of()
    signals = true_signals(model, batch.inputs_BT[:1], batch.targets_BT[:1], weight=1 / batch.targets)
    found = diagnosed(model, FeedbackAlignment(DfaConfig(), Told(signals)))
    assert found.pop("dfa_error") == pytest.approx(0, abs=1e-6)
    assert found["dfa_cosine"] == pytest.approx(1, abs=1e-9)
    assert {name for name in found if "." in name} == {
        f"dfa_{k}.{n}" for k in ("cosine", "error") for n in range(3)
    }


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_a_diagnosis_is_that_of_the_two_gradients():
    model, batch, dfa = build_model(LLAMA, device="cpu", seed=0), batch_of(), DfaConfig(top_blocks=1)
    rule = FeedbackAlignment(dfa, random_feedback(LLAMA, dfa))
    found = diagnosed(model, rule)
    one = (batch.inputs_BT[:1], batch.targets_BT[:1])
    both = [learned(model, either, *one)[1] for either in (rule, BackPropagation())]
    names = [name for name in both[0] if name.startswith("blocks.1.")]
    ours, true = (torch.cat([gradients[name].flatten() for name in names]) for gradients in both)
    assert found["dfa_cosine.1"] == pytest.approx(float(ours @ true / ours.norm() / true.norm()), rel=1e-9)
    assert found["dfa_error.1"] == pytest.approx(float((ours - true).norm() / true.norm()), rel=1e-9)
    assert "dfa_cosine.2" not in found


def test_more_features_are_more_similar_to_exact_attention():
    """Sharp attention, so that the estimate matters; 64 times the features have an eighth of the error."""

    def similarity(features: int) -> float:
        config = replace(LLAMA, attention="favor", features=features)
        model = build_model(config, device="cpu", seed=0)
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv.weight.mul_(20)
        dfa = DfaConfig()
        return diagnosed(model, FeedbackAlignment(dfa, random_feedback(config, dfa)))["attention_similarity"]

    few, many = similarity(8), similarity(512)
    assert few < many <= 1.0


def test_diagnoses_are_so_rare_that_they_cost_two_percent():
    """Three passes, each at most as long as one of the update's."""
    hardware = hardware_here(read_facts(), None)
    for micro_batch in (8, 4, 1):
        recipe = load_recipe("okadfa/nano", [f"plan.micro_batch={micro_batch}"])
        diagnosis = Diagnosis(recipe, make_plan(recipe, hardware))
        passes = diagnosis.every * 8 // micro_batch
        assert 3 / passes <= 0.02 < 3 / (passes - 8 // micro_batch)
    assert not Diagnosis(load_recipe("nano"), make_plan(load_recipe("nano"), hardware)).due(150)
    assert {"dfa_cosine", "dfa_error", "attention_similarity", "diagnose_s"} <= METRICS.keys()


@pytest.mark.parametrize(
    ("name", "millions", "claimed"),
    [("fast", 85, 85), ("production", 178, 175), ("max", 354, 355), ("mega", 773, 750)],
)
def test_recipes_have_the_sizes_that_their_guide_claims(name: str, millions: int, claimed: int) -> None:
    """Within 4%: the guide counts the blocks alone for `fast`, and all parameters for the others."""
    recipe = load_recipe(f"okadfa/{name}")
    counted = parameters(recipe.model)
    assert round((counted.blocks if name == "fast" else counted.total) / 1e6) == millions
    assert abs(millions / claimed - 1) < 0.04
    assert (recipe.train.rule, recipe.model.attention) == ("dfa", "favor")
    assert recipe.train.orthogonality > 0


def test_the_study_makes_every_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    recipe, hardware = load_recipe("okadfa/nano", TINY), hardware_here(read_facts(), None)

    def train(recipe: Path, run: Path, _plan: Path | None) -> str | None:
        if "lr-0.1-" in run.name:
            return "the loss of step 3 is nan"
        chosen = load_recipe(str(recipe))
        with join("cpu") as process:
            pretrain(chosen, make_plan(chosen, hardware), run, process)
        return None

    made: list[str] = []
    given: dict[str, Any] = {"arms": ("A0", "A6"), "seeds": 2, "lrs": (1e-3, 1e-2, 0.1)}
    rows = study(recipe, hardware.title, tmp_path, train=train, progress=made.append, **given)
    runs = {path.parent for path in tmp_path.glob("A*/*/metrics.jsonl")}
    assert len(runs) == 2 * (2 + 1)
    kept = {path.parent.name for path in tmp_path.glob("A*/*/checkpoints")}
    assert kept == {f"lr-{row.lr:g}-seed-{seed}" for row in rows for seed in (0, 1)}, "only at the best rate"
    assert [row.name for row in rows] == ["A0", "A6"]
    assert "A6, lr 0.1: diverged" in made
    for row in rows:
        assert row.searched["0.1"] is None, "it diverged"
        assert row.searched[f"{row.lr:g}"] == min(loss for loss in row.searched.values() if loss is not None)
        assert [tokens for tokens, _ in row.curve] == [2 * 2 * 64, 4 * 2 * 64]
        assert row.losses[0] == row.searched[f"{row.lr:g}"]
        assert len(row.losses) == 2
    written = json.loads((tmp_path / okadfa.RESULT).read_text())
    assert written["rows"][0]["losses"] == rows[0].losses

    def again(recipe: Path, run: Path, _plan: Path | None) -> str | None:
        assert "lr-0.1-" in run.name, "a finished run was made again"
        return "the loss of step 3 is nan"

    assert study(recipe, hardware.title, tmp_path, train=again, progress=made.append, **given) == rows
    with pytest.raises(TrainingError, match="no memory"):
        study(
            recipe,
            hardware.title,
            tmp_path / "x",
            train=lambda *_: "no memory",
            progress=made.append,
            **given,
        )
    other = load_recipe("okadfa/nano", [*TINY, "train.batch_size=4"])
    with pytest.raises(StorageError, match="holds a run of another recipe: give another folder with --out"):
        study(other, hardware.title, tmp_path, train=again, progress=made.append, **given)
    with pytest.raises(ConfigError, match="no arm 'A9'"):
        study(
            recipe, hardware.title, tmp_path, train=train, progress=made.append, **{**given, "arms": ("A9",)}
        )


def test_seeds_that_ended_early_are_averaged_as_far_as_all_ran(tmp_path: Path) -> None:
    def train(recipe: Path, run: Path, _plan: Path | None) -> None:
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(recipe.read_text())
        seed = load_recipe(str(recipe)).train.seed
        validated = [
            {"step": n, "tokens": 100 * n, "elapsed_s": 1.0 * n, "valid_loss": 6.0 + seed - n}
            for n in (1, 2, 3)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in validated[: 3 - seed]))
        (run / "events.jsonl").write_text('{"event": "end", "step": 3, "why": "finished"}\n')

    given: dict[str, Any] = {"arms": ("A0",), "seeds": 2, "lrs": (1e-3,), "progress": lambda text: None}
    (row,) = study(load_recipe("okadfa/nano"), "a CPU", tmp_path, train=train, **given)
    assert (row.curve, row.tokens, row.losses) == ([(100, 5.5), (200, 4.5)], 200, [3.0, 5.0])


def test_the_table_of_one_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no spread, and a number below its row stands with its name."""
    curve = [(256, 6.25), (512, 6.0)]
    row = okadfa.Row("A0", "softmax", 1e-3, {"0.001": 6.0}, [6.0], curve, tokens=512, seconds=2.0)
    monkeypatch.setattr(command, "study", lambda *_, **__: [row])
    monkeypatch.setattr(command, "tokenise", lambda _: None)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["okadfa", "ablate", "okadfa/nano", "--seeds", "1", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "perplexity 403.4; at 1/4 6.250;" in " ".join(told.split())
    assert "; nan" not in told
    assert okadfa.brief(row) == "A0: 6.000 at lr 0.001, 2 s"


def test_the_arms_differ_in_what_they_say() -> None:
    recipe = load_recipe("okadfa/nano")
    made = {arm.name: arm.of(recipe, 1e-3, 0) for arm in ARMS}
    assert len({one.fingerprint for one in made.values()}) == len(ARMS)
    assert [name for name, one in made.items() if one.feedback] == ["A3", "A4", "A5", "A6", "A7"]
    assert [name for name, one in made.items() if one.model.attention == "softmax"] == ["A0"]
    assert [name for name, one in made.items() if one.train.orthogonality] == ["A2", "A4", "A5", "A6", "A7"]
    assert (made["A3"].dfa.depth, made["A5"].dfa.depth, made["A6"].dfa.top_blocks) == ("layer", "block", 2)
    assert isinstance(made["A0"].model, ModelConfig)
