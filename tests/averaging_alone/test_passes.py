"""Counted backward passes, and parameters whose memory changes between means."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from functional_optim import sgd
from hooks import PostLocalSGDState, post_localSGD_hook
from hooks.averaging import OuterModelAverager
from hooks.averaging.compression import Blocks


class TwoDtypes(nn.Module):
    """DDP reduces its gradients in two buckets, also in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2).double()

    def forward(self, given: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(given).double())
        return made


@pytest.mark.parametrize("static_graph", [False, True])
def test_every_backward_pass_is_counted(world_of_one: None, *, static_graph: bool) -> None:
    """Also the first pass of a static graph, in which DDP marks no bucket as the last."""
    ddp = DistributedDataParallel(TwoDtypes(), static_graph=static_graph)
    state = PostLocalSGDState(None, dist.group.WORLD, 2)
    everywhere: list[int] = []

    def hook(state: PostLocalSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
        everywhere.append(state.iter)
        return post_localSGD_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    for number in range(4):
        ddp(torch.ones(1, 2)).sum().backward()
        assert state.iter == number + 1
    assert everywhere == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_failed_pass_is_not_counted(world_of_one: None) -> None:
    module = TwoDtypes()
    ddp = DistributedDataParallel(module)
    state = PostLocalSGDState(None, dist.group.WORLD, 2)
    ddp.register_comm_hook(state, post_localSGD_hook)

    def fails(grad: Tensor) -> None:
        raise RuntimeError("no gradient")

    handle = module.first.weight.register_hook(fails)
    with pytest.raises(RuntimeError, match="no gradient"):
        ddp(torch.ones(1, 2)).sum().backward()
    assert state.iter == 0
    handle.remove()


def test_errors_of_compression_are_float32_whatever_the_default_dtype(world_of_one: None) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float32))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        averager = OuterModelAverager([weight], sgd(lr=1.0), 1, compression=Blocks())
        saved = averager.state_dict()
        averager.load_state_dict({**saved, "residuals": [saved["residuals"][0].double()]})
        with torch.no_grad():
            weight.sub_(0.5)
        averager.average_parameters()
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.5))
    assert [one.dtype for one in averager.state_dict()["residuals"]] == [torch.float32]


def test_means_follow_a_shard_that_was_replaced(world_of_one: None) -> None:
    """``module.to`` gives a DTensor another local tensor."""
    mesh = init_device_mesh("cpu", (1,))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    averager = OuterModelAverager(module.parameters(), sgd(lr=0.5), 1)
    module.to(torch.float64)
    with torch.no_grad():
        module.weight.sub_(1.0)
    averager.average_parameters()
    assert module.weight.full_tensor().tolist() == [0.5] * 4
