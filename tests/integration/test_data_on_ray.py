"""`redline data build --on ray`: tasks on a real local Ray make the bytes of a build in one process."""

import argparse
import json
from pathlib import Path

import pytest

from redline.cli.data import _build_on_ray
from redline.cli.main import main
from redline.data.build import build, segments
from redline.data.read import SHIPPED


def test_a_build_on_ray_makes_the_bytes_of_one_process(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, sources = SHIPPED["tinyshakespeare"].read_text(), []
    for number in range(4):
        rows = [text[start : start + 400] for start in range(number * 8_000, (number + 1) * 8_000, 400)]
        sources.append(str(tmp_path / f"{number}.jsonl"))
        Path(sources[-1]).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    how = {"vocab_size": 300, "valid_fraction": 0.2, "shard_tokens": 800}
    whole = build(sources, tmp_path / "here", **how)
    assert len(segments(tmp_path, whole.inputs)) == 4
    asked = argparse.Namespace(source=sources, out=str(tmp_path / "ray"), workers=3, ray_address=None)
    assert _build_on_ray(asked, how) == whole
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {path.name for path in (tmp_path / "ray").iterdir()}
    for name in names:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()

    (tmp_path / "wrong.jsonl").write_text("no\n" * 20)  # an error in a task is one line, as without Ray
    wrong = [
        "data",
        "build",
        str(tmp_path / "wrong.jsonl"),
        "--vocab-size",
        "300",
        "--out",
        str(tmp_path / "x"),
    ]
    assert main([*wrong, "--on", "ray", "--workers", "1"]) == 3
    assert "11 of the first 11 rows hold no text" in capsys.readouterr().err.splitlines()[-1]
