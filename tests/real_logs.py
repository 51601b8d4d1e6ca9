"""How well `diagnose` does on logs that people really have, judged by tests/data/logs/expected.toml.

    python tests/real_logs.py          # the tables of docs/diagnose.md, from ../shared/data/logs

An expectation was written by reading the log. What is judged: the step time (within 2%, where the file has
one), the findings that would be wrong, and whether the first finding is one that an expert would name. A
finding that the expectation does not mention counts neither way and is listed, so that somebody reads it.
"""

import lzma
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redline.diagnose.finding import Finding
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.errors import RedlineError

OWN = Path(__file__).parent / "data" / "logs"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "logs"
EXPECTED: list[dict[str, Any]] = tomllib.loads((OWN / "expected.toml").read_text())["log"]
STEP_TIME_WITHIN = 0.02
SURE = 0.8
"""From this confidence on a wrong finding is a lie and not a guess."""


@dataclass(frozen=True)
class Answer:
    """What redline made of one log, beside what there was to find."""

    expected: dict[str, Any]
    step_s: float | None = None
    updates: int | None = None
    tokens_per_s: float | None = None
    gpus: float | None = None
    findings: tuple[Finding, ...] = ()
    refused: str | None = None

    @property
    def name(self) -> str:
        return str(self.expected["file"])

    @property
    def step_time_is_right(self) -> bool:
        """Of a log without times the right answer is none."""
        right = [self.expected.get("step_s"), *self.expected.get("also_step_s", ())]
        if right[0] is None:
            return self.step_s is None
        return self.step_s is not None and any(
            abs(self.step_s - one) <= STEP_TIME_WITHIN * one for one in right
        )

    @property
    def wrong_numbers(self) -> list[str]:
        """Numbers that were read and are not those of the log; one that was not read is not wrong. Steps may
        count from 0 or from 1, and throughput follows from a step time that may be off by 2% itself."""
        wrong = []
        for name, within in (("tokens_per_s", 2 * STEP_TIME_WITHIN), ("gpus", 0.0)):
            got = getattr(self, name)
            right = (
                [self.expected[name], *self.expected.get(f"also_{name}", ())] if name in self.expected else []
            )
            if got is not None and right and all(abs(got - one) > within * one for one in right):
                wrong.append(f"{self.name}: {name} {got:g}, not {right[0]:g}")
        counts = [self.expected["updates"], *self.expected.get("also_updates", ())]
        if self.updates and all(abs(self.updates - right) > 1 for right in counts):
            wrong.append(f"{self.name}: updates {self.updates}, not {counts[0]}")
        return wrong

    @cached_property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if self._is_wrong(finding))

    def _is_wrong(self, finding: Finding) -> bool:
        text = f"{finding.title} {finding.fix}"
        for entry in self.expected["wrong"]:
            if entry["cause"] == finding.cause:
                matches, unless = entry.get("matches"), entry.get("unless")
                if (not matches or re.search(matches, text)) and not (unless and re.search(unless, text)):
                    return True
        return False

    @cached_property
    def right(self) -> tuple[Finding, ...]:
        named = {entry["cause"] for entry in self.expected["expert"]}
        return tuple(f for f in self.findings if f.cause in named and f not in self.wrong)

    @property
    def unjudged(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f not in self.wrong and f not in self.right)

    @property
    def has_cause(self) -> bool:
        """Whether there is something to find: of a run that is fast enough, or whose file does not tell, what
        an expert would still say is welcome and not missed."""
        return self.expected["verdict"] in ("found", "failed")

    @property
    def missed(self) -> list[str]:
        named = {finding.cause for finding in self.right}
        return [e["cause"] for e in self.expected["expert"] if self.has_cause and e["cause"] not in named]

    @property
    def expert_first(self) -> bool:
        return bool(self.findings) and self.findings[0] in self.right


def answer(path: Path, expected: dict[str, Any]) -> Answer:
    try:
        observed = read(path)
        return Answer(
            expected,
            step_s=observed.median("step_s"),
            updates=observed.updates,
            tokens_per_s=observed.tokens_per_s,
            gpus=observed.facts.gpus,
            findings=tuple(diagnose(observed)),
        )
    except RedlineError as error:
        return Answer(expected, refused=str(error))


