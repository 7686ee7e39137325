"""TorchOptimizer over TorchScript programs: torch's class, bit for bit."""

import copy
import pickle
from typing import Any

import torch

from functional_optim import adamw, chain, clip_by_global_norm, qhm
from tests.choices import each, examples
from tests.front_ends.support import CASES, FLAT, same_bits, twins
from tests.front_ends.test_flat import FlatAndApart
from tests.front_ends.test_scaled_and_sparse import SPARSE, embeddings, sparse_step


@each(name=CASES, flat=FLAT)
def test_steps_are_those_of_torch_s_class(name: str, flat: bool) -> None:
    pair = twins(name, flat=flat, executor="script")
    for seed, without in enumerate([{1, 2}, {0, 1, 2, 3}, {0}, ()]):
        pair.step(seed, without=without)
        pair.assert_same()


@each(name=SPARSE, flat=FLAT)
def test_sparse_rows(name: str, flat: bool) -> None:
    pair, tables = embeddings(SPARSE[name], executor="script", flat=flat)
    for rows in ([1, 4], [4, 0, 6], [2]):
        sparse_step(pair, tables, rows)
        assert same_bits(tables[0].weight, tables[1].weight)


@each(
    optimizer=[adamw(0.1), chain(clip_by_global_norm(1.0), qhm(0.1, 0.9))],
    way=[copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
)
def test_a_copied_chain_can_be_scripted(optimizer: Any, way: Any) -> None:
    params, grads = {"w": torch.ones(3)}, {"w": torch.tensor([1.0, -2.0, 3.0])}
    state = optimizer.init(params)
    want, _ = optimizer.update(params, grads, state)
    got, _ = way(optimizer).using(executor="script").update(params, grads, state)
    assert same_bits(got["w"], want["w"])


class Scripted(FlatAndApart):
    """Parameters in flat buffers as apart, whatever is done between steps."""

    executor = "script"


TestScripted = Scripted.TestCase
TestScripted.settings = examples(5, stateful_step_count=25)
