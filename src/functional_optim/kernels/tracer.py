"""The recorder of what a rule does with stand-ins."""

from typing import Any

from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from functional_optim.kernels.errors import UntraceableError

_RANDOM = frozenset(
    [
        "alpha_dropout",
        "bernoulli",
        "binomial",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "feature_dropout",
        "gumbel_softmax",
        "multinomial",
        "normal",
        "poisson",
        "rand_like",
        "randint_like",
        "randn_like",
        "rrelu",
    ]
)
"""In a graph, two equal calls are one, and blocks would draw in another order."""


class Tracer(GraphAppendingTracer):
    """Records calls on stand-ins, and refuses what cannot be recorded."""

    def __init__(self) -> None:
        super().__init__(fx.Graph())

    def placeholder(self, name: str) -> fx.Proxy:
        """A stand-in for an input of the graph."""
        return fx.Proxy(self.graph.placeholder(name), self)

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        plain = getattr(target, "__module__", "") == "_operator"  # and_, or_, not_
        in_place = name.endswith("_") and not name.endswith("__") and not plain
        given = rest[1] if len(rest) > 1 else named.get("kwargs") or {}
        in_place = in_place or given.get("out") is not None or given.get("inplace") is True
        if kind in ("call_method", "call_function") and in_place:
            raise UntraceableError(f"a rule calls {name}, which writes in place: rules are pure")
        if kind in ("call_method", "call_function") and name in _RANDOM:
            raise UntraceableError(f"a rule calls {name}, which draws random numbers")
        if kind == "get_attr":
            raise UntraceableError(f"a rule uses {name}, a tensor that is none of its arguments")
        return super().create_node(kind, target, *rest, **named)
