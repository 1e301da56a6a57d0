"""The program of the all-to-all experiment; ``benchmarks/all_to_all.py`` starts it under torchrun."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import distributed as dist

from moelab.deepep.all_to_all.plan import NODE_SIZE, ROUTINGS, SIZES, SM_COUNTS, SMALL, Backend, Group, plan
from moelab.deepep.all_to_all.report import run
from moelab.deepep.all_to_all.world import open_libraries, open_world

ON_REQUEST = (*SIZES, SMALL, NODE_SIZE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the options name; returns the exit code."""
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    world = open_world(options.device)
    libraries = open_libraries(options.device)
    world.say(f"libraries: {libraries.found}")
    groups = _groups(options, libraries.backends)
    run(groups, world, libraries, options.output, repeats=options.repeats, budget_s=options.budget_s, began=began)
    dist.barrier(group=world.control)
    dist.destroy_process_group()
    return 0


def _groups(options: argparse.Namespace, installed: Sequence[Backend]) -> list[Group]:
    sizes = [size for size in ON_REQUEST if size.name in (options.sizes or ())]
    sizes = sizes or ([SMALL] if options.device == "cpu" else list(SIZES))
    backends = [backend for backend in installed if backend in options.backends]
    return plan(sizes, options.routings, backends, options.sms)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time dispatch and combine of every way to move tokens.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, written after each group of arms")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = [size.name for size in ON_REQUEST]
    parser.add_argument("--sizes", nargs="*", choices=names, help="default: all on GPUs, small on a CPU")
    parser.add_argument("--routings", nargs="*", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--backends", nargs="*", default=["standard", "deepep", "hybridep"])
    parser.add_argument("--sms", nargs="*", type=int, default=list(SM_COUNTS), help="SM counts that DeepEP is given")
    parser.add_argument("--repeats", type=int, default=10, help="turns of each arm that count")
    parser.add_argument("--budget-s", type=float, default=110, help="prepare no arm after so many seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
