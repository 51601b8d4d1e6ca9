"""Property-based attacks. `make test` runs a few fixed examples of each; `make fuzz` runs many random ones."""

import os

from hypothesis import HealthCheck, settings

_CALM = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("test", max_examples=20, derandomize=True, database=None, **_CALM)
settings.register_profile("fuzz", max_examples=1000, **_CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))
