"""`redline diagnose` and `redline optimizations LOG` as a user types them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.diagnose.read import read
from redline.report.page import write_diagnosis

LOGS = Path(__file__).parents[1] / "data" / "logs"
NAMES = sorted(path.name for path in LOGS.iterdir() if path.suffix != ".toml")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_fits_80_columns_and_json_holds_the_same(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = answer(capsys, "diagnose", str(LOGS / name))
    assert max(len(line) for line in shown.splitlines()) <= 80
    told = json.loads(answer(capsys, "diagnose", str(LOGS / name), "--json"))
    assert told["verdict"]["word"] in ("found", "failed", "fast enough", "not judged")
    for finding in told["findings"]:
        assert {"cause", "title", "evidence", "fix", "gain", "confidence"} <= finding.keys()
        assert " ".join(finding["title"].split())[:40] in " ".join(shown.split())


def test_several_logs_stand_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ("nanogpt.log", "verl.log", "titan-oom.log")
    page = tmp_path / "page.html"
    shown = answer(capsys, "diagnose", *(str(LOGS / name) for name in names), "--html", str(page))
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert all(name in " ".join(shown.split()) for name in names)
    assert all(word in shown for word in ("found", "failed"))
    assert len(json.loads(answer(capsys, "diagnose", *(str(LOGS / name) for name in names), "--json"))) == 3
    html = page.read_text()
    assert all(name in html for name in names)
    assert "https://" not in html.split("<body>")[1].split("<script")[0]


def test_the_page_has_the_curve_and_escapes_what_a_log_says(tmp_path: Path) -> None:
    name = "<script>alert(1)<.log"
    shutil.copy(LOGS / "nanogpt.log", tmp_path / name)
    write_diagnosis([(read(tmp_path / name), [])], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in html
    drawn = json.loads(html.split('id="data">')[1].split("</script>")[0])["runs"][0]
    assert len(drawn["curves"]["loss"]["mean"]) == 26
    assert drawn["curves"]["tokens_per_s"]["mean"][-1] == pytest.approx(491_520 / 1.195, rel=0.02)


def test_the_catalogue_for_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(answer(capsys, "optimizations", str(LOGS / "verl-nested.log"), "--json"))
    assert {row["name"] for row in rows} >= {"no-offload"}
    assert all(row["fix"] and row["cause"] for row in rows)
    assert "no-offload" in answer(capsys, "optimizations", str(LOGS / "verl-nested.log"))
    assert main(["optimizations", str(LOGS / "verl-nested.log"), "--as", "a100-80g"]) == 2


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"a": 1, "b": 1, "step_s": 0.2}) + "\n")
    assert main(["diagnose", str(tmp_path / "log.jsonl"), "--map", "step=a,step=b"]) == 2
    assert "--map names step twice: a and b" in " ".join(capsys.readouterr().err.split())


def test_a_text_without_columns_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello world\n")
    assert main(["diagnose", str(tmp_path / "notes.txt"), "--map", "step_s=dt:ms"]) == 2
    assert capsys.readouterr().err.endswith("has no column 'dt'; it has none\n")


def test_a_large_log_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "verl.log"
    path.write_text((LOGS / "verl.log").read_text() + "(pid=1) nothing of interest\n" * 160_000)
    assert main(["diagnose", str(path), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("reading 4.")
    assert json.loads(shown.out)["step_s"] == pytest.approx(read(LOGS / "verl.log").median("step_s"))


def test_it_answers_on_a_laptop_without_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = None; from redline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", blocked, "diagnose", str(LOGS / "verl.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
