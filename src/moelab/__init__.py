"""moelab: how much faster can a Mixture-of-Experts model be pre-trained, on your hardware, without hurting the loss?

``import moelab`` loads neither torch nor plotly: the names below are resolved on first use.
"""

from __future__ import annotations

__version__ = "0.3.0"
