"""Readers of foreign logs on what real files are like: cut, sparse, in other encodings and units, with losses
that are no numbers."""

import json
import shutil
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.read import FORMATS, read
from redline.diagnose.rules import diagnose
from redline.diagnose.summary import nothing_found
from redline.errors import ConfigError, DataError, RedlineError

LOGS = Path(__file__).parents[1] / "data" / "logs"


def found(observed: Observed) -> dict[str, Finding]:
    return {finding.cause: finding for finding in diagnose(observed)}


def text_file(folder: Path, text: str, name: str = "log") -> Path:
    (folder / name).write_text(text)
    return folder / name


# ---- sparse logs: every tenth update, evaluations among them ----


def nanogpt(*, evaluated: bool, updates: int = 5000, every: int = 250) -> str:
    """27.5 ms an iteration, one line in ten, an evaluation of 2.9 s every 250 that prints its own line, or
    does not."""
    lines = ["number of parameters: 10.65M", "tokens per iteration will be: 16,384"]
    for step in range(0, updates + 1, 10):
        slow = step % every == 0
        if slow and evaluated:
            lines.append(f"step {step}: train loss 1.2000, val loss 1.4000")
        ms = 27.5 + (2900.0 if slow else 0.0) + (30_000.0 if step == 0 else 0.0)
        lines.append(f"iter {step}: loss 1.3000, time {ms:.2f}ms, mfu 13.50%")
    return "\n".join(lines) + "\n"


def test_an_evaluation_inside_an_iteration_is_no_stall(tmp_path: Path) -> None:
    """21 evaluations of 2.9 s beside 5,001 iterations of 27.5 ms and 30 s of compiling."""
    observed = read(text_file(tmp_path, nanogpt(evaluated=True)))
    findings = found(observed)
    assert "stall" not in findings
    pause = findings["validation-pause"]
    assert pause.evidence[0].value == 21
    assert pause.evidence[1].value == pytest.approx(2.9, rel=0.01)
    assert pause.evidence[2].value == pytest.approx(21 * 2.9 + 5001 * 0.0275 + 30, rel=0.01)
    assert "eval_interval" in pause.fix


def test_a_stall_in_a_log_of_every_tenth_update_counts_once_in_so_many(tmp_path: Path) -> None:
    """One update in 250 takes 2.9 s more than 27.5 ms: 39.1 ms on average, so 1.42 times as fast without; not
    one line in 25."""
    stall = found(read(text_file(tmp_path, nanogpt(evaluated=False))))["stall"]
    assert stall.title.startswith("Every 250 updates")
    assert stall.gain is not None
    assert stall.gain.high == pytest.approx(1 + 2.9 / 250 / 0.0275, rel=0.02)


def trainer_state(tmp_path: Path, *, timed: bool = True, ended: bool = True, bad_from: int = 10_000) -> Path:
    """1.25 s an update, a line in ten, an evaluation of 31.2 s every 50."""
    history: list[dict[str, object]] = []
    clock_s = 0.0
    for step in range(10, 501, 10):
        clock_s += 12.5
        norm = float("nan") if step >= bad_from else 1.2
        times = {"train_runtime": clock_s, "num_input_tokens_seen": step * 32_768} if timed else {}
        history.append({"step": step, "loss": 2.5, "grad_norm": norm, **times})
        if step % 50 == 0:
            history.append({"step": step, "eval_loss": 2.4, "eval_runtime": 31.2})
            clock_s += 31.2
    if ended:
        history.append(
            {
                "step": 500,
                "train_runtime": clock_s,
                "train_samples_per_second": 8.0,
                "train_steps_per_second": 500 / clock_s,
            }
        )
    return text_file(tmp_path, json.dumps({"global_step": 500, "log_history": history}), "trainer_state.json")


@pytest.mark.parametrize("timed", [True, False])
def test_the_trainers_evaluations_are_taken_off_its_updates(tmp_path: Path, timed: bool) -> None:
    observed = read(trainer_state(tmp_path, timed=timed))
    assert observed.median("step_s") == pytest.approx(1.25)
    findings = found(observed)
    assert "stall" not in findings
    assert findings["validation-pause"].title == "Validation takes 33% of the run", "312 of 937 s"
    assert "eval_steps" in findings["validation-pause"].fix


