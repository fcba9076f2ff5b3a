"""A crossing in motion, from the tracks of an episode: a GIF, or a strip of moments as a PNG. Drawn with Pillow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64
from PIL import Image, ImageDraw

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.files import writing
from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Driver, Ending, Field

__all__ = ["animate"]

_SIZE, _SMOOTH = 440, 2  # [pixels] of a side; drawn larger and shrunk, for smooth edges
_VIEW = 62.0  # [m] from the centre to the edge of the picture
_FRAME = 0.2  # [s] of traffic between two frames
_SHOWN = 0.1  # [s] that a frame stays: twice as fast as the traffic
_LANE = 3.5  # [m] drawn width
_SHADES, _EDGES = 24, 5  # of the palette: speeds; mixtures of two colours at the edge of a shape
_GRASS, _ROAD, _MARK, _INK = (238, 240, 236), (199, 204, 208), (225, 228, 231), (34, 48, 60)
_PAINTS = np.array([(206, 62, 44), (236, 164, 42), (52, 152, 108), (24, 104, 186)], np.float64)  # standing … fast
_FAST = 18.0  # [m/s]
_HUMAN, _CRASH = (120, 120, 120), (20, 20, 20)
_STRIP = 4  # pictures of a PNG
_WRECK = 1.0  # [s] that a crash stays in the picture


def animate(
    roads: Roads,
    tracks: Mapping[str, np.ndarray],
    step_length: float,
    out: Path,
    *,
    begin: float = 30.0,
    seconds: float = 20.0,
    vehicle: tuple[float, float] = (5.0, 1.8),
) -> Path:
    """Draw a spell of an episode.

    Args:
        roads: of the crossing.
        tracks: as `env.trajectory()` gives them.
        step_length: [s].
        out: `.gif`: twice as fast as the traffic; `.png`: four moments side by side.
        begin: of the spell. [s]
        seconds: its length. [s]
        vehicle: length and width. [m]

    Returns:
        `out`.

    Raises:
        ConfigError: another kind of file is wanted, or the episode is over before `begin`.
        StorageError: it cannot be written.
    """
    if out.suffix.lower() not in (".gif", ".png"):
        raise ConfigError(f"{out} is neither a GIF nor a PNG", fix="end its name in .gif or .png")
    steps = tracks.get("step", np.zeros(0))
    first, last = round(begin / step_length), round((begin + seconds) / step_length)
    if not len(steps) or steps.max() < first:
        raise ConfigError(f"the tracks end before {begin:g} s", fix="choose a longer episode")
    last = min(last, int(steps.max()))
    apart = max(1, round(_FRAME / step_length)) if out.suffix.lower() == ".gif" else max(1, (last - first) // _STRIP)
    ground = _ground(roads)
    frames = list(_frames(ground, tracks, range(first, last, apart), step_length, vehicle))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix.lower() == ".png":
            _beside(frames[:_STRIP]).save(out)
        else:
            _save(frames, out)
    return out


def _place(points: Float64[np.ndarray, "points 2"]) -> list[tuple[float, float]]:
    """Metres, y up -> pixels of the large picture, y down."""
    scale = _SIZE * _SMOOTH / (2.0 * _VIEW)
    centre = _SIZE * _SMOOTH / 2.0
    return [(centre + scale * x, centre - scale * y) for x, y in points.tolist()]


def _ground(roads: Roads) -> Image.Image:
    """Grass and lanes."""
    picture = Image.new("RGB", (_SIZE * _SMOOTH, _SIZE * _SMOOTH), _GRASS)
    draw = ImageDraw.Draw(picture)
    scale = _SIZE * _SMOOTH / (2.0 * _VIEW)
    lines = [_place(roads.points[route, : roads.samples[route], :2]) for route in range(roads.routes)]
    for line in lines:
        draw.line(line, fill=_ROAD, width=round(scale * _LANE * 1.06), joint="curve")
    draw.polygon(_place(_junction(roads)), fill=_ROAD)
    for route in range(roads.routes):
        first, last = (int(place[route] / roads.spacing) for place in (roads.stop_line, roads.junction_exit))
        for part in (slice(0, first), slice(last, int(roads.samples[route]))):
            if part.stop - part.start > 1:
                draw.line(_place(roads.points[route, part, :2]), fill=_MARK, width=max(1, round(scale * 0.15)))
    return picture


def _junction(roads: Roads) -> Float64[np.ndarray, "corners 2"]:
    """Where lanes begin and end at the junction, half a lane to both sides, in a ring around it."""
    places = []
    for route in range(roads.routes):
        for distance in (roads.stop_line[route], roads.junction_exit[route]):
            x, y, heading = roads.points[route, min(int(distance / roads.spacing), int(roads.samples[route]) - 1)]
            aside = 0.53 * _LANE * np.array([-np.sin(heading), np.cos(heading)])
            places += [np.array([x, y]) + aside, np.array([x, y]) - aside]
    ring = np.array(places)
    middle = ring.mean(axis=0)
    return ring[np.argsort(np.arctan2(ring[:, 1] - middle[1], ring[:, 0] - middle[0]))]


def _frames(
    ground: Image.Image,
    tracks: Mapping[str, np.ndarray],
    steps: range,
    step_length: float,
    vehicle: tuple[float, float],
) -> Iterator[Image.Image]:
    crashed = tracks["end_ending"] == Ending.COLLIDED
    wrecks = [
        (int(step), tracks["values"][(tracks["step"] == step) & (tracks["id"] == identity)])
        for step, identity in zip(tracks["end_step"][crashed], tracks["end_id"][crashed], strict=True)
    ]
    for step in steps:
        picture = ground.copy()
        draw = ImageDraw.Draw(picture)
        now = tracks["step"] == step
        _draw_vehicles(draw, tracks["values"][now], tracks["driver"][now] == Driver.HUMAN, vehicle)
        for at, values in wrecks:
            if 0 <= (step - at) * step_length < _WRECK and len(values):
                (x, y), arm = _place(values[-1:, [Field.X, Field.Y]])[0], 5.0 * _SMOOTH
                draw.line([(x - arm, y - arm), (x + arm, y + arm)], fill=_CRASH, width=2 * _SMOOTH)
                draw.line([(x - arm, y + arm), (x + arm, y - arm)], fill=_CRASH, width=2 * _SMOOTH)
        small = picture.resize((_SIZE, _SIZE), Image.Resampling.LANCZOS)
        ImageDraw.Draw(small).text((8, 6), f"{step * step_length:5.1f} s", fill=_INK)
        yield small


def _draw_vehicles(
    draw: ImageDraw.ImageDraw,
    values: Float64[np.ndarray, "vehicles fields"],
    human: Bool[np.ndarray, " vehicles"],
    vehicle: tuple[float, float],
) -> None:
    """A rectangle each, by speed from red (standing) over green to blue; those that people drive are grey."""
    half_length, half_width = vehicle[0] / 2.0, vehicle[1] / 2.0
    corners = np.array([[half_length, half_width], [half_length, -half_width], [-half_length, -half_width]])
    corners = np.vstack([corners, [-half_length, half_width]])
    for row, by_person in zip(values, human.tolist(), strict=True):
        cos, sin = np.cos(row[Field.HEADING]), np.sin(row[Field.HEADING])
        turned = corners @ np.array([[cos, sin], [-sin, cos]]) + row[[Field.X, Field.Y]]
        draw.polygon(_place(turned), fill=_HUMAN if by_person else _paint(float(row[Field.SPEED]) / _FAST))


def _paint(share: float) -> tuple[int, int, int]:
    """Colour of a speed, as a share of the fastest."""
    at = np.clip(share, 0.0, 1.0) * (len(_PAINTS) - 1)
    red, green, blue = (round(float(np.interp(at, range(len(_PAINTS)), _PAINTS[:, k]))) for k in range(3))
    return red, green, blue


def _palette() -> Image.Image:
    """All colours and their mixtures with the road: a palette that is found by counting forgets the few vehicles."""
    still = [_GRASS, _ROAD, _MARK, _INK, _HUMAN, _CRASH]
    shades = [_paint(k / (_SHADES - 1)) for k in range(_SHADES)]
    blends = [
        tuple(round(a + (b - a) * k / _EDGES) for a, b in zip(colour, under, strict=True))
        for colour in (*still, *shades)
        for under in (_ROAD, _GRASS)[: 1 if colour in shades else 2]
        for k in range(1, _EDGES)
    ]
    flat = [value for colour in (*still, *shades, *blends)[:256] for value in colour]
    picture = Image.new("P", (1, 1))
    picture.putpalette(flat)
    return picture


def _beside(frames: list[Image.Image]) -> Image.Image:
    strip = Image.new("RGB", (_SIZE * len(frames) + 6 * (len(frames) - 1), _SIZE), (255, 255, 255))
    for index, frame in enumerate(frames):
        strip.paste(frame, (index * (_SIZE + 6), 0))
    return strip


def _save(frames: list[Image.Image], out: Path) -> None:
    """One palette for all frames, no dithering: what does not move costs nothing."""
    palette = _palette()
    reduced = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    reduced[0].save(
        out, save_all=True, append_images=reduced[1:], duration=round(1000 * _SHOWN), loop=0, optimize=False, disposal=1
    )
