"""torchrun for one machine, which listens on its loopback address alone: ``python -m moelab.launch.loopback``.

torchrun's own rendezvous of one machine, ``c10d``, listens on every address and unpickles what it finds in its store:
whoever reaches the port can run commands as the user. Its ``static`` rendezvous keeps no pickles, but also listens on
every address and needs a port that is known to be free. This one is static, in a store on the loopback address.

Written for torch 2.14.1: a ``StaticTCPRendezvous`` makes its store unless it has one.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import main as torchrun

NAME, ADDRESS, INTERFACE = "loopback", "127.0.0.1", "lo"
TIMEOUT_S = 600  # as torchrun's own


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one node."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        # The system picks a free port, which stays bound: no other run on the machine can take it meanwhile.
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        super().__init__(ADDRESS, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=TIMEOUT_S)
        self._store = TCPStore(
            *(ADDRESS, port, 1, True, timedelta(seconds=TIMEOUT_S)),
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        """The name that it is registered by."""
        return NAME


def main() -> None:
    """Be torchrun, with the options and the program of the command line."""
    for library in ("GLOO", "NCCL"):  # which listen too; a person may have chosen an interface
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", INTERFACE)
    rendezvous_handler_registry.register(NAME, LoopbackRendezvous)
    torchrun(["--nnodes=1", f"--rdzv-backend={NAME}", f"--rdzv-endpoint={ADDRESS}:0", *sys.argv[1:]])


if __name__ == "__main__":
    main()
