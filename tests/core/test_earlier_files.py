"""Files that were saved under earlier module names, and that are still readable."""

import io
import pickle
import zipfile
from typing import Any

import torch

from functional_optim import LeafState, State, adamw, matching, sgd

from ..tensors import assert_same, normal

MOVED = {
    b"functional_optim.core.state\n": b"functional_optim.state\n",
    b"functional_optim.core.stage\n": b"functional_optim.stage\n",
    b"functional_optim.core.stage_defaults\n": b"functional_optim.stage\n",
    b"functional_optim.core.gate\n": b"functional_optim.stage\n",
    b"functional_optim.core.selectors\n": b"functional_optim.where\n",
}


def as_before(content: bytes) -> bytes:
    """Return a pickle with the earlier module names."""
    for now, before in MOVED.items():
        content = content.replace(now, before)
    return content


def some_state() -> State:
    params = {"w": normal(3), "b": normal(2, seed=1)}
    state = adamw().init(params)
    return adamw().update(params, params, state)[1]


def test_states_of_earlier_versions_are_loaded_by_torchs_safe_defaults() -> None:
    file, earlier = io.BytesIO(), io.BytesIO()
    torch.save(some_state(), file)
    with zipfile.ZipFile(file) as read, zipfile.ZipFile(earlier, "w") as written:
        for name in read.namelist():
            content = read.read(name)
            written.writestr(name, as_before(content) if name.endswith("data.pkl") else content)
    assert b"functional_optim.state\n" in earlier.getvalue()
    earlier.seek(0)
    found = torch.load(earlier)
    assert isinstance(found, State) and isinstance(found.leaves["w"], LeafState)
    assert_same(found, some_state())


def test_pickles_of_earlier_versions_are_read() -> None:
    for value in (some_state(), sgd(lr=0.5), sgd(lr=0.5).override(matching("a*"), lr=0.1)):
        content = as_before(pickle.dumps(value, protocol=0))
        assert not any(now in content for now in MOVED)
        found: Any = pickle.loads(content)
        assert type(found) is type(value)
