"""What a sample store holds, for readers: its statistics, and the samples as files. Runs without torch.

    stats(run)                                         # plain values, as `redline rft stats --json` prints them
    export(run, Path("rft.json"), per_question=1)      # [[question, answer, reasoning], ...] of what is kept
    export(run, Path("samples.parquet"))               # all samples with verdicts; `kept`: trained on

pass@k is estimated without bias from the samples that every question gets whatever the verdicts (numbers 0 .. n - 1).
Samples that a budget adds or saves because of verdicts would bias it, and count only in the other figures.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redline.errors import ConfigError, need
from redline.record.files import replacing, write_atomic
from redline.record.read import total
from redline.record.run import RunFolder, read_lines
from redline.rft.budget import ROUNDS
from redline.rft.store import Store
from redline.train.open_run import recipe_of

HARDEST = 10


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n samples include a correct one."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def stats(run: Path) -> dict[str, Any]:
    with Store(run / "samples.db", create=False) as store:
        source, settings = store.latest()
        questions, verdicts = store.tallies(source), store.verdicts(source)
        right, wrong = (store.examples(source, correct=correct, most=2) for correct in (True, False))
    asked = [question for question in questions if question["samples"]]
    counted = ("samples", "correct", "cut", "distinct_correct", "tokens")
    sums = {name: sum(question[name] for question in asked) for name in counted}
    solved = sum(question["correct"] > 0 for question in asked)
    hardest = sorted(asked, key=lambda q: (q["correct"] / q["samples"], -q["samples"]))[:HARDEST]
    # Of all attempts that ended; one that was killed left no record of its time.
    events, anyway = read_lines(RunFolder(run).events_path), _drawn_anyway(run)
    sampling_s, sampled_tokens = (total(events, "sampling_end", name) for name in ("elapsed_s", "tokens"))
    # samples 0, 1, ... up to the first missing one: later ones came early because they were short
    drawn = [
        [correct for place, (_, number, correct, _) in enumerate(own) if number == place][:anyway]
        for _, own in itertools.groupby(verdicts, key=lambda verdict: verdict[0])
    ]
    return {
        "run": str(run),
        "model": source.model,
        "settings": settings,
        "questions": len(questions),
        "asked": len(asked),
        "solved": solved,
        "solved_share": _share(solved, len(asked)),
        **sums,
        "success_rate": _share(sums["correct"], sums["samples"]),
        "tokens_per_sample": _share(sums["tokens"], sums["samples"]),
        "sampling_s": sampling_s,
        "tokens_per_s": _share(sampled_tokens, sampling_s) if sampled_tokens else None,
        "pass_at": _pass_curve(drawn),
        "families": _families(asked),
        "examples": [*right, *wrong][:3] if right else wrong,
        "hardest": [{name: q[name] for name in ("id", "text", "samples", "correct")} for q in hardest],
    }


def _drawn_anyway(run: Path) -> int | None:
    """Samples that a question gets whatever the verdicts. None if there is no recipe."""
    if (recipe := recipe_of(run)) is None:
        return None
    samples = recipe.sample.samples_per_question
    return samples if recipe.sample.distinct_correct is None else -(-samples // ROUNDS)


def _pass_curve(verdicts: Sequence[Sequence[bool]]) -> dict[int, float]:
    """pass@1, 2, 4, ... up to the number of samples that every question has."""
    n = min(map(len, verdicts), default=0)
    counts = [sum(row[:n]) for row in verdicts]
    ks = [1 << power for power in range(n.bit_length()) if 1 << power < n] + [n] if n else []
    return {k: sum(pass_at_k(n, count, k) for count in counts) / len(counts) for k in ks}


def _families(asked: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Questions, solved share and success rate by family, for questions whose meta names one."""
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for question in asked:
        if "family" in question["meta"]:
            families[str(question["meta"]["family"])].append(question)
    return {
        name: {
            "questions": len(own),
            "solved_share": _share(sum(q["correct"] > 0 for q in own), len(own)),
            "success_rate": _share(sum(q["correct"] for q in own), sum(q["samples"] for q in own)),
        }
        for name, own in sorted(families.items())
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


FORMATS = (".json", ".jsonl", ".parquet")


def export(run: Path, to: Path, *, per_question: int | None = None) -> int:
    """Write the samples as the suffix says; returns how many. `per_question`: how many to keep (0: all)."""
    if to.suffix not in FORMATS:
        raise ConfigError(f"samples are written as {', '.join(FORMATS)}, got {to.name!r}: use one of these")
    if per_question is not None and per_question < 0:
        raise ConfigError(f"--per-question must not be negative (0: all), got {per_question}")
    with Store(run / "samples.db", create=False) as store:
        source, _ = store.latest()
        if per_question is None:
            per_question = recipe.sample.keep_per_question if (recipe := recipe_of(run)) else 0
        kept = store.kept(source, per_question)
        if to.suffix == ".json":
            triples = [[row.text, _number(row.answer), row.reasoning.strip()] for row in kept]
            write_atomic(to, json.dumps(triples, indent=1, ensure_ascii=False) + "\n")
            return len(triples)
        names = {(row.question, row.sample) for row in kept}
        rows = [{**row, "kept": (row["question"], row["sample"]) in names} for row in store.rows(source)]
    if to.suffix == ".jsonl":
        write_atomic(to, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return len(rows)
    pyarrow, parquet = need("pyarrow", extra="parquet"), need("pyarrow.parquet", extra="parquet")
    with replacing(to) as temporary:
        parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
    return len(rows)


def _number(answer: str) -> float | str:
    """A reference answer as a number if it is a finite one (JSON has no others), as in the public triples."""
    try:
        return float(answer) if math.isfinite(float(answer)) else answer
    except ValueError:
        return answer
