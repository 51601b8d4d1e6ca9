"""Greedy accuracy on held-out questions of every domain, with Wilson's intervals.

validate = make_validation(domains, policy, process)
validate(model, pass_size)      # {"valid_accuracy": 0.41, "valid_accuracy.units": 0.52, ..._low.units, ..._high.units}
"""

from collections.abc import Callable

from redline.engine.request import Request
from redline.evaluate import interval_95
from redline.model.transformer import Transformer
from redline.rl.domains import Domains
from redline.rl.policy import Policy
from redline.train.process import Process


def make_validation(
    domains: Domains,
    policy: Policy,
    process: Process,
    phase: Callable[[str | None], None] = lambda name: None,
) -> Callable[[Transformer, int], dict[str, float]]:
    def validate(_model: Transformer, _pass_size: int) -> dict[str, float]:
        phase("validate")
        asked = [(name, one) for name in domains.by_name for one in domains.held_out(name)]
        mine = asked[process.rank :: process.world_size]
        requests = [
            Request(prompt=one.prompt, sampling=domains.sampling(one.stops, greedy=True), tag=place)
            for place, (_, one) in enumerate(mine)
        ]
        right = dict.fromkeys(domains.by_name, 0.0)
        with policy.speaking():
            completions = list(policy.engine.run(requests))
        for completion in completions:
            name, one = mine[completion.request.tag]
            (sample,) = domains.scored(name, one.question, [completion])
            right[name] += sample.correct
        correct = dict(zip(right, process.sums(*right.values()), strict=True))
        phase(None)
        counts = {name: sum(own == name for own, _ in asked) for name in right}
        return _accuracies(correct, counts)

    return validate


def _accuracies(correct: dict[str, float], counts: dict[str, int]) -> dict[str, float]:
    """Of all domains together (their mean, each counting alike), then of each with its interval."""
    shares = {name: correct[name] / counts[name] for name in correct if counts[name]}
    found = {"valid_accuracy": sum(shares.values()) / len(shares)}
    for name, share in shares.items():
        low, high = interval_95(share, counts[name])
        found |= {f"valid_accuracy.{name}": share}
        found |= {f"valid_accuracy_low.{name}": low, f"valid_accuracy_high.{name}": high}
    return found
