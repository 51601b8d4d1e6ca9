"""The build: same bytes whatever the workers, the kills and the order of work; refusals; the cache for
recipes."""

import contextlib
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from redline.cli.main import main
from redline.config.recipe import DataConfig
from redline.data import build as build_module
from redline.data import read as encode_module
from redline.data.build import build, build_part, prepare, segments, tokenizer_for
from redline.data.read import SHIPPED, documents, split_of
from redline.data.shards import Manifest, TokenDataset
from redline.data.tokenizer import load_tokenizer, train_bpe
from redline.errors import DataError, StorageError

TEXTS = list(documents(SHIPPED["tinyshakespeare"], "text"))[:12]


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    train_bpe(iter(TEXTS), 400).save(tmp_path / "given.json")
    return str(tmp_path / "given.json")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files of short documents, with repeats and an empty one."""
    rows = [text[start : start + 997] for text in TEXTS for start in range(0, len(text), 997)] + [
        "",
        "again",
        "again",
    ]
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, part in (("a.jsonl", rows[::2]), ("b.jsonl", rows[1::2])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }


def test_shards_hold_every_document_once_in_its_split(
    tmp_path: Path, corpus: Path, tokenizer_file: str
) -> None:
    options = {"tokenizer": tokenizer_file, "valid_fraction": 0.2, "shard_tokens": 20_000}
    manifest = build(str(corpus), tmp_path / "out", **options)
    tokenizer = load_tokenizer(tmp_path / "out")
    texts = [text for name in ("a.jsonl", "b.jsonl") for text in documents(corpus / name, "text")]
    assert len(manifest.train) > 3
    for split in ("train", "valid"):
        wanted = [text for text in texts if split_of(text.encode(), 0.2) == split]
        expected = [token for text in wanted for token in [*tokenizer.encode([text])[0], tokenizer.eot_id]]
        shards = manifest.shards(split)
        seen = np.concatenate([np.fromfile(tmp_path / "out" / shard.name, dtype="<u2") for shard in shards])
        assert seen.tolist() == expected
        assert sum(shard.documents for shard in shards) == len(wanted)
        assert sum(shard.bytes_of_text for shard in shards) == sum(len(text.encode()) for text in wanted)
        assert max(shard.max_id for shard in shards) == max(expected)
        dataset = TokenDataset.open(tmp_path / "out", split, verify=True)
        assert dataset.tokens == len(expected)
        assert dataset.bytes_of_text == sum(len(text.encode()) for text in wanted)
    assert Manifest.load(tmp_path / "out") == manifest
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".bin") == [
        ".lock",
        "manifest.json",
        "tokenizer.json",
    ]


def test_workers_and_batches_do_not_change_a_byte(
    tmp_path: Path, corpus: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tokenizer": tokenizer_file, "valid_fraction": 0.2, "shard_tokens": 30_000}
    build(str(corpus), tmp_path / "one", workers=1, **options)
    monkeypatch.setattr(encode_module, "BATCH_BYTES", 3_000)
    seen: list[tuple[int, ...]] = []
    manifest = build(
        str(corpus), tmp_path / "four", workers=4, progress=lambda *numbers: seen.append(numbers), **options
    )
    assert digests(tmp_path / "one") == digests(tmp_path / "four")
    assert seen == sorted(seen)
    total_bytes = sum(path.stat().st_size for path in corpus.iterdir())
    tokens = sum(shard.tokens for shard in (*manifest.train, *manifest.valid))
    assert seen[-1] == (total_bytes, total_bytes, tokens)
    assert os.environ.get("TOKENIZERS_PARALLELISM") is None


def test_trained_bpe_comes_from_the_training_documents(tmp_path: Path) -> None:
    build("tinyshakespeare", tmp_path / "out", vocab_size=300, valid_fraction=0.1)
    train = [
        text
        for text in documents(SHIPPED["tinyshakespeare"], "text")
        if split_of(text.encode(), 0.1) == "train"
    ]
    assert load_tokenizer(tmp_path / "out").fingerprint == train_bpe(iter(train), 300).fingerprint
    streamed = tokenizer_for(DataConfig(source="tinyshakespeare", seq_len=8, valid_fraction=0.1), 300)
    assert streamed.fingerprint == load_tokenizer(tmp_path / "out").fingerprint


def test_a_killed_build_continues_to_the_same_bytes(tmp_path: Path, corpus: Path) -> None:
    options = {"tokenizer": "bpe", "vocab_size": 400, "valid_fraction": 0.2, "shard_tokens": 15_000}
    build(str(corpus), tmp_path / "unbroken", **options)
    out = tmp_path / "killed"
    code = """
