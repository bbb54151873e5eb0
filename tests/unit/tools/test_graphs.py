"""tools/graphs.py: what calls take beside one that is timed around each."""

from __future__ import annotations

import pytest

from tools.graphs import among


def test_ratios_leave_out_what_changes_evenly() -> None:
    """Each time is 1 % longer than that before, as clocks fall; one window is slow throughout."""
    relative = [1.0, 0.5, 1.0, 0.25, 1.0]
    even = [x * (1 + 0.01 * place) for place, x in enumerate(relative)]
    alone, ratios, spreads = among([even, [1.3 * x for x in even], even])
    assert ratios == pytest.approx([0.5, 0.25])
    assert spreads == pytest.approx([0.0, 0.0])
    assert alone == pytest.approx(1.04)


def test_a_window_of_its_own_is_no_median() -> None:
    steady, slow = [2.0, 1.0, 2.0], [2.0, 3.0, 2.0]
    alone, ratios, spreads = among([steady, slow, steady])
    assert (alone, ratios, spreads) == (2.0, [0.5], [1.0])
