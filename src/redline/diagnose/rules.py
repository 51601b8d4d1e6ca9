"""All rules together: `diagnose` runs each on what was read and puts the findings in order.

    findings = diagnose(read(Path("runs/nano")))

To add a rule: a function from Observed to findings, and its name in the RULES of its file.
"""

from dataclasses import replace

from redline.diagnose import (
    causes,
    claims,
    communication,
    generation,
    logging,
    pauses,
    plans,
    trouble,
    workload,
)
from redline.diagnose.finding import Finding, ordered
from redline.diagnose.observed import Observed

OPTIMISATIONS = {
    "slow-loader": "loader-threads",
    "host-gap": "logging-cadence",
    "padding": "packing",
    "checkpoint-pause": "checkpoint-cadence",
    "small-passes": "micro-batch",
    "needless-recomputation": "no-recompute",
    "slow-precision": "bf16",
    "launch-bound": "compile",
    "not-compiled": "compile",
    "uncached-generation": "kv-cache",
    "real-batch": "batched-generation",
    "inference-api": "fp8",
    "accumulation-as-speed": "accumulation",
}
"""Which entry of the catalogue mends, or is wrongly blamed for, a cause."""
RULES = (
    *causes.RULES,
    *pauses.RULES,
    *logging.RULES,
    *plans.RULES,
    *communication.RULES,
    *generation.RULES,
    *claims.RULES,
    *workload.RULES,
    *trouble.RULES,
)


def diagnose(observed: Observed) -> list[Finding]:
    """Findings: failures, then the most worth (predicted gain times confidence), then those that correct
    numbers."""
    found = [finding for rule in RULES for finding in rule(observed)]
    return ordered([replace(finding, optimisation=OPTIMISATIONS.get(finding.cause)) for finding in found])
