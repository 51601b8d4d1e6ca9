"""The report and the watched page in a real browser: no errors, curves drawn, nothing wider than a desktop or
a phone, light and dark.

Needs playwright (in the dev extra) and a Chromium (browser.py finds or fetches one); skipped with the reason
where they cannot be had.
"""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import ARGUMENTS, Missing, find_chromium, libraries

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from run_folders import ABLATION, EVALUATIONS, EVENTS, HOSTILE, jsonl, lines, write_run

from redline.cli.main import main
from redline.record.read import read_runs
from redline.report.page import write_page
from redline.report.serve import make_server
from redline.report.view import RunView

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'redline[dev]'"
)

WIDTHS = {"desktop": 1280, "phone": 390}
INKED = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return seen.size;
}"""
NOTE_TEXTS = """window.drawn = [];
const { fillText } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  window.drawn.push(text);
  return fillText.call(this, text, ...rest);
};"""
TOO_WIDE = """() => [...document.querySelectorAll("body *")]
  .filter(e => !e.closest(".scroll, .events-box") && e.getBoundingClientRect().right > innerWidth + 0.5)
  .map(e => e.tagName + "." + e.className)"""

BEYOND_ITS_FRAME = """() => [...document.querySelectorAll("figure.chart")]
  .filter(f => f.querySelector(".u-wrap").getBoundingClientRect().right > f.getBoundingClientRect().right)
  .map(f => f.dataset.chart)"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    try:
        path = find_chromium()
    except Missing as missing:
        pytest.skip(str(missing))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path), args=ARGUMENTS, env=libraries())
        yield browser
        browser.close()


