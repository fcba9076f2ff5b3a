"""Spawn points: on the lanes' middles, in the direction of driving, in CARLA's frame."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opencda_marl.standin.roads import BUILT_IN, NotARoadError, spawn_points
from tests.standin.raw import CROSSING

_LANE = '<lane id="{}" type="{}"><width sOffset="0" a="{}" b="{}" c="0" d="0"/></lane>'


def road(geometry: str, lanes: str, *, length: float = 50.0, junction: str = "-1", more: str = "", at: str = "") -> str:
    where = at or 'x="10" y="20" hdg="0"'
    return (
        f'<OpenDRIVE><road id="1" length="{length}" junction="{junction}"><planView>'
        f'<geometry s="0" {where} length="{length}">{geometry}</geometry></planView>'
        f'<elevationProfile><elevation s="0" a="2" b="0.1" c="0" d="0"/></elevationProfile>'
        f'<lanes>{more}<laneSection s="0"><center><lane id="0" type="none"/></center>'
        f"<right>{lanes}</right></laneSection></lanes></road></OpenDRIVE>"
    )


RIGHT = _LANE.format(-1, "driving", 3.5, 0) + _LANE.format(-2, "shoulder", 1, 0) + _LANE.format(-3, "driving", 3, 0.01)


def test_a_straight_line_by_hand() -> None:
    one, *_, other = spawn_points(road("<line/>", RIGHT), spacing=100.0)
    assert (one.x, one.y, one.yaw) == (15.0, pytest.approx(-(20.0 - 1.75)), 0.0)  # right of it, y points south
    assert one.z == pytest.approx(2.0 + 0.1 * 5.0 + 0.5)
    assert other.y == pytest.approx(-(20.0 - 3.5 - 1.0 - (3.0 + 0.01 * 5.0) / 2))
    assert (one.lane, other.lane) == (-1, -3)


def test_left_lanes_are_driven_against_the_line() -> None:
    (one,) = spawn_points(road("<line/>", _LANE.format(1, "driving", 4, 0)), spacing=100.0)
    assert (one.x, one.y, one.yaw) == (55.0, -22.0, 180.0)


def test_a_lane_offset_moves_all_lanes() -> None:
    more = '<laneOffset s="0" a="1.5" b="0" c="0" d="0"/>'
    (one,) = spawn_points(road("<line/>", _LANE.format(-1, "driving", 3, 0), more=more), spacing=100.0)
    assert one.y == pytest.approx(-20.0)


def test_headings_turn_the_other_way() -> None:
    north = road("<line/>", _LANE.format(-1, "driving", 3, 0), at=f'x="0" y="0" hdg="{math.pi / 2}"')
    (one,) = spawn_points(north, spacing=100.0)
    assert (one.x, one.y, one.yaw) == (pytest.approx(1.5), pytest.approx(-5.0), pytest.approx(-90.0))


_ARC = '<arc curvature="0.02"/>'
_POLY = '<paramPoly3 pRange="{}" aU="0" bU="{}" cU="0" dU="0" aV="0" bV="0" cV="{}" dV="0"/>'


@pytest.mark.parametrize(
    ("geometry", "u", "v", "turn"),
    [
        (_ARC, 50 * math.sin(0.9), 50 * (1 - math.cos(0.9)), 0.9),
        ('<spiral curvStart="0.02" curvEnd="0.02"/>', 50 * math.sin(0.9), 50 * (1 - math.cos(0.9)), 0.9),
        ('<spiral curvStart="0" curvEnd="0.02"/>', None, None, 0.0004 * 45.0**2 / 2),
        ('<poly3 a="0" b="0" c="0.001" d="0"/>', 45.0, 0.001 * 45.0**2, math.atan(0.09)),
        (_POLY.format("arcLength", 1, 0.001), 45.0, 0.001 * 45.0**2, math.atan(0.09)),
        (_POLY.format("normalized", 50, 2.5), 45.0, 2.5 * 0.9**2, math.atan2(2 * 2.5 * 0.9, 50.0)),
    ],
)
def test_each_geometry(geometry: str, u: float | None, v: float | None, turn: float) -> None:
    """At s = 45 of 50, on a lane without width but for rounding."""
    found = spawn_points(road(geometry, _LANE.format(-1, "driving", 1e-9, 0)), spacing=40.0)
    assert found[-1].s == 45.0
    assert math.radians(found[-1].yaw) == pytest.approx(-turn)
    if u is None or v is None:  # a clothoid: the integral by ten thousand steps
        way = (np.arange(10_000) + 0.5) * 45.0 / 10_000
        u, v = (float(np.sum(f(0.0004 * way**2 / 2)) * 45.0 / 10_000) for f in (np.cos, np.sin))
    assert (found[-1].x, found[-1].y) == (pytest.approx(10 + u, abs=1e-3), pytest.approx(-(20 + v), abs=1e-3))


def test_the_crossing() -> None:
    """Four arms, three lanes in and three out, 85.5 m: four points each, none inside the junction."""
    points = spawn_points(CROSSING.read_text(encoding="utf-8"))
    assert len(points) == 4 * 6 * 4
    assert all(max(abs(p.x), abs(p.y)) > 14.5 for p in points)
    places = np.array([[p.x, p.y] for p in points])
    apart = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1)) + 99.0 * np.eye(len(points))
    assert apart.min() == pytest.approx(3.5)


def test_junctions_are_left_out_and_the_built_in_map_is_one() -> None:
    with pytest.raises(NotARoadError, match="no driving lane"):
        spawn_points(road("<line/>", RIGHT, junction="5"))
    assert len(spawn_points(BUILT_IN)) == 80


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<OpenDRIVE", "not XML"),
        ("<net/>", "root element is <net>"),
        ("<OpenDRIVE/>", "no driving lane"),
        (road("<cubic/>", RIGHT), "<cubic> is no geometry"),
        (road("<arc/>", RIGHT), "cannot be read"),
    ],
)
def test_what_is_no_map(text: str, says: str) -> None:
    with pytest.raises(NotARoadError, match=says):
        spawn_points(text)