def test_a_stall_between_lines_that_are_means_is_counted_whole(tmp_path: Path) -> None:
    """12.5 s more in every fifth line of ten updates of 1.25 s."""
    rows, clock_s = [], 0.0
    for line in range(1, 61):
        clock_s += 12.5 + (12.5 if line % 5 == 0 else 0.0)
        rows.append({"step": 10 * line, "loss": 2.0, "train_runtime": clock_s})
    stall = found(read(text_file(tmp_path, json.dumps({"log_history": rows}), "trainer_state.json")))["stall"]
    assert stall.title.startswith("Every 50 updates the mean of 10 takes 2.0 times")
    assert stall.gain is not None
    assert stall.gain.high == pytest.approx(1.2, rel=0.01)


# ---- GPUs, verl, torchtitan, Lightning ----


def test_nanogpt_on_several_gpus_is_not_above_the_peak(tmp_path: Path) -> None:
    """8 A100s, 43 % MFU each: 491,520 tokens in 393.5 ms need 0.93 PFLOP/s and more, which one of them does
    not have."""
    lines = [
        "number of parameters: 123.59M",
        "tokens per iteration will be: 491,520",
        "batch_size = 12",
        "block_size = 1024",
    ]
    lines += [f"iter {10 * i}: loss 4.0000, time 393.50ms, mfu 42.90%" for i in range(1, 60)]
    path = text_file(tmp_path, "\n".join(lines) + "\n")
    observed = read(path, facts={"gpu": "a100-80g"})
    assert observed.facts.gpus == 8
    assert any("8 GPUs" in repair for repair in observed.repairs)
    assert found(observed) == {}
    shaped = read(text_file(tmp_path, "n_layer = 12\nn_embd = 768\n" + "\n".join(lines), "shaped"))
    assert shaped.facts.gpus == 8
    assert "over-peak" in found(read(path, facts={"gpu": "a100-80g", "gpus": "1"})), (
        "who says that it was one is told"
    )


def verl(tmp_path: Path, head: str, **changed: float) -> Path:
    data = {
        "perf/mfu/actor": 0.35,
        "response_length/mean": 820.0,
        "response_length/max": 8192.0,
        "prompt_length/mean": 120.0,
        "prompt_length/max": 400.0,
        "timing_s/gen": 100.0,
        "timing_s/update_actor": 50.0,
        "timing_s/step": 180.0,
        "perf/total_num_tokens": 962_560,
        "perf/time_per_step": 180.0,
        "perf/throughput": 668.4,
        **changed,
    }
    line = " - ".join(f"{name}:{value}" for name, value in data.items())
    return text_file(
        tmp_path, head + "".join(f"(TaskRunner pid=1) step:{step} - {line}\n" for step in range(1, 20))
    )


def test_generation_of_an_engine_ends_with_its_longest_response(tmp_path: Path) -> None:
    """100 s for 8,192 tokens are 12 ms each; over the mean of 820 they would be 122, as if nothing was
    cached."""
    findings = found(read(verl(tmp_path, "")))
    assert "uncached-generation" not in findings
    assert "max_response_length" in findings["long-tail"].fix
    slow = {"timing_s/gen": 160.0, "response_length/max": 1000.0}
    assert "uncached-generation" in found(read(verl(tmp_path, "", **slow)))
    assert "uncached-generation" not in found(read(verl(tmp_path, "{'rollout': {'name': 'vllm'}}\n", **slow)))


def test_padding_that_verl_removes_is_not_told(tmp_path: Path) -> None:
    assert "padding" in found(read(verl(tmp_path, "")))
    assert "padding" in found(
        read(
            verl(
                tmp_path, "{'model': {'use_remove_padding': False}, 'critic': {'use_remove_padding': True}}\n"
            )
        )
    )
    assert "padding" not in found(read(verl(tmp_path, "{'model': {'use_remove_padding': True}}\n")))


def test_verl_may_start_with_a_validation(tmp_path: Path) -> None:
    first = json.dumps({"step": 0, "data": {"val-core/reward/mean@1": 0.12}})
    observed = read(text_file(tmp_path, first + "\n" + (LOGS / "verl.jsonl").read_text()))
    assert (observed.format, len(observed.steps)) == ("verl", 20)


def titan(tmp_path: Path, kind: str, mesh: str, batch: str) -> Path:
    text = (
        (LOGS / "torchtitan.log")
        .read_text()
        .replace("Applied full", f"Applied {kind}")
        .replace("1-D device mesh with ['dp_shard'], [8]", mesh)
    )
    return text_file(tmp_path, text.replace("global batch size 8", f"global batch size {batch}"))