class Opened:
    """A page that notes everything it should not do."""

    def __init__(self, chromium: Any, url: str, *, width: int = 1280, scheme: str = "light") -> None:
        self.page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.troubles: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def colours(self, chart: str) -> int:
        """How many opaque colours the chart's canvas holds: none on an empty one."""
        found: int = self.page.eval_on_selector(f"figure[data-chart={chart}] canvas", INKED)
        return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run with everything a folder may hold, and one of two runs."""
    root = tmp_path_factory.mktemp("pages")
    changed = {"micro_batch": {"value": HOSTILE, "reason": HOSTILE, "source": "rule"}}
    full = write_run(root / "full", about=HOSTILE, metrics=lines(1500), plan_changes=changed)
    (full / "ablation.json").write_text(json.dumps(ABLATION))
    jsonl(full / "evaluations.jsonl", EVALUATIONS)
    two = [
        write_run(root / name, metrics=lines(faster=faster))
        for name, faster in (("a", 1), ("a-long-name-" * 8, 2))
    ]
    found = {"one": root / "one.html", "two": root / "two.html"}
    write_page([RunView(run) for run in read_runs([full])], found["one"])
    write_page([RunView(run, place) for place, run in enumerate(read_runs(two))], found["two"])
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_page_is_drawn_fits_and_asks_for_nothing(
    chromium: Any, pages: dict[str, Path], tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    url = pages[name].as_uri()
    opened = Opened(chromium, url, width=width, scheme=scheme)
    for chart in ("loss", "tokens_per_s", "memory_bytes"):
        assert opened.colours(chart) > 3
    assert opened.page.evaluate(TOO_WIDE) == []
    assert opened.page.evaluate(BEYOND_ITS_FRAME) == []
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.page.evaluate("window.hacked") is None
    background = (
        opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        .removeprefix("rgb(")
        .removesuffix(")")
    )
    assert (sum(map(int, background.split(","))) > 384) == (scheme == "light")
    opened.page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png", full_page=True)
    assert opened.troubles == []
    assert [asked for asked in opened.asked if asked != url and not asked.startswith("data:")] == []
    opened.page.close()


def test_pointing_at_a_curve_tells_its_numbers_and_the_axis_can_be_changed(
    chromium: Any, pages: dict[str, Path]
) -> None:
    opened = Opened(chromium, pages["two"].as_uri())
    over = opened.page.locator("figure[data-chart=tokens_per_s] .u-over")
    box = over.bounding_box()
    over.hover(position={"x": box["width"] - 2, "y": 40})
    told = opened.page.inner_text("figure[data-chart=tokens_per_s] .tip")
    assert told.splitlines()[0] == "update 40"
    assert "a speed 2k" in told
    assert "speed 4k" in told
    opened.page.click("[data-axis=elapsed_s]")
    over.hover(position={"x": box["width"] - 2, "y": 40})
    assert opened.page.inner_text("figure[data-chart=tokens_per_s] .tip b") == "training time 25.5 s"
    assert opened.page.evaluate(BEYOND_ITS_FRAME) == []
    opened.page.click("#more summary")
    opened.page.wait_for_selector("figure[data-chart=lr] canvas")
    assert opened.colours("lr") > 1
    assert opened.troubles == []
    opened.page.close()


def test_the_curves_of_different_trainings_are_drawn_by_time(chromium: Any, tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=50)])
    write_page([RunView(run, place) for place, run in enumerate(runs)], tmp_path / "two.html")
    opened = Opened(chromium, (tmp_path / "two.html").as_uri())
    opened.page.locator("figure[data-chart=loss] .u-over").hover(position={"x": 40, "y": 40})
    assert opened.page.inner_text("figure[data-chart=loss] .tip b").startswith("training time ")
    opened.page.close()


def test_pointing_at_an_update_tells_the_validation_before_it_and_when_it_was(
    chromium: Any, tmp_path: Path
) -> None:
    made = [
        {name: value for name, value in line.items() if name != "valid_loss"}
        | ({"valid_loss": line["step"] / 10} if line["step"] in (20, 40) else {})
        for line in lines()
    ]
    short = write_run(tmp_path / "short", metrics=made[:10])
    paths = [write_run(tmp_path / "whole", metrics=made), short]
    write_page([RunView(run) for run in read_runs(paths[:1])], tmp_path / "one.html")
    write_page([RunView(run, place) for place, run in enumerate(read_runs(paths))], tmp_path / "two.html")

    long = [line | {"tokens_per_s": float(line["step"])} for line in lines(900)]  # 3 updates a point
    long_run = write_run(tmp_path / "long", metrics=long)
    write_page([RunView(run) for run in read_runs([long_run])], tmp_path / "long.html")
    opened = Opened(chromium, (tmp_path / "long.html").as_uri())
    over = opened.page.locator("figure[data-chart=tokens_per_s] .u-over")
    over.hover(position={"x": over.bounding_box()["width"] - 1, "y": 40})
    tip = opened.page.inner_text("figure[data-chart=tokens_per_s] .tip").splitlines()
    opened.page.close()
    assert tip == ["update 900", "speed 899 (mean of 898 to 900)"]

    def told(step: int, page: str) -> list[str]:
        opened = Opened(chromium, (tmp_path / page).as_uri())
        over = opened.page.locator("figure[data-chart=loss] .u-over")
        over.hover(position={"x": (over.bounding_box()["width"] - 2) * (step - 1) / 39, "y": 40})
        lines = opened.page.inner_text("figure[data-chart=loss] .tip").splitlines()
        opened.page.close()
        assert lines[0] == f"update {step}"
        return [line for line in lines if "validation" in line or "short" in line]

    assert told(10, "one.html") == []  # not that of update 20, which nobody knew yet
    assert told(20, "one.html") == ["validation 2"]
    assert told(31, "one.html") == ["validation 2, update 20"]  # nearer to 40
    assert told(40, "one.html") == ["validation 4"]
    assert "whole validation 2, update 20" in told(30, "two.html")
    assert not [line for line in told(30, "two.html") if "short" in line]  # it ended at 10


def test_every_line_of_a_comparison_is_in_its_key(chromium: Any, pages: dict[str, Path]) -> None:
    opened = Opened(chromium, pages["two"].as_uri())
    keys = {
        chart: opened.page.inner_text(f"figure[data-chart={chart}] .inkey").splitlines()
        for chart in ("loss", "tokens_per_s", "memory_bytes")
    }
    assert [key.strip() for key in keys["loss"]] == ["smoothed", "validation"]
    assert [key.strip() for key in keys["tokens_per_s"]] == ["attainable 2.5k", "matmul ceiling 4k"], (
        "one plan: one line for both runs"
    )
    assert (
        opened.page.inner_text(".compare tbody tr:has(th:text-is('against the first')) td >> nth=0") == "1×"
    )
    opened.page.close()


def test_on_a_phone_the_columns_of_a_comparison_lie_side_by_side(
    chromium: Any, pages: dict[str, Path]
) -> None:
    opened = Opened(chromium, pages["two"].as_uri(), width=375)
    assert opened.page.evaluate(
        "(() => { const box = document.querySelector('.scroll'); return box.scrollWidth <= box.clientWidth;"
        " })()"
    )
    right = (
        "[...document.querySelectorAll('.compare td')].every(cell => cell.getBoundingClientRect().right <="
        " innerWidth)"
    )
    assert opened.page.evaluate(right)
    opened.page.close()


def test_a_diagnosis_fits_a_phone_whatever_an_option_of_the_trainer_is_called(
    chromium: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's options are 50 characters without a place to break."""
    log = Path(__file__).parents[1] / "data" / "logs" / "verl.log"
    assert main(["diagnose", str(log), "--fact", "recompute=on", "--html", str(tmp_path / "verl.html")]) == 0
    assert "actor_rollout_ref.model.enable_gradient_checkpointing=False" in capsys.readouterr().out
    opened = Opened(chromium, (tmp_path / "verl.html").as_uri(), width=WIDTHS["phone"])
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.troubles == []
    opened.page.close()


