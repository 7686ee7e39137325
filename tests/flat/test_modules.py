"""Modules with parameters in flat buffers behave like other modules."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from functional_optim.plan.flat.layout import FlatLayout

from ..choices import case, pairs
from ..tensors import assert_same
from .support import lives_in, of_module


class Tied(nn.Module):
    """Embedding that shares its weights with the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(tokens)))


class Last(nn.Module):
    """Output of a recurrent network, without its state."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.LSTM(3, 4, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)[0]


def channels_last() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    return layers.to(memory_format=torch.channels_last)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)),
        lambda: torch.randn(5, 3),
    ),
    "channels_last": (
        channels_last,
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ),
    "tied": (Tied, lambda: torch.tensor([[0, 3, 1]])),
    "lstm": (Last, lambda: torch.randn(2, 1, 3)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: torch.randn(2, 3, 4),
    ),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, data = MODULES[name]
    torch.manual_seed(0)
    return make(), data()


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.arange(out.numel()).reshape(out.shape)).sum()


def run(model: nn.Module, data: Tensor) -> list[Tensor]:
    """Return the output and all gradients of one forward and backward pass."""
    model.zero_grad()
    out = model(data)
    loss_of(out).backward()
    grads = [param.grad for param in model.parameters()]
    return [out, *[grad for grad in grads if grad is not None]]


def descend(layout: FlatLayout) -> None:
    for buffer, flat in zip(layout.buffers, layout.gradient_buffers(), strict=True):
        buffer.data.sub_(flat, alpha=0.01)
    layout.mark_changed()


@pytest.mark.parametrize("name", MODULES)
def test_it_trains_as_its_twin_and_is_undone(name: str) -> None:
    for align in (1, 16):
        (model, data), (twin, _) = build(name), build(name)
        layout = of_module(model, align=align)
        assert layout.apart == ()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
        for _ in range(2):
            found, expected = run(model, data), run(twin, data)
            assert len(found) == len(expected) == 1 + len(list(model.parameters()))
            # A kernel may take another path if memory starts at another alignment.
            torch.testing.assert_close(found, expected)
            layout.gather(found[1:])
            descend(layout)
            layout.check()
            optimizer.step()
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
        model.load_state_dict(twin.state_dict())
        layout.check()
        assert list(model.state_dict()) == list(twin.state_dict())
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
        layout.undo()
        assert_same(run(model, data), run(twin, data))


def test_ties_hold_and_both_places_see_a_step() -> None:
    model = Tied()
    layout = of_module(model)
    assert model.output.weight is model.embedding.weight
    layout.buffers[0].data.fill_(2.0)
    assert model.output.weight.unique().tolist() == [2.0]
    layout.undo()
    assert model.output.weight is model.embedding.weight


def test_hooks_and_other_optimizers_state_stay() -> None:
    model = nn.Linear(2, 3)
    calls: list[str] = []
    model.weight.register_hook(lambda grad: calls.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run(model, torch.ones(1, 2))
    optimizer.step()
    of_module(model).attach_gradients()
    calls.clear()
    model.bias.register_post_accumulate_grad_hook(lambda param: calls.append("new"))
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(calls) == ["after", "hook", "new"]
    place, before = model.weight.data_ptr(), model.weight.detach().clone()
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 2
    assert model.weight.data_ptr() == place and not torch.equal(model.weight, before)


def test_half_and_double_take_parameters_out_and_check_says_so() -> None:
    for convert, dtype in ((nn.Module.half, torch.float16), (nn.Module.double, torch.float64)):
        model = nn.Linear(3, 2)
        values = model.weight.detach().clone()
        layout = of_module(model)
        convert(model)
        with pytest.raises(RuntimeError, match=f"'weight' has left its flat buffer.*{dtype}"):
            layout.check()
        layout.undo()
        assert_same(model.weight, values.to(dtype))
        assert of_module(model).apart == ()


def test_a_deep_copy_has_memory_of_its_own() -> None:
    model, data = build("tied")
    layout = of_module(model)
    twin = copy.deepcopy(model)
    assert twin.output.weight is twin.embedding.weight
    expected = run(twin, data)
    layout.buffers[0].data.zero_()
    for param in twin.parameters():
        assert not lives_in(layout, param)
        assert param.untyped_storage().nbytes() == param.numel() * 4
    assert_same(run(twin, data), expected)
    assert of_module(twin).apart == ()


def test_parameters_to_vector_and_back() -> None:
    model, _ = build("attention")
    layout = of_module(model)
    vector = parameters_to_vector(model.parameters())
    expected = torch.cat([param.flatten() for param in build("attention")[0].parameters()])
    assert_same(vector, expected)
    vector_to_parameters(vector * 2, model.parameters())
    assert_same(parameters_to_vector(model.parameters()), vector * 2)
    with pytest.raises(RuntimeError, match="has left its flat buffer"):
        layout.check()  # vector_to_parameters assigns to .data


@pytest.mark.usefixtures("world_of_one")
def test_wrapped_by_ddp() -> None:
    for chosen in pairs(bucket_view=[False, True], attached=[False, True]):
        (model, data), (twin, _) = build("mlp"), build("mlp")
        layout = of_module(model)
        if chosen["attached"]:
            layout.attach_gradients()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=chosen["bucket_view"])
        in_place = chosen["attached"] and not chosen["bucket_view"]
        for _ in range(2):
            loss_of(ddp(data)).backward()
            grads = [param.grad for param in model.parameters()]
            with case(**chosen):
                assert layout.gradients_in_place(grads) == in_place
                if not in_place:
                    layout.gather(grads)
                torch.testing.assert_close(grads, run(twin, data)[1:])
            layout.zero_gradients() if in_place else model.zero_grad()
        layout.check()


def test_a_graph_of_before_gives_what_it_would_have_given() -> None:
    for name in ("mlp", "channels_last", "lstm", "attention"):
        (model, data), (twin, _) = build(name), build(name)
        outs = [model(data), twin(data)]
        of_module(model)
        for out in outs:
            out.square().sum().backward()
        grads = [[param.grad for param in one.parameters()] for one in (model, twin)]
        assert_same(*grads)


def test_a_graph_that_needs_values_from_before_a_step_raises() -> None:
    """A graph that needs old values raises, if it is built before or after the move to a buffer."""
    x = torch.ones(2, 2, requires_grad=True)
    graphs: dict[str, Callable[[Tensor], Tensor]] = {
        "the parameter": lambda param: (param * param).sum(),
        "a view of it": lambda param: (x @ param.t()).sum(),
    }
    for saves, graph in graphs.items():
        param = nn.Parameter(torch.ones(2, 2))
        before = graph(param)
        layout = FlatLayout([param], ["a"])
        after = graph(param)
        layout.buffers[0].data.add_(1.0)
        layout.mark_changed()
        for loss in (before, after):
            modified = pytest.raises(RuntimeError, match="modified by an inplace operation")
            with case(saves=saves), modified:
                loss.backward()