def test_torchtitan_tells_full_from_selective_and_multiplies_its_mesh(tmp_path: Path) -> None:
    flat = "1-D device mesh with ['dp_shard'], [8]"
    full, selective = (
        found(read(titan(tmp_path, kind, flat, "8")))["needless-recomputation"]
        for kind in ("full", "selective")
    )
    assert full.gain is not None
    assert selective.gain is not None
    assert selective.gain.high <= full.gain.low
    assert selective.title.startswith("Selective")
    assert "--activation_checkpoint.mode" in selective.fix
    square = read(titan(tmp_path, "full", "2-D device mesh with ['dp_shard', 'tp'], [4, 2]", "8"))
    assert square.facts.gpus == 8
    assert "one pass already" in found(read(titan(tmp_path, "full", flat, "8")))["small-passes"].fix
    assert "halve the accumulation" in found(read(titan(tmp_path, "full", flat, "32")))["small-passes"].fix


@pytest.mark.parametrize("sep", ["/", "|"])
def test_lightnings_own_names(tmp_path: Path, sep: str) -> None:
    rates = f"train{sep}device{sep}items_per_sec,train{sep}device{sep}samples_per_sec,train{sep}time"
    rows = [f"0,{step},1000,2,{step * 0.5}" for step in range(9, 200, 10)]
    alone = read(text_file(tmp_path, f"epoch,step,{rates}\n" + "\n".join(rows) + "\n"))
    assert (alone.format, alone.facts.gpus, alone.tokens_per_s) == ("lightning", 1, pytest.approx(1000))
    assert alone.median("step_s") == pytest.approx(0.5)
    several = f"epoch,step,{rates},train{sep}samples_per_sec"
    part = read(text_file(tmp_path, several + "\n" + "\n".join(f"{row},8" for row in rows) + "\n"))
    assert (part.facts.gpus, part.tokens_per_s) == (4, pytest.approx(4000))
    assert "one GPU" in part.repairs[0]
    whole = read(
        text_file(
            tmp_path,
            f"{several},train{sep}items_per_sec\n" + "\n".join(f"{row},8,3900" for row in rows) + "\n",
        )
    )
    assert whole.tokens_per_s == pytest.approx(3900), "the sum, where Lightning wrote one"


# ---- losses that are no numbers ----


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "log.csv",
            "step,loss,step_s\n" + "".join(f"{i},{'nan' if i > 20 else 1.0},0.5\n" for i in range(1, 41)),
        ),
        (
            "log.jsonl",
            "".join(
                json.dumps({"step": i, "loss": None if i > 20 else 1.0, "step_s": 0.5}) + "\n"
                for i in range(1, 41)
            ),
        ),
        (
            "log.jsonl",
            "".join(
                json.dumps({"step": i, "loss": float("inf") if i > 20 else 1.0}) + "\n" for i in range(1, 41)
            ),
        ),
        (
            "log",
            "".join(
                f"iter {i}: loss {'nan' if i > 20 else '1.0'}, time 10.00ms, mfu 1.00%\n"
                for i in range(1, 41)
            ),
        ),
        (
            "log",
            "".join(
                f"step:{i} - actor/grad_norm:{'nan' if i > 20 else 1.0} - perf/time_per_step:1.0\n"
                for i in range(1, 41)
            ),
        ),
    ],
)
def test_a_loss_that_is_not_a_number_is_told_with_its_update(tmp_path: Path, name: str, text: str) -> None:
    assert found(read(text_file(tmp_path, text, name)))["not-a-number"].title.endswith("from update 21 on")


def test_a_gradient_of_the_trainer_that_is_not_a_number(tmp_path: Path) -> None:
    """Its loss is filtered by default and looks well."""
    assert "from update 300 on" in found(read(trainer_state(tmp_path, bad_from=300)))["not-a-number"].title


def test_a_failure_stands_before_what_is_slow(tmp_path: Path) -> None:
    rows = [
        {"step": i, "loss": None if i > 20 else 1.0, "step_s": 0.5, "data_wait_s": 0.4} for i in range(1, 41)
    ]
    observed = read(text_file(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "log.jsonl"))
    assert [finding.cause for finding in diagnose(observed)] == ["not-a-number", "slow-loader"]


def test_a_line_without_a_loss_is_no_failure(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 1.0, "step_s": 0.5} for i in range(1, 20)] + [
        {"step": 20, "loss": None, "val_loss": 1.0}
    ]
    assert "not-a-number" not in found(
        read(text_file(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "log.jsonl"))
    )


