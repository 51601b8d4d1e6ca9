"""`redline finetune`: one's own examples in every form, LoRA and all weights, one process and two, a model and a data
set (a corpus too) from a Hugging Face Hub on loopback."""

import itertools
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from precision import CLOSE_FP32
from warm import Fault, Warm

from redline.cli.main import main
from redline.data.examples import read_chats
from redline.data.shards import TokenDataset
from redline.data.tokenizer import load_tokenizer
from redline.errors import DataError
from redline.record.run import read_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from rft_model import tiny_model

QUICK = ("--quiet", "--set", "train.epochs=2", "--set", "train.batch_size=8", "--set", "train.lr=1e-2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", chat=True)


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Write {n}"},
                {"role": "assistant", "content": "a" * (1 + n % 3)},
            ]
        }
        for n in range(count)
    ]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl")]


def test_an_adapter_comes_out_and_the_run_can_be_used(model, examples, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["finetune", str(model), str(examples), "--run", str(run), *QUICK]) == 0
    found = losses(run)
    assert found[-1] < found[0]
    assert read_lines(run / "metrics.jsonl")[-1]["valid_loss"] > 0, "a share of the rows is held out"
    assert (run / "adapter" / "adapter_config.json").is_file()
    capsys.readouterr()
    assert (
        main(["generate", str(run), "--prompt", "Write 1", "--chat", "--max-new-tokens", "3", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["finetune", str(model), str(examples), "--run", str(run), *QUICK]) == 0, (
        "nothing is left to do"
    )
    assert losses(run) == found


def test_a_model_without_a_chat_template_reads_plain_text(examples, tmp_path, capsys):
    plain, run = tiny_model(tmp_path / "plain", chat=False), tmp_path / "run"
    assert main(["finetune", str(plain), str(examples), "--run", str(run), *QUICK]) == 0
    assert "no chat template: examples are read as plain text (prompt.mode=text)" in capsys.readouterr().err
    assert '\nmode = "text"\n' in (run / "recipe.toml").read_text()


def test_all_weights(model, examples, tmp_path):
    run = tmp_path / "run"
    assert main(["finetune", str(model), str(examples), "--full", "--run", str(run), *QUICK]) == 0
    before, after = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (model, run / "model")
    )
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before if "embed" in name or "proj" in name)


def test_a_run_is_extended_and_forked(model, examples, tmp_path, capsys):
    run, fork = tmp_path / "run", tmp_path / "fork"
    command = ["finetune", str(model), str(examples), *QUICK]
    assert main([*command, "--run", str(run)]) == 0
    steps = len(losses(run))
    assert (
        main([*command, "--run", str(run), "--set", "train.epochs=3", "--set", "train.checkpoint_every=2"])
        == 0
    )
    assert len(losses(run)) == steps * 3 // 2
    assert [e["changed"] for e in read_lines(run / "events.jsonl") if e["event"] == "extended"] == [
        {"train.epochs": [2, 3]}
    ]
    assert main([*command, "--run", str(run), "--set", "train.lr=1e-3"]) == 2
    assert "--fork" in capsys.readouterr().err
    other = ["--run", str(fork), "--fork", str(run), "--set", "train.lr=1e-3", "--set"]
    assert main([*command, *other, "train.epochs=3"]) == 2, "its checkpoint is at the end of three"
    assert "more train.steps or train.epochs" in capsys.readouterr().err
    assert main([*command, *other, "train.epochs=4"]) == 0
    lines, (*_, forked) = (
        read_lines(fork / "metrics.jsonl"),
        [e for e in read_lines(fork / "events.jsonl") if e["event"] == "forked"],
    )
    assert [line["step"] for line in lines] == list(range(steps * 3 // 2 + 1, 2 * steps + 1))
    assert forked["changed"]["train.lr"] == [1e-2, 1e-3]


def test_two_processes_train_what_one_trains(warm: Warm, model, examples, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    command = ("finetune", model, examples, *QUICK, "--set", "data.valid_fraction=0")
    alone = warm.run(*command, "--run", one)
    both = warm.run(*command, "--run", two, "--nproc", "2", fault=Fault("forked_members"))
    assert (alone.code, both.code) == (0, 0), alone.err + both.err
    found, expected = (read_lines(run / "metrics.jsonl") for run in (two, one))
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    for name in (
        "loss",
        "grad_norm",
    ):  # of the first update; in test_processes.py all are compared, in double
        assert found[0][name] == pytest.approx(expected[0][name], rel=CLOSE_FP32)
    assert losses(two)[-1] < losses(two)[0]
    a, b = (safetensors.torch.load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two))
    assert a.keys() == b.keys()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pairs.json", json.dumps([["Write 1", "a"], ["Write 2", "aa", "so: aa"]])),
        ("prompts.jsonl", '{"prompt": "Write 1", "completion": "a"}\n{"question": "2", "answer": 3}\n'),
        ("chat.jsonl", "".join(json.dumps(row) + "\n" for row in rows(2))),
    ],
)
def test_every_form_of_a_row_is_read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    chats = read_chats(tmp_path / name)
    assert [chat[-1]["role"] for chat in chats.rows] == ["assistant"] * 2
    assert chats.left_out == 0


