"""Seconds a step of nano takes on this CPU, in BF16 and with emulated MXFP8 experts.

    python benchmarks/nano_step.py [--output benchmarks/results/nano_step.json] [--only runs | --only turns]

Two measurements. ``runs`` are training runs as ``moelab run`` starts them, in A B A B order: two ranks of 1,024 tokens
each (4 sequences of 256). ``turns`` has the models in one process of one thread and takes single steps in turns
(A B C A B C …: BF16, torchao's emulation, ours), which other work on the machine disturbs less; the times there are
those of the processor, and loss, backward and AdamW are included. The ratio is what to compare between machines; the
seconds belong to the processor that is named beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import types
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common.attention import FlexAttention

from moelab.experiment_file import make_study
from moelab.launch.local import run_study
from moelab.machine import environment
from moelab.model.shape import NANO
from moelab.mxfp8.converter import MXFP8Converter, MXFP8Experts
from moelab.runs.collect import WARMUP_STEPS, collect_run
from moelab.runs.table import throughput_rows
from moelab.titan import cpu
from moelab.titan.models import model_spec

SHARED = {"model": "nano", "steps": 25, "seq_len": 256, "local_batch": 4, "hardware": "cpu"}
TOKENS_PER_RANK = 1024
TURNS, WARM_UP_TURNS = 25, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/nano_step.json"))
    parser.add_argument("--only", choices=("runs", "turns"))
    given = parser.parse_args()
    result: dict[str, Any] = {"label": "measured", "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    if given.only != "turns":
        result["runs"] = runs()
    if given.only != "runs":
        result["turns"] = turns()
    given.output.write_text(json.dumps(result | {"environment": environment()}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def runs() -> dict[str, Any]:
    study = make_study("nano_step", SHARED, [{"precision": "bf16"}, {"precision": "mxfp8"}], [0, 1])
    with tempfile.TemporaryDirectory() as folder:
        collected = [collect_run(run) for run in run_study(study, Path(folder)).runs]
    rows: list[dict[str, Any]] = []
    for one in collected:
        seconds = TOKENS_PER_RANK / throughput_rows(one.rows, warmup_steps=WARMUP_STEPS)["tps"]
        quartiles = statistics.quantiles(seconds, n=4)
        rows.append({"arm": one.arm, "step_s_median": quartiles[1], "step_s_iqr": quartiles[2] - quartiles[0]})
    medians = {arm: [row["step_s_median"] for row in rows if row["arm"] == arm] for arm in study.arms}
    ratios = [m / b for b, m in zip(medians["bf16_standard"], medians["mxfp8_standard"], strict=True)]
    return {"order": [one.arm for one in collected], "rows": rows, "mxfp8_over_bf16": ratios}


def turns() -> dict[str, Any]:
    """Processor seconds of single steps, raw, and the medians of the ratios of neighbours."""
    torch.set_num_threads(1)
    cpu.enable()
    models = {arm: build(arm) for arm in ("bf16", "torchao", "ours")}
    optimizers = {arm: torch.optim.AdamW(model.parameters(), lr=1e-3) for arm, model in models.items()}
    tokens = torch.randint(NANO.vocab_size, (4, 257), generator=torch.Generator().manual_seed(0))
    raw: dict[str, list[float]] = {arm: [] for arm in models}
    losses: dict[str, float] = {}
    for turn in range(WARM_UP_TURNS + TURNS):
        for arm, model in models.items():
            begin = time.process_time()
            losses[arm] = step(model, optimizers[arm], tokens)
            if turn >= WARM_UP_TURNS:
                raw[arm].append(round(time.process_time() - begin, 4))
    row: dict[str, Any] = {"step_s": raw, "last_loss": losses}
    for arm in ("torchao", "ours"):
        quartiles = statistics.quantiles([a / b for a, b in zip(raw[arm], raw["bf16"], strict=True)], n=4)
        row[f"{arm}_over_bf16"] = {"median": quartiles[1], "iqr": quartiles[2] - quartiles[0]}
    return row


def build(arm: str) -> Any:
    """Nano with masked SDPA, and for the two MXFP8 arms with converted experts."""
    config: Any = model_spec("nano", ep_backend="standard").model
    if arm != "bf16":
        MXFP8Converter.Config(kernels="emulated").build().convert(config)
    for _, found, parent, attribute in list(config.traverse(FlexAttention.Config)):
        setattr(parent, attribute, cpu.masked_sdpa(found))
    model = config.build()
    torch.manual_seed(0)
    model.init_states()
    if arm == "torchao":
        for module in model.modules():
            if isinstance(module, MXFP8Experts):
                module._grouped_mm = types.MethodType(super(MXFP8Experts, module)._grouped_mm.__func__, module)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchTitan's FP32 autocast of the router, which a CPU does not have
        mask = model.get_attention_masks(positions)  # type: ignore[operator]
        logits = model(tokens[:, :-1], attention_masks=mask, positions=positions)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