# ---- times that are not there, and units ----


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("log.csv", "step,loss,dt\n" + "".join(f"{i},1.0,120\n" for i in range(20)), "--map step_s=COLUMN"),
        (
            "metrics.csv",
            "epoch,step,train_loss\n" + "".join(f"0,{i},1.0\n" for i in range(20)),
            "ThroughputMonitor",
        ),
        (
            "log.jsonl",
            "".join(json.dumps({"step": i, "loss": 1.0}) + "\n" for i in range(20)),
            "--map step_s=COLUMN",
        ),
    ],
)
def test_a_log_without_times_is_not_called_fast(tmp_path: Path, name: str, text: str, hint: str) -> None:
    observed = read(text_file(tmp_path, text, name))
    assert diagnose(observed) == []
    said = nothing_found(observed)
    assert "no times" in said
    assert hint in said
    assert name != "log.csv" or "columns that are not read: dt" in observed.repairs


def test_a_trainer_that_was_killed_has_no_times(tmp_path: Path) -> None:
    assert "include_num_input_tokens_seen" in nothing_found(
        read(trainer_state(tmp_path, timed=False, ended=False))
    )


def test_columns_may_have_a_unit(tmp_path: Path) -> None:
    path = text_file(
        tmp_path, "i,dt,mem,mfu,speed\n" + "".join(f"{i},120,40,1.35,31\n" for i in range(1, 21)), "log.csv"
    )
    columns = {
        "step": "i",
        "step_s": "dt:ms",
        "memory_bytes": "mem:GB",
        "mfu": "mfu:%",
        "tokens_per_s": "speed:k",
    }
    observed = read(path, columns=columns)
    assert observed.steps[0].step_s == pytest.approx(0.12)
    assert observed.steps[0].memory_bytes == pytest.approx(40e9)
    assert observed.steps[0].mfu == pytest.approx(0.0135)
    assert observed.tokens_per_s == pytest.approx(31_000)
    assert read(path, columns={**columns, "memory_bytes": "mem:GiB"}).steps[0].memory_bytes == pytest.approx(
        40 * 2**30
    )
    with pytest.raises(ConfigError, match="knows no unit 'kg'"):
        read(path, columns={"step": "i", "step_s": "dt:kg"})


def test_a_negative_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="step_s is -1 at step 3"):
        read(text_file(tmp_path, "step,step_s\n3,-1\n", "log.csv"))


@pytest.mark.parametrize(("mfu", "percent"), [("1.35", 135), ("250", 250), ("43", 43), ("0.6", 60)])
def test_an_mfu_above_one_is_impossible(tmp_path: Path, mfu: str, percent: float) -> None:
    observed = read(
        text_file(
            tmp_path, "step,step_s,mfu\n" + "".join(f"{i},0.5,{mfu}\n" for i in range(1, 21)), "log.csv"
        )
    )
    assert observed.median("mfu") == pytest.approx(percent / 100)
    assert ("over-peak" in found(observed)) == (percent > 100)


def test_tokens_that_one_gpu_cannot_do_are_not_read_as_an_mfu(tmp_path: Path) -> None:
    """6 x 454M x 500,000 = 1.36 PFLOP/s on an H100 with 0.99: two of them, or nonsense."""
    rows = "".join(f"{i},0.5,500000,0.8\n" for i in range(1, 21))
    path = text_file(tmp_path, "step,step_s,tokens_per_s,mfu\n" + rows, "log.csv")
    facts = {"gpu": "h100-80g", "parameters": "454M"}
    unknown = found(read(path, facts=facts))
    assert "impossible" in unknown["mfu-mismatch"].title
    assert "gpus=N" in unknown["mfu-mismatch"].fix
    assert "over-peak" not in unknown, "its own MFU says that there were several"
    assert list(found(read(path, facts={**facts, "gpus": "1"}))) == ["over-peak"]
    assert found(read(path, facts={**facts, "gpus": "2"})) == {}


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        (("parameters", "7b"), 7e9),
        (("parameters", "1.24e8"), 1.24e8),
        (("parameters", "124m"), 124e6),
        (("parameters", "123,590,000"), 123.59e6),
        (("memory_bytes", "80GB"), 80e9),
        (("memory_bytes", "80GiB"), 80 * 2**30),
        (("precision", "bf16"), "bf16"),
        (("parameters", "-5"), None),
        (("parameters", "0"), None),
        (("parameters", "7 bananas"), None),
        (("parameters", "nan"), None),
        (("memory_bytes", "80 parsec"), None),
        (("gpus", "1.5"), None),
        (("precision", "qq"), None),
    ],
)
def test_a_fact_is_read_whole_or_refused(fact: tuple[str, str], value: float | str | None) -> None:
    if value is None:
        with pytest.raises(ConfigError, match=f"--fact {fact[0]}"):
            read(LOGS / "thrice.csv", columns={"step": "iteration"}, facts=dict([fact]))
    else:
        observed = read(LOGS / "thrice.csv", columns={"step": "iteration"}, facts=dict([fact]))
        assert getattr(observed.facts, fact[0]) == pytest.approx(value) if isinstance(value, float) else value


