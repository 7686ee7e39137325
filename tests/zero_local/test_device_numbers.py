"""Tests of the vector of scalars per parameter that ranks add up."""

import torch

from sharding.zero.groups import vector_at

PLACES = {"a": 2, "b": 0}


def test_numbers_stay_on_their_device() -> None:
    """Scalars stay on their device; else the host would wait for the device at each bucket."""
    addends = {name: torch.empty((), device="meta") for name in PLACES}
    assert vector_at(addends, PLACES, 3).device.type == "meta"


def test_numbers_of_several_devices_come_together() -> None:
    addends = {"a": torch.tensor(2.0), "b": torch.tensor(1.5, dtype=torch.float64)}
    assert vector_at(addends, PLACES, 4).tolist() == [1.5, 0.0, 2.0, 0.0]
    assert vector_at({}, {}, 2).tolist() == [0.0, 0.0]