def test_losses_of_every_fifth_update(chromium: Any, tmp_path: Path) -> None:
    """As a Trainer logs them: nothing is drawn before the first, the axis counts whole updates, and an end
    without numbers is marked."""
    made = [
        {name: value for name, value in line.items() if name != "loss" or line["step"] % 5 == 0}
        for line in lines(9)
    ]
    del made[-1]["valid_loss"]
    for name, changed in (
        ("sparse", made),
        ("broken", [*made[:5], *(line | {"loss": None} for line in made[5:])]),
    ):
        write_page(
            [RunView(run) for run in read_runs([write_run(tmp_path / name, metrics=changed)])],
            tmp_path / f"{name}.html",
        )
    opened = Opened(chromium, (tmp_path / "sparse.html").as_uri())
    opened.page.add_init_script(NOTE_TEXTS)
    opened.page.reload()
    over = opened.page.locator("figure[data-chart=loss] .u-over")
    box = over.bounding_box()
    over.hover(position={"x": 2, "y": 40})
    assert opened.page.inner_text("figure[data-chart=loss] .tip").splitlines() == ["update 1"]
    over.hover(position={"x": box["width"] / 2, "y": 40})
    assert "smoothed 4.75" in opened.page.inner_text("figure[data-chart=loss] .tip")
    texts = opened.page.evaluate("window.drawn")
    assert {"2", "4", "6", "8"} <= set(texts)
    assert not {"2.5", "7.5"} & set(texts)
    opened.page.goto((tmp_path / "broken.html").as_uri())
    assert "not a number from update 6" in opened.page.evaluate("window.drawn")
    assert opened.troubles == []
    opened.page.close()


def test_the_watched_page_keeps_up_with_its_run(chromium: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", metrics=lines()[:20], events=EVENTS[:1])
    with make_server(path, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        opened = Opened(chromium, server.url)
        assert "20 of 40" in opened.page.inner_text(".facts")
        before = opened.page.evaluate("document.querySelector('figure[data-chart=loss] canvas').toDataURL()")
        with (path / "metrics.jsonl").open("a") as metrics, (path / "events.jsonl").open("a") as events:
            metrics.write("".join(json.dumps(line) + "\n" for line in lines()[20:]))
            events.write("".join(json.dumps(event) + "\n" for event in EVENTS[1:]))
        opened.page.get_by_text("40 of 40").wait_for(timeout=120_000)
        opened.page.wait_for_function(
            "document.getElementById('pulse').textContent === 'finished'", timeout=120_000
        )
        assert (
            opened.page.evaluate("document.querySelector('figure[data-chart=loss] canvas').toDataURL()")
            != before
        )
        assert "validation" in opened.page.inner_text("figure[data-chart=loss] figcaption")
        assert opened.troubles == []
        assert all(asked.startswith(server.url) for asked in opened.asked if not asked.startswith("data:"))
        opened.page.close()
        server.shutdown()
