"""Forms of an update: which one runs, why, and that a failure says so."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from opencda_marl.core.errors import CompilerError
from opencda_marl.nn import graph
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.graph import UpdateForm, why_not_compiled


def descend(theta: Tensor, batch: dict[str, Tensor], rate: Tensor) -> tuple[Tensor, Tensor]:
    loss = ((theta * batch["x"]).sum(-1) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, theta)
    with torch.no_grad():
        return theta - rate * gradient, loss.detach()


def arguments() -> tuple[Tensor, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(6, 4, generator=generator, dtype=torch.float64)}
    theta = torch.randn(4, generator=generator, dtype=torch.float64)
    return as_leaf(theta), batch, torch.tensor(0.1, dtype=torch.float64)


def test_eager_is_the_function_itself() -> None:
    form = UpdateForm(descend, "eager")
    assert (form.mode, form.note) == ("eager", "")
    theta, loss = form(*arguments())
    expected = descend(*arguments())
    assert torch.equal(theta, expected[0])
    assert torch.equal(loss, expected[1])


def test_compiled_is_equal_and_survives_invalidation() -> None:
    form = UpdateForm(descend, "compiled")
    assert form.mode == ("eager" if why_not_compiled() else "compiled")  # eager where torch's path has a space
    for _ in range(2):
        theta, batch, rate = arguments()
        plain = theta
        for i in range(10):
            rate = torch.tensor(0.1 / (i + 1), dtype=torch.float64)
            theta, _ = form(as_leaf(theta), batch, rate)
            plain, _ = descend(as_leaf(plain), batch, rate)
        torch.testing.assert_close(theta, plain, rtol=1e-12, atol=1e-12)
        form.invalidate()


@pytest.mark.parametrize(("faster", "slower"), [("eager", "compiled"), ("compiled", "eager")])
def test_auto_measures_once_and_keeps_the_faster(monkeypatch: pytest.MonkeyPatch, faster: str, slower: str) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda: None)
    form = UpdateForm(descend, "auto")
    monkeypatch.setattr(form, "_call_compiled", lambda given: descend(*given))
    seconds = iter([1.0 if name == faster else 2.0 for _ in range(graph._ROUNDS) for name in ("eager", "compiled")])
    monkeypatch.setattr(graph, "_seconds", lambda _: next(seconds))
    assert form.mode is None
    form(*arguments())
    assert form.mode == faster
    assert form.note.startswith(f"update_mode auto: {faster} (eager ")
    form(*arguments())  # nothing is measured again: the times are used up
    assert slower != form.mode


def test_what_an_earlier_part_of_the_run_decided_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda: None)
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
    assert form.note == f"update_mode {asked}: eager, because no C++ compiler (no-such-compiler)"
    form(*arguments())


def test_a_path_with_a_space_is_eager_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/a cache")
    assert "has a space" in str(why_not_compiled())
    assert UpdateForm(descend, "compiled").mode == "eager"
    monkeypatch.setattr(torch, "__file__", "/some where/torch/__init__.py")
    assert "path of torch" in str(why_not_compiled())


def test_an_obstacle_of_the_function_itself() -> None:
    form = UpdateForm(descend, "compiled", obstacle="its shapes are not static")
    assert (form.mode, form.note) == ("eager", "update_mode compiled: eager, because its shapes are not static")


def test_more_forms_of_one_function_than_the_compiler_keeps() -> None:
    import torch._dynamo.config

    for i in range(torch._dynamo.config.recompile_limit + 2):
        form = UpdateForm(partial(scaled, float(i)), "compiled")
        torch.testing.assert_close(form(torch.ones(2)), torch.full((2,), float(i)))


def scaled(factor: float, theta: Tensor) -> Tensor:
    return theta * factor


def hostile(theta: Tensor) -> Tensor:
    if theta.sum().item() > 0:  # a branch on a tensor: no graph
        return theta + 1.0
    return theta


def test_what_cannot_be_compiled_is_an_error_when_it_was_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda: None)
    with pytest.raises(CompilerError, match="could not be compiled"):
        UpdateForm(hostile, "compiled")(torch.ones(2))


def test_what_cannot_be_compiled_is_eager_when_it_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "why_not_compiled", lambda: None)
    form = UpdateForm(hostile, "auto")
    assert form(torch.ones(2)).tolist() == [2.0, 2.0]
    assert form.mode == "eager"
    assert "could not be compiled" in form.note
