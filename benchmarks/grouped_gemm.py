"""Time grouped GEMMs of routed experts on this GPU: BF16 against every 8-bit precision that it has kernels for.

    python benchmarks/grouped_gemm.py --output FILE.json                                      # under 4 minutes
    python benchmarks/grouped_gemm.py --output FILE.json --quick                              # two shapes
    python benchmarks/grouped_gemm.py --output FILE.json --shapes 8192,2048,7168,8 8192,2048,7168,8,skewed

Nothing is downloaded. The file is replaced after every shape. Without a GPU it says why there is nothing to time. What
``notebooks/02_find_grouped_gemm_break_even.ipynb`` replays is ``benchmarks/results/grouped_gemm_h100.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moelab.errors import MoelabError
from moelab.mxfp8.grouped_gemm import run
from moelab.mxfp8.grouped_gemm_cases import CASES, PRECISIONS, QUICK, parse_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", nargs="*", help="M,N,K,G with even groups, or M,N,K,G,random or M,N,K,G,skewed")
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, help="by default all that can be timed here")
    parser.add_argument("--quick", action="store_true", help="two shapes")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-components", action="store_true", help="leave out the kernels alone")
    parser.add_argument("--budget-s", type=float, default=220, help="begin no shape after this many seconds")
    given = parser.parse_args()
    try:
        cases = [parse_case(text) for text in given.shapes] if given.shapes else QUICK if given.quick else CASES
        result = run(
            cases,
            given.output,
            precisions=given.precisions,
            budget_s=given.budget_s,
            compiled=not given.no_compile,
            with_components=not given.no_components,
        )
    except MoelabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{len(result['rows'])} rows, {len(result['errors'])} errors, {result['wall_s']} s: {given.output}")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
