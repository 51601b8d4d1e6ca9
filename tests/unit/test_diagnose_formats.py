"""Every format that we know, made in the form its trainer prints, ends in the same table: steps, times, tokens, losses."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from diagnose_formats import FORMATS, Format, Run

from redline.diagnose.observed import Observed
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose

RUN = Run()
CONSOLES = [name for name, form in FORMATS.items() if form.name == "train.log"]


def made(folder: Path, form: Format, text: str | None = None) -> Observed:
    path = folder / form.name
    path.write_text(form.text(RUN) if text is None else text, encoding="utf-8")
    return read(path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_made_run_is_read_as_it_was(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    observed = made(tmp_path, form)
    assert observed.trainer.name == form.trainer
    assert observed.updates == RUN.updates * form.per_line
    step_s, speed = observed.median("step_s"), observed.tokens_per_s
    assert step_s == (pytest.approx(RUN.step_s, rel=form.exact) if form.times else None)
    assert speed == (pytest.approx(RUN.tokens / RUN.step_s, rel=form.exact + 0.01) if form.tokens else None)
    if form.losses:
        assert observed.steps[-1].loss == pytest.approx(RUN.loss(RUN.updates), abs=0.01)
    failures = [finding.cause for finding in diagnose(observed) if finding.kind == "failure"]
    assert failures == []


@pytest.mark.parametrize("name", CONSOLES)
def test_what_a_terminal_and_a_file_system_do_to_a_console_changes_nothing(tmp_path: Path, name: str) -> None:
    form, text = FORMATS[name], FORMATS[name].text(RUN)
    plain = made(tmp_path, form).steps
    dos = text.replace("\n", "\r\n") if "\r" not in text else text
    path = tmp_path / "other.log"
    for raw in (
        dos.encode(),
        text.replace("loss", "\x1b[32mloss\x1b[0m").encode(),
        text.encode() + b"\xff\xfe\x00 half a character\n",
    ):
        path.write_bytes(raw)
        assert read(path).steps == plain
    if "\r" not in text and "[" not in text.split("\n")[-2][:1]:
        path.write_text("".join(f" 3: {line}\n" for line in text.splitlines()))
        assert len(read(path).steps) == len(plain), "srun -l"


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.encode("utf-8-sig"),
        lambda text: gzip.compress(text.encode()),
        lambda text: lzma.compress(text.encode()),
    ],
    ids=["utf-16", "utf-16-le", "utf-8-sig", "gzip", "xz"],
)
def test_a_console_in_any_encoding_is_the_same(tmp_path: Path, encode: Callable[[str], bytes]) -> None:
    """Whatever the form: bytes become text before anybody looks for one."""
    form = FORMATS["megatron"]
    (tmp_path / "other.log").write_bytes(encode(form.text(RUN)))
    assert read(tmp_path / "other.log").steps == made(tmp_path, form).steps


def test_lines_of_several_ranks_count_once(tmp_path: Path) -> None:
    lines = FORMATS["megatron"].text(RUN).replace("31: ", "").splitlines()
    path = tmp_path / "ranks.log"
    path.write_text("".join(f"[rank{rank}]: {line}\n" for line in lines for rank in range(4)))
    assert len(read(path).steps) == RUN.updates


def test_source_code_and_a_page_on_top_do_not_make_a_log_a_document(tmp_path: Path) -> None:
    top = "# Training\n\n| name | value |\n|---|---|\n| lr | 3 |\n" + Path(__file__).read_text()
    for name in ("seed 002", "llm.c", "megatron"):
        observed = made(tmp_path, FORMATS[name], top + FORMATS[name].text(RUN))
        assert observed.format == "console"
        assert observed.updates == RUN.updates
