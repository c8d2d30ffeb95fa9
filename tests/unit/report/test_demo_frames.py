"""The frames of the demo: they fit every terminal and show what has happened until then."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.analysis import incident
from nodeagent.report import demo_frames
from nodeagent.report.demo_frames import Line
from nodeagent.report.demo_story import Point

STORY = incident.read().story


def text(lines: Sequence[Line]) -> list[str]:
    return demo_frames.plain(lines).splitlines()


@given(
    at=st.floats(-1e6, 1e6),
    width=st.integers(1, 300),
    height=st.integers(1, 80),
)
def test_a_frame_fits_every_terminal(at: float, width: int, height: int) -> None:
    lines = demo_frames.frame(STORY, at, width=width, height=height, speed=4)
    assert 1 <= len(lines) <= height
    assert all(sum(len(cell.text) for cell in line) <= width for line in lines)


def test_nothing_is_shown_before_it_happens() -> None:
    kill = STORY.alone.acted_at
    assert kill is not None
    before = text(demo_frames.frame(STORY, kill - 0.2, width=120, height=40, speed=4))
    after = text(demo_frames.frame(STORY, kill + 0.2, width=120, height=40, speed=4))
    assert not any("SIGKILL" in line for line in before)
    assert any("SIGKILL" in line for line in after)
    assert not any("OOM killer" in line for line in before)


@pytest.mark.parametrize(("at", "act"), [(-2.0, "calm"), (5.0, "ramp"), (STORY.ended, "outcome")])
def test_the_acts_are_calm_ramp_and_outcome(at: float, act: str) -> None:
    assert demo_frames.act(STORY, at) == act
    assert act.upper() in text(demo_frames.frame(STORY, at, width=80, height=24, speed=4))[0]


def test_during_the_ramp_the_first_pod_of_the_order_is_named() -> None:
    lines = text(demo_frames.frame(STORY, 12.0, width=120, height=40, speed=4))
    assert any(line.startswith("WITH NODEAGENT") and f"first in order: {STORY.pod}, uses " in line for line in lines)


def test_a_short_dip_stays_visible() -> None:
    curve = tuple(Point(at / 10, 1 if at == 105 else 400 << 20) for at in range(-40, 350))
    lane = STORY.alone._replace(curve=curve, acted_at=None)
    bottom = text(demo_frames.chart(STORY, lane, at=STORY.ended, width=60, rows=5))[-1]
    assert "\u2581" in bottom


def test_an_unknown_value_is_a_gap() -> None:
    lane = STORY.alone._replace(curve=(Point(STORY.began, 400 << 20),), acted_at=None)
    bottom = text(demo_frames.chart(STORY, lane, at=STORY.ended, width=80, rows=5))[-1]
    assert bottom.count("\u2588") == 1


def test_a_zone_of_a_chart_is_named_after_its_threshold() -> None:
    lines = text(demo_frames.charts(STORY, width=100))
    labels = [line[75:].strip() for line in lines if "Mi: " in line]
    assert labels == ["300Mi: nodeagent, soft", "200Mi: nodeagent, hard", "100Mi: kubelet, hard"] * 2
