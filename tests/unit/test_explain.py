"""A trace is read whatever wrote it, and its time is where it went."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moelab
from moelab import data
from moelab.cli import main
from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.traces.categories import COMMUNICATION, COMPUTE, Context, category
from moelab.traces.explanation import Explanation, explain, explanation_text
from moelab.traces.trace import Collective, read_trace

MEASURED = Path(data.__path__[0]) / "measured"
GEMM = "nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN"
A2A = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
NORM = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
Event = dict[str, Any]


def event(cat: str, name: str, start: float, end: float, pid: int, tid: int, args: Event) -> Event:
    place = {"pid": pid, "tid": tid, "ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, **place, "args": args}


def kernel(name: str, start: float, end: float, *, stream: int = 7, call: int = -1, **args: Any) -> Event:
    correlation = {"correlation": call} if call >= 0 else {}
    return event("kernel", name, start, end, 0, stream, {"device": 0, "stream": stream, **correlation, **args})


def launch(start: float, call: int, *, name: str = "cudaLaunchKernel", end: float | None = None) -> Event:
    return event("cuda_runtime", name, start, start + 5.0 if end is None else end, 1, 1, {"correlation": call})


def op(name: str, start: float, end: float, *, tid: int = 1, cat: str = "cpu_op", **args: Any) -> Event:
    return event(cat, name, start, end, 1, tid, args)


def write(path: Path, events: Sequence[Any], *, gpu: str = "NVIDIA H200", **header: Any) -> Path:
    content = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": gpu}], **header, "traceEvents": list(events)}
    text = json.dumps(content, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)
    return path


def explained(tmp_path: Path, events: Sequence[Any], **header: Any) -> Explanation:
    return explain([write(tmp_path / "trace.json", events, **header)])


# span, compute, collectives and what of them is exposed, all-to-all and what is exposed, idle; all ms
MEASURED_STEPS = {
    "two_h200_full_standard": (707.7, 569.5, 88.7, 55.9, 57.7, 47.2, 35.0),
    "two_h200_full_fp8_deepep": (565.9, 492.4, 60.3, 29.7, 14.9, 14.9, 28.9),
    "four_h200_none_standard": (634.6, 464.8, 128.5, 103.0, 48.9, 42.0, 24.8),
}


@pytest.mark.parametrize("name", MEASURED_STEPS)
def test_the_measured_steps_are_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Interval unions of 2026-11-28, made by another program: *collectives* are all of NCCL but the all-to-all."""
    assert main(["explain", str(MEASURED / f"trace_{name}.json.gz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = {one["group"]: (one["ms"], one["exposed_ms"]) for one in found["communication"]}
    exchange = groups.pop("all-to-all")
    collectives = [sum(ms) for ms in zip(*groups.values(), strict=True)]
    told = (found["span_ms"], found["compute_ms"], *collectives, *exchange, found["idle_ms"])
    assert told == pytest.approx(MEASURED_STEPS[name], abs=0.5)
    assert sum(found["parts_ms"].values()) == pytest.approx(found["span_ms"], rel=1e-6)
    assert found["busy_ms"] - found["compute_ms"] == pytest.approx(found["exposed_communication_ms"])
    assert found["classified"] > 0.98
    assert (found["notes"], found["predicted_ms"]) == ([], {})


def test_a_measured_step_has_passes_layers_and_causes() -> None:
    found = explain([MEASURED / "trace_two_h200_full_standard.json.gz"])
    assert not any(row["optimizer"] for row in found.layers_ms.values()), "a name cut off in lambda is no LAMB"
    experts = found.kernels_ms["expert GEMMs"]
    assert experts["recompute"] == pytest.approx(experts["forward"], rel=0.02), "checkpointed in full"
    assert experts["backward"] == pytest.approx(2 * experts["forward"], rel=0.02)
    exchange = found.kernels_ms["all-to-all"]
    assert exchange["backward"] == pytest.approx(exchange["forward"], rel=0.1), "combine is computed again too"
    assert list(found.layers_ms) == [0, 1, 2, 3, 4]
    assert "DataLoader" in found.gaps[0].where
    assert any("cudaEventSynchronize in CompiledFunction" in gap.where for gap in found.gaps), "counts of tokens"
    none = explain([MEASURED / "trace_four_h200_none_standard.json.gz"])
    assert all(row["recompute"] == 0 for row in none.kernels_ms.values()), "nothing is checkpointed"


@given(st.lists(st.tuples(st.sampled_from([GEMM, A2A, NORM, "no_such_kernel"]), st.integers(0, 60), st.integers(1, 12)),
                min_size=1, max_size=12))  # fmt: skip
def test_every_instant_belongs_to_one_part(kernels: list[tuple[str, int, int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        events = [kernel(name, a, a + b, stream=place) for place, (name, a, b) in enumerate(kernels)]
        found = explained(Path(folder), events)
    computing = {t for name, a, b in kernels if name != A2A for t in range(a, a + b)}
    sending = {t for name, a, b in kernels if name == A2A for t in range(a, a + b)} - computing
    first, last = min(a for _, a, _ in kernels), max(a + b for _, a, b in kernels)
    assert found.span_ms * 1e3 == pytest.approx(last - first)
    assert found.compute_ms * 1e3 == pytest.approx(len(computing))
    assert found.exposed_communication_ms * 1e3 == pytest.approx(len(sending))
    assert found.parts_ms.get("all-to-all", 0.0) * 1e3 == pytest.approx(len(sending))
    assert found.idle_ms * 1e3 == pytest.approx(last - first - len(computing | sending))
    assert sum(found.parts_ms.values()) == pytest.approx(found.span_ms)


# --- what kernels do -------------------------------------------------------------------------------------------------


def test_a_kernel_is_classified_by_its_name() -> None:
    sections = (Path(__file__).parents[1] / "cases" / "kernel_names.txt").read_text().split("\n== ")[1:]
    parts = [section.strip().replace("\n", " | ").split(" | ") for section in sections]
    expected = {name: part for part, *names in parts for name in names}
    assert {name: category(name, Context(), None) for name in expected} == expected


LAUNCHED = """
expert GEMMs         | _ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversal | aten::_grouped_mm
other GEMMs          | some_new_gpu_kernel | aten::mm
attention            | some_new_gpu_kernel | aten::_scaled_dot_product_cudnn_attention
memory-bound         | void at::native::(anonymous namespace)::compute_grad_weight< | aten::embedding_dense_backward
optimizer            | void at::native::(anonymous namespace)::multi_tensor_apply_kernel< | aten::_foreach_mul_
quantisation         | some_new_gpu_kernel | torchao::mxfp8_quantize
memory-bound         | some_new_gpu_kernel | aten::some_new_op
unknown              | some_new_gpu_kernel | mine::op
all-to-all           | ncclDevKernel_SendRecv |
"""
AROUND = """
FSDP collectives     | ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem) | nccl:all_reduce | backward
imbalance and stragglers | ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem) | nccl:all_reduce | optimizer
other collectives    | ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem) | nccl:all_reduce | forward
all-to-all           | ncclDevKernel_Generic_4 | nccl:all_to_all | forward
pipeline transfers   | ncclDevKernel_SendRecv | nccl:send | forward
FSDP collectives     | ncclDevKernel_AllGather_RING_LL | FSDP::all_gather (layers.1) | forward
"""
GROUPS = """
tensor-parallel collectives  | _allgather_base      | 4194304  | TENSOR_MODEL_PARALLEL_GROUP 3
FSDP collectives             | _reduce_scatter_base | 67108864 | DATA_PARALLEL_GROUP_WITH_CP 5
pipeline transfers           | send                 | 4194304  | PIPELINE_MODEL_PARALLEL_GROUP 3
all-to-all                   | all_to_allv          | 4194304  | EXPERT_MODEL_PARALLEL_GROUP 3
all-to-all                   | _allgather_base      | 4194304  | mesh_ep 3
tensor-parallel collectives  | _allgather_base      | 4194304  | EXPERT_TENSOR_PARALLEL_GROUP 2
context-parallel collectives | coalesced            | 4194304  | CONTEXT_PARALLEL_GROUP 3
FSDP collectives             | _allgather_base      | 4194304  | mesh_efsdp 3
FSDP collectives             | allreduce            | 67108864 | mesh_dp_replicate 3
imbalance and stragglers     | allreduce            | 1        | default_pg 0
imbalance and stragglers     | barrier              | 0        | default_pg 0
other collectives            | allreduce            | 4194304  | default_pg 0
"""


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("|")] for row in table.strip().split("\n")]


def test_what_launched_a_kernel_says_more_than_its_name() -> None:
    told = [[category(kernel, Context(op=op, around=(op,)), None), kernel, op] for _, kernel, op in rows(LAUNCHED)]
    told += [
        [category(kernel, Context(around=(around,), phase=phase), None), kernel, around, phase]
        for _, kernel, around, phase in rows(AROUND)
    ]
    told += [
        [category("ncclDevKernel_Any", Context(), Collective(name, int(size), group, 1)), name, size, group]
        for _, name, size, group in rows(GROUPS)
    ]
    assert told == rows(LAUNCHED) + rows(AROUND) + rows(GROUPS)


def test_parts_are_the_projections_own() -> None:
    from moelab.planning.time.job import CATEGORIES

    own = {"unknown", "pipeline transfers", "other collectives"}
    assert {*COMPUTE, *COMMUNICATION} - own == set(CATEGORIES) - {"host and waiting", "pipeline bubble"}


# --- idle time, passes and layers ------------------------------------------------------------------------------------


def parts_us(found: Explanation) -> dict[str, float]:
    return {part: round(1e3 * ms, 2) for part, ms in found.parts_ms.items() if round(1e3 * ms, 2)}


def test_idle_time_is_the_hosts_a_synchronisations_or_a_graphs(tmp_path: Path) -> None:
    events = [
        *(launch(0, 1), kernel(GEMM, 10, 100, call=1)),
        *(op("aten::relu", 280, 310), launch(300, 2), kernel(GEMM, 310, 400, call=2)),  # launched late: until 305
        *(op("aten::item", 390, 430), launch(395, 90, name="cudaStreamSynchronize", end=425)),
        *(launch(450, 3), kernel(GEMM, 460, 500, call=3)),  # after the wait: until 455
        *(op("aten::mm", 459, 469), launch(460, 4, name="cudaGraphLaunch")),
        *(kernel(GEMM, start, start + 30, call=4, **{"graph id": 7}) for start in (530, 570)),
        *(launch(470, 91, name="cudaEventSynchronize", end=599) | {"tid": 9},),  # NCCL's watchdog holds up nobody
    ]
    found = explained(tmp_path, events)
    idle = {"host behind": 205, "waiting for a synchronisation": 55, "between kernels": 10, "gaps of a graph": 40}
    assert {name: round(1e3 * ms) for name, ms in found.idle_by_cause_ms.items()} == idle
    assert {gap.where for gap in found.gaps if gap.cause in [*idle][1:2]} == {"cudaStreamSynchronize in aten::item"}
    passes = {name: round(1e3 * ms) for name, ms in found.kernels_ms["other GEMMs"].items() if ms}
    assert passes == {"forward": 90, "unknown": 190}, "a graph is launched as a whole"


def test_a_wait_explains_later_gaps_until_a_kernel_queues_again_or_the_host_does_something_else(tmp_path: Path) -> None:
    events = [
        *(launch(0, 1), kernel(GEMM, 10, 100, call=1), launch(20, 90, name="cudaStreamSynchronize", end=105)),
        *(launch(110, 2), kernel(GEMM, 116, 130, call=2)),
        *(launch(140, 3), kernel(GEMM, 146, 300, call=3)),  # a gap that began after the wait had ended
        *(launch(147, 4), kernel(GEMM, 300, 310, call=4)),  # queued
        *(launch(320, 5), kernel(GEMM, 326, 330, call=5)),
    ]
    idle = {"idle: waiting for a synchronisation": 30, "idle: host behind": 15, "idle: between kernels": 3}
    assert parts_us(explained(tmp_path, events)) == {"other GEMMs": 272, **idle}
    events = [
        launch(50, 90, name="cudaStreamSynchronize", end=110),  # the first call of its thread
        *(launch(0, 1) | {"tid": 2}, kernel(GEMM, 10, 100, call=1)),
        op("enumerate(DataLoader)#_It.__next__", 120, 9_000, cat="user_annotation"),
        *(launch(9_110, 2), kernel(GEMM, 9_120, 9_200, call=2)),
    ]
    found = explained(tmp_path, events)
    idle = {"idle: host behind": 8005, "idle: waiting for a synchronisation": 1010, "idle: between kernels": 5}
    assert parts_us(found) == {"other GEMMs": 170, **idle}
    assert found.gaps[0].where == "enumerate(DataLoader)#_It.__next__"


def test_without_correlation_nothing_is_guessed(tmp_path: Path) -> None:
    found = explained(tmp_path, [kernel(GEMM, 0, 10), kernel(A2A, 20, 40), launch(0, 1)])
    assert parts_us(found) == {"other GEMMs": 10, "all-to-all": 20, "idle: unknown": 10}
    assert found.kernels_ms["other GEMMs"]["unknown"] == pytest.approx(0.01)
    correlation, names = found.notes
    assert "no correlation" in correlation
    assert "classified by their kernels' names" in names


def test_passes_and_layers_are_those_of_the_operators(tmp_path: Path) -> None:
    backward, forward = {"Sequence number": 5, "Fwd thread id": 1}, {"Sequence number": 9, "Fwd thread id": 0}
    events = [
        *(op("FSDP::pre_forward (layers.3)", 0, 5, cat="user_annotation"), op("aten::mm", 10, 20), launch(12, 1)),
        op("FSDP::post_forward (layers.3)", 25, 30, cat="user_annotation"),
        *(op("aten::mm", 40, 50), launch(42, 2)),  # after the layer
        *(op("aten::mm", 100, 120, **forward), launch(112, 3)),  # records a gradient: computed again
        op("autograd::engine::evaluate_function: MmBackward0", 100, 200, **backward),  # around what begins with it
        *(op("aten::mm", 130, 140), launch(132, 4)),
        *(op("Optimizer.step#AdamW.step", 300, 400, cat="user_annotation"), op("aten::mul_", 310, 320), launch(312, 5)),
        *(kernel(GEMM, 1000 + 10 * call, 1005 + 10 * call, call=call) for call in (1, 2, 3, 4)),
        kernel(NORM, 1050, 1055, call=5),
    ]
    found = explained(tmp_path, events)
    passes = {part: {name: round(1e3 * ms) for name, ms in row.items() if ms} for part, row in found.kernels_ms.items()}
    gemms = {"forward": 10, "recompute": 5, "backward": 5}
    assert passes == {"other GEMMs": gemms, "optimizer": {"optimizer": 5}}
    assert {layer: round(1e3 * row["forward"]) for layer, row in found.layers_ms.items()} == {3: 5}


def test_products_are_held_against_the_gpus_peak(tmp_path: Path) -> None:
    events = [
        *(op("aten::mm", 0, 10, **{"Input Dims": [[4096, 8192], [8192, 2048]]}), launch(2, 1), launch(4, 9)),
        *(op("aten::_grouped_mm", 20, 30, **{"Input Dims": [[4096, 7168], [8, 7168, 2048], [8]]}), launch(22, 2)),
        *(op("aten::mm", 40, 50), launch(42, 3)),
        *(op("aten::bmm", 51, 59, **{"Input Dims": [[8, 4, 2], [8, 2, 16]]}), launch(52, 5), launch(53, 6)),
        *(op("aten::bmm", 71, 79, **{"Input Dims": [[8, 4, 2], [8, 2, 16]]}), launch(72, 7)),
        *(op("aten::mm", 81, 89, **{"Input Dims": [[8], []]}), launch(82, 8)),
        *(kernel(GEMM, 1000 + 10 * call, 1010 + 10 * call, call=call) for call in (5, 6, 7, 8)),
        *(op("aten::addmm", 60, 70, **{"Input Dims": [[1, 2048], [4096, 8192], [8192, 2048]]}), launch(62, 4)),
        *(kernel(GEMM, 100, 250, call=1), kernel(GEMM, 250, 300, call=9)),  # one product of two kernels
        *(kernel(GEMM, 300, 500, call=2), kernel(GEMM, 500, 510, call=3), kernel(GEMM, 510, 710, call=4)),
    ]
    found = explained(tmp_path, events)
    of = {(one.op, one.shape): one for one in found.products}
    dense = of["aten::mm", "[4096, 8192] × [8192, 2048]"]
    assert dense.tflops == pytest.approx(2 * 4096 * 8192 * 2048 / 200e-6 / 1e12)
    assert (dense.count, dense.share_of_peak) == (1, pytest.approx(dense.tflops / 989, rel=0.01))
    added = of["aten::addmm", "[1, 2048] × [4096, 8192] × [8192, 2048]"]
    assert added.tflops == pytest.approx(dense.tflops)
    grouped = of["aten::_grouped_mm", "[4096, 7168] × [8, 7168, 2048] × [8]"]
    assert grouped.tflops == pytest.approx(2 * 4096 * 7168 * 2048 / 200e-6 / 1e12)
    batched = of["aten::bmm", "[8, 4, 2] × [8, 2, 16]"]
    assert (batched.count, batched.tflops) == (2, pytest.approx(2 * (2 * 8 * 4 * 2 * 16) / 30e-6 / 1e12))
    assert of["aten::mm", None].tflops is of["aten::mm", "[8]"].tflops is None, "shapes were not recorded"


# --- several ranks, several steps ------------------------------------------------------------------------------------


def collective(order: int, start: float, end: float) -> Event:
    sizes = {"Collective name": "all_to_allv", "In msg nelems": 1 << 20, "dtype": "BFloat16", "Group size": 2}
    return kernel(A2A, start, end, **sizes, **{"Seq": order, "Process Group Description": "mesh_ep"})


def test_the_rank_that_waits_least_is_late_and_a_bad_file_hides_no_rank(tmp_path: Path) -> None:
    (tmp_path / "rank2_trace.json").write_text("no JSON")
    write(tmp_path / "rank0_trace.json", [collective(1, 0, 50), collective(2, 100, 150)], distributedInfo={"rank": 0})
    late = [collective(0, 10, 15), collective(1, 40, 50), collective(2, 140, 150)]  # the first is not in rank 0's trace
    write(tmp_path / "rank1_trace.json.gz", late, distributedInfo={"rank": 1})
    found = explain([tmp_path])
    assert found.rank == 0
    assert {one.rank: one.waiting_ms for one in found.ranks} == {0: pytest.approx(0.08), 1: pytest.approx(0.0)}
    assert found.late_rank.startswith("rank 1 arrives last")
    assert any("rank2_trace.json is not a Kineto trace" in note for note in found.notes)
    (exchange,) = found.communication
    assert (exchange.waiting_ms, exchange.from_ranks) == (pytest.approx(0.08), True)
    assert "measured on all ranks" in explanation_text(found)
    assert explain([tmp_path], rank=1).rank == 1
    with pytest.raises(BadInput, match=r"ranks 0, 1.*rank2_trace.json is not a Kineto trace"):
        explain([tmp_path], rank=2)
    one_number = {"Collective name": "allreduce", "In msg nelems": 1, "Process Group Description": "default_pg"}
    (group,) = explained(
        tmp_path / "few", [kernel(A2A, 0, 10, **one_number), kernel(A2A, 20, 50, **one_number)]
    ).communication
    assert (group.ms, group.waiting_ms) == pytest.approx((0.04, 0.04)), (
        "what moves next to nothing waits all of its time"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no trace .* below"):
        explain([tmp_path / "empty"])
    with pytest.raises(BadInput, match="does not exist"):
        explain([tmp_path / "trace.json"])


def test_several_steps_are_named_and_one_can_be_chosen(tmp_path: Path) -> None:
    events = [op(f"ProfilerStep#{n}", 1000 * n, 1000 * n + 900, cat="user_annotation") for n in (4, 5, 6)]
    for n in (4, 5, 6):  # kernels run after the host has gone on
        events += [launch(1000 * n + 10, n), kernel(GEMM, 1000 * n + 950, 1000 * n + 950 + 10 * n, call=n)]
    path = write(tmp_path / "trace.json", events)
    found = explain([path])
    assert found.span_ms == pytest.approx(2.06 - 0.04 + 0.04)
    assert [step for step, _ in found.steps] == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
    assert any("3 steps" in note and "--step" in note for note in found.notes)
    assert (found.step_count, explain([path], step=5).step_count) == (3, 1)
    assert explain([path], step=5).span_ms == pytest.approx(0.05)
    with pytest.raises(BadInput, match="4, 5, 6"):
        explain([path], step=9)
    write(tmp_path / "rank1_trace.json", [kernel(GEMM, 0, 10)])  # of another rank no step is marked
    both = explain([path, tmp_path / "rank1_trace.json"], step=5)
    assert both.span_ms == pytest.approx(0.05)
    assert "step is 5; the profiler's steps in rank1_trace.json are not marked" in both.notes


# --- damaged files, and the command -----------------------------------------------------------------------------


def test_a_trace_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.json", [kernel(GEMM, 10 * n, 10 * n + 5) for n in range(2000)]).read_text()
    (tmp_path / "cut.json").write_text(whole[: len(whole) // 2])
    packed = gzip.compress(whole.encode(), mtime=0)
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    for name in ("cut.json", "cut.json.gz"):
        trace = read_trace(tmp_path / name)
        assert 500 < len(trace.events) < 1900
        assert trace.gpu == "NVIDIA H200"
        assert "was cut off" in trace.notes[0]
    (tmp_path / "early.json").write_text(whole[:150])
    with pytest.raises(BadInput, match="cut off"):
        read_trace(tmp_path / "early.json")


def test_a_damaged_event_does_not_hide_the_others(tmp_path: Path) -> None:
    text = write(tmp_path / "trace.json", [kernel(GEMM, 10 * n, 10 * n + 5, bytes=1) for n in range(6)]).read_text()
    text = text.replace('"bytes": 1', '"bytes": inf', 1)  # what Kineto writes for a copy that took no time
    text = text.replace('"ts": 10', '"ts": "10"', 1).replace('"dur": 5', '"dur": nan', 1)
    text = text.replace(f'"name": "{GEMM}"', r'"name": "gemm\d"', 1).replace('"ts": 40', '"ts": ""', 1)
    (tmp_path / "trace.json").write_text(text)
    trace = read_trace(tmp_path / "trace.json")
    assert len(trace.events) == 5
    assert trace.notes == (
        "trace.json: 1 of 6 events are damaged and were left out",
        "trace.json: 1 kernels and copies have no duration and take no time here",
    )
    assert r"gemm\d" in trace.names
    head, tail = text.rsplit('"cat": "kernel"', 1)  # of the last event
    (tmp_path / "trace.json").write_text(f'{head}"cat" "kernel"{tail}')
    trace = read_trace(tmp_path / "trace.json")
    assert len(trace.events) == 4
    assert trace.notes[0] == "trace.json is damaged: it ends after 5 events, and what followed is missing"


def test_a_pipe_among_the_traces_of_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank1_trace.json")
    write(tmp_path / "rank0_trace.json", [kernel(GEMM, 0, 10)])
    found = explain([tmp_path])
    assert found.rank == 0
    assert any("rank1_trace.json cannot be read: it is not a regular file" in note for note in found.notes)


def test_other_forms_of_the_same_trace(tmp_path: Path) -> None:
    events = [kernel(GEMM, 0, 10), {"ph": "M", "name": "process_name"}, kernel(A2A, 20, 30)]
    (tmp_path / "list.json").write_text(json.dumps(events))
    late = {"traceEvents": events, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    (tmp_path / "late_header.json").write_text(json.dumps(late, separators=(",", ":")))
    (tmp_path / "marked.json").write_text("\ufeff" + json.dumps({"traceEvents": events}), encoding="utf-8")
    for name in ("list", "late_header", "marked"):
        assert explain([tmp_path / f"{name}.json"]).span_ms == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("report.nsys-rep", b"\x00\x01binary", "not JSON"),
        ("export.json", b'{"Type":79,"CudaEvent":{"startNs":"1"}}\n{"Type":80}', "not JSON"),
        ("tables.json", b'{"StringIds": [{"id": 1, "value": "x"}]}', "no kernels or operators"),
        ("jax.json", b'{"traceEvents": [{"ph": "X", "name": "dot.1", "args": {"hlo_op": "dot"}}]}', "no kernels or"),
        (
            "odd.json",
            b'[{"ph": "X", "cat": {}, "args": 5}, 7, {"ph": "X", "cat": "kernel", "pid": []}]',
            "no kernels or",
        ),
        ("deep.json", b'{"a": ' + b"[" * 1_000_000, "not JSON"),
        ("deep_event.json", b'{"traceEvents": [' + b'{"args":' * 1_000_000, "not JSON"),
        ("memory.pickle", b"\x80\x04\x95\x00\x00", "not JSON"),
        ("train.log", b"step: 1 loss: 2.0", "not JSON"),
        ("empty.json", b"", "not JSON"),
        ("none.json", b'{"traceEvents": []}', "no kernels or"),
        ("stacks.json", b'[{"ph": "X", "cat": "python_function", "name": "f", "ts": 1}]', "no kernels or"),
        ("marks.json", b'[{"ph": "X", "cat": "user_annotation", "name": "f", "ts": 1, "dur": 9}]', "that takes time"),
        ("instants.json", b'[{"ph": "X", "cat": "kernel", "name": "f", "ts": 1, "dur": 0}]', "that takes time"),
    ],
)
def test_what_is_no_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["explain", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "torch.profiler" in error


def step(*, launched_by: str = "cudaLaunchKernel", waits: str = "cudaDeviceSynchronize") -> list[Event]:
    """A product, an exchange beside its end, and after a wait a kernel that was launched late."""
    return [
        *(op("aten::mm", 0, 20), launch(2, 1, name=launched_by), kernel(GEMM, 30, 130, call=1)),
        *(op("nccl:all_to_all", 40, 60, cat="user_annotation"), launch(45, 2, name=launched_by)),
        *(kernel(A2A, 120, 220, stream=9, call=2), launch(225, 3, name=waits, end=240)),
        *(op("aten::add", 250, 270), launch(255, 4, name=launched_by), kernel(NORM, 260, 280, call=4)),
    ]


PARTS_OF_STEP = {"other GEMMs": 100, "all-to-all": 90, "memory-bound": 20, "idle: waiting for a synchronisation": 40}


WRITTEN: dict[str, tuple[list[Event], str]] = {
    "in any order": (sorted(step(), key=lambda event: str(event["name"])), ""),
    "device not told": ([*step()[:-1], {**step()[-1], "pid": "GPU", "args": {"correlation": 4}}], ""),
    "numbers as text": ([dict(event, ts=str(event["ts"]), dur=str(event["dur"])) for event in step()], ""),
    "dates in µs": ([dict(event, ts=event["ts"] + 1_795_912_345_678_901.25) for event in step()], ""),
    "2⁶⁴ ns": ([*step(), kernel(NORM, 300, 300 + 2**64 / 1e3)], "1 of 11 events are damaged"),
    "start at 0": ([*[dict(e, ts=e["ts"] + 1e15) for e in step()], kernel(NORM, 0, 9)], "1 of 11 events are damaged"),
    "no duration": ([*step(), dict(kernel(NORM, 270, 271), dur=None)], "1 kernels and copies have no duration"),
    "NaN": ([*step(), dict(kernel(NORM, 270, 271), dur=float("nan"))], "1 kernels and copies have no duration"),
    "beyond 64 bits": ([*step(), kernel(NORM, 270, 275, call=1 << 70)], ""),
    "text for a number": ([*step(), dict(kernel(NORM, 270, 275), ts="soon")], "1 of 11 events are damaged"),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_trace_is_read_however_it_is_written(tmp_path: Path, how: str) -> None:
    events, note = WRITTEN[how]
    found = explained(tmp_path, events)
    assert parts_us(found) == PARTS_OF_STEP
    said = [one for one in found.notes if "collectives that name" not in one]
    assert len(said) == bool(note)
    assert note in "".join(said)


def test_names_of_folders_tell_ranks_and_steps(tmp_path: Path) -> None:
    """As TorchTitan 0.3.0, NeMo and Kineto's daemon name their files."""
    for iteration, rank in ((10, 0), (10, 3), (9, 0), (9, 3)):
        write(tmp_path / "titan" / f"iteration_{iteration}" / f"rank{rank}_trace.json", step())
    found = explain([tmp_path / "titan" / "iteration_10"])
    assert [one.rank for one in found.ranks] == [0, 3]
    twice = "iteration_10/rank0_trace.json and iteration_9/rank0_trace.json are both of rank 0: the first"
    assert any(note.startswith(twice) for note in explain([tmp_path / "titan"]).notes)
    write(tmp_path / "nemo" / "rank-1.json.gz", step())
    write(tmp_path / "daemon" / "libkineto_activities_71.json", step())
    (tmp_path / "unnamed").write_bytes((tmp_path / "nemo" / "rank-1.json.gz").read_bytes())
    for name, rank in (("nemo", 1), ("daemon", None), ("unnamed", None)):
        found = explain([tmp_path / name])
        assert (found.rank, parts_us(found)) == (rank, PARTS_OF_STEP)


def test_a_trace_of_a_cpu_is_the_operators_own_time(tmp_path: Path) -> None:
    events = [
        op("aten::linear", 0, 100),
        op("aten::addmm", 10, 90),
        op("autograd::engine::evaluate_function: AddmmBackward0", 110, 200, tid=2),
        op("aten::mm", 120, 190, tid=2),
        op("gloo:all_to_all", 195, 230, tid=3, cat="user_annotation"),
        op("Optimizer.step#AdamW.step", 240, 300, cat="user_annotation"),
        op("aten::_fused_adamw_", 250, 290),
    ]
    found = explained(tmp_path, events, deviceProperties=[])
    assert found.gpu is None
    assert parts_us(found) == {
        "other GEMMs": 170,
        "optimizer": 40,
        "unknown": 20,
        "all-to-all": 30,  # from 200 on nothing computes beside it
        "idle: host behind": 30,
    }
    assert found.kernels_ms["other GEMMs"]["backward"] == pytest.approx(0.070)
    assert any("no GPU kernels" in note for note in found.notes)
    (file,) = tmp_path.glob("*.json*")
    beside = moelab.explain(file, against=Experiment(gpus_per_node=2, ep=2))
    assert "note: not compared with a prediction: a projection is of GPUs" in str(beside)


def test_a_long_file_is_never_in_memory(tmp_path: Path) -> None:
    stack = json.dumps({"ph": "X", "cat": "python_function", "name": "f" * 400, "ts": 1, "dur": 1, "args": {}})
    with (tmp_path / "trace.json").open("w") as file:
        file.write('{"traceEvents": [' + f"{stack},\n" * 30_000 + json.dumps(kernel(GEMM, 0, 10)) + "]}")
    tracemalloc.start()
    trace = read_trace(tmp_path / "trace.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.events) == 1
    assert peak < 7e6 < 0.5 * (tmp_path / "trace.json").stat().st_size


def test_a_text_says_what_to_look_at_first_and_what_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(MEASURED / "trace_two_h200_full_fp8_deepep.json.gz")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("565.9 ms from the first to the last event of rank 0 (NVIDIA H200): 87.0% compute")
    assert "look first at exposed FSDP collectives: 27.8 ms" in text
    assert "measured on all ranks" not in text
    found = explained(tmp_path, [kernel("mine", 0, 10), kernel(GEMM, 10, 30)], gpu="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    text = explanation_text(found)
    assert "66.7% of kernel time is classified" in text
    assert "the peaks of NVIDIA H100 80GB HBM3 MIG 1g.10gb are not known" in text
    assert "mine  0.01 ms" in text
    (tmp_path / "list.json").write_text(json.dumps([kernel(GEMM, 0, 10)]))
    assert "rank (a GPU that is not named): 100.0% compute" in explanation_text(explain([tmp_path / "list.json"]))
