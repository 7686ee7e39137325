"""Small Ray cluster on this machine, shared by all tests of this folder."""

import gc
import shutil
import tempfile
import warnings
from collections.abc import Iterator

import pytest
import ray

from functional_optim.remote import RayTransport


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore ResourceWarnings: Ray leaves files and processes to the garbage collector."""
    for item in items:
        if "ray_actors" in item.path.parts:
            for text in ("ignore:unclosed file", "ignore:subprocess .* is still running"):
                item.add_marker(pytest.mark.filterwarnings(f"{text}:ResourceWarning"))


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Start Ray in a folder with a short name, because the names of Ray's sockets are long."""
    folder = tempfile.mkdtemp(prefix="fo-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("FUNCTIONAL_OPTIM_LOOPS", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # On a busy machine, a process takes minutes to start, and other programs use the memory.
        patch.setenv("RAY_worker_register_timeout_seconds", "600")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            logging_level="ERROR",
            log_to_driver=False,
        )
    yield  # Ray's processes inherited these variables; other tests do not see them
    ray.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def shared(cluster: None) -> Iterator[RayTransport]:
    """Yield a transport to the actors "ps0" and "ps1", which many optimizers share."""
    transport = RayTransport()
    yield transport
    transport.close()
