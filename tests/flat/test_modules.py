"""Modules whose parameters live in flat buffers behave as others do."""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from functional_optim.flat_layout import FlatLayout

from .support import assert_same, lives_in, of_module


class Tied(nn.Module):
    """An embedding whose weights are the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(tokens)))


class Last(nn.Module):
    """The output of a recurrent network, without its state."""

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


def run(model: nn.Module, data: Tensor) -> list[Tensor]:
    """The output and all gradients of one pass."""
    model.zero_grad()
    out = model(data)
    (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    return [out, *[grad for grad in grads if grad is not None]]


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("name", MODULES)
def test_forward_and_backward_give_the_same_numbers(name: str, align: int) -> None:
    model, data = build(name)
    twin, _ = build(name)
    layout = of_module(model, align=align)
    assert layout.apart == ()
    found, expected = run(model, data), run(twin, data)
    assert len(found) == len(expected) == 1 + len(list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        # A kernel may take another path where memory begins at another multiple of bytes.
        torch.testing.assert_close(a, b)
    layout.undo()
    for a, b in zip(run(model, data), expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("name", MODULES)
def test_it_trains_as_its_twin_by_steps_on_buffers(name: str) -> None:
    model, data = build(name)
    twin, _ = build(name)
    layout = of_module(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for _ in range(3):
        run(model, data)
        run(twin, data)
        layout.gather([param.grad for param in model.parameters() if param.grad is not None])
        for buffer, grad in zip(layout.buffers, layout.gradient_buffers(), strict=True):
            buffer.data.sub_(grad, alpha=0.01)
        layout.mark_changed()
        layout.check()
        optimizer.step()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other)


@pytest.mark.parametrize("name", MODULES)
def test_state_dict_keys_values_and_loading(name: str) -> None:
    model, _ = build(name)
    twin, _ = build(name)
    layout = of_module(model)
    ours, theirs = model.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert_same(ours[key], value)
    with torch.no_grad():
        for param in twin.parameters():
            param.add_(1.0)
    model.load_state_dict(twin.state_dict())
    layout.check()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(param, other)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_torch_save_writes_each_buffer_once() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    numbers = sum(param.numel() for param in model.parameters()) * 4
    apart = len(saved(model.state_dict()))
    layout = of_module(model)
    together = saved(model.state_dict())
    assert numbers < len(together) <= apart
    for key, value in torch.load(io.BytesIO(together)).items():
        assert_same(value, model.state_dict()[key])
    alone = {"0.bias": model.state_dict()["0.bias"]}
    assert len(saved(alone)) > numbers, "as of any view, torch.save writes all that is behind it"
    assert len(saved({"0.bias": alone["0.bias"].clone()})) < 5000
    layout.undo()
    assert len(saved({"0.bias": model.state_dict()["0.bias"]})) < 5000


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
    of_module(model)
    calls.clear()
    run(model, torch.ones(1, 2))
    assert calls == ["hook", "after"]
    place, before = model.weight.data_ptr(), model.weight.detach().clone()
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 2
    assert model.weight.data_ptr() == place and not torch.equal(model.weight, before)


def test_hooks_made_afterwards_run() -> None:
    model = nn.Linear(2, 1)
    layout = of_module(model)
    layout.attach_gradients()
    seen: list[Tensor] = []
    model.bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    run_once = model(torch.ones(3, 2)).sum()
    run_once.backward()
    assert [grad.tolist() for grad in seen] == [[3.0]] and seen[0] is model.bias.grad


def test_half_and_double_take_parameters_out_and_check_says_so() -> None:
    for convert, dtype in ((nn.Module.half, torch.float16), (nn.Module.double, torch.float64)):
        model = nn.Linear(3, 2)
        values = model.weight.detach().clone()
        layout = of_module(model)
        convert(model)
        with pytest.raises(RuntimeError, match=f"'weight' has left its flat buffer.*{dtype}"):
            layout.check()
        layout.undo()
        assert model.weight.dtype == dtype
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
    for a, b in zip(run(twin, data), expected, strict=True):
        assert_same(a, b)
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
        layout.check()  # it assigns to .data


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_wrapped_by_ddp(bucket_view: bool, attached: bool) -> None:
    model, data = build("mlp")
    twin, _ = build("mlp")
    layout = of_module(model)
    if attached:
        layout.attach_gradients()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    for _ in range(3):
        found = [ddp(data), model]
        (found[0] * torch.arange(10).reshape(5, 2)).sum().backward()
        expected = run(twin, data)
        grads = [param.grad for param in model.parameters()]
        assert layout.gradients_in_place(grads) == (attached and not bucket_view)
        if not layout.gradients_in_place(grads):
            layout.gather([grad for grad in grads if grad is not None])
        for grad, other in zip(grads, expected[1:], strict=True):
            assert grad is not None
            torch.testing.assert_close(grad, other)
        for buffer, flat in zip(layout.buffers, layout.gradient_buffers(), strict=True):
            buffer.data.sub_(flat, alpha=0.01)
        with torch.no_grad():
            for param in twin.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.01)
        layout.mark_changed()
        if attached and not bucket_view:
            layout.zero_gradients()
        else:
            model.zero_grad()
    layout.check()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other)


def test_a_graph_of_before_gives_what_it_would_have_given() -> None:
    for name in ("mlp", "channels_last", "lstm", "attention"):
        model, data = build(name)
        twin, _ = build(name)
        outs = [model(data), twin(data)]
        of_module(model)
        for out in outs:
            out.square().sum().backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert param.grad is not None and other.grad is not None
            assert_same(param.grad, other.grad)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("saves", ["the parameter", "a view of it"])
def test_a_graph_that_needs_values_from_before_a_step_raises(moment: str, saves: str) -> None:
    """Both for a graph made before the parameters were moved, and for one made after."""
    param = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2, requires_grad=True)

    def graph() -> Tensor:
        return (param * param).sum() if saves == "the parameter" else (x @ param.t()).sum()

    loss = graph() if moment == "before" else None
    layout = FlatLayout([param], ["a"])
    loss = graph() if loss is None else loss
    layout.buffers[0].data.add_(1.0)
    layout.mark_changed()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_plain_tensors_train_too() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    layout = FlatLayout([weight], ["w"])
    layout.attach_gradients()
    (weight.square().sum()).backward()
    layout.buffers[0].data.sub_(layout.gradient_buffers()[0], alpha=0.5)
    layout.mark_changed()
    assert weight.tolist() == [[0, 0], [0, 0]]
