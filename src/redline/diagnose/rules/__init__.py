"""All rules: `diagnose` runs those for what was read and puts the findings in order.

    findings = diagnose(read(Path("runs/nano")))

To add a rule: a function from Observed to findings, its name here, its cause and its words in causes.toml.
"""

import math

from redline.diagnose.finding import UNNAMED, Finding, ordered
from redline.diagnose.observed import Observed
from redline.diagnose.rules import claims, generation, memory, pauses, plans, trouble, update
from redline.diagnose.rules.memory import LOW, WELL

_TRAINING = (
    *(update.data_wait, update.padding, pauses.uneven, pauses.pauses, plans.communication),
    *(generation.rewards, trouble.loss_spike),
    *(memory.recomputation, memory.small_passes, memory.offload, memory.slow_precision, memory.low_mfu),
    *(trouble.ran_out_of_memory, trouble.ended, trouble.crash, trouble.not_a_number),
)
RULES = {
    "run": (
        *(*_TRAINING, update.gaps, trouble.halved, plans.against_the_plan),
        *(generation.uncached_loop, generation.few_correct),
    ),
    "log": (
        *(*_TRAINING, pauses.planned_pauses, memory.tiny_batch),
        *(generation.nested, generation.uncached, generation.slow, generation.long_tail, generation.eager),
        *(memory.wrong_throughput, memory.over_the_peak, memory.nanogpt_mfu),
    ),
    "page": (
        *(claims.speed_against_mfu, claims.over_the_peak, claims.per_gpu_throughput, claims.gains_multiply),
        *(claims.unknown_arguments, claims.inference_api, claims.no_such_memory, claims.other_work),
        *(claims.contradictions, claims.accumulation_as_speed, claims.parameter_counts),
        *(claims.recomputation_among_changes, generation.uncached_page, generation.real_batch),
    ),
}


def diagnose(observed: Observed) -> list[Finding]:
    """Findings: failures, then the most worth (predicted gain times confidence), then those that correct numbers. A low MFU
    is a symptom: it is left out where what the named causes may bring together explains it."""
    findings = [finding for rule in RULES[observed.kind] for finding in rule(observed)]
    named = math.prod(f.gain.high for f in findings if f.gain and f.cause not in UNNAMED)
    explained = [f for f in findings if f.cause == "low-mfu" and f.gain and named * WELL >= f.gain.high * LOW]
    return ordered(f for f in findings if f not in explained)
