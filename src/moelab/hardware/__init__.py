"""GPUs, nodes and clusters, with a source for every figure.

``spec.py`` has the classes and refuses impossible figures, ``data/hardware.yaml`` has the figures, which
``catalogue.py`` reads; ``profiles.py`` has the clusters that an experiment's ``hardware`` can name.
"""

from moelab.hardware.catalogue import B200, GB200, GB300, GPUS, H100, H200, H800, MODELS, known_gpu
from moelab.hardware.profiles import PROFILES, cluster_of, gpu_from, gpu_of
from moelab.hardware.spec import (
    GROUP_PADDING,
    ROCM,
    Cluster,
    Figure,
    Gpu,
    ImpossibleHardware,
    Label,
    Node,
    architecture,
    has_deepep,
    has_grouped_fp8,
    has_native_mxfp8,
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
    "MODELS",
    "PROFILES",
    "ROCM",
    "Cluster",
    "Figure",
    "Gpu",
    "ImpossibleHardware",
    "Label",
    "Node",
    "architecture",
    "cluster_of",
    "gpu_from",
    "gpu_of",
    "has_deepep",
    "has_grouped_fp8",
    "has_native_mxfp8",
    "known_gpu",
]
