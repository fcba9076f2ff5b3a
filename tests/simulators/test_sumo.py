"""What is particular to SUMO: its options, its getters, its ways to fail."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import libsumo
import numpy as np
import pytest

from opencda_marl.core.errors import BackendMissingError, ConfigError, DeadlineError, SimulatorError, StorageError
from opencda_marl.core.roads import Movement
from opencda_marl.core.state import Command, Driver, Ending, Field, Schedule
from opencda_marl.settings.traffic import DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators import links, sumo, wheels
from opencda_marl.simulators.demand import build_schedule
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.sumo import SumoSimulator, choose_backend, inspect_sumo

ROADS = load_roads(find_network("intersection"))


def _make(**demand: Any) -> SumoSimulator:
    return SumoSimulator(ROADS, SimulatorSettings(backend="libsumo"), VehicleSettings(), DemandSettings(**demand))


@pytest.fixture
def simulator() -> Iterator[SumoSimulator]:
    made = _make()
    yield made
    made.close()


def _traffic(rate: float = 300.0, cav_share: float = 0.5, seconds: float = 40.0, episode: int = 0) -> Schedule:
    demand = DemandSettings(rate_vph=rate, cav_share=cav_share)
    return build_schedule(demand, ROADS, episode=episode, horizon=seconds, rng=np.random.default_rng(3))


def _command(simulator: SumoSimulator, speed: float = 10.0) -> Command:
    slots = simulator.info.slots
    return Command(np.full(slots, speed), np.zeros(slots, np.bool_))


# -------------------------------------------------------------------- exactness


@pytest.mark.parametrize("model", ["Krauss", "IDM"])
def test_distance_and_acceleration_are_sumos_own(model: str) -> None:
    """Both are computed here, not read. Acceleration: the same bits; distance: on the entry lane too, behind it
    the same but for rounding, because SUMO counts anew on each lane."""
    simulator = _make(car_following=model)
    rng = np.random.default_rng(0)
    compared = 0
    try:
        state, command = simulator.reset(_traffic(rate=500.0), 5), _command(simulator)
        for _ in range(800):
            command.controlled[:] = state.drivers == Driver.CAV
            command.target_speed[:] = rng.uniform(4, 16, len(state.ids))
            state, _ = simulator.step(command)
            for slot in state.rows().tolist():
                name, values = f"e0.v{state.ids[slot]}", state.values[slot]
                assert values[Field.SPEED] == libsumo.vehicle.getSpeed(name)
                assert values[Field.ACCEL] == libsumo.vehicle.getAcceleration(name)
                assert values[Field.PROGRESS] == pytest.approx(5.0 + libsumo.vehicle.getDistance(name), abs=1e-9)
                if libsumo.vehicle.getLaneID(name)[0] in "NESW":
                    on_entry = values[Field.PROGRESS] < 85.5
                    assert not on_entry or values[Field.PROGRESS] == libsumo.vehicle.getLanePosition(name)
                compared += 1
    finally:
        simulator.close()
    assert compared > 4000


def test_a_target_told_once_sticks(simulator: SumoSimulator) -> None:
    """Telling only what changed is the same as telling everybody everything in every step."""

    def run(always: bool) -> np.ndarray:
        rng, seen = np.random.default_rng(1), []
        state, command = simulator.reset(_traffic(cav_share=1.0), 5), _command(simulator)
        for step in range(500):
            if step % 10 == 0:
                command.target_speed[:] = rng.uniform(0, 17, len(state.ids))
            command.controlled[:] = state.alive
            if always:
                for slot in state.rows().tolist():
                    libsumo.vehicle.setSpeedMode(f"e0.v{state.ids[slot]}", 38)
                    libsumo.vehicle.setSpeed(f"e0.v{state.ids[slot]}", command.target_speed[slot])
            state, _ = simulator.step(command)
            seen.append(state.values.copy())
        return np.stack(seen)

    assert np.array_equal(run(always=False), run(always=True))


def test_only_changes_are_told(simulator: SumoSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(simulator._link, "write", lambda names, speeds: told.extend(zip(names, speeds, strict=True)))
    schedule = _traffic(rate=60.0, cav_share=1.0, seconds=10.0)
    state, command = simulator.reset(schedule, 5), _command(simulator, 9.0)
    for step in range(200):
        command.controlled[:] = state.alive & (step < 150)
        command.target_speed[:] = 9.0 if step < 100 else 8.0
        state, _ = simulator.step(command)
    entered = {f"e0.v{i}" for i in range(len(schedule.ids))}
    assert sorted(told) == sorted((name, speed) for name in entered for speed in (9.0, 8.0, -1.0))


@pytest.mark.parametrize("network", ["intersection_all_way_stop", "intersection_signals"])
def test_variants_of_the_crossing(network: str) -> None:
    """People cross under the other rules too, more slowly, and nobody crashes."""
    roads = load_roads(find_network(network))
    simulator = SumoSimulator(roads, SimulatorSettings(), VehicleSettings(), DemandSettings())
    try:
        state, command = simulator.reset(_traffic(rate=100.0, cav_share=0.0, seconds=60.0), 5), _command(simulator)
        endings: list[int] = []
        slowest = np.inf
        for _ in range(2000):
            state, events = simulator.step(command)
            endings += events.endings.tolist()
            slowest = min(slowest, state.values[state.alive, Field.SPEED].min(initial=np.inf))
    finally:
        simulator.close()
    assert set(endings) == {Ending.ARRIVED}
    assert len(endings) > 8
    assert slowest < 0.5, "somebody had to stop"


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    """Off the origin and askew: fronts still follow the routes' centre lines."""
    turn = np.radians(25.0)
    nodes, edges = '<node id="C" x="700" y="-300" type="priority"/>', ""
    for name, bearing in (("a", 90.0), ("b", 0.0), ("c", -90.0)):
        x, y = 90 * np.cos(np.radians(bearing) + turn), 90 * np.sin(np.radians(bearing) + turn)
        nodes += f'<node id="{name}" x="{700 + x}" y="{y - 300}"/>'
        edges += f'<edge id="{name}i" from="{name}" to="C" numLanes="2" speed="14"/>'
        edges += f'<edge id="{name}o" from="C" to="{name}" numLanes="2" speed="14"/>'
    (tmp_path / "n.nod.xml").write_text(f"<nodes>{nodes}</nodes>")
    (tmp_path / "n.edg.xml").write_text(f"<edges>{edges}</edges>")
    command = [wheels.program("netconvert"), "-n", "n.nod.xml", "-e", "n.edg.xml", "-o", "own.net.xml"]
    options = ["--offset.disable-normalization", "true", "--no-turnarounds", "true", "--precision", "4"]
    subprocess.run([*command, *options], cwd=tmp_path, check=True, capture_output=True)
    roads = load_roads(tmp_path / "own.net.xml")
    simulator = SumoSimulator(roads, SimulatorSettings(), VehicleSettings(), DemandSettings())
    try:
        for route in range(roads.routes):
            schedule = replace(_traffic(seconds=40.0), routes=np.full(len(_traffic().ids), route, np.int16))
            state, tell = simulator.reset(schedule, 1), _command(simulator, 6.0)
            for _ in range(300):
                tell.controlled[:] = state.alive
                state, _ = simulator.step(tell)
                for row in state.values[state.alive]:
                    front = row[:2] + 2.5 * np.array([np.cos(row[Field.HEADING]), np.sin(row[Field.HEADING])])
                    at = np.arange(roads.samples[route]) * roads.spacing
                    at[-1] = roads.length[route]
                    line = roads.points[route, : roads.samples[route]]
                    expected = [np.interp(row[Field.PROGRESS], at, line[:, k]) for k in (0, 1)]
                    assert np.hypot(*(front - expected)) < 0.05
    finally:
        simulator.close()


