"""What is shown of a run of reinforcement learning, and two of them compared: figures against sums by hand."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from run_folders import EVENTS, HOSTILE, jsonl, lines, write_run

from redline.cli.watch import _Notes
from redline.config.rl import domain_name
from redline.errors import ConfigError, DataError
from redline.record.read import read_run
from redline.report.page import page
from redline.report.reinforcement import Compared, Share, reinforcement
from redline.report.terminal import print_report
from redline.report.view import RunView

RECIPE = """name = "rl"
workload = "rl"

[model]
init_from = "demo"

[rl]
domains = ["units", "my/letters.py:make"]

[train]
steps = 20
batch_size = 4
"""


def write_rl(folder: Path, *, units: float = 0.6, cosine: float = -0.25, step_s: float = 1.0) -> Path:
    """20 updates; rewards rise from 0 to 0.95; two validations, of which the second finds `units` and 0.5."""
    made, events = [], EVENTS[:1]
    for line in lines(20):
        step = line["step"]
        held_out = {
            f"valid_accuracy{part}.{name}": value + off
            for name, value in (("units", units * step / 20), ("letters", 0.5))
            for part, off in (("", 0.0), ("_low", -0.1), ("_high", 0.1))
        }
        if step in (10, 20):
            events.append({"at": 1e9 + step, "event": "validation", "step": step, **held_out})
        made.append(
            {name: value for name, value in line.items() if not name.startswith("valid")}
            | {"step_s": step_s, "reward": step / 20 - 0.05, "entropy": 2.0 - step / 20, "cut_share": 0.25}
            | {
                "reward.units": step / 20,
                "accuracy.units": 0.5,
                "reward.letters": 1.0,
                "accuracy.letters": 1.0,
            }
            | {"cosine.units.letters": cosine if step % 2 else 0.75, "conflict.units.letters": 0.1}
            | {
                "generate_s": 0.25,
                "forward_s": 0.25,
                "backward_s": 0.25,
                "optimizer_s": 0.1,
                "combine_s": 0.1,
            }
        )
    write_run(folder, recipe=RECIPE, metrics=made, events=events)
    (folder / "samples").mkdir()
    groups = [
        group("units", "How many m are 3 km?", [(HOSTILE, 0.0), ("the <b>best</b>", 1.0)]),
        group("letters", "l1", [("only", 0.5)]),
    ]
    jsonl(folder / "samples" / "step-00000019.jsonl", [group("units", "old", [("older", 1.0)])])
    jsonl(last := folder / "samples" / "step-00000020.jsonl", groups)
    last.write_text(last.read_text() + '{"step": 20, "dom')
    return folder


def group(domain: str, question: str, texts: list[tuple[str, float]]) -> dict[str, Any]:
    answers = [
        {
            "text": text,
            "reward": reward,
            "correct": reward == 1,
            "parsed": reward > 0,
            "cut": False,
            "reason": None,
        }
        for text, reward in texts
    ]
    return {"step": 20, "domain": domain, "number": 0, "question": question, "answers": answers}


def test_figures(tmp_path: Path) -> None:
    found = reinforcement(read_run(write_rl(tmp_path / "a")))
    assert found is not None
    units, letters = found.domains
    assert (units.name, letters.name) == ("units", "letters"), "a file of the user's is named by its stem"
    assert [domain_name(task) for task in ("gym:chain_sum", "a/b.py:make", "math")] == [
        "chain_sum",
        "b",
        "math",
    ]
    assert units.accuracy == pytest.approx(Share(0.6, 0.5, 0.7))
    assert units.before == pytest.approx(Share(0.3, 0.2, 0.4))
    assert units.reward == pytest.approx((17 + 18 + 19 + 20) / 4 / 20), "the last fifth"
    assert (units.sampled, letters.sampled) == (0.5, 1.0)
    assert ("answers cut off", "25.0%", "25.0%") in found.figures
    assert ("entropy, nats/token", "1.075", "1.875") in found.figures
    (pair,) = found.pairs
    assert (pair.a, pair.b, pair.rate) == ("units", "letters", 0.5)
    assert (pair.cosine, pair.tensors) == pytest.approx((0.25, 0.1))
    assert [(one.domain, one.text, one.reward, one.note) for one in found.said] == [
        ("units", "the <b>best</b>", 1.0, "correct"), ("units", HOSTILE, 0.0, "no answer found"),
        ("letters", "only", 0.5, "wrong"),
    ], "best and worst of the last step; the line that is being written is left out"  # fmt: skip
    (_, (first, second)), _ = found.heat
    assert (first[0], second[0]) == ("", "+0.25")


def test_other_runs_have_none_of_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"))
    assert reinforcement(run) is None
    with pytest.raises(ConfigError, match=r"a is a run of pretrain: .* needs two runs of `redline rl run`"):
        Compared(run, run)
    (tmp_path / "a" / "recipe.toml").write_text("")
    with pytest.raises(DataError, match=r"a/recipe\.toml is empty, so nothing tells what the run is"):
        read_run(tmp_path / "a")


def test_a_run_without_updates_shows_its_domains(tmp_path: Path) -> None:
    found = reinforcement(read_run(write_run(tmp_path / "a", recipe=RECIPE, metrics=[])))
    assert found is not None
    assert [(domain.name, domain.accuracy, domain.reward) for domain in found.domains] == [
        ("units", None, None), ("letters", None, None),
    ]  # fmt: skip
    assert (found.figures, found.pairs, found.said) == ([], [], [])


@pytest.mark.parametrize(
    "line",
    [
        b"[1, 2]",
        b'{"answers": 3}',
        b'{"answers": [1, {"reward": "x", "text": 5}]}',
        b"[" * 5000,
        b"\xff\xfe\0",
    ],
)
def test_samples_that_are_none_cost_their_own_line(tmp_path: Path, line: bytes) -> None:
    folder = write_rl(tmp_path / "a")
    path = folder / "samples" / "step-00000020.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    found = reinforcement(read_run(folder))
    assert found is not None
    assert found.said[0].text == "the <b>best</b>"
    (folder / "recipe.toml").write_text(RECIPE.replace('["units", "my/letters.py:make"]', "7"))
    assert reinforcement(read_run(folder)).domains == []


def test_the_page_and_the_terminal_show_accuracies_first(tmp_path: Path) -> None:
    shown = RunView(read_run(write_rl(tmp_path / "a")))
    assert [tile.label for tile in shown.tiles[:2]] == ["accuracy, units", "accuracy, letters"]
    assert shown.tiles[0].value == "60.0%"
    assert not any("loss" in tile.label for tile in shown.tiles), "the loss of a policy says nothing"
    text = page([shown])
    assert "Conflicts between domains" in text
    assert "the &lt;b&gt;best&lt;/b&gt;" in text
    assert HOSTILE not in text
    drawn = json.loads(text.split('id="data">')[1].split("</script>")[0])["runs"][0]["curves"]
    assert {"reward", "reward.units", "reward.letters"} <= drawn.keys()
    assert not any(name.startswith(("cosine", "conflict", "valid_accuracy")) for name in drawn)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report([shown], console)
    told = console.export_text()
    assert (
        told.index("accuracy, units") < told.index("What the policy does") < told.index("Where the time went")
    )
    assert "combining gradients" in told
    assert "units: How many m are 3 km?" in told
    assert "units: How many m are 3 km?" in text
    view_of_watch = MagicMock()
    notes = _Notes(view_of_watch)
    notes.tell(shown)
    notes.tell(shown)
    said = [call.args[1]["text"] for call in view_of_watch.event.call_args_list]
    assert said[0] == "units: How many m are 3 km? It wrote: the <b>best</b> (correct)"
    assert said.count(said[0]) == 1


class TestCompared:
    def test_a_difference_that_the_intervals_resolve(self, tmp_path: Path) -> None:
        """Both intervals are 0.1 to each side, so the difference's is 0.1 times the root of two."""
        base, other = (
            read_run(write_rl(tmp_path / name, units=u)) for name, u in (("base", 0.4), ("pcgrad", 0.6))
        )
        found = Compared(base, other)
        units, letters = found.differences
        assert (units.value, units.word) == (pytest.approx(0.2), "better")
        assert (units.low, units.high) == pytest.approx((0.2 - 0.1 * 2**0.5, 0.2 + 0.1 * 2**0.5))
        assert (letters.value, letters.word) == (0.0, "not resolved")
        assert found.verdict == "pcgrad is better on units; +10.0 points on average over 2 domains."
        assert Compared(other, base).verdict.startswith("base is worse on units")

    def test_one_that_they_do_not(self, tmp_path: Path) -> None:
        base, other = (
            read_run(write_rl(tmp_path / name, units=u)) for name, u in (("base", 0.5), ("pcgrad", 0.6))
        )
        found = Compared(base, other)
        said = "No difference is resolved: every interval contains 0. pcgrad is +5.0 points on average."
        assert found.verdict == said, "the mean need not lie in the interval of every domain"
        assert any("One run each" in caveat for caveat in found.caveats)
        assert any("one in twenty" in caveat for caveat in found.caveats)

    def test_costs_and_conflicts(self, tmp_path: Path) -> None:
        base, other = (write_rl(tmp_path / name, step_s=s) for name, s in (("base", 1.0), ("pcgrad", 1.5)))
        found = Compared(read_run(base), read_run(other))
        assert ("relative to the first", "1×", "1.50×") in found.costs
        assert ("spent combining gradients", "10.0%", "6.7%") in found.costs
        assert found.pairs.keys() == {"base", "pcgrad"}

    def test_recipes_that_differ_in_more_than_pcgrad_are_named(self, tmp_path: Path) -> None:
        base, other = write_rl(tmp_path / "base"), write_rl(tmp_path / "pcgrad")
        changed = RECIPE.replace("batch_size = 4", "batch_size = 8").replace(
            "[rl]", '[rl]\npcgrad = "global"'
        )
        (other / "recipe.toml").write_text(changed)
        (caveat,) = (
            text for text in Compared(read_run(base), read_run(other)).caveats if "more than PCGrad" in text
        )
        assert "train.batch_size: 4 | 8" in caveat
        assert "rl.pcgrad" not in caveat
