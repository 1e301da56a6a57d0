"""What torchrun starts as each rank: TorchTitan's own program, which dies with torchrun from its first moment on.

TorchTitan's imports take up to a minute, and a rank that torchrun left behind meanwhile would hold its GPU for as long.
"""

from __future__ import annotations

import runpy

from moelab.machine import end_with_torchrun

PROGRAM = "torchtitan.train"

if __name__ == "__main__":
    end_with_torchrun()
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
