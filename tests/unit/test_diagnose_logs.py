"""Foreign logs: each format is told by itself, its units are repaired, and the numbers are those that stand
in the file."""

import dataclasses
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.diagnose.finding import Finding
from redline.diagnose.read import FORMATS, read
from redline.diagnose.rules import OPTIMISATIONS, diagnose
from redline.diagnose.trainer_arguments import KNOWN
from redline.errors import ConfigError, DataError

LOGS = Path(__file__).parents[1] / "data" / "logs"


def found(path: Path, **options: object) -> dict[str, Finding]:
    return {finding.cause: finding for finding in diagnose(read(path, **options))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        ("trainer_state.json", "hf", 6),
        ("nanogpt.log", "nanogpt", 26),
        ("torchtitan.log", "torchtitan", 20),
        ("verl.log", "verl", 20),
        ("verl.jsonl", "verl", 20),
        ("lightning.csv", "lightning", 30),
    ],
)
def test_the_format_is_found(name: str, kind: str, steps: int) -> None:
    observed = read(LOGS / name)
    assert (observed.format, len(observed.steps)) == (kind, steps)
    assert observed.tokens_per_s


def test_trainer_state_gives_the_time_of_each_update() -> None:
    """The file is a real Trainer's: 4 rows of 32 tokens, 0.0926 s between the second and the third line of
    two updates each."""
    observed = read(LOGS / "trainer_state.json")
    assert observed.steps[1].tokens == 128
    assert observed.steps[1].step_s == pytest.approx((0.4556 - 0.274) / 2)
    assert observed.facts.flops_per_token


def test_a_folder_of_the_trainer_is_read_at_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    shutil.copy(LOGS / "trainer_state.json", tmp_path / "checkpoint-12")
    assert read(tmp_path).source.endswith("checkpoint-12/trainer_state.json")


def test_nanogpt_mfu_is_counted_against_the_gpu_it_ran_on() -> None:
    observed = read(LOGS / "nanogpt.log")
    assert observed.tokens_per_s == pytest.approx(491_520 / 1.195, rel=0.01)
    printed = observed.median("mfu")
    assert printed is not None
    assert printed > 1, "over 100 %, as nanoGPT prints on an H100"
    right = found(LOGS / "nanogpt.log", facts={"gpu": "h200-141g"})["nanogpt-mfu"].evidence[1].value
    assert right == pytest.approx(printed * 312 / 989)
    assert "nanogpt-mfu" not in found(LOGS / "nanogpt.log", facts={"gpu": "a100-80g"}), "there it is right"


def test_torchtitan_speed_is_per_gpu_and_its_colours_do_not_matter() -> None:
    observed = read(LOGS / "torchtitan.log")
    assert observed.facts.gpus == 8
    assert observed.tokens_per_s == pytest.approx(8 * 4100, rel=0.01)
    assert observed.facts.memory_bytes == pytest.approx(79.1 * 2**30, rel=0.001)
    assert any("one GPU" in repair for repair in observed.repairs)
    assert found(LOGS / "torchtitan.log")["needless-recomputation"].evidence[0].value == pytest.approx(
        0.4186, rel=0.001
    )


@pytest.mark.parametrize("name", ["verl.log", "verl.jsonl"])
def test_verl_generation_without_a_cache(name: str) -> None:
    observed = read(LOGS / name)
    assert observed.facts.gpus == 8, "total tokens / (throughput x seconds)"
    first = observed.steps[0]
    line = json.loads((LOGS / "verl.jsonl").read_text().splitlines()[0])["data"]
    assert first.tokens == pytest.approx(line["perf/throughput"] * line["perf/time_per_step"] * 8, rel=1e-3)
    assert any(
        f"{line['perf/throughput']:.0f}"[:1] in repair and "one GPU" in repair for repair in observed.repairs
    )
    top = diagnose(observed)[0]
    assert top.cause == "uncached-generation"
    assert top.confidence == (0.95 if name == "verl.log" else 0.6), "the console log says rollout.name=hf"


