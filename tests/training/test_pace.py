"""The time that is left of a training, estimated from its log lines and pauses."""

import pytest

from lm.training.callbacks.logging import StepTimeEstimator


@pytest.mark.parametrize("log_interval", [10, 100])  # with 100 a validation lies between any two lines
def test_the_time_left_is_right_to_a_second_after_a_hang_too(log_interval):
    """2,000 steps of 0.5 s, compilation in the first, a validation of 20 s every 100; the disk hangs for 600 s once."""
    pace, now, lines, estimates = StepTimeEstimator(), 0.0, {}, {}
    for step in range(1, 2001):
        now += 0.5 + (60.0 if step == 1 else 0.0) + (600.0 if step == 1005 else 0.0)
        if step % log_interval == 0:
            pace.add_line(step, now)
            lines[step], estimates[step] = now, pace.rest(2000 - step, 20 - (step - 1) // 100)
        if step % 100 == 0:
            now += 20.0
            pace.add_pause(step, 20.0, "validation")
    assert estimates.pop(log_interval) is None  # one line says nothing of the pace
    for step, seconds in estimates.items():
        if step > 100:
            hang = 600.0 if step < 1005 else 0.0  # is not foreseen
            assert seconds == pytest.approx(now - lines[step] - hang, abs=1.0), step
