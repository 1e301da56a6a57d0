"""The bridge to TorchTitan: ``python -m torchtitan.train --module moelab.titan --config NAME``.

It calls internals of TorchTitan and torchao, which ``docs/torchtitan.md`` lists. With any other release, importing it
warns, because what breaks then may name neither.
"""

import warnings

from moelab.machine import TESTED, is_tested, version

_OTHERS = [
    f"{name} {release} (tested: {' and '.join(TESTED[name])})"
    for name in ("torchtitan", "torchao")
    if (release := version(name)) and not is_tested(name, release)
]
if _OTHERS:
    warnings.warn(
        f"moelab was not tested with {' and '.join(_OTHERS)}, whose internals it calls: docs/torchtitan.md lists them, "
        "and what is known to break. Reinstall with `pip install moelab`, or run moelab's tests first",
        stacklevel=2,
    )
