"""The time that is left of a training, estimated from its log lines and pauses."""

import pytest

from lm.training.budget import StepTimeEstimator


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


def test_pauses_that_come_again_are_part_of_the_pace_and_a_single_one_is_not():
    """Evaluations of 120 s every 250 steps make a step of 0.1 s one of 0.58 s."""
    pace = StepTimeEstimator()
    pace.steps.append(0.1)
    pace.pauses.append((250, 500.0))  # the first of a session, which compiled something
    assert pace.rest(1000, 0) == pytest.approx(100.0)
    pace.pauses.extend([(500, 120.0), (750, 120.0)])
    assert pace.rest(1000, 0) == pytest.approx(100.0 + 4 * 120.0)