# -------------------------------------------------------------------- endings


def test_a_vehicle_that_sumo_takes_out_is_removed_with_its_reason(simulator: SumoSimulator) -> None:
    state, command = simulator.reset(_traffic(rate=600.0, cav_share=0.0, seconds=5.0), 5), _command(simulator)
    for _ in range(120):
        state, _ = simulator.step(command)
    slot = int(state.rows()[0])
    identity, progress = int(state.ids[slot]), float(state.values[slot, Field.PROGRESS])
    libsumo.vehicle.remove(f"e0.v{identity}")
    before = state.values[slot].copy()
    state, events = simulator.step(command)
    assert (events.ids.tolist(), events.slots.tolist()) == ([identity], [slot])
    assert events.endings.tolist() == [Ending.REMOVED]
    route = int(state.routes[slot])
    assert events.reasons == (f"vanished from SUMO {ROADS.length[route] - progress:.1f} m before the end of its route",)
    assert np.array_equal(state.values[slot], before)
    assert not state.alive[slot]


def test_a_pile_up_ends_everybody_once(simulator: SumoSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once, one pair said twice, and strangers: each ends once, with the first partner named."""
    state, command = simulator.reset(_traffic(rate=600.0, cav_share=0.0, seconds=5.0), 5), _command(simulator)
    for _ in range(100):
        state, _ = simulator.step(command)
    a, b, c, d = state.rows()[:4].tolist()
    names = {slot: f"e0.v{state.ids[slot]}" for slot in (a, b, c, d)}
    crashes = [(names[a], names[b]), (names[b], names[a]), (names[b], names[c]), (names[d], "stranger")]
    monkeypatch.setattr(simulator._link, "collisions", lambda: crashes)
    state, events = simulator.step(command)
    assert events.slots.tolist() == [a, b, c, d]
    assert set(events.endings.tolist()) == {Ending.COLLIDED}
    assert events.partners.tolist() == [state.ids[b], state.ids[a], state.ids[b], -1]
    assert not set(names.values()) & set(libsumo.vehicle.getIDList())
    state, events = simulator.step(command)  # SUMO goes on about them
    assert len(events.ids) == 0


# -------------------------------------------------------------------- setting up


def test_options_are_understood(simulator: SumoSimulator) -> None:
    simulator.reset(_traffic(), 123456)
    expected = {
        "seed": "123456",
        "step-length": "0.05",
        "step-method.ballistic": "false",
        "collision.action": "warn",
        "collision.check-junctions": "true",
        "collision.mingap-factor": "0",
        "time-to-teleport": "-1",
        "max-depart-delay": "-1",
        "threads": "1",
    }
    assert {name: libsumo.simulation.getOption(name) for name in expected} == expected


def test_the_seed_is_read_back(simulator: SumoSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator._link, "option", lambda name: "23423")
    with pytest.raises(SimulatorError, match="seed 23423, not 7"):
        simulator.reset(_traffic(), 7)


@pytest.mark.parametrize("kind", ["ours", "human"])
def test_vehicle_types(simulator: SumoSimulator, kind: str) -> None:
    simulator.reset(_traffic(), 1)
    get = libsumo.vehicletype
    assert (get.getLength(kind), get.getWidth(kind), get.getMinGap(kind)) == (5.0, 1.8, 2.5)
    assert (get.getAccel(kind), get.getDecel(kind)) == (2.6, 4.5)
    assert get.getImperfection(kind) == (0.5 if kind == "human" else 0.0)
    assert get.getSpeedDeviation(kind) == 0.0


def test_human_drivers_keep_their_speed_factor_and_lane(simulator: SumoSimulator) -> None:
    schedule = _traffic(rate=300.0, cav_share=0.0)
    state, command = simulator.reset(schedule, 1), _command(simulator)
    for _ in range(300):
        state, _ = simulator.step(command)
    assert state.alive.sum() > 5
    for slot in state.rows().tolist():
        name, index = f"e0.v{state.ids[slot]}", int(state.ids[slot])
        assert libsumo.vehicle.getSpeedFactor(name) == schedule.speed_factors[index]
        assert libsumo.vehicle.getLaneChangeMode(name) == 0
        assert libsumo.vehicle.getSpeedMode(name) == 31


def test_step_lengths_are_whole_milliseconds() -> None:
    with pytest.raises(ConfigError, match="step_length"):
        SumoSimulator(ROADS, SimulatorSettings(step_length=0.0125), VehicleSettings(), DemandSettings())


def test_other_step_lengths_keep_time() -> None:
    simulator = SumoSimulator(ROADS, SimulatorSettings(step_length=0.1), VehicleSettings(), DemandSettings())
    try:
        state, command = simulator.reset(_traffic(), 1), _command(simulator)
        for _ in range(100):
            state, _ = simulator.step(command)
        assert state.time == pytest.approx(10.0)
        assert libsumo.simulation.getTime() == pytest.approx(10.0)
    finally:
        simulator.close()


def test_sumo_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither progress nor warnings of crashes reach a person's terminal."""
    for backend in ("libsumo", "traci"):
        settings = SimulatorSettings(backend=backend)  # type: ignore[arg-type]
        simulator = SumoSimulator(ROADS, settings, VehicleSettings(), DemandSettings())
        state, command = simulator.reset(_traffic(rate=600.0, cav_share=1.0), 1), _command(simulator, 13.0)
        crashed = 0
        for _ in range(500):
            command.controlled[:] = state.alive
            state, events = simulator.step(command)
            crashed += int((events.endings == Ending.COLLIDED).sum())
        simulator.reset(_traffic(), 2)
        simulator.close()
        assert crashed > 0
    assert capfd.readouterr() == ("", "")


# -------------------------------------------------------------------- failing


def test_a_second_simulation_in_the_process_is_refused(simulator: SumoSimulator) -> None:
    simulator.reset(_traffic(), 1)
    with pytest.raises(SimulatorError, match="libsumo allows one"):
        _make()
    simulator.close()
    other = _make()
    other.reset(_traffic(), 1)
    other.close()


def test_the_later_of_two_idle_simulators_is_refused() -> None:
    first, second = _make(), _make()
    first.reset(_traffic(), 1)
    with pytest.raises(SimulatorError, match="libsumo allows one"):
        second.reset(_traffic(), 1)
    second.close()
    state, _ = first.step(_command(first))  # unharmed
    assert state.step == 1
    first.close()


def test_stepping_without_an_episode(simulator: SumoSimulator) -> None:
    with pytest.raises(SimulatorError, match="call reset first"):
        simulator.step(_command(simulator))


@pytest.mark.parametrize("speed", [-1.0, np.nan])
def test_a_command_that_is_no_speed(simulator: SumoSimulator, speed: float) -> None:
    """SUMO would take -1 for a release without a word."""
    state, command = simulator.reset(_traffic(rate=900.0, cav_share=1.0), 1), _command(simulator, speed)
    while not state.alive.any():
        state, _ = simulator.step(command)
    command.controlled[:] = state.alive
    with pytest.raises(SimulatorError, match=r"vehicle e0\.v\d+ was told to drive"):
        simulator.step(command)


def test_a_libsumo_that_dies_is_an_error_with_a_way_out(simulator: SumoSimulator) -> None:
    command = _command(simulator)
    simulator.reset(_traffic(episode=3), 1)
    for _ in range(40):
        simulator.step(command)
    libsumo.close()
    with pytest.raises(SimulatorError, match=r"(?s)step 40 of episode 3.*--resume"):
        simulator.step(command)
    with pytest.raises(SimulatorError, match="call reset first"):
        simulator.step(command)


def test_a_broken_network_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for backend in ("libsumo", "traci"):
        settings = SimulatorSettings(backend=backend)  # type: ignore[arg-type]
        roads = replace(ROADS, network=str(tmp_path / "gone.net.xml"))
        simulator = SumoSimulator(roads, settings, VehicleSettings(), DemandSettings())
        with pytest.raises(SimulatorError, match=r"gone\.net\.xml"):
            simulator.reset(_traffic(), 1)
        simulator.close()
    capfd.readouterr()  # libsumo repeats its errors on stderr: they may be seen


@pytest.mark.parametrize("backend", ["libsumo", "traci"])
def test_paths_with_spaces(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's and the temporary folder's; compressed too. A comma is beyond SUMO, and said so."""
    folder = tmp_path / "my own nets"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with gzip.open(folder / "a crossing.net.xml.gz", "wb") as packed:
        packed.write(Path(ROADS.network).read_bytes())
    settings = SimulatorSettings(backend=backend)  # type: ignore[arg-type]
    roads = load_roads(folder / "a crossing.net.xml.gz")
    simulator = SumoSimulator(roads, settings, VehicleSettings(), DemandSettings())
    simulator.reset(_traffic(), 1)
    assert simulator.step(_command(simulator))[0].step == 1
    simulator.close()
    with pytest.raises(ConfigError, match="comma"):
        SumoSimulator(replace(roads, network="/a,b.net.xml"), settings, VehicleSettings(), DemandSettings())
    assert [path.name for path in folder.iterdir()] == ["a crossing.net.xml.gz"]


def test_files_are_removed(simulator: SumoSimulator) -> None:
    folder = Path(simulator._folder.name)
    assert folder.is_dir()
    simulator.close()
    assert not folder.exists()


# -------------------------------------------------------------------- backends


def _hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    real = wheels.import_module

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(wheels, "import_module", missing)


def test_auto_prefers_libsumo() -> None:
    assert choose_backend(SimulatorSettings()) == "libsumo"
    assert choose_backend(SimulatorSettings(backend="traci")) == "traci"
    assert choose_backend(SimulatorSettings(gui=True)) == "traci"
    with pytest.raises(ConfigError, match="gui"):
        choose_backend(SimulatorSettings(backend="libsumo", gui=True))


def test_auto_falls_back_to_traci_with_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "libsumo")
    assert choose_backend(SimulatorSettings()) == "traci"
    simulator = SumoSimulator(ROADS, SimulatorSettings(), VehicleSettings(), DemandSettings())
    simulator.close()
    assert simulator.info.backend == "traci"
    assert len(simulator.info.notes) == 1
    assert "slower than libsumo" in simulator.info.notes[0]
    assert "\n" not in simulator.info.notes[0]
    with pytest.raises(BackendMissingError, match="libsumo"):
        choose_backend(SimulatorSettings(backend="libsumo"))


def test_without_the_program_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = wheels.find_spec
    monkeypatch.setattr(wheels, "find_spec", lambda name: None if name == "sumo" else real(name))
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(BackendMissingError, match=r"opencda-marl\[sumo\]"):
        choose_backend(SimulatorSettings(backend="traci"))
    _hide(monkeypatch, "libsumo")
    with pytest.raises(BackendMissingError, match=r"(?s)eclipse-sumo.*opencda-marl\[sumo\]"):
        choose_backend(SimulatorSettings())
    _hide(monkeypatch, "libsumo", "traci")
    with pytest.raises(BackendMissingError):
        choose_backend(SimulatorSettings())
    assert inspect_sumo()["sumo_program"] is None


def test_sumo_home_is_that_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMO_HOME", "/an/old/one")
    found = inspect_sumo()
    assert found["SUMO_HOME"] == os.environ["SUMO_HOME"] != "/an/old/one"
    assert (Path(str(found["SUMO_HOME"])) / "data").is_dir()
    assert found["libsumo"] == found["sumo"] == found["traci"]


def test_importing_the_module_starts_no_sumo() -> None:
    code = "import sys, opencda_marl.simulators.sumo; sys.exit('libsumo' in sys.modules or 'traci' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -------------------------------------------------------------------- TraCI


@pytest.fixture
def over_traci() -> Iterator[SumoSimulator]:
    made = SumoSimulator(ROADS, SimulatorSettings(backend="traci"), VehicleSettings(), DemandSettings())
    yield made
    made.close()


def test_both_backends_give_the_same_bits(simulator: SumoSimulator, over_traci: SumoSimulator) -> None:
    states: list[np.ndarray] = []
    for one in (simulator, over_traci):
        state, command = one.reset(_traffic(rate=400.0), 9), _command(one)
        rng, seen = np.random.default_rng(2), []
        for _ in range(600):
            command.controlled[:] = state.drivers == Driver.CAV
            command.target_speed[:] = rng.uniform(0, 17, len(state.ids))
            state, _ = one.step(command)
            seen.append(np.column_stack([state.values, state.ids, state.alive]))
        states.append(np.stack(seen))
    assert np.array_equal(*states)


def test_a_sumo_program_that_dies_is_an_error(over_traci: SumoSimulator) -> None:
    command = _command(over_traci)
    over_traci.reset(_traffic(), 1)
    over_traci.step(command)
    process = over_traci._link._process  # type: ignore[attr-defined] # TraciLink
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(SimulatorError, match="SUMO failed in step"):
        over_traci.step(command)


def test_closing_ends_the_program(over_traci: SumoSimulator) -> None:
    over_traci.reset(_traffic(), 1)
    process = over_traci._link._process  # type: ignore[attr-defined] # TraciLink
    assert process.poll() is None
    over_traci.close()
    assert process.poll() is not None


def test_a_port_that_is_taken_is_tried_no_second_time(
    over_traci: SumoSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []
    real = links.TraciLink._connect

    def refuse_twice(self: links.TraciLink, port: int) -> bool:
        ports.append(port)
        return len(ports) > 2 and real(self, port)

    monkeypatch.setattr(links.TraciLink, "_connect", refuse_twice)
    over_traci.reset(_traffic(), 1)
    assert len(ports) == len(set(ports)) == 3
    monkeypatch.setattr(links.TraciLink, "_connect", lambda self, port: False)
    other = SumoSimulator(ROADS, SimulatorSettings(backend="traci"), VehicleSettings(), DemandSettings())
    with pytest.raises(SimulatorError, match="did not answer on any of 5 ports"):
        other.reset(_traffic(), 1)
    other.close()


def test_movements_exist() -> None:
    """The types file names every route of the crossing."""
    text = sumo._additional(ROADS, VehicleSettings(), DemandSettings(car_following="IDM"))
    assert text.count("<route ") == 12 == 4 * len(Movement)
    assert 'carFollowModel="IDM"' in text
    assert "sigma" not in text.split('id="human"')[1].split("/>")[0]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no signals that stop a process")
def test_a_stopped_sumo_misses_its_deadline_and_is_killed() -> None:
    settings = SimulatorSettings(backend="traci", deadline=0.5)
    simulator = SumoSimulator(ROADS, settings, VehicleSettings(), DemandSettings())
    simulator.reset(_traffic(), 1)
    simulator.step(_command(simulator))
    process = simulator._link._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGSTOP)
    words = r"(?s)within 0\.5 s after step 1 of the episode \(0\.05 s\); .*simulator\.deadline"
    with pytest.raises(DeadlineError, match=words):
        simulator.step(_command(simulator))
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(SimulatorError, match="call reset first"):
        simulator.step(_command(simulator))
    simulator.reset(_traffic(), 1)  # a new process
    assert simulator.step(_command(simulator))[0].step == 1
    process = simulator._link._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGSTOP)
    simulator.close()
    assert process.returncode == -signal.SIGKILL


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error without a path would be taken for one of stdout."""

    def full(path: Path, *_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match=r"types\.add\.xml"):
        _make()
