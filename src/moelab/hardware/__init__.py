"""GPUs, nodes and clusters, with a source for every figure.

``spec.py`` has the classes and refuses impossible figures, ``catalogue.py`` has the figures, ``profiles.py`` has the
clusters that an experiment's ``hardware`` can name.
"""

from moelab.hardware.catalogue import B200, GB200, GB300, GPUS, H100, H200, H800
from moelab.hardware.profiles import PROFILES, cluster_of, gpu_from, gpu_of
from moelab.hardware.spec import (
    GROUP_PADDING,
    MXFP8_CAPABILITY,
    Cluster,
    Figure,
    Gpu,
    ImpossibleHardware,
    Label,
    Node,
    has_grouped_fp8,
)

__all__ = [
    "B200",
    "GB200",
    "GB300",
    "GPUS",
    "GROUP_PADDING",
    "H100",
    "H200",
    "H800",
    "MXFP8_CAPABILITY",
    "PROFILES",
    "Cluster",
    "Figure",
    "Gpu",
    "ImpossibleHardware",
    "Label",
    "Node",
    "cluster_of",
    "gpu_from",
    "gpu_of",
    "has_grouped_fp8",
]
