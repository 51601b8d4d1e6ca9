"""What `redline rl doctor` and `redline rl compare` print. No torch."""

from typing import TYPE_CHECKING

from redline.record.units import DASH, format_bytes, format_duration, format_share, visible
from redline.report.grid import show

if TYPE_CHECKING:
    from redline.report.reinforcement import Compared
    from redline.rl.doctor import Report

LONGEST_TEXT = 300


def print_doctor(report: "Report") -> None:
    show(
        ("domain", "answers", "correct", "reward", "groups alike", "no answer found", "cut off", "tokens", "scoring"),
        [
            (
                d.name, f"{d.answers:,}", format_share(d.solved), f"{d.reward:.3f}", format_share(d.even),
                format_share(d.unread), format_share(d.cut), f"{d.tokens:.0f}", format_duration(d.scoring_s),
            )
            for d in report.domains
        ],
        right=range(1, 9),
    )  # fmt: skip
    for domain in report.domains:
        for text in domain.unread_texts:
            print(f"\n{domain.name}, no answer found in: {visible(' '.join(text.split()))[:LONGEST_TEXT]}")
    if (gap := report.gap) is not None:
        rows = [(repr(token), f"{engine:.4f}", f"{trainer:.4f}") for token, engine, trainer in gap.beside]
        print(
            f"\nLog-probabilities of {gap.tokens:,} tokens, engine against trainer: {gap.mean:.2g} nats apart on average,"
            f" {gap.most:.2g} at most"
        )
        show(("token", "engine", "trainer"), rows, right=(1, 2))
    rows = [
        ("memory", format_bytes(report.memory_bytes), "predicted: " + _parts(report)),
        (
            "generation", format_duration(report.generate_s),
            f"a step, at the {report.generate_tokens_per_s:,.0f} tokens/s seen here",
        ),
        ("scoring", format_duration(report.scoring_s), "a step; hidden behind generation as far as it is shorter"),
        ("update", format_duration(report.update_s), "a step, predicted" if report.update_s else "not predicted on a CPU"),
        ("sandbox", report.sandbox.partition(";")[0], report.sandbox.partition("; ")[2]),
    ]  # fmt: skip
    print()
    show(("", "", ""), rows)
    print()
    for line in report.advice or ["Nothing to change was found."]:
        print(visible(line))


def _parts(report: "Report") -> str:
    sizes = sorted(report.memory_parts_bytes.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes if size)


def print_compared(found: "Compared", labels: tuple[str, str]) -> None:
    rows = [
        (
            one.domain,
            str(one.base),
            str(one.other),
            f"{100 * one.low:+.1f} to {100 * one.high:+.1f}",
            one.word,
        )
        for one in found.differences
    ]
    show(("accuracy", *labels, "difference, points", ""), rows)
    for label, pairs in found.pairs.items():
        shown = [
            (f"{p.a} and {p.b}", f"{p.cosine:+.2f}", format_share(p.rate), format_share(p.tensors))
            for p in pairs
        ]
        columns = (f"conflicts in {label}", "mean cosine", "updates", "tensors")
        print()
        show(columns, shown or [(DASH,) * 4], right=(1, 2, 3))
    print()
    show(("cost", *labels), found.costs)
    print(f"\n{visible(found.verdict)}")
    for caveat in found.caveats:
        print(visible(caveat))
