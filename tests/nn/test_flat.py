"""Flat parameters: what goes in comes out, views share storage, gradients arrive where they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opencda_marl.nn.flat import Layout, as_leaf

LAYOUT = Layout({"a.weight": (2, 3), "a.bias": (3,), "b.scale": ()})


def arrays() -> dict[str, np.ndarray]:
    return {"a.weight": np.arange(6.0).reshape(2, 3), "a.bias": np.arange(6.0, 9.0), "b.scale": np.array(9.0)}


def test_views_are_the_arrays_and_share_the_vector() -> None:
    flat = torch.from_numpy(LAYOUT.flatten(arrays()))
    assert flat.tolist() == list(range(10))
    views = LAYOUT.views(flat)
    assert {name: tuple(view.shape) for name, view in views.items()} == LAYOUT.shapes
    views["b.scale"].fill_(-1.0)
    assert flat[-1].item() == -1.0


def test_gradient_of_a_view_is_a_gradient_of_the_vector() -> None:
    leaf = as_leaf(torch.from_numpy(LAYOUT.flatten(arrays())))
    views = LAYOUT.views(leaf)
    loss = (views["a.weight"] ** 2).sum() + 3.0 * views["b.scale"]
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 0.0, 0.0, 0.0, 3.0]


def test_a_leaf_shares_storage() -> None:
    flat = torch.zeros(3)
    assert as_leaf(flat).data_ptr() == flat.data_ptr()
    assert not flat.requires_grad


def test_parts_lie_together() -> None:
    assert LAYOUT.part("a.") == slice(0, 9)
    assert LAYOUT.part("b.") == slice(9, 10)
    with pytest.raises(ValueError, match="no contiguous part 'c"):
        LAYOUT.part("c.")
    with pytest.raises(ValueError, match="no contiguous part"):
        Layout({"a.x": (1,), "b.x": (1,), "a.y": (1,)}).part("a.")


def test_wrong_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names differ: \['b.scale'\]"):
        LAYOUT.flatten({name: value for name, value in arrays().items() if name != "b.scale"})
    with pytest.raises(ValueError, match=r"a\.bias: shape \(2,\) instead of \(3,\)"):
        LAYOUT.flatten({**arrays(), "a.bias": np.zeros(2)})


def test_nothing_is_a_layout_too() -> None:
    empty = Layout({})
    assert (empty.size, empty.views(torch.zeros(0)), empty.flatten({}).shape) == (0, {}, (0,))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"a.weight": (2, 3), "a.bias": (3,), "b.scale": ()}, None),
        ({"a.weight": (2, 4), "a.bias": (3,), "b.scale": ()}, "'a.weight' has shape [2, 4] instead of [2, 3]"),
        ({"a.weight": (2, 3), "x": (3,), "b.scale": ()}, "'x' where 'a.bias' is expected"),
        ({"a.weight": (2, 3), "a.bias": (3,)}, "'b.scale' is missing"),
        ({"a.weight": (2, 3), "a.bias": (3,), "b.scale": (), "c": (1,)}, "'c' is unknown"),
    ],
)
def test_the_first_difference_is_named(other: dict[str, tuple[int, ...]], words: str | None) -> None:
    found = LAYOUT.mismatch(Layout(other).as_json())
    assert found is None if words is None else found is not None and words in found