def answers(*, own: bool) -> list[Answer]:
    """Of the logs in the repository, or of the shared ones (none where they are not there)."""
    wanted = [entry for entry in EXPECTED if entry.get("own", False) == own]
    if own:
        return [answer(OWN / entry["file"], entry) for entry in wanted]
    with TemporaryDirectory() as folder:
        found = []
        for entry in wanted:
            if (packed := SHARED / f"{entry['file']}.xz").exists():
                path = Path(folder) / entry["file"]
                path.write_bytes(lzma.decompress(packed.read_bytes()))
                found.append(answer(path, entry))
        return found


@dataclass(frozen=True)
class Score:
    """The aims of issue 14 in numbers, as (reached, of)."""

    step_times: tuple[int, int]
    expert_first: tuple[int, int]
    surely_wrong: tuple[str, ...]


def score(given: Iterable[Answer]) -> Score:
    given = list(given)
    timed = [one for one in given if "step_s" in one.expected]
    with_cause = [one for one in given if one.has_cause]
    return Score(
        (sum(one.step_time_is_right for one in timed), len(timed)),
        (sum(one.expert_first for one in with_cause), len(with_cause)),
        tuple(
            f"{one.name}: {finding.cause} at {finding.confidence:.0%}"
            for one in given
            for finding in one.wrong
            if finding.confidence >= SURE
        ),
    )


def by_rule(given: Iterable[Answer]) -> list[tuple[str, int, int, int, int]]:
    """Each cause with how often it was named rightly, wrongly and without judgement, and how often it was
    missed, the most named first."""
    rows: dict[str, list[int]] = {}
    for one in given:
        for place, findings in enumerate((one.right, one.wrong, one.unjudged)):
            for finding in findings:
                rows.setdefault(finding.cause, [0, 0, 0, 0])[place] += 1
        for cause in one.missed:
            rows.setdefault(cause, [0, 0, 0, 0])[3] += 1
    ranked = sorted(rows.items(), key=lambda row: (-sum(row[1][:3]), -row[1][3], row[0]))
    return [(cause, *counts) for cause, counts in ranked]  # type: ignore[misc]


def document(given: Iterable[Answer]) -> str:
    """The Markdown of docs/diagnose.md: the aims, and precision and recall of every rule."""
    given = list(given)
    reached = score(given)
    lines = [
        f"- step time right within 2%: {reached.step_times[0]} of {reached.step_times[1]} logs that have one",
        f"- a finding that an expert would name comes first: {reached.expert_first[0]} of {reached.expert_first[1]}"
        " runs that something holds back",
        f"- wrong findings at 80% confidence or more: {len(reached.surely_wrong)}",
        "",
        "| cause | right | wrong | not judged | missed | precision | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    for cause, right, wrong, unjudged, missed in by_rule(given):
        precision = f"{right / (right + wrong):.0%}" if right + wrong else ""
        recall = f"{right / (right + missed):.0%}" if right + missed else ""
        lines.append(f"| `{cause}` | {right} | {wrong} | {unjudged} | {missed} | {precision} | {recall} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = answers(own=False)
    print(document(given))
    for one in given:
        state = (
            "right" if one.step_time_is_right else f"WRONG ({one.step_s}, not {one.expected.get('step_s')})"
        )
        said = ", ".join(f"{finding.cause} {finding.confidence:.0%}" for finding in one.findings)
        print(f"{one.name}: step time {state}; {one.refused or said or 'nothing found'}")
        for finding in one.wrong:
            print(f"    WRONG {finding.cause} at {finding.confidence:.0%}: {finding.title}")
        for finding in one.unjudged:
            print(f"    not judged: {finding.cause} at {finding.confidence:.0%}: {finding.title}")
        for wrong in one.wrong_numbers:
            print(f"    WRONG NUMBER {wrong}")
        if one.missed:
            print(f"    missed: {', '.join(one.missed)}")


if __name__ == "__main__":
    main()
