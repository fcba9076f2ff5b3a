"""What the layouts have in common: the other vehicle in my frame, the scene, the finite check."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from opencda_marl.core.state import Field
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import disc_time_to_collision

__all__ = [
    "BRAKING",
    "CONFLICT",
    "HARDEST",
    "INTENT",
    "LANES",
    "PARAMETERS",
    "PULL",
    "RADIUS",
    "VEHICLE",
    "add_to_scene",
    "clip",
    "finish_scene",
    "headings",
    "living",
    "relative",
]

_X, _Y, _HEADING, _SPEED = int(Field.X), int(Field.Y), int(Field.HEADING), int(Field.SPEED)

# indices into `parameters` of the kernels: radius [m], length of a vehicle [m], comfortable braking [m/s^2],
# is intent shared, is the selection `conflict`, highest lane index, hardest braking and acceleration [m/s^2]
RADIUS, VEHICLE, BRAKING, INTENT, CONFLICT, LANES, HARDEST, PULL = range(8)
PARAMETERS = 8


@kernel
def clip(value: float, low: float, high: float) -> float:
    # NaN passes through: it must not become a plausible value
    if value < low:
        return low
    return high if value > high else value


@kernel
def living(
    values: Float64[np.ndarray, "slots fields"], alive: Bool[np.ndarray, " slots"], rows: Int64[np.ndarray, " rows"]
) -> tuple[Int64[np.ndarray, " others"], bool]:
    """Slots of living vehicles, and whether every value of theirs and of `rows` is finite."""
    others = np.flatnonzero(alive)
    finite = True
    for source in (others, rows):
        for s in source:
            for field in range(values.shape[1]):
                finite = finite and np.isfinite(values[s, field])
    return others, finite


@kernel
def headings(
    rows: Int64[np.ndarray, " rows"],
    values: Float64[np.ndarray, "slots fields"],
    directions: Float64[np.ndarray, "slots 2"],
) -> None:
    """Cosine and sine of the headings of `rows`: once each, not once a pair."""
    for s in rows:
        directions[s, 0], directions[s, 1] = np.cos(values[s, _HEADING]), np.sin(values[s, _HEADING])


@kernel
def relative(
    i: int, j: int, values: Float64[np.ndarray, "slots fields"], directions: Float64[np.ndarray, "slots 2"]
) -> tuple[float, float, float, float, float, float, float]:
    """The other in my frame: x ahead, y left, u, v, cosine and sine of its heading; and the disc time to collision."""
    c, s = directions[i, 0], directions[i, 1]
    dx, dy = values[j, _X] - values[i, _X], values[j, _Y] - values[i, _Y]
    x, y = c * dx + s * dy, c * dy - s * dx
    along = c * directions[j, 0] + s * directions[j, 1]
    across = c * directions[j, 1] - s * directions[j, 0]
    u = values[j, _SPEED] * along - values[i, _SPEED]  # my own velocity is (speed, 0)
    v = values[j, _SPEED] * across
    return x, y, u, v, along, across, disc_time_to_collision(x, y, u, v)


@kernel
def add_to_scene(ego: Float32[np.ndarray, " ego"], seen: int, scene: Float64[np.ndarray, "2 ego"]) -> None:
    """One more vehicle in the sums (row 0) and maxima (row 1); `seen`: how many were in before."""
    for f in range(len(ego)):
        scene[0, f] += ego[f]
        if seen == 0 or ego[f] > scene[1, f]:
            scene[1, f] = ego[f]


@kernel
def finish_scene(scene: Float64[np.ndarray, "2 ego"], seen: int, out: Float32[np.ndarray, " scene"]) -> None:
    size = scene.shape[1]
    for f in range(size):
        out[f] = scene[0, f] / max(seen, 1)
        out[size + f] = scene[1, f]