import json, os, signal, sys
from pathlib import Path
from redline.data.build import build

def die_in_the_unit_after_the_next(*_):
    state = out / ".parts" / "00000.json"
    if state.exists() and json.loads(state.read_text())["units"] > known:
        os.kill(os.getpid(), signal.SIGKILL)

source, out, known = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
build(source, out, progress=die_in_the_unit_after_the_next, **json.loads(sys.argv[4]))
"""
    units = [0]
    for _ in range(3):
        given = [str(corpus), str(out), str(units[-1]), json.dumps(options)]
        child = subprocess.run([sys.executable, "-c", code, *given], check=False)
        assert child.returncode == -signal.SIGKILL
        units.append(json.loads((out / ".parts" / "00000.json").read_text())["units"])
        assert not (out / "manifest.json").exists()
        with pytest.raises(DataError, match="unfinished build"):
            prepare(DataConfig(source=str(out), seq_len=8), 400)
    assert units == sorted(set(units))  # each child went on from where the last was killed
    read_from: list[int] = []
    build(str(corpus), out, progress=lambda done_bytes, *_: read_from.append(done_bytes), **options)
    assert read_from[0] > 2_000  # and so did this one
    assert digests(out) == digests(tmp_path / "unbroken")


def test_a_finished_folder_is_returned_and_other_inputs_refused(
    tmp_path: Path, corpus: Path, tokenizer_file: str
) -> None:
    manifest = build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file)

    def never(*_: int) -> None:
        raise AssertionError("built again")

    assert build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file, progress=never) == manifest
    with pytest.raises(DataError, match=r"other inputs \(valid_fraction\)"):
        build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file, valid_fraction=0.3)
    (corpus / "a.jsonl").write_text('{"text": "changed"}\n')
    with pytest.raises(DataError, match=r"other inputs \(sources\)"):
        build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file)
    with pytest.raises(DataError, match=r"holds other files \([ab].jsonl\)"):
        build(str(corpus), corpus, tokenizer=tokenizer_file)


def test_bad_corpora_and_options_are_refused(tmp_path: Path, tokenizer_file: str) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DataError, match=r"the corpus is empty: .*empty\.txt"):
        build(str(empty), tmp_path / "out", tokenizer=tokenizer_file)
    empty.write_text("no longer")  # the failed build stands in nobody's way
    assert build(str(empty), tmp_path / "out", tokenizer=tokenizer_file).train[0].documents == 1
    with pytest.raises(DataError, match=r"the tokenizer has 400 ids and model\.vocab_size is 399"):
        build(str(empty), tmp_path / "x", tokenizer=tokenizer_file, vocab_size=399)
    with pytest.raises(DataError, match="needs a vocabulary size"):
        build(str(empty), tmp_path / "x")
    with pytest.raises(DataError, match=r"valid_fraction must be .* got 1"):
        build(str(empty), tmp_path / "x", tokenizer=tokenizer_file, valid_fraction=1)
    assert not (tmp_path / "x").exists()


def test_a_few_rows_without_text_are_left_out_and_counted_however_often_the_build_stops(
    tmp_path: Path, tokenizer_file: str
) -> None:
    rows = [json.dumps({"text": f"document {number} " * 20}) for number in range(300)]
    for place in (0, 150, 299):
        rows[place] = "not json"
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    options = {"tokenizer": tokenizer_file, "shard_tokens": 3_000}
    manifest = build(str(tmp_path / "a.jsonl"), tmp_path / "unbroken", **options)
    assert manifest.skipped == 3
    assert sum(shard.documents for shard in (*manifest.train, *manifest.valid)) == 297
    for stop_at in (40, 60, 80):
        left = iter(range(stop_at))
        with pytest.raises(StopIteration):
            build(
                str(tmp_path / "a.jsonl"),
                tmp_path / "stopped",
                progress=lambda *_, left=left: next(left),
                **options,
            )
    build(str(tmp_path / "a.jsonl"), tmp_path / "stopped", **options)
    assert digests(tmp_path / "stopped") == digests(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([b'{"text": "x"}', b"no"], None),  # one is always allowed, beside one that is good
        ([b"no"], "1 of the first 1 rows hold no text"),
        ([b'{"text": "x"}', b"no", b"no"], "2 of the first 3 rows"),
        ([b'{"text": "x"}'] * 150 + [b'{"body": "x"}'] * 2, r"2 of the first 152 rows .* no field 'text'"),
        ([b'{"text": "x"}'] * 298 + [b"[" * 100_000] * 2, None),
        ([b"no"] * 1000, "11 of the first 11 rows"),  # soon, not at the end of a terabyte
    ],
)
def test_more_rows_without_text_than_their_share_are_an_error(
    tmp_path: Path, tokenizer_file: str, rows: list[bytes], found: str | None
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    with contextlib.nullcontext() if found is None else pytest.raises(DataError, match=found):
        build(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=tokenizer_file)


def test_another_tokenizer_in_a_data_folder_is_noticed(
    tmp_path: Path, corpus: Path, tokenizer_file: str
) -> None:
    build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file)
    other = Path(tokenizer_file).read_text().replace("<|endoftext|>", "</s>")
    (tmp_path / "out" / "tokenizer.json").write_text(other)
    with pytest.raises(DataError, match="not the tokenizer that made the shards"):
        prepare(DataConfig(source=str(tmp_path / "out"), seq_len=8), 400)
    assert main(["data", "info", str(tmp_path / "out")]) == 0
    assert main(["data", "info", str(tmp_path / "out"), "--verify"]) == DataError.exit_code


@pytest.mark.parametrize("damage", ["", "[]", "{}", "[" * 100_000])
def test_a_damaged_state_of_a_build_is_one_line(
    tmp_path: Path, corpus: Path, tokenizer_file: str, damage: str
) -> None:
    (tmp_path / "building.json").write_text(damage)
    with pytest.raises(DataError, match=r"building\.json is damaged"):
        build(str(corpus), tmp_path, tokenizer=tokenizer_file)


def test_a_disk_that_refuses_is_one_clear_line(
    tmp_path: Path, corpus: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="choose another folder"):
        build(str(corpus), tmp_path / "file" / "out", tokenizer=tokenizer_file)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(build_module.os, "fsync", full)
        with pytest.raises(StorageError, match="the disk is full"):
            build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file)
    build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file)  # after space was freed
    TokenDataset.open(tmp_path / "out", "train", verify=True)


def test_batches_in_flight_are_bounded(
    tmp_path: Path, corpus: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read but not yet written is bounded by the workers, not by the corpus."""
    monkeypatch.setattr(encode_module, "BATCH_BYTES", 1_000)
    read = written = largest = 0
    scan = encode_module.scan

    def counted(*arguments: object) -> object:
        nonlocal read
        for each in scan(*arguments):
            read += 1
            yield each

    def progress(*_: int) -> None:
        nonlocal written, largest
        written += 1
        largest = max(largest, read - written)

    monkeypatch.setattr(encode_module, "scan", counted)
    build(str(corpus), tmp_path / "out", tokenizer=tokenizer_file, workers=2, progress=progress)
    assert written == read > 150
    assert largest <= 2 * 2 * 2 + 2  # two batches a worker, of two documents each, and the one being read


