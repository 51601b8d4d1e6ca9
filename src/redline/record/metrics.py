"""The metrics of a run: every name, its unit and its meaning, stated once, in metrics.toml. The documentation, the
exporters and the live view read this table."""

from typing import NamedTuple

from redline.record.files import shipped


class Metric(NamedTuple):
    unit: str
    meaning: str
    phase: str = ""
    """What a report calls this part of an update, if it is one."""


METRICS = {name: Metric(*about) for name, about in shipped("record/metrics.toml").items()}
PHASES = {name: metric.phase for name, metric in METRICS.items() if metric.phase}
"""The parts of an update, which do not overlap."""
