"""Complex parameters: each front-end gives the bits of a step on the real view.

torch.optim also steps most complex parameters through their real view. SGD and coupled weight decay
add complex numbers instead, so they round in another way than on the real view.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.choices import each

from .runs import Functional
from .support import CASES, assert_same_tensors, parameters, params_of, run, set_grads, twins

COMPLEX = [name for name, (cls, _) in CASES.items() if cls is not torch.optim.Adafactor]
"""Cases with complex parameters, which Adafactor refuses, here and in torch."""


def real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return detached real views."""
    return [torch.view_as_real(one.detach()) for one in tensors]


def assert_as_on_real_views(ours: Any, theirs: torch.optim.Optimizer) -> None:
    """Check that our next steps on complex numbers equal torch's steps on their real views."""
    for seed in range(60, 63):
        given = parameters(1, torch.complex64)
        set_grads(given, seed)
        for param, one in zip(params_of(theirs), given, strict=True):
            assert one.grad is not None
            param.grad = torch.view_as_real(one.grad)
        ours.step(seed) if isinstance(ours, Functional) else run(ours, seed)
        theirs.step()
        params = ours.params if isinstance(ours, Functional) else params_of(ours)
        assert_same_tensors(real(params), params_of(theirs))


def on_real_views(name: str, params: Sequence[Tensor]) -> Any:
    cls, options = CASES[name]
    made: Any = cls
    leaves = [torch.nn.Parameter(one.clone()) for one in real(params)]
    return made(leaves, **options, foreach=False)


@each(name=COMPLEX)
def test_from_torch_is_torch_s_class_on_the_real_view(name: str) -> None:
    live = twins(name, torch.complex64).theirs
    run(live, 0, 1, without={1})
    twin = on_real_views(name, params_of(live))
    written = live.state_dict()
    written["state"] = {
        number: {
            key: torch.view_as_real(value).clone() if torch.is_complex(value) else value.clone()
            for key, value in entries.items()
        }
        for number, entries in written["state"].items()
    }
    twin.load_state_dict(written)
    assert_as_on_real_views(Functional(live), twin)
