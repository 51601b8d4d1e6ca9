"""Greedy accuracy on held-out questions of every domain, with Wilson's intervals.

validate = make_validation(domains, policy)
validate(model, pass_size)      # {"valid_accuracy": 0.41, "valid_accuracy.units": 0.52, ..._low.units, ..._high.units}
"""

from collections.abc import Callable
from statistics import fmean

from redline.model.transformer import Transformer
from redline.rl.domains import Domains
from redline.rl.policy import Policy
from redline.tasks.task import interval_95


def make_validation(domains: Domains, policy: Policy) -> Callable[[Transformer, int], dict[str, float]]:
    process = policy.process
    # read now: a domain whose prompts are all too long is refused before anything is trained
    held_out = {name: domains.held_out(name) for name in domains.by_name}

    def validate(_model: Transformer, _pass_size: int) -> dict[str, float]:
        policy.phase("validate")
        counts, right = {name: len(own) for name, own in held_out.items()}, dict.fromkeys(held_out, 0.0)
        asked = [((name, place), one) for name, own in held_out.items() for place, one in enumerate(own)]
        with policy.speaking() as run:
            mine = dict(asked[process.rank :: process.world_size])
            for (name, _), (sample,) in domains.answers(run, mine):
                right[name] += sample.correct
        correct = dict(zip(right, process.sums(*right.values()), strict=True))
        policy.phase(None)
        shares = {name: correct[name] / n for name, n in counts.items()}
        found = {"valid_accuracy": fmean(shares.values())}  # all domains count equally
        for name, share in shares.items():
            low, high = interval_95(share, counts[name])
            ends = {"": share, "_low": low, "_high": high}
            found |= {f"valid_accuracy{end}.{name}": value for end, value in ends.items()}
        return found

    return validate
