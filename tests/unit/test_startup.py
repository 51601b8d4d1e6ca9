"""Where the time before the first update went, on a clock of the test's."""

import pytest

from redline.record import startup


def test_parts_add_up_and_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_age_s", lambda: 2.0)
    monkeypatch.setattr(startup.time, "monotonic", iter((10.0, 11.0, 14.0, 20.0)).__next__)
    with startup.watched():
        startup.mark("plan")
        startup.mark("first_update")
        assert startup.taken() == {"python_s": 2.0, "plan_s": 1.0, "first_update_s": 3.0, "total_s": 6.0}
        assert not startup.underway(), "it is told once"
    with pytest.raises(KeyError), startup.watched():
        raise KeyError
    assert not startup.underway(), "a command that failed leaves nothing to the next run of the process"
