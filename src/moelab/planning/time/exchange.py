"""Time on the wires: dispatch and combine of an MoE layer, and the collectives of FSDP, TP and CP.

A ring over P ranks moves (P − 1)/P of the whole over every rank's wire. Inside a node that wire is NVLink; across nodes
every GPU has a network card, and ranks that share a node share their cards.

What dispatch and combine send is ``traffic.py``'s, wire by wire; NVLink and network work at the same time,
so the slower one counts. What the GPU waits while the host learns how many rows come is the host's (``step.py``).

DeepEP publishes bandwidths and counts *logical* bytes: a token once for each destination, those that never leave the
node included. With N nodes a share of 1/N stays, so the network carries 1 − 1/N of the figure.

HybridEP and ``minimal_async_ep`` are not modelled; a projection of them is DeepEP's and says so.

References:
    ``deepseek-ai/DeepEP``, README (V2), ``docs/legacy.md`` (V1).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from moelab.data import read_yaml
from moelab.experiment import EPBackend
from moelab.model import BYTES_PER_ELEMENT
from moelab.planning.memory.activations import BF16
from moelab.planning.time.calibration import Calibration
from moelab.planning.time.gemm import memory_rate, sms_of
from moelab.planning.time.job import PASS_INDEX, Job, PassName, Times, add_both_ways


@functools.lru_cache(maxsize=1024)
def expected_maximum(draws: int) -> float:
    """Expected maximum of standard normal draws.

    References:
        Blom 1958, Statistical Estimates and Transformed Beta-Variables: alpha 0.375.

    >>> round(expected_maximum(2), 2), round(expected_maximum(256), 2)
    (0.59, 2.81)
    """
    return 0.0 if draws < 2 else NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def nvlink_rate(job: Job, calibration: Calibration) -> float:
    """Bytes a second that a rank moves each way inside a node."""
    return 1e9 * float(job.node.gpu.nvlink_gb_s or 1) * calibration.nvlink


def network_rate(job: Job, calibration: Calibration, *, deepep: bool = False) -> float:
    """Bytes a second that a rank moves each way between nodes, by NCCL or by ``deepep``."""
    # without a figure nothing is sent over the network: `on_cluster` has refused what would
    share = calibration.deepep_network if deepep else calibration.nccl_network
    return 1e9 * float(job.node.nic_gb_s or 1) * share


def ring_time_s(job: Job, calibration: Calibration, whole_bytes: float, ranks: int, *, stride: int = 1) -> float:
    """Seconds to gather or scatter ``whole_bytes`` over ``ranks`` GPUs, neighbours being ``stride`` GPUs apart."""
    together = min(ranks, max(1, job.node.gpus // stride))  # ranks of the group on one node
    nodes = ranks / together
    nvlink_s = whole_bytes * (ranks - 1) / ranks / nvlink_rate(job, calibration)
    # data goes round in pieces, so the slower kind of link sets the pace and the other adds nothing
    return max(nvlink_s, whole_bytes * (nodes - 1) / nodes / (together * network_rate(job, calibration)))


def fsdp_time_s(job: Job, calibration: Calibration, dense: float, experts: float, element_bytes: float) -> float:
    """Seconds to gather, or scatter, parameters of which ``dense`` and ``experts`` elements are whole on a rank."""
    ranks, stride = job.degrees.fsdp, job.work.tp
    dense_s = ring_time_s(job, calibration, dense * element_bytes, ranks, stride=stride)
    if job.work.ep > 1:  # experts are sharded over the ranks that hold the same ones
        ranks, stride = job.degrees.efsdp, job.work.ep
    return dense_s + ring_time_s(job, calibration, experts * element_bytes, ranks, stride=stride)


def add_layer_collectives(times: Times, job: Job, calibration: Calibration) -> None:
    """Collectives of tensor and of context parallelism in one layer, forward and backward alike.

    Tensor parallelism gathers and scatters the residual stream around attention and around the dense or shared FFN.
    Context parallelism gathers keys and values over the ranks that share a sequence, and scatters their gradients.
    """
    shape, work = job.shape, job.work
    width = shape.kv_heads / work.tp * (shape.qk_head_dim + shape.v_head_dim)
    stream, keys_and_values = BF16 * work.tokens * shape.dim, BF16 * work.tokens * work.cp * width
    collectives = {
        "tensor-parallel collectives": 4 * ring_time_s(job, calibration, stream, work.tp),
        # ranks of a sequence are tp GPUs apart
        "context-parallel collectives": ring_time_s(job, calibration, keys_and_values, work.cp, stride=work.tp),
    }
    for category, seconds in collectives.items():
        add_both_ways(times, category, seconds, seconds, again=job.recomputes_layers)


def exchange_time_s(job: Job, calibration: Calibration, element_bytes: float) -> float:
    """Seconds that one exchange is on its wires, and what DeepEP takes beside its bytes."""
    if job.work.ep == 1:
        return 0.0
    deepep = job.work.backend is not EPBackend.STANDARD
    row_bytes = job.work.routed_tokens * job.shape.dim * element_bytes * job.work.imbalance
    wires_s = max(  # both wires work at once
        job.rows_sent.nvlink * row_bytes / nvlink_rate(job, calibration),
        job.rows_sent.network * row_bytes / network_rate(job, calibration, deepep=deepep),
    )
    return wires_s + calibration.deepep_s * (deepep and job.stack.launch_s != 0)


def add_exchange(times: Times, job: Job, calibration: Calibration) -> None:
    """Dispatch and combine of one layer, there and back."""
    both = sum(exchange_time_s(job, calibration, BYTES_PER_ELEMENT[one]) for one in (job.dispatch, "bf16"))
    forward, back = (_exposed_s(times, job, passes, both) for passes in (("forward",), ("dgrad", "wgrad")))
    rate = memory_rate(job, calibration) * calibration.row_copy  # rows in a random order are slower than a copy
    copy_s = 2 * BF16 * job.work.received(job.shape) * job.shape.dim / rate
    dispatch, combine, combine_back, dispatch_back = (copies * copy_s for copies in job.stack.permutation.copies)
    waited = 2 * calibration.wait_s * expected_maximum(job.work.ep) * waits_over_network(job)
    again = job.recomputes_layers and not job.keeps_exchange
    add_both_ways(times, "all-to-all", forward, back, again=again)
    add_both_ways(
        times, "permutation and padding", dispatch + combine, combine_back + dispatch_back, again=job.recomputes_layers
    )
    add_both_ways(times, "imbalance and stragglers", waited, waited, again=again)


def waits_over_network(job: Job) -> bool:
    """Whether exchanges over the network wait for the last of their ranks, which is where PyTorch launches.

    Not within a node, where no measured step has room for it, nor under Megatron, whose steps have none either. Of what
    it comes from nothing is known: the five public steps of TorchTitan that send tokens over the network need it.
    """
    return job.stack.launch_s is None and job.work.ep > 1 and job.rows_sent.network > 0


def _exposed_s(times: Times, job: Job, passes: tuple[PassName, ...], exchange_s: float) -> float:
    """What an exchange adds to computation of the same passes, beside which some stacks run it.

    Computation then has the SMs that the exchange leaves.
    """
    if not job.stack.exchange_overlapped:
        return exchange_s
    compute_s = sum(float(times[PASS_INDEX[name]].sum()) for name in passes)
    taken = EXCHANGE_SMS / sms_of(job.node.gpu)  # while both run, compute slows down by the SMs it lacks
    return max(exchange_s - compute_s, 0.0) + taken * min(exchange_s, compute_s)


EXCHANGE_SMS = 24
"""Streaming multiprocessors of an exchange beside compute: DeepEP's own tests use 24 of them, Megatron's recipes 20."""


@dataclass(frozen=True, kw_only=True)
class QuotedBandwidth:
    """One row of DeepEP's tables; GB/s are logical."""

    version: str
    gpu: str  # as the table names it
    nodes: int  # hosts of 8 GPUs
    dispatch_gb_s: float
    combine_gb_s: float
    sms: int | None  # streaming multiprocessors used; None where the table does not say
    source: str

    @property
    def wire(self) -> Literal["network", "NVLink"]:
        """Where the bottleneck is."""
        return "NVLink" if self.nodes == 1 else "network"

    @property
    def name(self) -> str:
        """Such as ``V2, SM90, EP 8×2``."""
        return f"{self.version}, {self.gpu}, EP 8×{self.nodes}"

    def on_wire_gb_s(self, logical_gb_s: float) -> float:
        """Bytes that cross the bottleneck: 1 − 1/N of the logical ones over a network, 7/8 over NVLink in a node."""
        return logical_gb_s * (1 - 1 / (self.nodes if self.wire == "network" else 8))


_DEEPEP = read_yaml("deepep_bandwidth.yaml")
QUOTED = tuple(QuotedBandwidth(**row, source=_DEEPEP["sources"][row["version"]]) for row in _DEEPEP["rows"])
"""DeepEP's tables."""
