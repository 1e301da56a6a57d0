"""Initial weights on a CPU: those of one process, whatever the number of ranks; no two experts start as twins."""

from __future__ import annotations

import pytest
import torch
from titan_process import in_titan_process


def initial_experts(rank: int, ranks: int) -> list[list[float]]:
    """This rank's experts of a nano layer as TorchTitan shards and moelab initialises them, ``(e, …)``."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moelab.titan import cpu
    from moelab.titan.models import model_spec

    cpu.enable()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    layer = next(layer for layer in model_spec("nano", ep_backend="standard").model.layers if layer.moe is not None)
    experts = layer.moe.routed_experts.inner_experts.build()
    for name, whole in list(experts.named_parameters()):
        shard = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, torch.nn.Parameter(shard))
    torch.manual_seed(7)  # the same on all ranks, as TorchTitan does it
    with torch.no_grad():
        experts.init_states()
    local = torch.cat([parameter.to_local().flatten(1)[:, :64] for parameter in experts.parameters()], dim=1)
    dist.destroy_process_group()
    return local.detach().tolist()


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_are_those_of_one_process(ranks: int) -> None:
    whole = torch.tensor(in_titan_process(initial_experts, 0, 1))
    shards = [torch.tensor(in_titan_process(initial_experts, rank, ranks)) for rank in range(ranks)]
    assert torch.equal(torch.cat(shards), whole)
    assert len(torch.unique(whole, dim=0)) == len(whole)
    assert float(whole.std()) > 0.001
