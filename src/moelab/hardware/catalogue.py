"""The figures, each with its source. Peaks are those of datasheets, dense; a GPU under load runs below them."""

from __future__ import annotations

from dataclasses import replace

from moelab.hardware.spec import Figure, Gpu, Label

H100_SHEET = "NVIDIA H100 datasheet, SXM"
H200_SHEET = "NVIDIA H200 datasheet, SXM"
B200_SHEET = "NVIDIA HGX B200 datasheet, half of the sparse figure"
GB200_SHEET = "NVIDIA GB200 NVL72 datasheet, a 72nd of it, half of the sparse figures"
GB300_PAGE = "verda.com/blog/gb300-nvl72-architecture"


def quoted(value: float, source: str) -> Figure:
    """A figure as its source gives it."""
    return Figure(value=value, label="quoted", source=source)


def mib(value: float, label: Label, source: str) -> Figure:
    """Memory in GiB from a number of MiB."""
    return Figure(value=value / 1024, label=label, source=source)


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
    memory_gib=Figure(
        value=141 * 0.99,
        label="derived",
        source=f"141 GB ({H200_SHEET}) times what is seen of H100's 80 and B200's 180, 99 to 99.5 % of as many GiB",
    ),
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
    memory_gib=Figure(value=186 * 0.99, label="derived", source=f"186 GB ({GB200_SHEET}), read as for H200"),
    bf16_tflops=quoted(2500, GB200_SHEET),
    fp8_tflops=quoted(5000, GB200_SHEET),
    mxfp8_tflops=quoted(5000, GB200_SHEET),
    hbm_tb_s=quoted(8, GB200_SHEET),
    nvlink_gb_s=quoted(900, GB200_SHEET),
)
GB300 = Gpu(
    name="GB300",
    capability=10.3,
    memory_gib=Figure(value=279 * 0.99, label="derived", source=f"279 GB ({GB300_PAGE}), read as for H200"),
    bf16_tflops=quoted(2500, GB300_PAGE),
    fp8_tflops=quoted(5000, GB300_PAGE),
    mxfp8_tflops=quoted(5000, GB300_PAGE),
    hbm_tb_s=quoted(8, GB300_PAGE),
    nvlink_gb_s=quoted(900, GB300_PAGE),
)
GPUS = {gpu.name: gpu for gpu in (GB300, GB200, B200, H200, H800, H100)}
"""Names that contain another stand before it: they are looked for in what nvidia-smi says."""

NIC_400G = quoted(50, "one 400 Gb/s network card for each GPU (NVIDIA ConnectX-7 datasheet)")
