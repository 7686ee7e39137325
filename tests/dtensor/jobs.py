"""Jobs of the ranks: models of DTensors, stepped by our optimizers and by torch's."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    TorchOptimizer,
    adahessian,
    adamw,
    chain,
    export_step,
    muon,
    partition,
    scale_by_trust_ratio,
    sgd,
    soap,
    sophia,
)
from functional_optim.storage import stored
from hooks import apply_optimizer_in_backward
from sharding import ZeroRedundancyOptimizer
from tests.choices import case
from tests.composition.trees import kind
from tests.dtensors import cut

LR, STEPS = 0.1, 3

Step = Callable[[nn.Module], None]
"""Function that steps a module by its gradients."""


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def plain(dtype: torch.dtype) -> nn.Sequential:
    """Return a model whose sizes no number of ranks divides; one rank has the whole last bias."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1)]
    for layer in layers:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(param.detach().to(dtype)))
    return nn.Sequential(*layers)


def by_fsdp(dtype: torch.dtype) -> nn.Module:
    """Shard each layer with FSDP2."""
    model, over = plain(dtype), mesh()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return model


def by_hand(dtype: torch.dtype) -> nn.Module:
    """Distribute parameters as sharded and replicated DTensors, without FSDP2."""
    model, over = plain(dtype), mesh()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(cut(layer.weight.detach(), over, [Shard(1)]))
            layer.bias = nn.Parameter(cut(layer.bias.detach(), over, [Replicate()]))
    return model


MODELS = {"fsdp": by_fsdp, "by hand": by_hand}


def set_gradients(model: nn.Module, step: int, kind: str, *, missing: bool) -> None:
    """Set the same gradients for a model and its twin; one can be None."""
    model.zero_grad()
    if kind == "fsdp":
        drawn = torch.Generator().manual_seed(100 * step + dist.get_rank())
        dtype = next(model.parameters()).dtype
        x = torch.randn(3, 4, generator=drawn, dtype=torch.float64).to(dtype)
        model(x).square().sum().backward()
    else:
        for place, param in enumerate(model.parameters()):
            drawn = torch.Generator().manual_seed(100 * step + place)
            full = torch.randn(param.shape, generator=drawn, dtype=torch.float64).to(param.dtype)
            assert isinstance(param, DTensor)
            param.grad = cut(full, param.device_mesh, param.placements)
    if missing:
        next(model.parameters()).grad = None


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def torch_optimizer(optimizer: Optimizer, model: nn.Module) -> Step:
    made = TorchOptimizer(model.parameters(), optimizer)
    return lambda _: made.step()


def bound(optimizer: Optimizer, model: nn.Module) -> Step:
    made = optimizer.bind(dict(model.named_parameters()))
    return lambda _: made.step()


def in_place(optimizer: Optimizer, model: nn.Module) -> Step:
    params = dict(model.named_parameters())
    state = optimizer.init(params)
    return lambda own: optimizer.update_(params, grads_of(own), state)


def pure(optimizer: Optimizer, model: nn.Module) -> Step:
    params = dict(model.named_parameters())
    states = [optimizer.init(params)]

    def step(own: nn.Module) -> None:
        with torch.no_grad():
            new, states[0] = optimizer.update(params, grads_of(own), states[0])
            for name, param in params.items():
                param.copy_(new[name])

    return step


Way = Callable[[Optimizer, nn.Module], Step]

WAYS: dict[str, Way] = {
    "TorchOptimizer": torch_optimizer,
    "bound": bound,
    "update_": in_place,
    "update": pure,
}


def adamw_as_torch(cases: Sequence[dict[str, Any]]) -> None:
    """Compare each way of stepping with torch's AdamW after every step, bit for bit."""
    for one in cases:
        for name, way in WAYS.items():
            with case(**one, way=name):
                _as_torch(way, **one)


def _as_torch(way: Way, model: str, dtype: str, executor: Any) -> None:
    ours, twin = (MODELS[model](getattr(torch, dtype)) for _ in range(2))
    begun = [_local(param).clone() for param in ours.parameters()]
    versions = [param._version for param in ours.parameters()]
    step = way(adamw(lr=LR).using(executor=executor), ours)
    theirs = torch.optim.AdamW(twin.parameters(), lr=LR, foreach=False)
    for number in range(STEPS):
        for one in (ours, twin):
            set_gradients(one, number, model, missing=number == 2)
        step(ours)
        theirs.step()
        assert all(isinstance(param, DTensor) for param in ours.parameters())
        assert_same(ours, twin)
    for old, version, param in zip(begun, versions, ours.parameters(), strict=True):
        assert old.numel() == 0 or not torch.equal(old, _local(param))
        assert param._version > version  # autograd checks the version


def as_plain_tensors(cases: Sequence[dict[str, Any]]) -> None:
    """Check that shards are stepped as plain tensors of the same values, with the same rounding."""
    for one in cases:
        for name, way in WAYS.items():
            # Flat buffers would pack plain tensors in another order.
            apart = in_place if name == "bound" else way
            with case(**one, way=name):
                _as_plain(way, apart, **one)


