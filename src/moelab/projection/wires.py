"""What travels over which wire: amounts by wire, and the names of the methods that put them there.

*Rows* are token vectors. What a rank keeps is ``local`` and crosses no wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moelab.errors import BadInput
from moelab.hardware.spec import Node

Method = Literal["standard", "deepep_direct", "deepep_hybrid"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class OnWires:
    """An amount, of rows or bytes, that a rank sends on average, by the wire that it takes."""

    nvlink: float
    network: float
    local: float

    @property
    def logical(self) -> float:
        """All of it, what stays in the rank included: the traffic that DeepEP's own bandwidths are over."""
        return self.nvlink + self.network + self.local

    def times(self, factor: float) -> OnWires:
        """The amount, scaled."""
        return OnWires(nvlink=self.nvlink * factor, network=self.network * factor, local=self.local * factor)


def move_time_s(sent: OnWires, node: Node) -> tuple[float, float]:
    """Seconds that NVLink and the network need at the full bandwidth of the hardware profile; the larger is a bound.

    Args:
        sent: bytes that a rank sends.
        node: gives the bandwidths.

    Returns:
        Seconds on NVLink and on the network; 0 where nothing takes that wire.

    Raises:
        BadInput: if bytes take a wire that the node does not have.
    """
    wires = (("nvlink", sent.nvlink, node.gpu.nvlink_gb_s), ("network", sent.network, node.nic_gb_s))
    for name, amount, bandwidth in wires:
        if amount > 0 and bandwidth is None:
            raise BadInput(
                f"bytes travel over {name}, but the profile of {node.gpus} × {node.gpu.name} has no {name} bandwidth; "
                "choose a profile that has: b200_x256"
            )
    nvlink_s, network_s = (amount / float(bandwidth) / 1e9 if bandwidth else 0.0 for _, amount, bandwidth in wires)
    return nvlink_s, network_s


def require_method(method: str) -> None:
    """Check the name of a method.

    Raises:
        BadInput: naming the methods.
    """
    if method not in METHODS:
        raise BadInput(f"method is {method!r}; valid: {', '.join(METHODS)}")
