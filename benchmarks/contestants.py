"""The contestants of one cell (one workload, one optimizer), built when their turn comes.

All contestants share the separate gradients, and each has its own parameters and state. Only the
classes of torch.optim share parameters and state, and step them one after the other. The time does
not depend on sharing, and many copies of a model of 124 M parameters would not fit in memory.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import functional_optim.testing.compiled_executor  # noqa: F401  adds the executor "compiled"
from benchmarks.cases import OptimizerCase, Step
from benchmarks.errors import Absent
from benchmarks.peers.floor import Floor
from benchmarks.peers.scripted import scripted
from benchmarks.workloads import Shape, Size
from functional_optim import TorchOptimizer
from functional_optim.native import LOOPS
from hooks.named_groups import NamedGroups

Built = tuple[Step, list[Tensor]]

START = 0.5
"""Value of every parameter before the first step."""

FLOOR = "floor"
LOOP, FOREACH, FUSED = "torch for-loop", "torch foreach", "torch fused"
COMPILED, FUNCTIONAL, TORCHOPT = "torch compiled", "torch functional", "TorchOpt"
SCRIPTED = "torch scripted"
TORCH_OPTIM = (LOOP, FOREACH, FUSED, COMPILED)
PEERS = (*TORCH_OPTIM, FUNCTIONAL, SCRIPTED, TORCHOPT)
AUTO, GATHERED, DOT_GRAD = "auto", "auto, separate grads", "auto, .grad"
PLAIN, PLAIN_GATHERED = "auto, plain", "auto, plain, separate grads"
FRONT_END, IN_PLACE, BUCKET = "TorchOptimizer", "update_", "step_hook, one bucket"
DOORS = (FRONT_END, IN_PLACE, BUCKET)
"""Front-ends, constructed as users do it. They read gradients in place."""

COMPILE_LIMITS: dict[Size, int] = {"full": 500, "quick": 0, "tiny": 20}
"""Largest number of tensors for torch.compile. Its time grows with their number (15 s for 10, 23 s
for 40 on 2 cores), and 10,000 would take most of an hour."""

_VARIANTS: dict[str, dict[str, bool]] = {
    LOOP: {"foreach": False},
    FOREACH: {"foreach": True},
    FUSED: {"fused": True},
    COMPILED: {},
}


class Way(NamedTuple):
    """Settings of one of our contestants: executor, gradients, and ``requires_grad``."""

    executor: str
    grads: str = "flat"
    """"flat": already in the flat buffers; "separate": a list; "dot_grad": read from ``.grad``;
    "door": read by one of :data:`DOORS`."""
    requires_grad: bool = True


OURS: dict[str, Way] = {
    "blocked": Way("blocked"),
    "compiled": Way("compiled"),
    "fused": Way("fused"),
    AUTO: Way("auto"),
    GATHERED: Way("auto", "separate"),
    DOT_GRAD: Way("auto", "dot_grad"),
    PLAIN: Way("auto", "flat", requires_grad=False),
    PLAIN_GATHERED: Way("auto", "separate", requires_grad=False),
    **{name: Way("reference", "door") for name in DOORS},
}
NAMES = (FLOOR, *OURS, *PEERS)


class Contestants:
    """Builder of contestants. It keeps the tensors that they share.

    Args:
        shapes: the shapes of the parameters.
        size: the size of the workload; it limits the number of tensors for torch.compile.
        case: the optimizer.
        device: "cpu" or "cuda".
        threads: the number of threads of the floor.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        size: Size,
        case: OptimizerCase,
        *,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self._shapes = list(shapes)
        self._size = size
        self._case = case
        self._device = torch.device(device)
        self._threads = threads
        self._generator = torch.Generator(device).manual_seed(0)
        self.grads = self._normal()
        self.stepped: dict[str, list[Tensor]] = {}
        """The parameters that each contestant steps."""
        self._bound: dict[tuple[str, bool], tuple[Any, list[Tensor]]] = {}
        self._torch_params: list[Parameter] = []
        self._torch_state: dict[Any, Any] | None = None

    def build(self, name: str) -> Step:
        """Return the step of a contestant, which can be called any number of times.

        Raises:
            Absent: the contestant does not exist here; the message says why.
        """
        if name in OURS:
            step, params = self._door(name) if name in DOORS else self._ours(OURS[name])
        elif name in TORCH_OPTIM:
            step, params = self._torch_optim(name)
        elif name == FLOOR:
            step, params = self._floor() if self._device.type == "cpu" else self._copy()
        else:
            step, params = self._others(name)
        self.stepped[name] = params
        return step

    def release(self, kept: Sequence[str]) -> None:
        """Release all parameters and state except those of the contestants ``kept``."""
        self.stepped = {name: self.stepped[name] for name in kept if name in self.stepped}
        ways = [OURS[name] for name in kept if name in OURS]
        needed = {(way.executor, way.requires_grad) for way in ways}
        self._bound = {key: value for key, value in self._bound.items() if key in needed}
        self._torch_params, self._torch_state = [], None

    def _normal(self) -> list[Tensor]:
        """Return tensors of standard normal numbers, for the gradients."""
        options: Any = {"generator": self._generator, "device": self._device}
        return [torch.randn(shape, **options) for shape in self._shapes]

    def _params(self) -> list[Tensor]:
        return [torch.full(shape, START, device=self._device) for shape in self._shapes]

    def _ours(self, way: Way) -> Built:
        if way.executor == "fused" and not self._case.fused:
            raise Absent(f"torch has no fused {self._case.name} for this executor to call")
        if way.executor == "fused" and self._device.type == "cpu":
            raise Absent("this executor steps on CUDA only")
        key = (way.executor, way.requires_grad)
        if key not in self._bound:
            params: list[Tensor] = self._params()
            if way.requires_grad:
                params = [Parameter(param) for param in params]
            executor: Any = way.executor
            bound = self._case.ours().using(executor=executor).bind(params)
            bound.ready()
            LOOPS.wait()
            for place, grad in zip(bound.gradients, self.grads, strict=True):
                place.copy_(grad)
            for param, grad in zip(params, self.grads, strict=True):
                param.grad = grad if way.requires_grad else None
            self._bound[key] = bound, params
        bound, params = self._bound[key]
        grads = bound.gradients if way.grads == "flat" else self.grads
        return bound.step if way.grads == "dot_grad" else lambda: bound.step(grads), params

    def _door(self, name: str) -> Built:
        params: list[Tensor] = [Parameter(param) for param in self._params()]
        optimizer = self._case.ours()
        # Build now what would be built in the background or only after many steps.
        optimizer.using(executor="compiled").bind([Parameter(torch.zeros(1))]).ready()
        LOOPS.get(len(params))
        LOOPS.wait()
        if name == FRONT_END:
            for param, grad in zip(params, self.grads, strict=True):
                param.grad = grad
            return TorchOptimizer(params, optimizer).step, params
        if name == IN_PLACE:
            state = optimizer.init(params)
            return lambda: optimizer.update_(params, self.grads, state), params
        named = {str(place): param for place, param in enumerate(params)}
        groups = NamedGroups(named, optimizer.using(executor="auto"))  # as a step hook has them
        names = list(named)
        return lambda: groups.step_some(names, self.grads), params

    def _torch_optim(self, name: str) -> Built:
        case = self._case
        if name == FUSED and not case.fused:
            raise Absent(f"torch has no fused {case.name}")
        limit = COMPILE_LIMITS[self._size]
        if name == COMPILED and len(self._shapes) > limit:
            raise Absent(
                f"torch.compile of a step over {len(self._shapes):,} tensors: compiling takes a "
                f"third of a second per tensor; in size {self._size!r} not run above {limit}"
            )
        if not self._torch_params:
            self._torch_params = [Parameter(param) for param in self._params()]
        for param, grad in zip(self._torch_params, self.grads, strict=True):
            param.grad = grad
        optimizer = case.torch_class(self._torch_params, **_VARIANTS[name])
        optimizer.step()  # creates the state
        self._share_state(optimizer)
        step: Step = torch.compile(optimizer.step) if name == COMPILED else optimizer.step
        return step, list(self._torch_params)

    def _share_state(self, optimizer: Any) -> None:
        """Let an optimizer use the state tensors of the first one. Step counts stay separate."""
        if self._torch_state is None:
            self._torch_state = {param: dict(optimizer.state[param]) for param in optimizer.state}
            return
        for param, fields in self._torch_state.items():
            shared = {key: value for key, value in fields.items() if key != "step"}
            optimizer.state[param].update(shared)

    def _others(self, name: str) -> Built:
        case = self._case
        params = self._params()
        if name in {FUNCTIONAL, SCRIPTED}:
            if case.functional is None:
                raise Absent(f"torch has no functional {case.name}")
            functional = case.functional(params)
            step = functional.step if name == FUNCTIONAL else scripted(functional)
            return lambda: step(self.grads), params
        assert name == TORCHOPT
        if case.torchopt is None:
            raise Absent(f"TorchOpt has no {case.name}")
        return case.torchopt(params, self.grads), params

    def _floor(self) -> Built:
        loop = self._case.floor
        numel = sum(map(prod, self._shapes))
        options: Any = {"dtype": torch.float32, "device": self._device}
        grad = torch.cat([one.reshape(-1) for one in self.grads], out=torch.empty(numel, **options))
        param = torch.full((numel,), START, **options)
        buffers = [param, grad, *(torch.zeros(numel, **options) for _ in range(loop.states))]
        step = Floor(loop.kernel, loop.coefficients, buffers, self._threads, varying=loop.varying)
        return step, [param]

    def _copy(self) -> Built:
        """Return a copy that moves as many bytes as a step: the floor on an accelerator."""
        count = sum(map(prod, self._shapes)) * self._case.bytes_per_parameter // 2
        source = torch.zeros(count, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), []
