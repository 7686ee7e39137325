"""Fixtures and hooks of all tests: tiers, the folder of compiled code, Hypothesis settings.

No example of Hypothesis has a deadline, in any folder: its duration depends on how busy the
machine is, and the first example also includes compilation.
"""

import gc
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.nn.parallel import DistributedDataParallel

import functional_optim.testing.compiled_executor  # noqa: F401  adds the executor "compiled"
from functional_optim.core.leaf import Scalars
from functional_optim.kernels.fused_kernel import FusedKernel
from functional_optim.native import LOOPS
from functional_optim.native.loader import SWITCH

from . import worlds
from .choices import EVERYTHING

TESTS = Path(__file__).parent

TIERS = {
    "agreement": "unit",
    "averaging": "ranks",
    "averaging_alone": "unit",
    "bench": "bench",
    "bench/ranks": "ranks",
    "checkpoint_files": "unit",
    "commands": "docs",
    "browser": "browser",
    "composition": "unit",
    "core": "unit",
    "core/compiled": "compile",
    "cuda": "compile",
    "cuda/ranks": "ranks",
    "ddp": "ranks",
    "demo": "docs",
    "demo/ranks": "ranks",
    "docs": "docs",
    "distributed_checkpoint": "ranks",
    "distributed_checkpoint/alone": "unit",
    "dtensor": "ranks",
    "dtensor/alone": "unit",
    "ecosystem": "docs",
    "examples": "docs",
    "executors": "compile",
    "executors/plain": "unit",
    "export": "compile",
    "flat": "unit",
    "flat/compiled": "compile",
    "front_ends": "unit",
    "front_ends/compiled": "compile",
    "front_ends/ranks": "ranks",
    "hooks_alone": "unit",
    "hooks_compiled": "compile",
    "laws": "unit",
    "laws/compiled": "compile",
    "matrices": "ranks",
    "native": "compile",
    "old_format": "unit",
    "notebooks": "docs",
    "packaging": "docs",
    "planner": "unit",
    "readme": "docs",
    "remote": "unit",
    "remote/compiled": "compile",
    "remote/ray_actors": "ranks",
    "remote/rpc": "ranks",
    "storage": "unit",
    "storage/compiled": "compile",
    "torch_names": "unit",
    "transport": "ranks",
    "transport_alone": "unit",
    "zero": "ranks",
    "zero_drawn": "ranks",
    "zero_faults": "ranks",
    "zero_hooks": "ranks",
    "zero_local": "unit",
}
"""Tier of each folder of tests: the things that its tests need, and when they run (see
CONTRIBUTING)."""

TOGETHER = ("checkpoint_files/test_growth.py", "docs/test_site.py", "notebooks")
"""Files and folders whose tests share a site or a kernel, which takes seconds to start."""