def test_each_answer_of_a_conversation_is_an_example(tmp_path):
    turns = [("user", "hi"), ("assistant", "a"), ("user", "more"), ("assistant", "e")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    assert [len(chat) for chat in read_chats(tmp_path / "x.jsonl").rows] == [2, 4]


def test_a_file_that_is_something_else_is_one_line(tmp_path, model, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "no example"}\n' * 5)
    with pytest.raises(DataError, match=r"5 of 5 rows are not examples; the first: .*row 1"):
        read_chats(bad)
    bad.write_text(json.dumps({"messages": ["hi", {"role": "assistant", "content": "a"}]}))
    with pytest.raises(DataError, match=r"row 1: messages must be objects with role and content"):
        read_chats(bad)
    bad.write_text("")
    with pytest.raises(DataError, match=r"bad\.jsonl: no rows\."):
        read_chats(bad)
    one_of_many = "".join(json.dumps(row) + "\n" for row in rows(200)) + "{broken\n"
    bad.write_text(one_of_many)
    assert (read_chats(bad).left_out, len(read_chats(bad).rows)) == (1, 200)
    assert main(["finetune", str(model), "no/such.jsonl", "--run", str(tmp_path / "run")]) == 3
    assert "no/such.jsonl" in capsys.readouterr().err


# ---- a Hub on loopback ----


class _Hub(BaseHTTPRequestHandler):
    """Answers what `snapshot_download` asks: the list of a repository's files, and the files."""

    folders: dict[str, Path]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        for name, folder in self.folders.items():
            kind, _, repository = name.partition(":")
            if path.startswith(f"/api/{kind}/{repository}"):
                files = sorted(f for f in folder.rglob("*") if f.is_file())
                names = [f.relative_to(folder).as_posix() for f in files]
                tree = [
                    {"type": "file", "path": name, "size": f.stat().st_size, "oid": f"{n:040x}"}
                    for n, (name, f) in enumerate(zip(names, files, strict=True))
                ]
                about = {
                    "id": repository,
                    "sha": "c" * 40,
                    "siblings": [{"rfilename": name} for name in names],
                }
                self._send(json.dumps(tree if "/tree/" in path else about).encode(), body)
                return
            where = f"/{'datasets/' if kind == 'datasets' else ''}{repository}/resolve/{'c' * 40}/"
            if path.startswith(where) and (folder / path.removeprefix(where)).is_file():
                self._send((folder / path.removeprefix(where)).read_bytes(), body)
                return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        for name, value in {
            "Content-Length": str(len(data)), "ETag": f'"{hash(data) & (2**64 - 1):x}"', "X-Repo-Commit": "c" * 40,
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


LINES = ["", " = Title = \n", "", " Some words here . \n"]


def _wikitext(folder: Path) -> Path:
    """As on the Hub: a folder for each size, a file for each split, and rows that are lines."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for size, split in itertools.product((2, 103), ("test", "train", "validation")):
        place = folder / f"wikitext-{size}-raw-v1"
        place.mkdir(parents=True, exist_ok=True)
        lines = [line.replace("words", split) for line in LINES * 50]
        pq.write_table(pa.table({"text": lines}), place / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables that a command needs to find it."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    _Hub.folders = {"models:org/tiny": model, "datasets:org/chats": data}
    _Hub.folders["datasets:Salesforce/wikitext"] = _wikitext(tmp_path / "wikitext")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # read by huggingface_hub when it is imported, which the warm process has not done
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",  # a benchmark's test may have set it for this process
    }
    server.shutdown()
    (model / "pytorch_model.bin").unlink()


def test_model_and_data_come_from_the_hub(warm: Warm, hub, tmp_path):
    run = tmp_path / "run"
    command = ("finetune", "org/tiny", "org/chats", "--run", run, *QUICK)
    done = warm.start(*command, environment=hub).wait()
    assert done.code == 0, done.err
    assert (run / "adapter" / "adapter_config.json").is_file()
    fetched = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.is_symlink()}
    assert "model.safetensors" in fetched
    assert "pytorch_model.bin" not in fetched, "no pickle is ever fetched"
    command = ("finetune", "org/nothing", "org/chats", "--run", tmp_path / "other")
    missing = warm.start(*command, environment=hub).wait()
    assert missing.code != 0
    assert "org/nothing: the Hugging Face Hub does not serve this model" in missing.err.splitlines()[-1]


def test_wikitext_comes_from_the_hub_with_its_own_splits_and_whole_texts(warm: Warm, hub, tmp_path):
    where = {**hub, "REDLINE_CACHE": str(tmp_path / "redline")}
    out = tmp_path / "corpus"
    done = warm.start(
        "data", "build", "wikitext-2", "--out", out, "--vocab-size", 300, environment=where
    ).wait()
    assert done.code == 0, done.err
    text = "".join(line or "\n" for line in LINES)
    tokenizer = load_tokenizer(out)
    for split, name in (("train", "train"), ("valid", "validation")):
        data = TokenDataset.open(out, split)
        ids = data.read_windows(np.zeros(1, dtype=np.int64), data.tokens - 1)[0, :-1]
        assert tokenizer.decode(ids.tolist()) == text.replace("words", name) * 50, "one document, and its end"
    fetched = {path.parent.name for path in (tmp_path / "cache").rglob("*.parquet")}
    assert fetched == {"wikitext-2-raw-v1"}, "the other sizes stay where they are"


def test_without_a_connection_it_is_one_line(warm: Warm, tmp_path):
    offline = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    done = warm.start("generate", "org/nowhere", "--prompt", "x", environment=offline).wait()
    assert done.code != 0
    said = done.err.strip().splitlines()[-1]
    assert said.startswith(
        "redline: org/nowhere: not on this disk, and the Hugging Face Hub cannot be reached"
    )