def test_a_fast_rollout_is_not_blamed(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (LOGS / "verl.jsonl").read_text().splitlines()]
    for row in rows:
        row["data"]["timing_s/gen"] = 1.2
    (tmp_path / "verl.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert "uncached-generation" not in found(tmp_path / "verl.jsonl")


def test_lightning_and_any_table() -> None:
    observed = read(LOGS / "lightning.csv")
    assert observed.steps[1].step_s == pytest.approx(0.126)
    columns = {"step": "iteration", "loss": "l", "data_wait_s": "loader_s"}
    observed = read(LOGS / "thrice.csv", columns=columns)
    assert observed.steps[0].step_s == pytest.approx(0.655, rel=0.02)
    assert observed.steps[0].loss == pytest.approx(8.9)
    assert "dt_ms is read as milliseconds" in observed.repairs


def test_a_table_with_more_cells_than_columns_is_asked_for_its_step(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2,3\n")
    with pytest.raises(ConfigError, match="it has a, b"):
        read(tmp_path / "log.csv", format="lightning")


def test_six_n_counted_thrice() -> None:
    finding = found(
        LOGS / "thrice.csv", columns={"step": "iteration"}, facts={"parameters": "124M", "gpu": "a100-80g"}
    )["mfu-6n-thrice"]
    assert finding.evidence[-1].value == pytest.approx(6 * 124e6 * 99_500 / 312e12, rel=0.01)


def test_a_wait_for_data_and_a_stall_every_ten_in_a_table(tmp_path: Path) -> None:
    rows = [f"{i},{1.0 + (3.0 if i % 10 == 0 else 0.0)},0.3" for i in range(1, 61)]
    (tmp_path / "log.csv").write_text("step,step_s,data_wait_s\n" + "\n".join(rows) + "\n")
    findings = found(tmp_path / "log.csv")
    assert "Every 10 updates" in findings["stall"].title
    gain = findings["stall"].gain
    assert gain is not None
    assert gain.high == pytest.approx(1.3 / 1.03, rel=0.05), (
        "a mean of 1.3 s; 3 s less in one of ten, but 0.3 of them were a wait"
    )
    wait = findings["slow-loader"].gain
    assert wait is not None
    assert wait.high == pytest.approx(1.3 / 1.0, rel=0.05)


def test_failures_in_a_log_get_advice(tmp_path: Path) -> None:
    text = (
        LOGS / "nanogpt.log"
    ).read_text() + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    (tmp_path / "log").write_text(text)
    assert "micro-batch" in found(tmp_path / "log")["out-of-memory"].fix


def test_low_mfu_is_said_where_nothing_else_is_known() -> None:
    finding = found(LOGS / "lightning.csv", facts={"parameters": "124M", "gpu": "h100-80g"})["low-mfu"]
    assert finding.confidence < 0.5
    assert finding.gain is not None
    assert finding.gain.high == 10.0 or finding.gain.high == pytest.approx(
        0.45 / (6 * 124e6 * 52_000 / 989e12), rel=0.02
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "nanogtp"}, "did you mean 'nanogpt'"),
        ({"columns": {"stepp": "x"}}, "did you mean 'step'"),
        ({"columns": {"step": "iter"}}, "did you mean 'iteration'"),
        ({"facts": {"parameter": "8"}}, "did you mean 'parameters'"),
        ({"facts": {"gpu": "h100"}}, "h100-80g"),
        ({"facts": {"parameters": "many"}}, "needs one number"),
    ],
)
def test_a_mistake_gets_one_clear_line(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(LOGS / "thrice.csv", **options)


def test_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    whole = (LOGS / "verl.jsonl").read_text()
    (tmp_path / "live.jsonl").write_text(whole[:-200])
    assert len(read(tmp_path / "live.jsonl").steps) == 19


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    for name, content in (("binary", b"\0\1\2"), ("words", b"nothing here\nat all"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError):
            read(tmp_path / name)
    with pytest.raises(DataError, match="is not there"):
        read(tmp_path / "missing")


def test_the_arguments_of_the_trainer_are_those_of_transformers() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    assert {field.name for field in dataclasses.fields(arguments)} == KNOWN


def test_findings_name_entries_of_the_catalogue() -> None:
    catalogue = pytest.importorskip("redline.optimizations.catalogue").catalogue()
    assert set(OPTIMISATIONS.values()) <= set(catalogue)


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.iterdir()))
def test_the_command_prints_at_80_columns_and_json(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    extra = ["--map", "step=iteration"] if name == "thrice.csv" else []
    assert main(["diagnose", str(LOGS / name), *extra]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert main(["diagnose", str(LOGS / name), *extra, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["format"] in FORMATS
    assert {"cause", "title", "evidence", "fix", "gain", "confidence"} <= {
        key for f in answer["findings"] for key in f
    } or not answer["findings"]


def test_it_answers_at_once_on_a_laptop_without_torch() -> None:
    blocked = (
        "import sys; sys.modules['torch'] = None; from redline.cli.main import main;"
        " sys.exit(main(sys.argv[1:]))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", blocked, "diagnose", str(LOGS / "verl.log")],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < 0.8, f"{used_s:.2f} s of the processor; 0.5 s is the promise, the rest is for a slow one"
