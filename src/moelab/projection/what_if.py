"""The same experiment elsewhere: another network, another number of nodes."""

from __future__ import annotations

from dataclasses import replace

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.hardware import Cluster, Figure


def with_network(cluster: Cluster, nic_gb_s: float) -> Cluster:
    """A cluster with another network.

    Args:
        cluster: gives everything else.
        nic_gb_s: of one GPU each way, GB/s.

    Raises:
        ImpossibleHardware: for a bandwidth that is not positive and finite.
    """
    figure = Figure(value=nic_gb_s, label="derived", source="what-if: network bandwidth as given")
    return replace(cluster, name=f"{cluster.name}, {nic_gb_s:g} GB/s", node=replace(cluster.node, nic_gb_s=figure))


def on_nodes(experiment: Experiment, nodes: int) -> Experiment:
    """An experiment on another number of nodes, with the tokens of a step kept and the other axes as they are.

    Raises:
        BadInput: if the sequences of a step do not divide.
    """
    local_batch, over = divmod(experiment.local_batch * experiment.nodes, nodes)
    if over or not local_batch:
        raise BadInput(
            f"{experiment.local_batch} sequences on each rank of {experiment.nodes} nodes do not divide among {nodes} "
            "nodes; choose nodes that divide their product"
        )
    return experiment.model_copy(update={"nodes": nodes, "local_batch": local_batch, "dp_shard": -1})