settings.register_profile(
    "the same in every run", deadline=None, derandomize=True, database=None, print_blob=True
)
settings.register_profile("others in each run", deadline=None, print_blob=True)
settings.load_profile("others in each run" if EVERYTHING else "the same in every run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the tier of its innermost folder, and docstring examples with docs."""
    limit = max(1800.0, config.getoption("timeout", None) or 0.0)
    for item in items:
        tier = tier_of(item.path)
        item.add_marker(getattr(pytest.mark, tier))
        if tier != "unit":  # the test starts processes or a compiler, and waits for them
            item.add_marker(pytest.mark.timeout(limit))


def pytest_collection_finish() -> None:
    """Exempt everything imported by now from garbage collection during the tests.

    This imports torch._dynamo first, which torch.optim imports when it is first used.
    """
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)  # the collector took a tenth of the time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send all tests on ranks to one process of pytest-xdist, which has the pool of ranks.

    Tests of one file or folder in TOGETHER run in one process, too. xdist's own ``--dist
    loadgroup`` has no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByTier(LoadScopeScheduling):  # type: ignore[misc]  # it has no annotations
        def _split_scope(self, nodeid: str) -> str:
            path = config.rootpath / nodeid.partition("::")[0]
            if tier_of(path) == "ranks":
                return "ranks"
            return next((one for one in TOGETHER if _is_in(path, TESTS / one)), nodeid)

    return ByTier(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import folders of other tiers if ``-m`` has the name of one tier.

    Tests in a browser run with ``-m browser`` only.
    """
    wanted = config.getoption("markexpr")
    if collection_path == TESTS / "browser" and wanted != "browser":
        return True
    if wanted not in TIERS.values() or TESTS not in collection_path.parents:
        return None
    below = [TIERS[name] for name in TIERS if collection_path in (TESTS / name).parents]
    other = not collection_path.is_file() and wanted not in (tier_of(collection_path / "_"), *below)
    return True if other else None


def _is_in(path: Path, folder: Path) -> bool:
    return folder in (path, *path.parents)


def tier_of(path: Path) -> str:
    """Return the tier of the file at a path.

    Raises:
        KeyError: none of its folders has a tier.
    """
    if TESTS not in path.parents:
        return "docs"
    folder = path.parent.relative_to(TESTS)
    while str(folder) not in TIERS:
        if folder == folder.parent:
            raise KeyError(f"{path}: its folder has no tier; {__file__} has a table of them")
        folder = folder.parent
    return TIERS[str(folder)]


@pytest.fixture(autouse=True, scope="session")
def compiled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep all compiled code of a run in one folder, so that it is compiled once."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(shared) / "compiled_steps"
    os.environ["FUNCTIONAL_OPTIM_CACHE"] = str(folder)
    return folder


@pytest.fixture
def fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let executor="fused" step on the CPU, where torch has the same kernels."""
    monkeypatch.setattr(FusedKernel, "is_for", lambda _, chunk: chunk.scalars is Scalars.HOST)


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_raised() -> None:
    """Raise KeyboardInterrupt in background runs too, where the shell ignores SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def with_loops(compiled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the C++ loops to inspect tensors."""
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(compiled_folder))
    monkeypatch.delenv(SWITCH, raising=False)
    load = partial(type(LOOPS)._load, LOOPS)
    monkeypatch.setattr(LOOPS, "_load", load)  # without_loops may have replaced it
    if LOOPS.get(0) is None:
        LOOPS.reset()
    assert LOOPS.wait(900)
    assert LOOPS.get(0) is not None


@pytest.fixture
def without_loops() -> Iterator[None]:
    """Python checks tensors, however many. A build that ends during the test is loaded after it."""
    late: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOOPS, "loaded", None)
        patch.setattr(LOOPS, "_done", True)
        patch.setattr(LOOPS, "_load", late.append)
        yield
    for content in late:
        LOOPS._load(content)


@pytest.fixture(autouse=True)
def no_loops_in_unit_tests(request: pytest.FixtureRequest) -> None:
    """Keep unit tests independent of a compiler and of code that was compiled before."""
    if request.node.get_closest_marker("unit"):
        request.getfixturevalue("without_loops")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset torch.compile before the test and after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()  # graphs are in cycles, and other tests count live tensors


@pytest.fixture(params=["with_loops", "without_loops"])
def both_ways(request: pytest.FixtureRequest) -> Any:
    """Run the test with the C++ loops, and without them."""
    request.getfixturevalue(request.param)
    return request.param


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """Make a process group in which this process is the only rank."""
    with worlds.world_of_one():
        yield


@pytest.fixture(autouse=True)
def grad_mode_is_restored() -> Iterator[None]:
    """Check that a test leaves autograd on, since later tests need it."""
    yield
    assert torch.is_grad_enabled()


@pytest.fixture(autouse=True)
def no_module_is_left_in_its_forward_pass() -> Iterator[None]:
    """Check that a test leaves no active DDP module, which torch.compile would include later."""
    yield
    left, DistributedDataParallel._active_ddp_module = (
        DistributedDataParallel._active_ddp_module,
        None,
    )
    assert left is None
