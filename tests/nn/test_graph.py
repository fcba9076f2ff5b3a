"""Forms of an update: which one runs, why, and that a failure says so."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from opencda_marl.core.errors import CompilerError, ConfigError, CudaGraphCaptureError
from opencda_marl.nn import graph
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.graph import Inputs, State, UpdateForm, make_update, why_not_compiled
from opencda_marl.settings.networks import NetworkSettings

Recorder = Any  # see tests/conftest.py
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def descend(state: State, inputs: Inputs) -> tuple[State, Tensor]:
    theta = state["theta"]
    loss = ((theta * inputs["x"]).sum(-1) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, theta)
    with torch.no_grad():
        return {"theta": theta - inputs["rate"] * gradient}, loss.detach()[None]


def arguments() -> tuple[State, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    theta = torch.randn(4, generator=generator, dtype=torch.float64)
    return {"theta": as_leaf(theta)}, {"x": x, "rate": torch.tensor(0.1, dtype=torch.float64)}


def test_eager_is_the_function_itself() -> None:
    form = UpdateForm(descend, "eager")
    assert (form.mode, form.note) == ("eager", "")
    state, loss = form(*arguments())
    expected = descend(*arguments())
    assert torch.equal(state["theta"], expected[0]["theta"])
    assert torch.equal(loss, expected[1])


def test_compiled_is_equal_and_survives_invalidation() -> None:
    form = UpdateForm(descend, "compiled")
    assert form.mode == ("eager" if why_not_compiled() else "compiled")  # eager where torch's path has a space
    for _ in range(2):
        state, inputs = arguments()
        plain = state
        for i in range(10):
            inputs["rate"] = torch.tensor(0.1 / (i + 1), dtype=torch.float64)
            state, _ = form({"theta": as_leaf(state["theta"])}, inputs)
            plain, _ = descend({"theta": as_leaf(plain["theta"])}, inputs)
        torch.testing.assert_close(state["theta"], plain["theta"], rtol=1e-12, atol=1e-12)
        form.invalidate()


def gather(state: State, inputs: Inputs) -> tuple[State, Tensor]:
    theta = state["theta"]
    loss = ((inputs["x"].index_select(0, inputs["real"]) * theta).sum(-1) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    return {"theta": (theta - inputs["rate"] * gradient).detach()}, loss.detach()[None]


def test_ragged_inputs_are_compiled_once_for_all_lengths() -> None:
    form = UpdateForm(gather, "compiled", ragged=("real",))
    assert not form.static
    compiled = torch._dynamo.utils.counters["stats"]
    before = compiled["unique_graphs"]
    for count in (2, 5, 3, 6):
        state, inputs = arguments()
        inputs["real"] = torch.randperm(6)[:count]
        expected, loss = gather(state, inputs)
        found, other = form({"theta": as_leaf(state["theta"])}, inputs)
        torch.testing.assert_close(found["theta"], expected["theta"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other, loss)
    if form.mode == "compiled":
        assert compiled["unique_graphs"] == before + 1


def clock(monkeypatch: pytest.MonkeyPatch, faster: str, *others: str) -> None:
    """Each round of a measurement times eager, then the other form."""
    seconds = iter([1.0 if name == faster else 2.0 for _ in range(graph._ROUNDS) for name in ("eager", *others)])
    monkeypatch.setattr(graph, "_seconds", lambda call: (call(), next(seconds))[1])


@pytest.mark.parametrize(("faster", "slower"), [("eager", "compiled"), ("compiled", "eager")])
def test_auto_measures_once_and_keeps_the_faster(monkeypatch: pytest.MonkeyPatch, faster: str, slower: str) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda device: None)
    form = UpdateForm(descend, "auto")
    monkeypatch.setattr(form, "_call_compiled", descend)
    clock(monkeypatch, faster, "compiled")
    assert form.mode is None
    form(*arguments())
    assert form.mode == faster
    assert form.note.startswith(f"update_mode auto: {faster} (eager ")
    form(*arguments())  # nothing is measured again: the times are used up
    assert slower != form.mode


def test_what_an_earlier_part_of_the_run_decided_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda device: None)
    form = UpdateForm(descend, "auto")
    form.choose("eager")
    monkeypatch.setattr(graph, "_seconds", lambda _: pytest.fail("it was measured"))
    form(*arguments())
    assert form.mode == "eager"
    form.choose("compiled")
    assert form.mode == "eager"
    fixed = UpdateForm(descend, "eager")
    fixed.choose("compiled")
    assert fixed.mode == "eager"


@pytest.mark.parametrize("asked", ["compiled", "auto"])
def test_without_a_compiler_it_is_eager_and_says_why(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    form = UpdateForm(descend, asked)
    assert form.mode == "eager"
    assert form.note == f"update_mode {asked}: eager, because no C++ compiler: no-such-compiler not found (CXX)"
    form(*arguments())


def test_a_path_with_a_space_is_eager_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/a cache")
    assert "has a space" in str(why_not_compiled())
    assert UpdateForm(descend, "compiled").mode == "eager"
    monkeypatch.setattr(torch, "__file__", "/some where/torch/__init__.py")
    assert "path of torch" in str(why_not_compiled())


@pytest.mark.parametrize(
    ("name", "has"),
    [("it's", "a quote"), ('q"q', "a quote"), ("tab\tx", "a tab"), ("a\nb", "a line break"), ("a\\b", "a backslash")],
)
def test_a_path_that_the_compilers_command_line_would_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, has: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
    monkeypatch.setattr(torch, "__file__", "/somewhere/torch/__init__.py")  # its own path may have a space
    form = UpdateForm(descend, "compiled")
    assert form.mode == "eager"
    assert f"the path of the compiler's cache has {has}: " in form.note
    assert "\n" not in form.note  # one line


@pytest.mark.slow
@pytest.mark.skipif(why_not_compiled() is not None, reason="nothing compiles here")
@pytest.mark.parametrize("name", ["#hash", "a;b$(x)", "über", "-dash", "(p)&", "%s{x}", "a*b", "a:b=c", "nbsp\u00a0x"])
def test_any_other_path_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
    form = UpdateForm(descend, "compiled")
    state, _ = form(*arguments())
    assert form.mode == "compiled"
    torch.testing.assert_close(state["theta"], descend(*arguments())[0]["theta"], rtol=1e-12, atol=1e-12)


def test_an_obstacle_of_the_function_itself() -> None:
    form = UpdateForm(descend, "compiled", obstacle="its shapes are not static")
    assert (form.mode, form.note) == ("eager", "update_mode compiled: eager, because its shapes are not static")


def test_more_forms_of_one_function_than_the_compiler_keeps() -> None:
    import torch._dynamo.config

    for i in range(torch._dynamo.config.recompile_limit + 2):
        form = UpdateForm(partial(scaled, float(i)), "compiled")
        state, _ = form({"theta": torch.ones(2)}, {})
        torch.testing.assert_close(state["theta"], torch.full((2,), float(i)))


def scaled(factor: float, state: State, inputs: Inputs) -> tuple[State, Tensor]:
    return {"theta": state["theta"] * factor}, torch.zeros(1)


def hostile(state: State, inputs: Inputs) -> tuple[State, Tensor]:
    if state["theta"].sum().item() > 0:  # a branch on a tensor: no graph
        return {"theta": state["theta"] + 1.0}, torch.zeros(1)
    return state, torch.zeros(1)


def test_what_cannot_be_compiled_is_an_error_when_it_was_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda device: None)
    with pytest.raises(CompilerError, match="could not be compiled"):
        UpdateForm(hostile, "compiled")({"theta": torch.ones(2)}, {})


def test_what_cannot_be_compiled_is_eager_when_it_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda device: None)
    form = UpdateForm(hostile, "auto")
    assert form({"theta": torch.ones(2)}, {})[0]["theta"].tolist() == [2.0, 2.0]
    assert form.mode == "eager"
    assert "could not be compiled" in form.note


def test_a_captured_form_is_equal_and_captured_anew_after_invalidation(recorder: Recorder) -> None:
    form = UpdateForm(descend, "cuda_graph", capturer=recorder)
    assert form.static
    assert form.mode == "cuda_graph"
    state, inputs = arguments()
    plain = state
    for i in range(30):
        inputs["rate"] = torch.tensor(0.1 / (i + 1), dtype=torch.float64)
        if i in (10, 20):
            form.invalidate()
        if i == 20:  # a load
            state = plain = {"theta": torch.full((4,), 0.5, dtype=torch.float64)}
        state, loss = form({"theta": as_leaf(state["theta"])}, inputs)
        plain, expected = descend({"theta": as_leaf(plain["theta"])}, inputs)
        assert torch.equal(state["theta"], plain["theta"])
        assert torch.equal(loss, expected)
    assert recorder.recorded == 3


def test_a_graph_that_was_asked_for_is_measured_once_beside_eager(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    form = UpdateForm(descend, "cuda_graph", capturer=recorder)
    clock(monkeypatch, "eager", "cuda_graph")
    form(*arguments())
    assert form.mode == "cuda_graph"  # slower, but it was asked for
    assert form.note == "update_mode cuda_graph: eager 1000.00 ms, cuda_graph 2000.00 ms"
    form.invalidate()
    form(*arguments())  # the times are used up
    assert recorder.recorded == 2


@pytest.mark.parametrize("faster", ["eager", "cuda_graph"])
def test_auto_on_cuda_measures_the_graph(monkeypatch: pytest.MonkeyPatch, recorder: Recorder, faster: str) -> None:
    form = UpdateForm(descend, "auto", capturer=recorder)
    assert form.mode is None
    clock(monkeypatch, faster, "cuda_graph")
    state, _ = form(*arguments())
    assert torch.equal(state["theta"], descend(*arguments())[0]["theta"])
    assert form.mode == faster
    assert form.note.startswith(f"update_mode auto: {faster} (eager ")
    assert "cuda_graph" in form.note


def test_what_auto_decided_on_another_machine_is_measured_anew(recorder: Recorder) -> None:
    on_cuda, on_cpu = UpdateForm(descend, "auto", capturer=recorder), UpdateForm(descend, "auto")
    on_cuda.choose("cuda_graph")
    assert on_cuda.mode == "cuda_graph"
    on_cuda(*arguments())
    assert "decided before" in on_cuda.note  # not measured
    before = on_cpu.mode
    on_cpu.choose("cuda_graph")
    assert on_cpu.mode == before


def test_a_failed_capture_never_falls_back(recorder: Recorder) -> None:
    recorder.failure = RuntimeError("operation failed due to a previous error during capture")
    for asked in ("cuda_graph", "auto"):
        form = UpdateForm(descend, asked, capturer=recorder)
        for _ in range(2):
            with pytest.raises(CudaGraphCaptureError, match="previous error during capture"):
                form(*arguments())


def test_a_graph_that_cannot_be_had_is_a_config_error(recorder: Recorder) -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device, and training is on cpu") as caught:
        make_update(descend, NetworkSettings(update_mode="cuda_graph"), CPU)
    assert "learner.update_mode=eager" in str(caught.value)
    with pytest.raises(ConfigError, match="no static shapes"):
        UpdateForm(descend, "cuda_graph", capturer=recorder, obstacle="no static shapes")


def test_a_wish_for_a_graph_is_eager_without_cuda_and_says_so() -> None:
    form = make_update(descend, NetworkSettings(cuda_graph_update=True), CPU)
    assert form.mode == "eager"
    assert form.note.startswith("cuda_graph_update: eager, because a CUDA graph needs a CUDA device")
    assert "\n" not in form.note
    form(*arguments())


def test_a_wish_for_a_graph_with_cuda(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setattr(graph, "CudaCapturer", lambda device: recorder)
    wish = NetworkSettings(cuda_graph_update=True)
    assert make_update(descend, wish, CUDA).mode == "cuda_graph"
    trained_lstm = make_update(descend, wish, CUDA, obstacle="a trained lstm has no static shapes")
    assert trained_lstm.mode == "eager"
    assert trained_lstm.note == "cuda_graph_update: eager, because a trained lstm has no static shapes"
    asked = make_update(descend, NetworkSettings(cuda_graph_update=True, update_mode="auto"), CUDA)
    assert asked.mode is None
    assert asked.note == "cuda_graph_update is left aside, because update_mode is auto"
    auto = UpdateForm(descend, "auto", device=CUDA, obstacle="a trained lstm has no static shapes")
    assert auto.mode == "eager"


def test_on_cuda_the_compiler_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "find_spec", lambda name: None)
    assert why_not_compiled(CPU) is None or "triton" not in str(why_not_compiled(CPU))
    assert why_not_compiled(CUDA) == "the package triton is not installed"


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    reason = why_not_compiled()
    assert reason is not None
    assert "cache cannot be made" in reason