# ---- files as they come ----


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_log_with_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "log").write_text((LOGS / "nanogpt.log").read_text(), encoding=encoding)
    assert len(read(tmp_path / "log").steps) == 26


def test_a_log_behind_the_prefix_of_a_launcher(tmp_path: Path) -> None:
    lines = (LOGS / "nanogpt.log").read_text().splitlines()
    assert len(read(text_file(tmp_path, "".join(f"0: {line}\n" for line in lines))).steps) == 26


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_table_of_a_spreadsheet(tmp_path: Path, mark: str) -> None:
    rows = [["step", "loss", "dt_ms"], *([str(i), "3.0", "120.5"] for i in range(20))]
    observed = read(text_file(tmp_path, "".join(mark.join(row) + "\n" for row in rows), "log.csv"))
    assert observed.median("step_s") == pytest.approx(0.1205)


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_log_is_called_empty(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="is empty"):
        read(text_file(tmp_path, text))


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.iterdir()))
def test_a_log_cut_anywhere_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """At every byte of its last two lines, as a trainer that is still writing, or a full disk, leaves it."""
    raw = (LOGS / name).read_bytes()
    start = raw.rstrip().rfind(b"\n", 0, raw.rstrip().rfind(b"\n"))
    columns = {"step": "iteration"} if name == "thrice.csv" else None
    path, read_ones = tmp_path / name, 0
    for end in range(start, len(raw)):
        path.write_bytes(raw[:end])
        try:
            diagnose(read(path, columns=columns))
            read_ones += 1
        except RedlineError:
            continue  # one line, and no traceback
    assert read_ones > 0.9 * (len(raw) - start) or name == "trainer_state.json", (
        "half a last line is left out"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"log_history": [{"loss": "a", "step": "b"}]}'),
        ("b.json", '{"log_history": [{"loss": 1.0}], "global_step": 1}'),
        ("c.json", '{"log_history": "x"}'),
        ("d.jsonl", '{"step":"x","data":{"perf/throughput":1}}\n'),
        (
            "e.log",
            "2025-13-45 99:99:99,123 - root - INFO - step: 1  loss: 1.0  memory: 1.0GiB(1%)  tps: 1,000\n"
            * 2,
        ),
        (
            "f.log",
            "2025-06-04 20:57:00,123 - root - INFO - step: 1  loss: ....  memory: 1.0GiB(1%)  tps: ,,,\n" * 2,
        ),
        ("g.log", "iter 1: loss naninf.., time 1..2ms, mfu 3%\n"),
        ("h.log", "step:1 - perf/throughput:1e - a:--3 - b:e\n"),
    ],
)
def test_nonsense_gets_one_line(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match=name):
        read(text_file(tmp_path, text, name))


def test_what_a_reader_stumbles_over_is_said_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumbles(text: str, source: str, columns: object) -> Observed:
        raise KeyError("step")

    monkeypatch.setitem(FORMATS, "csv", (lambda text: True, stumbles))
    with pytest.raises(DataError, match=r"odd\.csv is not what the reader for csv expects"):
        read(text_file(tmp_path, "a,b\n1,2\n", "odd.csv"), format="csv")


def test_the_place_of_a_broken_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.jsonl, line 2"):
        read(text_file(tmp_path, '{"step":1,"loss":1}\nnot json\n{"step":2}\n', "log.jsonl"))


def test_a_large_log_is_announced_and_json_holds_what_the_text_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(LOGS / "verl.log", tmp_path / "verl.log")
    with open(tmp_path / "verl.log", "a") as log:
        log.write("(pid=1) nothing of interest\n" * 200_000)
    assert main(["diagnose", str(tmp_path / "verl.log"), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("reading 5.")
    answer = json.loads(shown.out)
    assert answer["facts"]["gpus"] == 8
    assert answer["step_s"] == pytest.approx(read(LOGS / "verl.log").median("step_s"))
    assert answer["split_s"] == {}
