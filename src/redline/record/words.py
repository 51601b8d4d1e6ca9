"""Events in words: how a line of events.jsonl reads on every screen and page.

    told("checkpoint", {"step": 500, "stalled_s": 0.009})      # checkpoint of update 500 saved; training paused for 9 ms

The sentences are in events.toml.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redline.record.files import shipped
from redline.record.units import exact, fact, format_share, named

WORDS: dict[str, list[str]] = shipped("record/events.toml")
_VALIDATION: dict[str, Callable[[float], str]] = {
    "valid_perplexity": "perplexity {:,.2f} per token".format,
    "valid_word_perplexity": lambda perplexity: (
        f"{exact(perplexity) if perplexity < 1e9 else f'{perplexity:.2e}'} per word"
    ),
    "valid_bits_per_byte": "{:.4f} bits/byte".format,
}
BAD = ("failed", "process_died", "out_of_memory", "validation_out_of_memory", "updates_not_recorded")
"""Events shown in red."""
LOST = ("died", "hung")
"""States of a worker that are, too."""
_QUIET = ("at", "event", "exit_code")


def told_validation(line: dict[str, Any]) -> list[str]:
    """What a line says about a validation besides its loss: `perplexity 33.45 per token`, and so on."""
    known = {name: line[name] for name in _VALIDATION if isinstance(line.get(name), int | float)}
    return [_VALIDATION[name](value) for name, value in known.items()]


def told(kind: str, facts: dict[str, Any]) -> str:
    """One event as a sentence."""
    kind = "worker_joined" if kind == "worker" and facts.get("state") == "joined" else kind
    shares = [name for name in ("occupancy", "valid_accuracy") if isinstance(facts.get(name), int | float)]
    facts = facts | {name: format_share(facts[name]) for name in shares}
    if isinstance(facts.get("valid_loss"), float):
        facts = facts | {"valid_loss": f"{facts['valid_loss']:.4f}"}
    if isinstance(changed := facts.get("changed"), dict) and changed:
        pairs = {
            name: " to ".join(map(str, pair)) if isinstance(pair, list) else pair
            for name, pair in changed.items()
        }
        facts = facts | {"changes": ", ".join(f"{name} {pair}" for name, pair in pairs.items())}
    values = {name: named(name, value)[1] for name, value in facts.items() if value is not None}
    more = ", the best so far" if kind == "validation" and facts.get("best") is True else ""
    for sentence in WORDS.get(kind, ()):
        with suppress(KeyError):
            return sentence.format_map(values) + more
    rest = [fact(name, value) for name, value in facts.items() if value is not None and name not in _QUIET]
    return "; ".join([kind.replace("_", " "), *rest]) if rest else kind.replace("_", " ")
