"""Everything that is asked of TorchOptimizer is asked of flat parameters too."""

from typing import Any

import pytest

from functional_optim import Optimizer, TorchOptimizer

OURS = ("TorchOptimizer", "Twins", "twins")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module
    if "flat" in metafunc.fixturenames and any(hasattr(module, name) for name in OURS):
        metafunc.parametrize("flat", [False, True], ids=["apart", "flat"], indirect=True)


@pytest.fixture(autouse=True)
def flat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether parameters are in flat buffers, and stepped there where a test does not say how."""
    if not getattr(request, "param", False):
        return False
    construct = TorchOptimizer.__init__

    def construct_flat(self: TorchOptimizer, params: Any, optimizer: Any) -> None:
        if isinstance(optimizer, Optimizer) and optimizer.executor == "reference":
            # Both step whole buffers, to the same bits; TorchScript takes no methods.
            stored = any(stage.name.startswith("stored") for stage in optimizer.stages)
            optimizer = optimizer.using(executor="blocked" if stored else "script")
        construct(self, params, optimizer, flat=True)

    monkeypatch.setattr(TorchOptimizer, "__init__", construct_flat)
    return True