def _as_plain(way: Way, apart: Way, model: str, dtype: str, executor: Any) -> None:
    optimizer, kind = adamw(lr=LR).using(executor=executor), getattr(torch, dtype)
    ours, twin = MODELS[model](kind), plain(kind)
    pairs = list(zip(ours.parameters(), twin.parameters(), strict=True))
    for param, part in pairs:
        part.data = _local(param).clone()
    steps = way(optimizer, ours), apart(optimizer, twin)
    for number in range(STEPS):
        set_gradients(ours, number, model, missing=number == 2)
        for param, part in pairs:
            part.grad = None if param.grad is None else _local(param.grad)
        steps[0](ours)
        steps[1](twin)
    for param, part in pairs:
        assert torch.equal(_local(param), part)


def checkpoints() -> None:
    """Load state of torch's AdamW, and check that the next state is equal to torch's."""
    ours, twin = by_fsdp(torch.float32), by_fsdp(torch.float32)
    theirs = torch.optim.AdamW(twin.parameters(), lr=LR, foreach=False)
    before = torch.optim.AdamW(ours.parameters(), lr=LR, foreach=False)
    for model, optimizer in ((ours, before), (twin, theirs)):
        set_gradients(model, 0, "fsdp", missing=False)
        optimizer.step()
    made = TorchOptimizer(ours.parameters(), adamw(lr=LR))
    made.load_state_dict(before.state_dict())
    for model, optimizer in ((ours, made), (twin, theirs)):
        set_gradients(model, 1, "fsdp", missing=False)
        optimizer.step()
    assert_same(ours, twin)
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(_local(made.state[a][key]), _local(theirs.state[b][key]))


def in_backward() -> None:
    """Check steps of shards during backward."""
    ours, twin = by_fsdp(torch.float32), by_fsdp(torch.float32)
    apply_optimizer_in_backward(adamw, ours.parameters(), {"lr": LR}, ddp=False)
    theirs = torch.optim.AdamW(twin.parameters(), lr=LR, foreach=False)
    for number in range(STEPS):
        for model in (ours, twin):
            set_gradients(model, number, "fsdp", missing=False)
        theirs.step()
    assert_same(ours, twin)


SAID = {
    "script": ("'0.bias' is a DTensor", "a TorchScript program takes plain tensors", "to_local()"),
    "export": ("'0.bias' is a DTensor", "an exported step takes plain tensors"),
    "capturable": ("'0.bias' is a DTensor", "a step that may be captured takes plain tensors"),
    "zero": ("is a DTensor", "ZeroRedundancyOptimizer", "takes plain tensors"),
    "ratios": ("is a DTensor", "scale_by_trust_ratio needs more", "executor='reference'"),
    "blocks": ("'0.bias' is a DTensor", "blocks of 256 elements", "float32 or bfloat16"),
    "blocks, held": ("'0.weight' is a DTensor", "blocks of 256 elements"),
    "blocks, unnamed": ("'params[0]' is a DTensor", "blocks of 256 elements"),
    "soap": ("'0.weight' is a DTensor", "soap needs the whole tensor", "partition"),
    "muon": (
        "'0.weight' is a DTensor",
        "muon needs the whole tensor",
        "sharding.MatrixOwnerOptimizer",
        "ignored_params",
    ),
    "muon, held": ("'0.weight' is a DTensor", "muon needs the whole tensor"),
    "a user's": ("'0.bias' is a DTensor", "whole needs the whole", "takes_dtensors=True"),
    "plain": ("gradient at '2.bias' is a plain tensor", "DTensor"),
}


class NoHyper(NamedTuple):
    pass


def whole_rule(param: Tensor, grad: Tensor, state: NoState, c: NoHyper) -> tuple[Tensor, NoState]:
    return param - grad / grad.abs().max(), state


WHOLE = Rule(name="whole", hyper=NoHyper, rule=whole_rule, kind="per_matrix")


def redistributed() -> None:
    """Check gradients that are sharded differently or not reduced yet.

    They are redistributed to the shards of their parameters.
    """
    for executor in ("reference", "blocked"):
        for name, placed in {"whole": Replicate(), "other": Shard(0), "sums": Partial()}.items():
            with case(executor=executor, gradient=name):
                ours, twin = by_hand(torch.float32), by_hand(torch.float32)
                for model in (ours, twin):
                    set_gradients(model, 0, "by hand", missing=False)
                for param in ours.parameters():
                    assert isinstance(param.grad, DTensor)
                    full = param.grad.full_tensor()
                    if isinstance(placed, Partial):  # no rank has the whole sum
                        share = full if dist.get_rank() == 1 % dist.get_world_size() else full * 0.0
                        param.grad = DTensor.from_local(share, param.device_mesh, [placed])
                    else:
                        param.grad = distribute_tensor(full, param.device_mesh, [placed])
                for model in (ours, twin):
                    torch_optimizer(adamw(lr=LR).using(executor=executor), model)(model)
                assert_same(ours, twin)


