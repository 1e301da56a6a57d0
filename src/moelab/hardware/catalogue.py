"""The figures, each with its source, by the exact model: PCIe cards and superchips are not their SXM namesakes.

Peaks are those of datasheets, dense; a GPU under load runs below them. A figure that was not found is left out, and so
is NVLink of cards that bridges join in pairs or fours: it is no bandwidth between all GPUs of a node.
"""

from __future__ import annotations

from dataclasses import replace

from moelab.hardware.spec import Figure, Gpu, Label

H100_SHEET = "NVIDIA H100 datasheet, SXM"
H200_SHEET = "NVIDIA H200 datasheet, SXM"
H100_PCIE_SHEET = "NVIDIA H100 datasheet, PCIe, half of the sparse figures"
H100_NVL_SHEET = "NVIDIA H100 datasheet, NVL, half of the sparse figures"
H200_NVL_SHEET = "NVIDIA H200 datasheet, NVL, half of the sparse figures"
GH200_SHEET = "NVIDIA GH200 Grace Hopper Superchip datasheet, half of the sparse figures"
A100_SHEET = "NVIDIA A100 datasheet, 80 GB"
B200_SHEET = "NVIDIA HGX B200 datasheet, half of the sparse figure"
GB200_SHEET = "NVIDIA GB200 NVL72 datasheet, a 72nd of it, half of the sparse figures"
HGX_B300_SHEET = "NVIDIA HGX B300 datasheet, an eighth of it, half of the sparse figures"
GB300_PAGE = "verda.com/blog/gb300-nvl72-architecture"


def quoted(value: float, source: str) -> Figure:
    """A figure as its source gives it."""
    return Figure(value=value, label="quoted", source=source)


def mib(value: float, label: Label, source: str) -> Figure:
    """Memory in GiB from a number of MiB."""
    return Figure(value=value / 1024, label=label, source=source)


def nominal(gb: float, source: str) -> Figure:
    """Memory in GiB of as many GB on a datasheet."""
    return Figure(
        value=gb * 0.99,
        label="derived",
        source=f"{gb:g} GB ({source}) times what is seen of H100's 80 and B200's 180, 99 to 99.5 % of as many GiB",
    )


