"""Data folders in an object store: the tokens of the disk, a cache that keeps to its bound and that processes share,
and one line for whatever a store does."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import s3fs
from object_store import BUCKET, ObjectStore

from redline.cli.main import main
from redline.config.recipe import DataConfig
from redline.data import remote, shards
from redline.data.build import build, prepare
from redline.data.loader import Loader
from redline.data.read import SHIPPED
from redline.data.remote import fetch_folder, upload
from redline.data.shards import Manifest, TokenDataset
from redline.errors import ConfigError, DataError, MissingExtra

URL = f"s3://{BUCKET}/corpus"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen shards of about a thousand tokens."""
    base = tmp_path_factory.mktemp("built")
    text = SHIPPED["tinyshakespeare"].read_text()[:30_000]
    rows = [{"text": text[i : i + 300]} for i in range(0, len(text), 300)]
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(str(base / "rows.jsonl"), base / "data", vocab_size=300, valid_fraction=0.2, shard_tokens=1_500)
    return base / "data"


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[ObjectStore]:
    """The folder is at URL."""
    with ObjectStore() as store, pytest.MonkeyPatch.context() as patch:
        store.use(patch)
        upload(built, URL)
        yield store


@pytest.fixture
def store(server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """With an empty cache, and a client that gives up soon."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    server.requests.clear()
    yield server
    server.broken, server.broken_times = set(), None


def rows(dataset: TokenDataset, steps: int = 24) -> tuple[list[list[list[int]]], float]:
    loader = Loader(dataset, batch_size=8, seq_len=40, seed=3, threads=2)
    try:
        return [loader.next().inputs_BT.tolist() for _ in range(steps)], loader.waited_s
    finally:
        loader.close()


def in_cache() -> dict[str, int]:
    return {p.name: p.stat().st_size for p in remote._mirrors().glob("*/*") if p.suffix in (".bin", ".tmp")}


def test_a_store_gives_the_batches_of_the_disk_and_each_shard_once(store: ObjectStore, built: Path) -> None:
    folder = prepare(DataConfig(source=URL, seq_len=40), 300)
    names = [shard.name for shard in Manifest.load(built).train]
    assert len(names) > 8
    assert not in_cache()
    assert rows(TokenDataset.open(folder, "train"))[0] == rows(TokenDataset.open(built, "train"))[0]
    again = rows(TokenDataset.open(fetch_folder(URL), "train"))[0]
    assert again == rows(TokenDataset.open(built, "train"))[0]
    assert [store.fetched(name) for name in names] == [1] * len(names)
    valid = TokenDataset.open(folder, "valid")
    valid.read_windows(np.arange(1), 40)
    assert sorted(in_cache()) == sorted([*names, Manifest.load(built).valid[0].name])  # only what was read


def test_the_cache_keeps_to_its_bound_and_a_group_is_fetched_ahead(
    store: ObjectStore, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of two shards: two in use and two ahead fit into the bound, and the others leave."""
    monkeypatch.setattr(shards, "MIXED_SHARDS", 2)
    sizes = sorted(shard.tokens * 2 for shard in Manifest.load(built).train)
    bound_bytes = sum(sizes[-4:])
    monkeypatch.setenv("REDLINE_SHARDS_GB", repr((bound_bytes + 0.5) / 1e9))
    held: list[int] = []
    room = remote._room

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        with room():
            yield
            held.append(sum(in_cache().values()))

    monkeypatch.setattr(remote, "_room", counted)
    dataset = TokenDataset.open(fetch_folder(URL), "train")
    steps = sum(sizes) // 2 // 40 // 8 * 2  # about two epochs
    assert rows(dataset, steps)[0] == rows(TokenDataset.open(built, "train"), steps)[0]
    assert sum(store.fetched(shard.name) for shard in Manifest.load(built).train) > len(sizes)  # some left
    assert max(held) <= bound_bytes

    monkeypatch.setenv("REDLINE_SHARDS_GB", repr((bound_bytes - 2) / 1e9))
    with pytest.raises(DataError, match=rf"training holds up to .* of {URL} .* REDLINE_SHARDS_GB allows"):
        rows(TokenDataset.open(fetch_folder(URL), "train"))
    monkeypatch.setenv("REDLINE_SHARDS_GB", "much")
    with pytest.raises(
        ConfigError, match="REDLINE_SHARDS_GB must be a number of gigabytes above 0, got 'much'"
    ):
        TokenDataset.open(fetch_folder(URL), "train")


READER = """
import sys
import numpy as np
from redline.data.remote import fetch_folder
from redline.data.shards import TokenDataset
dataset = TokenDataset.open(fetch_folder(sys.argv[1]), "train")
dataset.read_windows(np.arange(1), 40)
"""


def test_a_killed_fetch_leaves_nothing_that_is_taken_for_a_shard(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    url, name = built.as_uri(), Manifest.load(built).train[0].name
    code = f"import os, signal\nos.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n{READER}"
    fetch_folder(url)
    killed = subprocess.run([sys.executable, "-c", code, url], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(in_cache()) == [f"{name}.tmp"]
    # it still counts against the bound, and leaves like any other
    largest_bytes = max(shard.tokens * 2 for shard in Manifest.load(built).train)
    monkeypatch.setenv("REDLINE_SHARDS_GB", repr((largest_bytes + 0.5) / 1e9))
    fetched = TokenDataset.open(fetch_folder(url), "train")._arrays
    assert fetched[1].tolist() == np.fromfile(built / Manifest.load(built).train[1].name, "<u2").tolist()
    assert list(in_cache()) == [Manifest.load(built).train[1].name]
    with pytest.raises(DataError, match=r"the shard cache is full: .* raise REDLINE_SHARDS_GB"):
        fetched[0]
    fetched.want([0], [])
    assert fetched[0].tolist() == np.fromfile(built / name, "<u2").tolist()


@pytest.mark.timeout(60)
def test_a_shard_that_another_reader_fetches_meanwhile_is_shared(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there when one looks, and then the other fetches it and keeps it open."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    folder = fetch_folder(built.as_uri())
    one, other = (TokenDataset.open(folder, "train")._arrays for _ in range(2))
    looked = []

    def look(index: int) -> bool:
        if not looked:
            looked.append(other[index])
            return False
        return type(one)._is_there(one, index)

    monkeypatch.setattr(one, "_is_there", look)
    assert one[0].tolist() == looked[0].tolist()


def test_a_damaged_object_is_refused_and_not_kept(store: ObjectStore, built: Path) -> None:
    url, (first, second) = f"s3://{BUCKET}/damaged", Manifest.load(built).train[:2]
    content = bytearray((built / first.name).read_bytes())
    content[7] ^= 1
    s3 = s3fs.S3FileSystem()
    for name in ("manifest.json", "tokenizer.json"):
        s3.put_file(str(built / name), f"{url}/{name}")
    s3.pipe_file(f"{url}/{first.name}", bytes(content))
    s3.pipe_file(f"{url}/{second.name}", (built / second.name).read_bytes() + b"more")
    fetched = TokenDataset.open(fetch_folder(url), "train")._arrays
    with pytest.raises(DataError, match=rf"shard {url}/{first.name} was altered: .* upload it again"):
        fetched[0]
    with pytest.raises(DataError, match=rf"{second.name} has \d+ bytes and should have \d+"):
        fetched[1]
    assert not in_cache()
    assert main(["data", "info", url]) == 0
    assert main(["data", "info", url, "--verify"]) == DataError.exit_code
    s3.put_file(str(built / first.name), f"{url}/{first.name}")
    assert fetched[0].tolist() == np.fromfile(built / first.name, "<u2").tolist()  # mended, and it goes on


def test_a_connection_that_breaks_is_tried_again_and_then_one_line(store: ObjectStore, built: Path) -> None:
    name = Manifest.load(built).train[0].name
    folder = fetch_folder(URL)
    store.broken, store.broken_times = {name}, 1
    expected = np.fromfile(built / name, "<u2").tolist()
    assert TokenDataset.open(folder, "train")._arrays[0].tolist() == expected
    assert store.fetched(name) == 2
    store.broken, store.broken_times = {"*"}, None
    fetched = TokenDataset.open(folder, "train")._arrays
    with pytest.raises(DataError, match=r"cannot be reached .*run the same command again"):
        fetched[1]
    store.broken = set()
    assert len(fetched[1]) == Manifest.load(built).train[1].tokens  # the same object goes on


def test_what_a_store_refuses_is_one_line(
    store: ObjectStore, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"s3://nowhere/x/manifest\.json does not exist: check the bucket"):
        fetch_folder("s3://nowhere/x/")
    with pytest.raises(DataError, match=r"s3://nowhere/x does not exist: check the bucket"):
        upload(built, "s3://nowhere/x")
    with pytest.raises(
        DataError, match=r"s3://bucket/text is not on disk: from an object store only built shards"
    ):
        build("s3://bucket/text", tmp_path / "out", vocab_size=300)
    with pytest.raises(DataError, match="abc://x cannot be read: Protocol not known"):
        fetch_folder("abc://x")
    build(str(built.parent / "rows.jsonl"), tmp_path / "other", vocab_size=290)
    for address in (URL, f"{URL}/"):
        with pytest.raises(DataError, match="holds another data folder: remove it, or choose another"):
            upload(tmp_path / "other", address)
    with pytest.raises(MissingExtra, match=r"gcsfs is needed .* pip install 'redline\[gs\]'"):
        fetch_folder("gs://bucket/x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=r"cannot be opened \(Unable to locate credentials\): check AWS_"):
        fetch_folder(URL)
    s3fs.S3FileSystem.clear_instance_cache()  # the next test has credentials again
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtra, match=r"s3fs is needed .* pip install 'redline\[s3\]'"):
        fetch_folder(URL)


def test_a_build_goes_to_a_store_and_is_inspected_there(
    store: ObjectStore, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["data", "build", str(built.parent / "rows.jsonl"), "--vocab-size", "300", "--json", "--out"]
    assert main([*arguments, str(tmp_path / "local")]) == 0
    local = capsys.readouterr().out
    for _ in range(2):  # the second time it is there
        assert main([*arguments, f"s3://{BUCKET}/rows"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(local)
    assert main(["data", "info", f"s3://{BUCKET}/rows", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(local) | {"verified": True}
