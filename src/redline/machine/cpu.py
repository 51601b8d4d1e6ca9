"""The CPU's name, and a fault of some virtual ones. No torch.

A hypervisor (Firecracker, for one) may show AMX, Intel's matrix unit, and hide the CPUID leaves that describe
it. oneDNN, which multiplies torch's bf16 matrices, then sets the unit up wrongly, and the first bf16 product
ends the process with an illegal instruction. AVX-512 computes the same product on such a machine.
"""

import platform
from collections.abc import MutableMapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_LAST_LEAF_OF_AMX = 0x1E
_BEST_WITHOUT_AMX = "AVX512_CORE_FP16"


def cpu_name() -> str:
    """The model, and that AMX is unusable where it is: bf16 is slower than the model promises."""
    facts = _first_processor()
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} (AMX unusable)" if _amx_is_broken(facts) else name


def avoid_broken_amx(environment: MutableMapping[str, str]) -> None:
    """Keep oneDNN from AMX where it would crash; a user's choice stands. Call it before the first product."""
    if _amx_is_broken(_first_processor()):
        environment.setdefault("ONEDNN_MAX_CPU_ISA", _BEST_WITHOUT_AMX)


def _first_processor() -> dict[str, str]:
    if not _CPUINFO.exists():
        return {}
    lines = _CPUINFO.read_text().split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _amx_is_broken(facts: dict[str, str]) -> bool:
    return "amx_tile" in facts.get("flags", "").split() and int(facts["cpuid level"]) < _LAST_LEAF_OF_AMX
