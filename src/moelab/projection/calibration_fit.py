"""How the fitted constants are found: each meets the row that it names, all at once.

``leave_out`` answers what the model would say had a source never been seen: its fitted constants fall back to what the
others know of the same thing.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import root

from moelab.projection.calibration import CALIBRATION, Calibration, fitted, with_values
from moelab.projection.step_cases import step_cases

FALLBACK = {"blackwell_gemm": "hopper_gemm", "host_nodes_s": "host_layer_s", "host_layer_s": "host_nodes_s"}
"""What a constant would have been: the rate of the older GPU, the host of one node, the host of several."""


def refit(calibration: Calibration = CALIBRATION) -> Calibration:
    """Find the fitted constants again.

    Returns:
        A calibration that meets every row that a constant was fitted on.
    """
    found = fitted(calibration)
    cases = {case.name: case for case in step_cases()}
    anchors = [cases[constant.fitted_on[0]] for constant in found.values()]

    def errors(logs: np.ndarray) -> list[float]:
        tried = with_values(calibration, **dict(zip(found, map(float, np.exp(logs)), strict=True)))
        return [float(np.log(case.predict(tried) / case.measured)) for case in anchors]

    solved = root(errors, np.log([constant.value for constant in found.values()]), tol=1e-9)
    return with_values(calibration, **dict(zip(found, map(float, np.exp(solved.x)), strict=True)))


def leave_out(source: str, calibration: Calibration = CALIBRATION) -> Calibration:
    """The calibration without what was fitted on a source."""
    rows = {case.name for case in step_cases() if case.source == source}
    values = {}
    for name, constant in fitted(calibration).items():
        if rows & set(constant.fitted_on):
            values[name] = float(getattr(calibration, FALLBACK[name]))
    return with_values(calibration, **values)
