"""Human units against hand-written values, with the edges where rounding changes the unit."""

import math
import sys

import pytest

from redline.record.units import (
    counted,
    format_amount,
    format_bytes,
    format_count,
    format_duration,
    format_iso,
    format_limit_share,
    format_rate,
    format_share,
    sparkline,
    visible,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),  # never "1024.0 KiB"
        (int(1.2 * 1024**3), "1.2 GiB"),
        (-(3 * 1024**2), "-3.0 MiB"),
        (1024**6, "1024.0 PiB"),
        (1e30, "8.9e+14 PiB"),
        (math.nan, "nan B"),
        (math.inf, "inf B"),
    ],
)
def test_bytes(count: float | None, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.512, "0.512"),
        (999, "999"),
        (999.96, "1.0k"),
        (41_234, "41.2k"),
        (999_960, "1.0M"),
        (542e3, "542.0k"),
        (1e30, "1.0e+18T"),
        (math.nan, "nan"),
    ],
)
def test_count(count: float | None, text: str) -> None:
    assert format_count(count) == text


def test_rate_and_share() -> None:
    assert format_rate(41_234, "tok") == "41.2k tok/s"
    assert format_rate(None, "tok") == format_share(None) == "–"
    assert [format_limit_share(share, "of it") for share in (None, 0.468, 1, 2.005)] == [
        "– of it", "46.8% of it", "100.0% of it", "200.5% of it (so the limit is too low)",
    ]  # fmt: skip
    assert [format_share(share) for share in (0, 0.4684, 1, 12, math.nan)] == [
        "0.0%",
        "46.8%",
        "100.0%",
        "1200.0%",
        "nan%",
    ]


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (2e-5, "0.02 ms"),
        (0.21, "210 ms"),
        (0.9996, "1.0 s"),
        (3.44, "3.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 m 0 s"),  # never "60 s"
        (130, "2 m 10 s"),
        (3599.7, "1 h 0 m"),
        (11_100, "3 h 5 m"),
        (86_399, "1 d 0 h"),
        (187_200, "2 d 4 h"),
        (1e9, "11574 d 2 h"),
        (-130, "-2 m 10 s"),
        (math.nan, "nan s"),
        (math.inf, "inf s"),
    ],
)
def test_duration(duration_s: float | None, text: str) -> None:
    assert format_duration(duration_s) == text


def test_a_number_and_its_noun_agree() -> None:
    told = [counted(n, "pass") for n in (0, 1, 12_000)]
    assert told == ["0 passes", "1 pass", "12,000 passes"]
    assert (counted(1, "seed"), counted(3, "seed"), counted(2, "child", "children")) == (
        "1 seed",
        "3 seeds",
        "2 children",
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (195_173.0, "s", "2 d 6 h"),
        (19.2, "s", "19.2 s"),
        (24.8, "s of 32.6", "24.8 s of 32.6"),
        (1, "sequences a GPU", "1 sequence a GPU"),
        (12, "sequences a GPU", "12 sequences a GPU"),
        (0.207, "of the device's", "20.7% of the device's"),
        (2048, "tokens", "2,048 tokens"),
    ],
)
def test_an_amount_reads_with_its_unit(value: float, unit: str, text: str) -> None:
    assert format_amount(value, unit) == text


def test_an_iso_time_reads_like_the_times_of_the_report() -> None:
    assert format_iso("2026-11-19T20:33:18+00:00") == "2026-11-19 20:33:18 UTC"


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2, 2, 2]) == "▄▄▄"
    assert sparkline([1, math.nan, 2, math.inf]) == "▁×█×"
    assert sparkline([math.nan]) == "×"
    assert sparkline([-sys.float_info.max, 0, sys.float_info.max]) == "▁▅█"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain – 你好 🙂\n\ttext", "plain – 你好 🙂\n\ttext"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("over\rwritten\b", "over\\rwritten\\x08"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_spelt_out(text, shown):
    assert visible(text) == shown
    visible(text).encode()
