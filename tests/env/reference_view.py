"""Every formula of the observation again, in plain Python: slow, one vehicle at a time, by feature name."""

from __future__ import annotations

import math

import numpy as np

from opencda_marl.core.conflicts import Conflicts
from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Driver, Field, TrafficState
from opencda_marl.settings.run import RunSettings


class ReferenceView:
    """What one vehicle sees, as dictionaries of unscaled, unclipped values."""

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts, state: TrafficState) -> None:
        self.settings, self.roads, self.zones, self.state = settings, roads, conflicts, state
        self.length = settings.scenario.vehicle.length

    def v(self, slot: int, field: Field) -> float:
        return float(self.state.values[slot, field])

    def route(self, slot: int) -> int:
        return int(self.state.routes[slot])

    def others(self, i: int) -> list[int]:
        return [int(j) for j in np.flatnonzero(self.state.alive) if j != i]

    def distance(self, i: int, j: int) -> float:
        return math.hypot(self.v(j, Field.X) - self.v(i, Field.X), self.v(j, Field.Y) - self.v(i, Field.Y))

    def in_sight(self, i: int) -> list[int]:
        return [j for j in self.others(i) if self.distance(i, j) <= self.settings.neighbours.radius]

    def ahead(self, i: int, j: int) -> float | None:
        """How far j's front is ahead of i's on i's lane."""
        mine, other = self.v(i, Field.PROGRESS), self.v(j, Field.PROGRESS)
        a, b = self.route(i), self.route(j)
        if self.zones.shared_until[a, b] > 0 and other - self.length < self.zones.shared_until[a, b]:
            gap = other - mine
        elif other >= self.zones.shared_after[b, a]:
            gap = (self.roads.length[a] - mine) - (self.roads.length[b] - other)
        else:
            return None
        return gap if gap > 0 else None

    def leader(self, i: int) -> int | None:
        found = [(self.ahead(i, j), j) for j in self.in_sight(i)]
        return min(((gap, j) for gap, j in found if gap is not None), default=(None, None))[1]

    def follower(self, i: int) -> int | None:
        found = [(self.ahead(j, i), j) for j in self.in_sight(i)]
        return min(((gap, j) for gap, j in found if gap is not None), default=(None, None))[1]

    def envelope(self, i: int) -> float:
        s, r, b = self.v(i, Field.PROGRESS), self.route(i), self.settings.envelope.comfort_braking
        here = [
            (self.roads.stop_line[r], self.roads.limit_inside[r]),
            (self.roads.junction_exit[r], self.roads.limit_exit[r]),
        ]
        bounds = [math.sqrt(limit**2 + 2 * b * (at - s)) for at, limit in here if at > s]
        return min([self.limit(i), *bounds])

    def limit(self, i: int) -> float:
        s, r = self.v(i, Field.PROGRESS), self.route(i)
        if s < self.roads.stop_line[r]:
            return float(self.roads.limit_entry[r])
        return float(self.roads.limit_inside[r] if s < self.roads.junction_exit[r] else self.roads.limit_exit[r])

    def ego(self, i: int, held: np.ndarray, acted: np.ndarray) -> dict[str, float]:
        roads, r, s = self.roads, self.route(i), self.v(i, Field.PROGRESS)
        leader, follower = self.leader(i), self.follower(i)
        before, past = s < roads.stop_line[r], s >= roads.junction_exit[r] + self.length
        speed = self.v(i, Field.SPEED)
        row = {
            "speed": speed,
            "speed_over_limit": speed / self.limit(i),
            "acceleration": self.v(i, Field.ACCEL),
            "stop_line": roads.stop_line[r] - s,
            "inside": float(not before and not past),
            "past": float(past),
            "exit": roads.junction_exit[r] + self.length - s,
            "progress": s / roads.length[r],
            "right": float(roads.movement[r] == 0),
            "straight": float(roads.movement[r] == 1),
            "left": float(roads.movement[r] == 2),
            "limit_ahead": roads.limit_inside[r] if before else roads.limit_exit[r],
            "envelope": self.envelope(i),
            "leader": float(leader is not None),
            "leader_gap": 0.0 if leader is None else self.ahead(i, leader) - self.length,
            "leader_closing": 0.0 if leader is None else speed - self.v(leader, Field.SPEED),
            "follower": float(follower is not None),
            "follower_gap": 0.0 if follower is None else self.ahead(follower, i) - self.length,
            "acted": float(acted[i]),
            "last_action": held[i] if acted[i] else 0.0,
            "others": len(self.in_sight(i)),
            "age": self.state.time - self.v(i, Field.DEPARTED_AT),
            "leader_stop": 0.0
            if leader is None
            else self.ahead(i, leader) - self.length + self.stop(leader) - self.stop(i),
        }
        return row | {"leader_stop_near": row["leader_stop"]}

    def possible(self, i: int, j: int) -> list[int]:
        """Routes that j may take, as far as i knows."""
        a, b = self.route(i), self.route(j)
        if self.zones.shared_until[a, b] > 0:
            return []
        if self.settings.neighbours.intent == "shared":
            routes = [b]
        else:
            routes = [k for k in range(self.roads.routes) if self.roads.arm[k] == self.roads.arm[b]]
        return [k for k in routes if self.zones.exists[a, k]]

    def zone(self, i: int, j: int) -> tuple[float, float, float, float] | None:
        """Distances: mine to entry and to clear, the other's to entry and to clear; None when there is no conflict."""
        a, routes = self.route(i), self.possible(i, j)
        if not routes:
            return None
        mine, other = self.v(i, Field.PROGRESS), self.v(j, Field.PROGRESS)
        found = (
            min(self.zones.entry[a, k] for k in routes) - mine,
            max(self.zones.exit[a, k] for k in routes) + self.length - mine,
            min(self.zones.entry[k, a] for k in routes) - other,
            max(self.zones.exit[k, a] for k in routes) + self.length - other,
        )
        return found if found[1] > 0 and found[3] > 0 else None

    def selected(self, i: int) -> list[int]:
        room = self.settings.neighbours.max
        if self.settings.neighbours.selection == "nearest":
            return sorted(self.in_sight(i), key=lambda j: (self.distance(i, j), j))[:room]
        leader = self.leader(i)
        found = [(self.zone(i, j)[2], j) for j in self.in_sight(i) if j != leader and self.zone(i, j) is not None]
        chosen = [j for _, j in sorted(found)]
        return chosen[:room] if leader is None else [*chosen[: room - 1], leader]

    def in_my_frame(self, i: int, j: int) -> tuple[float, float, float, float, float]:
        heading = self.v(i, Field.HEADING)
        turn = np.array([[math.cos(heading), math.sin(heading)], [-math.sin(heading), math.cos(heading)]])

        def velocity(k: int) -> np.ndarray:
            return self.v(k, Field.SPEED) * np.array(
                [math.cos(self.v(k, Field.HEADING)), math.sin(self.v(k, Field.HEADING))]
            )

        apart = [self.v(j, f) - self.v(i, f) for f in (Field.X, Field.Y)]
        x, y = turn @ apart
        u, v = turn @ (velocity(j) - velocity(i))
        return x, y, u, v, self.v(j, Field.HEADING) - heading

    def collision(self, i: int, j: int) -> float | None:
        """Smallest time at which the discs of 4 m touch, from the roots of the quadratic; 0 when inside and closing."""
        x, y, u, v, _ = self.in_my_frame(i, j)
        if x * u + y * v >= 0:
            return None
        if x * x + y * y <= 16.0:
            return 0.0
        roots = np.roots([u * u + v * v, 2 * (x * u + y * v), x * x + y * y - 16.0])
        real = [float(t.real) for t in roots if abs(t.imag) < 1e-9 and t.real > 0]
        return min(real, default=None)

    def row(self, i: int, j: int, held: np.ndarray, acted: np.ndarray) -> dict[str, float]:
        roads, b = self.roads, self.route(j)
        x, y, u, v, turned = self.in_my_frame(i, j)
        shared = self.settings.neighbours.intent == "shared"
        apart = roads.arm_heading[roads.arm[b]] - roads.arm_heading[roads.arm[self.route(i)]]
        quarter = round(apart / (math.pi / 2)) % 4
        row = {
            "right": float(shared and roads.movement[b] == 0),
            "straight": float(shared and roads.movement[b] == 1),
            "left": float(shared and roads.movement[b] == 2),
            "from_mine": float(quarter == 0),
            "from_right": float(quarter == 1),
            "from_opposite": float(quarter == 2),
            "from_left": float(quarter == 3),
            "x": x,
            "y": y,
            "u": u,
            "v": v,
            "sin_heading": math.sin(turned),
            "cos_heading": math.cos(turned),
            "speed": self.v(j, Field.SPEED),
            "distance": self.distance(i, j),
            "acceleration": self.v(j, Field.ACCEL),
            "acted": float(acted[j]),
            "last_action": held[j] if acted[j] else 0.0,
            "stop_line": roads.stop_line[b] - self.v(j, Field.PROGRESS),
            "is_leader": float(self.leader(i) == j),
        }
        return {**row, **self._meeting(i, j)}

    def time(self, k: int, distance: float, *, known: bool) -> float:
        """Driven in small pieces of road: the present speed, or what still allows to brake to the limit at the line."""
        if distance <= 0:
            return 0.0
        now, b = max(self.v(k, Field.SPEED), 1.0), self.settings.envelope.comfort_braking
        limit = float(self.roads.limit_inside[self.route(k)]) if known else math.inf
        line = self.roads.stop_line[self.route(k)] - self.v(k, Field.PROGRESS)
        lowest = min(now, limit)
        # too late for comfort: it brakes evenly harder, from here to the line
        braking = b if line <= 0 or now * now - lowest * lowest <= 2 * b * line else (now**2 - lowest**2) / (2 * line)
        pieces = 4000
        ds = distance / pieces
        total = 0.0
        for n in range(pieces):
            at = (n + 0.5) * ds
            speed = lowest if at >= line else min(now, math.sqrt(lowest * lowest + 2 * braking * (line - at)))
            total += ds / speed
        return total

    def stop(self, k: int) -> float:
        """Way until it stands, braking as hard as it can."""
        return self.v(k, Field.SPEED) ** 2 / 2 / self.settings.scenario.vehicle.braking

    def quickest(self, k: int, distance: float, *, known: bool) -> float:
        """Full acceleration up to the junction's limit, then that; no later than `time`."""
        r, a, steady = self.route(k), self.settings.scenario.vehicle.acceleration, self.time(k, distance, known=known)
        top = float(self.roads.limit_inside[r] if known else self.roads.limit_entry[r])
        speed = self.v(k, Field.SPEED)
        if speed >= top or distance <= 0:
            return steady
        until = (top - speed) / a  # where it has that speed
        rest = distance - (speed + top) / 2 * until
        if rest >= 0:
            return min(steady, until + rest / top)
        return min(steady, max(float(t.real) for t in np.roots([a / 2, speed, -distance])))

    def _meeting(self, i: int, j: int) -> dict[str, float]:
        zone, touch = self.zone(i, j), self.collision(i, j)
        names = ("my_entry", "my_exit", "its_entry", "its_exit", "entry_difference", "gap_if_second", "gap_if_first")
        more = ("my_stop", "its_stop", "fast_if_second", "fast_if_first")
        near = {"near_if_second": "gap_if_second", "near_if_first": "gap_if_first", "my_stop_near": "my_stop"}
        row = {**dict.fromkeys(("conflict", *names, "in_zone", *more), 0.0)}
        row["will_touch"] = float(touch is not None)
        row["time_to_collision"] = 0.0 if touch is None else touch
        if zone is not None:
            mine = [self.time(i, d, known=True) for d in zone[:2]]
            its = [self.time(j, d, known=self.settings.neighbours.intent == "shared") for d in zone[2:]]
            row |= dict(zip(names, (*zone, mine[0] - its[0], mine[0] - its[1], its[0] - mine[1]), strict=True))
            row |= {"conflict": 1.0, "in_zone": float(zone[2] <= 0)}
            row |= {"my_stop": zone[0] - self.stop(i), "its_stop": zone[2] - self.stop(j)}
            row["fast_if_second"] = mine[0] - self.quickest(
                j, zone[3], known=self.settings.neighbours.intent == "shared"
            )
            row["fast_if_first"] = its[0] - self.quickest(i, zone[1], known=True)
        return row | {name: row[of] for name, of in near.items()}


def controlled(state: TrafficState) -> list[int]:
    """Slots of the vehicles that the policy drives."""
    return [int(s) for s in np.flatnonzero(state.alive) if state.drivers[s] == Driver.CAV]
