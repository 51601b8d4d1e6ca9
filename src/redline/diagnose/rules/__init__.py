"""All rules together: `diagnose` runs each on what was read and puts the findings in order.

    findings = diagnose(read(Path("runs/nano")))

To add a rule: a function from Observed to findings, its name in the RULES of its file, its cause in causes.toml.
"""

from redline.diagnose.finding import Finding, ordered
from redline.diagnose.observed import Observed
from redline.diagnose.rules import claims, generation, memory, pauses, plans, trouble, units, update

ROOMS = (update, pauses, plans, memory, generation, units, claims, trouble)


def diagnose(observed: Observed) -> list[Finding]:
    """Findings: failures, then the most worth (predicted gain times confidence), then those that correct numbers."""
    return ordered(finding for room in ROOMS for rule in room.RULES for finding in rule(observed))
