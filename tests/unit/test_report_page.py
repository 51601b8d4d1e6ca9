"""The page without a browser: nothing in it comes from elsewhere, nothing of a run is taken for HTML, and it
stays small."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from run_folders import ABLATION, EVALUATIONS, EVENTS, HOSTILE, jsonl, lines, write_run

from redline.record.read import read_run, read_runs
from redline.report.page import ASSETS, page
from redline.report.view import RunView
from redline.rft.store import Sample, Store
from redline.tasks.task import Question


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    events = [
        {"at": 1.0, "event": HOSTILE, "note": HOSTILE},
        *EVENTS[:1],
        {"at": 2.0, "event": "failed", "error": HOSTILE},
    ]
    changed = {"micro_batch": {"value": HOSTILE, "reason": HOSTILE, "source": HOSTILE}, "work": HOSTILE}
    path = write_run(tmp_path / "a<b>&", about=HOSTILE, events=events, plan_changes=changed)
    (path / "ablation.json").write_text(
        json.dumps([ABLATION[0] | {"name": HOSTILE, "verdict": HOSTILE, "numerics": HOSTILE}])
    )
    jsonl(path / "evaluations.jsonl", [EVALUATIONS[0] | {"weights": HOSTILE, "split": HOSTILE}])
    return path


def test_text_of_a_run_is_never_taken_for_html(hostile: Path) -> None:
    shown = Elements(page([RunView(read_run(hostile))]))
    assert not [tag for tag, _ in shown.elements if tag == "img"]
    assert len(shown.scripts) == 2
    assert not [name for _, attributes in shown.elements for name in attributes if name.startswith("on")]
    assert "hacked" not in shown.scripts[1]
    assert json.loads(shown.scripts[0])["runs"][0]["label"] == "a<b>&"


def test_what_stands_between_backticks_is_code_and_nothing_else(tmp_path: Path) -> None:
    text = page([RunView(read_run(write_run(tmp_path / "a", about="`make <b>` or `more")))])
    assert "<code>make &lt;b&gt;</code> or `more</p>" in text


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    text = page(
        [
            RunView(run, i)
            for i, run in enumerate(read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")]))
        ]
    )
    for tag, attributes in Elements(text).elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attributes.get(name) or "data:,") == "data:,", (tag, name)
    style = "".join(re.findall(r"<style>(.*?)</style>", text, flags=re.S))
    assert "url(" not in style
    assert "@import" not in style
    addresses = set(re.findall(r"https?://[^\s\"')]+", text))
    assert addresses == {"https://github.com/leeoniya/uPlot"}  # in the comment that says whose work it is


def test_the_policy_allows_the_page_s_own_script_and_no_other(tmp_path: Path) -> None:
    shown = Elements(page([RunView(read_run(write_run(tmp_path / "a")))]))
    policy = next(a["content"] for tag, a in shown.elements if tag == "meta" and a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(shown.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:")
    assert f"script-src 'sha256-{digest}';" in policy
    assert "connect-src" not in policy


CURVES = (
    "loss", "tokens_per_s", "rows_per_s", "memory_bytes", "lr", "grad_norm", "step_s", "data_wait_s", "mfu",
    "ceiling_share", "padding_share", "power_w", "sm_clock_mhz", "temperature_c",
)  # fmt: skip


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    """docs/report.md: at most 250 KB, with every metric recorded and none of them smooth."""
    random, made = Random(0), lines(20_000)
    for line in made:
        line |= {name: random.random() * 10 ** random.randint(3, 9) for name in CURVES} | {
            "loss": 10 * random.random()
        }
    made[-1]["elapsed_s"] = 1e5
    validations = [
        {"at": 1e9 + step, "event": "validation", "step": step, "valid_loss": 1.23456}
        for step in range(0, 20_000, 50)
    ]
    path = write_run(tmp_path / "a", metrics=made, events=[*EVENTS[:1], *validations, *EVENTS[1:]])
    text = page([RunView(read_run(path))])
    assert len(text.encode()) < 250_000
    assert text.count(">validation<") <= 100
    assert "304 more" in text


def test_a_loss_that_is_no_number_any_more_is_said_and_marked(tmp_path: Path) -> None:
    made = [line | {"loss": None if line["step"] > 31 else line["loss"]} for line in lines()]
    text = page([RunView(read_run(write_run(tmp_path / "a", metrics=made)))])
    assert "not a number" in text
    assert "from update 32 on; the last number was 3.4500" in text
    assert '"broken":{"step":32,"tokens":32000,"elapsed_s":21.5}' in text
    assert '"broken":null' in page([RunView(read_run(write_run(tmp_path / "b")))])


def test_what_is_said_beside_findings(tmp_path: Path) -> None:
    shown = RunView(read_run(write_run(tmp_path / "a")))
    shown.remark = "beside <them>"
    text = page([shown])
    assert shown.findings
    assert text.index(shown.findings[-1].title) < text.index("beside &lt;them&gt;")


def test_an_rft_run_shows_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "rft"
    path.mkdir()
    (path / "recipe.toml").write_text(
        'name = "units"\nworkload = "rft"\n[task]\nname = "units"\n[model]\ninit_from = "demo"\n'
    )
    jsonl(path / "evaluations.jsonl", EVALUATIONS)
    with Store(path / "samples.db") as store:
        source = store.open_source("model", {"seed": 0})
        store.put_questions(
            [Question(id="q1", text="How long is <b>a mile</b>?", answer="1", meta={"family": "length"})]
        )
        row = Sample("q1", 0, "text", 5, None, None, "stop", True, True, 1.0, "1", None, "key", 0, 0.0)
        store.add(source, [row, row._replace(sample=1, correct=False, reasoning_key=None)])
    text = page([RunView(read_run(path))])
    assert "How long is &lt;b&gt;a mile&lt;/b&gt;?" in text
    for part in ("1 of 1 (100.0%)", "1 of 2 (50.0%)", "63.0%", "after RFT"):
        assert part in text


def test_the_chart_library_comes_with_its_licence() -> None:
    assert "MIT License" in (ASSETS / "uPlot-LICENSE.txt").read_text()
    assert (
        (ASSETS / "uPlot-1.6.32.min.js")
        .read_text()
        .startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    )