def test_prepare_builds_once_and_checks_the_tokenizer(
    tmp_path: Path, corpus: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    data = DataConfig(source=str(corpus), seq_len=32, tokenizer=tokenizer_file)
    built: list[int] = []
    folders: list[Path] = []

    def one() -> None:
        folders.append(prepare(data, 512, progress=lambda *_: built.append(threading.get_ident())))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(set(built)) == 1  # the others waited and found it done
    folder = folders[0]
    assert folder.is_relative_to(tmp_path / "cache")
    assert prepare(DataConfig(source=str(folder), seq_len=32), 512) == folder
    assert prepare(DataConfig(source=str(folder), seq_len=32, tokenizer=tokenizer_file), 512) == folder
    train_bpe(iter(TEXTS), 300).save(tmp_path / "other.json")
    with pytest.raises(DataError, match="wrong tokenizer"):
        prepare(DataConfig(source=str(folder), seq_len=32, tokenizer=str(tmp_path / "other.json")), 512)
    with pytest.raises(DataError, match=r"has 400 ids and model\.vocab_size is 320"):
        prepare(DataConfig(source=str(folder), seq_len=32), 320)
    assert prepare(DataConfig(source=str(corpus), seq_len=32, tokenizer="bpe"), 300) != folder


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Two sources of five files, each of a size that makes it a segment with shards of 800 tokens."""
    for number in range(5):
        folder = tmp_path / ("first" if number < 3 else "second")
        folder.mkdir(exist_ok=True)
        rows = [TEXTS[number][start : start + 500] for start in range(0, 9_000, 500)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(tmp_path / "first"), str(tmp_path / "second")


IN_PARTS = {"tokenizer": "bpe", "vocab_size": 400, "valid_fraction": 0.2, "shard_tokens": 800}


def test_killed_at_every_change_to_the_folder_a_build_leaves_what_an_unbroken_one_does(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    """A fork for every place, until one is not killed."""
    options = {"vocab_size": 300, "valid_fraction": 0.2}
    build(files, tmp_path / "whole", **options)
    code = """
import itertools, json, os, sys
sys.path.insert(0, sys.argv[1])
import faults
from redline.data.build import build

for call in itertools.count(1):
    if (pid := os.fork()) == 0:
        faults.kill_at(call, under=(out := f"{sys.argv[2]}/{call}"))
        build(sys.argv[4:], out, **json.loads(sys.argv[3]))
        os._exit(0)
    if os.waitpid(pid, 0)[1] == 0:
        break
"""
    faults = Path(__file__).parents[1] / "integration"
    out = tmp_path / "killed"
    out.mkdir()
    subprocess.run([sys.executable, "-c", code, faults, out, json.dumps(options), *files], check=True)
    places = sorted(out.iterdir())
    assert len(places) > 20
    for place in places:
        build(files, place, **options)
        assert digests(place) == digests(tmp_path / "whole")
        left = [path.name for path in place.iterdir() if path.name.startswith(".")]
        assert (left, (place / "building.json").exists()) == ([".lock"], False)


def test_parts_in_any_order_and_killed_make_the_same_bytes(tmp_path: Path, files: tuple[str, str]) -> None:
    whole = build(files, tmp_path / "whole", **IN_PARTS)
    assert len(segments(tmp_path, whole.inputs)) == 5
    assert len(whole.train) > 10
    out, read_from = tmp_path / "parts", []
    for part in (3, 1, 2):
        left = iter(range(12))  # documents of 500 characters: at least 125 tokens each, of the 800 of a unit
        with pytest.raises(StopIteration):
            build_part(part, 3, files, out, progress=lambda *_, left=left: next(left), **IN_PARTS)
        assert not (out / "manifest.json").exists()
    for part in (2, 3):
        told: list[int] = []
        assert (
            build_part(part, 3, files, out, progress=lambda n, *_, told=told: told.append(n), **IN_PARTS)
            is None
        )
        read_from.append(told[0])
    assert min(read_from) > 12 * 500 - 800 / 125 * 500  # each went on from its last finished unit
    with pytest.raises(DataError, match=r"other inputs \(valid_fraction\)"):
        build_part(1, 3, files, out, **IN_PARTS | {"valid_fraction": 0.3})
    with pytest.raises(DataError, match="unfinished build"):
        prepare(DataConfig(source=str(out), seq_len=8), 400)
    assert build_part(1, 3, files, out, **IN_PARTS) == whole
    assert digests(out) == digests(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [".lock"]
    assert build_part(2, 3, files, out, **IN_PARTS) == whole  # it is there


def test_a_join_that_was_killed_is_done_again(
    tmp_path: Path, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(files, tmp_path / "whole", **IN_PARTS)
    moves = iter(range(4))  # shards that get their final name

    def replace(*names: object, real: object = os.replace) -> None:
        if ".parts" in str(names[0]) and ".parts" not in str(names[1]):
            next(moves)
        real(*names)

    with monkeypatch.context() as patch:
        patch.setattr(build_module.os, "replace", replace)
        with pytest.raises(StopIteration):
            build(files, tmp_path / "out", **IN_PARTS)
    build(files, tmp_path / "out", **IN_PARTS)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_slurm_array_says_which_part_it_builds(
    tmp_path: Path,
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build(files, tmp_path / "whole", vocab_size=400)
    arguments = ["data", "build", *files, "--vocab-size", "400", "--out"]
    for name, value in {"COUNT": "2", "MIN": "4", "MAX": "7", "STEP": "3"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    for task, part in (("4", "1/2"), ("7", "2/2")):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        assert main([*arguments, str(tmp_path / "out")]) == 0
        assert f"task {task} of a SLURM array of 2: building --part {part}" in capsys.readouterr().err
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    for wrong in ("0/2", "3/2", "2", "a/b"):
        assert main([*arguments, str(tmp_path / "x"), "--part", wrong]) == 2
        assert f"--part must be K/N with K from 1 to N, got {wrong}" in capsys.readouterr().err
    for given, told in (
        (["s3://bucket/x", "--part", "1/2"], "share a folder"),
        (["x", "--part", "1/2", "--on", "ray"], "--on ray builds all parts: leave out --part"),
        (["x", "--ray-address", "auto"], "--ray-address is for a build on Ray: add --on ray"),
    ):
        assert main([*arguments, *given]) == 2
        assert told in capsys.readouterr().err
