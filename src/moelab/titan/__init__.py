"""The bridge to TorchTitan: ``python -m torchtitan.train --module moelab.titan --config NAME``.

It calls internals of TorchTitan and torchao, which ``docs/torchtitan.md`` lists; with other releases than those it says
so when it is imported, for what breaks may break in words that name neither.
"""

import warnings

from moelab.machine import TESTED, is_tested, version

_OTHERS = [
    f"{name} {found} (tested: {TESTED[name]})"
    for name in ("torchtitan", "torchao")
    if (found := version(name)) and not is_tested(name, found)
]
if _OTHERS:
    warnings.warn(
        f"moelab was not tested with {' and '.join(_OTHERS)}, whose internals it calls: docs/torchtitan.md names each, "
        "and what is known to break. Reinstall with `pip install moelab`, or run its tests first",
        stacklevel=2,
    )