def refused() -> None:
    """Fault 22: an error names the parameter that cannot be stepped and an alternative.

    Nothing is changed.
    """
    model = by_hand(torch.float32)
    set_gradients(model, 0, "by hand", missing=False)
    params, grads = dict(model.named_parameters()), grads_of(model)
    before = {name: _local(param).clone() for name, param in params.items()}
    blocked = adamw(lr=LR).using(executor="blocked")
    ratios = chain(scale_by_trust_ratio(), sgd(lr=LR)).using(executor="blocked")
    eight = stored(adamw(lr=LR), state="int8")
    matrices = {"0.weight": params["0.weight"]}

    def step(optimizer: Optimizer, **others: Tensor) -> None:
        optimizer.update_(params, {**grads, **others}, optimizer.init(params))

    attempts: dict[str, Callable[[], Any]] = {
        "script": lambda: blocked.script(params),
        "export": lambda: export_step(blocked, params),
        "capturable": lambda: adamw().bind(params, capturable=True),
        "zero": lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR),
        "ratios": lambda: step(ratios),
        "blocks": lambda: eight.init(params),
        "blocks, held": lambda: TorchOptimizer(model.named_parameters(), eight),
        "blocks, unnamed": lambda: TorchOptimizer(model.parameters(), eight),
        "soap": lambda: TorchOptimizer(
            model.named_parameters(),
            partition({"matrices": soap(lr=LR), "rest": adamw(lr=LR)}, kind),
        ),
        "muon": lambda: muon(lr=LR).init(matrices),
        "muon, held": lambda: TorchOptimizer(matrices.items(), muon(lr=LR)),
        "a user's": lambda: chain(WHOLE()).init(params),
        "plain": lambda: step(blocked, **{"2.bias": torch.ones(1)}),
    }
    for name, parts in SAID.items():
        with case(refused=name):
            with pytest.raises(ValueError, match="DTensor|gradient at") as caught:
                attempts[name]()
            for part in parts:
                assert part in str(caught.value)
            assert all(torch.equal(_local(params[path]), old) for path, old in before.items())


def with_inputs() -> None:
    """Check that a Hessian estimate with the sharding of its parameter is used shard by shard.

    Sophia gets one in every other step. An estimate with another sharding is refused.
    """
    for make in (sophia, adahessian):
        for executor in ("reference", "blocked"):
            with case(optimizer=make.__name__, executor=executor):
                _with_inputs(make(lr=LR).using(executor=executor))


def _with_inputs(optimizer: Optimizer) -> None:
    ours, others, twin = by_hand(torch.float32), by_hand(torch.float32), plain(torch.float32)
    for param, part in zip(ours.parameters(), twin.parameters(), strict=True):
        part.data = _local(param).clone()
    named = [dict(model.named_parameters()) for model in (ours, others, twin)]
    states = [optimizer.init(params) for params in named]
    front_end = TorchOptimizer(named[1].items(), optimizer)
    is_asked = any(one.required for stage in optimizer.stages for one in stage.inputs)
    for number in range(4):
        for model in (ours, others):
            set_gradients(model, number, "by hand", missing=number == 2)
        given = {name: 2.0 * param.detach() + 0.5 for name, param in named[0].items()}
        own = {name: _local(one) for name, one in given.items()}
        grads = grads_of(ours)
        local = {name: None if grad is None else _local(grad) for name, grad in grads.items()}
        is_given = is_asked or number % 2 == 0
        extra = {"hessian": given} if is_given else {}
        optimizer.update_(named[0], grads, states[0], extra=extra)
        front_end.step(extra=extra)
        optimizer.update_(named[2], local, states[2], extra={"hessian": own} if is_given else {})
    assert_same(ours, others)
    for param, part in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.equal(_local(param), part)
    whole = given["0.weight"].redistribute(placements=[Replicate()])
    for wrong, said in {
        own["0.weight"]: "input 'hessian' at '0.weight' is a plain tensor, and its parameter a DT",
        whole: r"input 'hessian' at '0.weight' is a DTensor of .*Replicate.*redistribute\(\)",
    }.items():
        extra = {"hessian": {**given, "0.weight": wrong}}
        with pytest.raises(ValueError, match=f"{said}|has shape"):
            optimizer.update_(named[0], grads, states[0], extra=extra)
    plain_extra = {"hessian": {**own, "0.bias": given["0.bias"]}}
    with pytest.raises(ValueError, match="'0.bias' is a DTensor, and its parameter a plain"):
        optimizer.update_(named[2], local, states[2], extra=plain_extra)


def twice() -> None:
    """Check that two DTensors of one shard are refused."""
    param = distribute_tensor(torch.ones(6), mesh(), [Shard(0)])
    again = DTensor.from_local(param.to_local(), param.device_mesh, param.placements)
    optimizer, given = sgd(lr=LR), {"a": param, "b": again}
    with pytest.raises(ValueError, match="'b' shares its memory with 'a'"):
        optimizer.update_(given, given, optimizer.init(given))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Check that two models have equal shards."""
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(_local(a), _local(b)), name


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()