H100 = Gpu(
    name="H100",
    capability=9.0,
    memory_gib=Figure(
        value=79.18,
        label="measured",
        source="torch.cuda on an H100 80GB HBM3, benchmarks/results/memory_h100.json, November 2026",
    ),
    bf16_tflops=quoted(989, H100_SHEET),
    fp8_tflops=quoted(1979, H100_SHEET),
    hbm_tb_s=quoted(3.35, H100_SHEET),
    nvlink_gb_s=quoted(450, H100_SHEET),
)
H200 = Gpu(
    name="H200",
    capability=9.0,
    memory_gib=nominal(141, H200_SHEET),
    bf16_tflops=quoted(989, H200_SHEET),
    fp8_tflops=quoted(1979, H200_SHEET),
    hbm_tb_s=quoted(4.8, H200_SHEET),
    nvlink_gb_s=quoted(450, H200_SHEET),
)
H800 = replace(
    H100,
    name="H800",
    nvlink_gb_s=quoted(200, "half of NVLink's 400 GB/s both ways: DeepSeek-AI 2025, arXiv 2505.09343, section 4.1"),
)
"""An H100 with fewer NVLinks. DeepSeek reach about 160 of the 200 GB/s (DeepSeek-V3 report, section 3.2.2)."""
H100_PCIE = Gpu(
    name="H100 PCIe",
    capability=9.0,
    memory_gib=nominal(80, H100_PCIE_SHEET),
    bf16_tflops=quoted(756, H100_PCIE_SHEET),
    fp8_tflops=quoted(1513, H100_PCIE_SHEET),
    hbm_tb_s=quoted(2, H100_PCIE_SHEET),
)
H100_NVL = Gpu(
    name="H100 NVL",
    capability=9.0,
    memory_gib=nominal(94, H100_NVL_SHEET),
    bf16_tflops=quoted(835, H100_NVL_SHEET),
    fp8_tflops=quoted(1670, H100_NVL_SHEET),
    hbm_tb_s=quoted(3.9, H100_NVL_SHEET),
)
H200_NVL = Gpu(
    name="H200 NVL",
    capability=9.0,
    memory_gib=nominal(141, H200_NVL_SHEET),
    bf16_tflops=quoted(835, H200_NVL_SHEET),
    fp8_tflops=quoted(1670, H200_NVL_SHEET),
    hbm_tb_s=quoted(4.8, H200_NVL_SHEET),
)
GH200 = Gpu(
    name="GH200 96 GB",
    capability=9.0,
    memory_gib=nominal(96, GH200_SHEET),
    bf16_tflops=quoted(990, GH200_SHEET),
    fp8_tflops=quoted(1979, GH200_SHEET),
    hbm_tb_s=quoted(4, GH200_SHEET),
)
"""One superchip: what joins it to others is the host's. ``480GB`` in its name is the processor's memory."""
GH200_HBM3E = replace(
    GH200,
    name="GH200 144 GB",
    memory_gib=nominal(144, GH200_SHEET),
    hbm_tb_s=quoted(4.9, GH200_SHEET),
)
A100 = Gpu(
    name="A100 SXM",
    capability=8.0,
    memory_gib=nominal(80, A100_SHEET),
    bf16_tflops=quoted(312, A100_SHEET),
    hbm_tb_s=quoted(2.039, A100_SHEET),
    nvlink_gb_s=quoted(300, A100_SHEET),
)
A100_PCIE = replace(A100, name="A100 PCIe", hbm_tb_s=quoted(1.935, A100_SHEET), nvlink_gb_s=None)
B200 = Gpu(
    name="B200",
    capability=10.0,
    memory_gib=mib(183_359, "quoted", "nvidia-smi, NVIDIA/TensorRT-LLM issue 10278"),
    bf16_tflops=quoted(2250, B200_SHEET),
    fp8_tflops=quoted(4500, B200_SHEET),
    mxfp8_tflops=quoted(4500, B200_SHEET),
    hbm_tb_s=quoted(8, B200_SHEET),
    nvlink_gb_s=quoted(900, B200_SHEET),
)
GB200 = Gpu(
    name="GB200",
    capability=10.0,
    memory_gib=nominal(186, GB200_SHEET),
    bf16_tflops=quoted(2500, GB200_SHEET),
    fp8_tflops=quoted(5000, GB200_SHEET),
    mxfp8_tflops=quoted(5000, GB200_SHEET),
    hbm_tb_s=quoted(8, GB200_SHEET),
    nvlink_gb_s=quoted(900, GB200_SHEET),
)
GB300 = Gpu(
    name="GB300",
    capability=10.3,
    memory_gib=nominal(279, GB300_PAGE),
    bf16_tflops=quoted(2500, GB300_PAGE),
    fp8_tflops=quoted(5000, GB300_PAGE),
    mxfp8_tflops=quoted(5000, GB300_PAGE),
    hbm_tb_s=quoted(8, GB300_PAGE),
    nvlink_gb_s=quoted(900, GB300_PAGE),
)
B300 = Gpu(
    name="B300",
    capability=10.3,
    memory_gib=None,
    bf16_tflops=quoted(2250, HGX_B300_SHEET),
    fp8_tflops=quoted(4500, HGX_B300_SHEET),
    mxfp8_tflops=quoted(4500, HGX_B300_SHEET),
    hbm_tb_s=quoted(8, HGX_B300_SHEET),
    nvlink_gb_s=quoted(900, HGX_B300_SHEET),
)
MODELS = {
    "A100-SXM4-80GB": A100,
    "A100 80GB PCIe": A100_PCIE,
    "H100 80GB HBM3": H100,
    "H100 PCIe": H100_PCIE,
    "H100 NVL": H100_NVL,
    "H800": H800,
    "H200": H200,
    "H200 NVL": H200_NVL,
    "GH200 480GB": GH200,
    "GH200 144G HBM3e": GH200_HBM3E,
    "B200": B200,
    "B300 SXM6 AC": B300,
    "GB200": GB200,
    "GB300": GB300,
}
"""By the name that CUDA and nvidia-smi give, without ``NVIDIA``. No other name is one of these: a MIG instance and a
virtual GPU (``H100-40C``) have a part of a GPU's rates, and ``H100 SXM5 64GB`` or ``H20`` have their own."""
GPUS = {gpu.name: gpu for gpu in MODELS.values()}


def known_gpu(name: str) -> Gpu | None:
    """The GPU of a name that CUDA or nvidia-smi gives, such as ``NVIDIA H100 PCIe``; None where it is not known.

    Example:
        >>> known_gpu("NVIDIA H100 NVL").bf16_tflops.value, known_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        (835, None)
    """
    return MODELS.get(name.removeprefix("NVIDIA "))


NIC_400G = quoted(50, "one 400 Gb/s network card for each GPU (NVIDIA ConnectX-7 datasheet)")
