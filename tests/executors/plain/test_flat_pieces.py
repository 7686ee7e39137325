"""A pointwise stage runs on flat pieces, so it must not read ranks, strides, or sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, TorchOptimizer, Transform, chain, sgd
from functional_optim.kernels.errors import NotPointwiseError

from ...choices import case
from ..rules import stateless

READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "ndim": lambda p, g: p.ndim,
    "ndim of the gradient": lambda p, g: g.ndim,
    "ndim by name": lambda p, g: getattr(p, "ndim"),  # noqa: B009  so may a rule
    "dim": lambda p, g: p.dim(),
    "dim of a result": lambda p, g: (p - g).dim(),
    "ndimension": lambda p, g: p.ndimension(),
    "stride": lambda p, g: p.stride()[0],
    "length of the shape": lambda p, g: len(p.shape),
    "length of the size": lambda p, g: len(p.size()),
    "length": lambda p, g: len(p),
    "branch on the rank": lambda p, g: 1.0 if p.ndim > 1 else 2.0,
    "branch on a size": lambda p, g: 1.0 if p.shape[0] == 2 else 2.0,
    "branch on the elements": lambda p, g: 1.0 if p.numel() == 6 else 2.0,
    "branch on the layout": lambda p, g: 1.0 if p.is_contiguous() else 2.0,
    "a loop over sizes": lambda p, g: sum(p.shape),
    "a range": lambda p, g: max(range(p.shape[0])),
    "a float": lambda p, g: float(p.numel()),
}
ASKED = ("auto", "blocked", "compiled")


def rule_of(read: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def rule(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
        return p - c.lr * g * read(p, g), s

    return rule


def require_refused(step: Callable[[], object], name: str) -> None:
    with pytest.raises(
        NotPointwiseError, match=rf"({name}|chain) declares .*'per_matrix'"
    ) as caught:
        step()
    assert "override" in str(caught.value)


def tree() -> dict[str, Tensor]:
    return {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}


def test_a_rule_that_reads_the_rank_is_refused_by_every_compiled_executor() -> None:
    """Fault 4: such a rule was compiled for a flat tensor, and gave wrong numbers."""
    for name, read in READS.items():
        for executor in ASKED:
            with case(name=name, executor=executor):
                optimizer = stateless(rule_of(read)).using(executor=executor)
                params, state = tree(), optimizer.init(tree())
                require_refused(lambda o=optimizer, s=state: o.update(tree(), tree(), s), "mine")  # type: ignore[misc]  # called at once
                require_refused(
                    lambda o=optimizer, p=params, s=state: o.update_(p, tree(), s),
                    "mine",  # type: ignore[misc]  # called at once
                )
                require_refused(lambda o=optimizer, p=params: o.bind(p).step(tree()), "mine")  # type: ignore[misc]  # called at once
                assert all(map(torch.equal, params.values(), tree().values()))


def test_so_is_it_by_a_torch_optimizer() -> None:
    """Fault 4: ``TorchOptimizer`` refuses a rule that reads the rank."""
    params = [torch.nn.Parameter(one) for one in tree().values()]
    optimizer = TorchOptimizer(params, stateless(rule_of(READS["ndim"])))
    for param in params:
        param.grad = torch.ones_like(param)
    require_refused(optimizer.step, "mine")
    assert all(map(torch.equal, params, tree().values()))


class NoHyper(NamedTuple):
    pass


def by_rank(g: Tensor, p: Tensor, s: NoState, c: NoHyper) -> tuple[Tensor, NoState]:
    return g * p.dim(), s


def chained(transform: Callable[..., Any]) -> Optimizer:
    return chain(Transform(name="scaled", hyper=NoHyper, transform=transform)(), sgd(lr=0.5))


def test_so_is_a_transform() -> None:
    """Fault 4: a transform that reads the rank is refused."""
    optimizer = chained(by_rank).using(executor="auto")
    require_refused(lambda: optimizer.update(tree(), tree(), optimizer.init(tree())), "scaled")


def after_a_branch(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return (p - c.lr * g * p.ndim if c.lr > 0.1 else p), s


def asks_the_class(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * Tensor.dim(p), s


def transposes(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g.t().t().flip(-1), s


def turns(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g.t(), s


def test_what_no_graph_shows_is_found_by_trying_a_matrix() -> None:
    """Fault 4: a rule that cannot be traced, or that turns a matrix, is tried on a matrix."""
    for rule in (after_a_branch, asks_the_class, transposes, turns):
        with case(rule=rule):
            optimizer = stateless(rule).using(executor="auto")
            square = {"w": torch.arange(9.0).view(3, 3)}
            grads = {"w": torch.ones(3, 3)}
            with pytest.raises(NotPointwiseError, match="kind='per_matrix'"):
                optimizer.update(square, grads, optimizer.init(square))


def keeps_shape(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    zeros = torch.zeros(p.shape, dtype=p.dtype)
    return zeros + p.view(-1).view_as(p) - c.lr * g.reshape(p.shape).expand(p.size()), s


def test_shapes_may_be_handed_on() -> None:
    optimizer = stateless(keeps_shape)
    want = optimizer.using(executor="reference").update(tree(), tree(), optimizer.init(tree()))[0]
    for executor in ASKED:
        other = optimizer.using(executor=executor)
        made = other.update(tree(), tree(), optimizer.init(tree()))[0]
        assert all(map(torch.equal, made.values(), want.values()))
