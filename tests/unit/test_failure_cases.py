"""The cause of failures as people reported them: what a job left, rebuilt from public threads, and what was wrong.

Names and numbers are changed. ``r3/stderr`` stands for torchrun's ``logs/<id>/attempt_0/3/stderr.log``.
"""

# ruff: noqa: E501 - lines of logs are as they were printed

from __future__ import annotations

import base64
import json
import os
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from stand_in import step_text, titan_line

from moelab.errors import BadInput
from moelab.runs import failure
from moelab.runs.collect import collect
from moelab.runs.log_text import tail
from moelab.runs.status import State

LIB = "/opt/env/lib/python3.12/site-packages"
WATCHDOG = (
    "[rank{rank}]:[E218 04:54:22.86 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=1, NumelOut=1, Timeout(ms)=100000) ran for 100045 "
    "milliseconds before timing out.\n"
    "[rank{rank}]:[E218 04:54:22.87 ProcessGroupNCCL.cpp:1795] [PG ID 11 PG GUID 119({group}) Rank {rank}] Exception "
    "(either an error or timeout) detected by watchdog at work: {number}, last enqueued NCCL work: {number}, last "
    "completed NCCL work: {number}.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 11 PG GUID 119({group}) Rank {rank}] Process group watchdog thread terminated with exception: "
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={operation}, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=100000) ran for 100045 milliseconds before timing out.\n"
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f83 in /opt/libc10.so)\n"
)
LOST = "torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketPollConnect: connect to 10.0.0.3<44321> returned Connection refused, exceeded error retry count after 35 attempts"
GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.12]:51234"


def watchdog(rank: int, operation: str = "ALLTOALL_BASE", number: int = 216, group: str = "ep") -> str:
    return WATCHDOG.format(rank=rank, operation=operation, number=number, group=group)


def raised(
    error: str, *, prefix: str = "", frame: str = f"{LIB}/torchtitan/train.py", source: str = "self.step()"
) -> str:
    """A traceback as Python prints it, each line with a prefix."""
    place = [f'  File "{frame}", line 12, in train', f"    {source}"]
    lines = ["Traceback (most recent call last):", *place, *error.split("\n")]
    return "".join(f"{prefix}{line}\n" for line in lines)


def chained(
    *tracebacks: str,
    prefix: str = "",
    words: str = "The above exception was the direct cause of the following exception:",
) -> str:
    return f"{prefix}\n{prefix}{words}\n{prefix}\n".join(tracebacks)


def recorded(message: str, *, time: int = 1767000003) -> str:
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": "…", "timestamp": str(time)}}})


def summary(
    *failures: tuple[int, int], prefix: str = "", local: int = 0, trace: str = "To enable traceback see: x"
) -> str:
    """Torchrun's list of (rank, exit code), the root cause last; local ranks are lower by ``local``."""
    lines = ["=" * 60, "torchtitan.train FAILED", "-" * 60, "Failures:"]
    for index, (rank, code) in enumerate(failures):
        if index == len(failures) - 1:
            lines += ["-" * 60, "Root Cause (first observed failure):"]
        lines += [f"[{index}]:", "  time      : 2026-10-24_18:38:53", "  host      : gpu-44",
                  f"  rank      : {rank} (local_rank: {rank - local})", f"  exitcode  : {code} (pid: {3608000 + rank})",
                  "  error_file: <N/A>", f"  traceback : {trace}"]  # fmt: skip
    return "".join(f"{prefix}{line}\n" for line in [*lines, "=" * 60])


def steps(*numbers: int, rank: int = 0) -> str:
    return "".join(titan_line(n, step_text(n, 9 - n / 100, memory_gib=60), f"[rank{rank}]:") for n in numbers)


def left(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        if name[0] == "r" and "/" in name:
            rank, _, stream = name[1:].partition("/")
            name = f"logs/none_x/attempt_0/{rank}/{stream}{'.json' if stream == 'error' else '.log'}"
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def reason(folder: Path) -> str:
    (run,) = collect(folder)
    assert run.status.state is State.FAILED, run.status
    assert run.status.reason is not None
    assert "\n" not in run.status.reason
    assert len(run.status.reason) <= 300
    return run.status.reason


BETWEEN = "During handling of the above exception, another exception occurred:"
HUB = f"{LIB}/huggingface_hub/utils/_http.py"

#: What it is and where it was reported; the files; how the reason begins, and what else it holds.
CASES: list[tuple[str, dict[str, str], str, list[str]]] = [
    # --- a collective timed out ---
    ("LlamaFactory 7396: the watchdog, no traceback",
     {"r0/stderr": watchdog(0), "r1/stderr": watchdog(1), "train.log": summary((1, -6), (0, -6))},
     "rank 0: a collective timed out: ALLTOALL_BASE", ["216", "expert-parallel group", "after 100 s"]),
    ("torchtune 2093: the watchdog of 2023 in one log, a progress bar before it",
     {"slurm-1.out": " 33%|###  | 24/72 [01:08<00:00][E ProcessGroupNCCL.cpp:475] [Rank 13] Watchdog caught collective operation timeout: "
      "WorkNCCL(SeqNum=21668, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800522 milliseconds before timing out.\n"},
     "rank 13: a collective timed out: ALLREDUCE", ["21668", "1801 s"]),
    ("a time-out of all ranks but the one that raised: its exception is the cause",
     {"r0/stderr": watchdog(0), "r1/stderr": watchdog(1), "r2/error": recorded("ValueError: cannot unpack"),
      "train.log": summary((2, 1), (1, -6), (0, -6))},
     "rank 2: ValueError: cannot unpack", []),
    ("ms-swift 7992: the watchdog's own watch, after a time-out",
     {"r0/stderr": "[rank0]:[E205 18:11:06.37 ProcessGroupNCCL.cpp:1870] [PG ID 14 PG GUID 117(EXPERT) Rank 0] ProcessGroupNCCL's watchdog "
      "got stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically\n"},
     "rank 0: NCCL's watchdog got stuck for 480 s", []),
    ("torchtune 2676: gloo timed out on one rank, another died",
     {"r2/stderr": raised("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
                          prefix="[rank2]: "), "train.log": summary((2, 1), (1, -9))},
     "rank 1: killed by SIGKILL", []),
    ("a group's rank is not the job's, and another group's line is not the group's",
     {"slurm-1.out": "[rank9]:[E218 04:54:22.86 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=_REDUCE_SCATTER_BASE, NumelIn=8, NumelOut=1, "
      "Timeout(ms)=600000) ran for 600061 milliseconds before timing out.\n[rank9]:[E218 04:54:22.87 ProcessGroupNCCL.cpp:2268] [PG ID 3 PG GUID 51(mesh_fsdp) Rank 1]  failure detected by watchdog at work sequence id: 7 "
      "PG status: last enqueued work: 9, last completed work: 6\n[rank9]:[E218 04:54:22.88 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 9] Received a dump signal due to a collective timeout from this local rank\n"},
     "rank 9: a collective timed out: _REDUCE_SCATTER_BASE (sequence number 7) of the FSDP group (fsdp) after 600 s", []),
    # --- kernels and native code ---
    ("torchtitan 3877: DeepEP V2 combine at EP 64, then what a trapped kernel leaves",
     {**{f"r{r}/stdout": f"DeepEP combine (scale-up wait) timeout, scale-out: 6/8, scale-up: {r}/8, channel: 0, lane: 3, recv: 0, tail: -1 (wait=0)\n" * 999
         for r in range(3)},
      **{f"r{r}/error": recorded("torch.AcceleratorError: CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronous")
         for r in range(3)}},
     "rank 0: DeepEP combine (scale-up wait) timeout, scale-out: 6/8", []),
    ("DeepEP 137: dispatch over RDMA",
     {"slurm-2.out": "DeepEP dispatch NVL receiver timeout, channel: 5, RDMA: 1, nvl: 0, src RDMA: 1, src nvl: 7, start: 0, end: 0\n" * 9
      + raised("RuntimeError: CUDA error: unspecified launch failure", prefix="[rank8]: ")},
     "DeepEP dispatch NVL receiver timeout", ["RDMA: 1"]),
    ("a flood of time-outs at which the log was cut off", {"slurm-2.out": steps(1, 2) + "DeepEP timeout check failed: rank = 3, thread = 7, value = 1024)\n" * 99},
     "DeepEP timeout check failed: rank = 3", []),
    ("ranks of a second node without torchrun's summary", {"logs/x/attempt_0/1/stderr.log": raised("ValueError: mine", prefix="[rank9]: "), "logs/x/attempt_0/1/error.json": recorded(GLOO)},
     "rank 9: ValueError: mine", []),
    ("tracebacks of several ranks in torchrun's summary",
     {"train.log": summary((0, 1), (1, 1), trace="Traceback (most recent call last):\n    File \"/a.py\", line 1, in f\n      g()\n  ValueError: mine")},
     "rank 1: ValueError: mine", []),
    ("Megatron-Bridge 1335: DeepEP waits on the host",
     {"r0/stderr": raised(LOST, prefix="[rank0]: "), "r4/stderr": raised("RuntimeError: DeepEP error: timeout (dispatch CPU)", prefix="[rank4]: ")},
     "rank 4: RuntimeError: DeepEP error: timeout (dispatch CPU)", []),
    ("DeepEP 202: NVSHMEM without a transport",
     {"r1/stderr": "WARN: init failed for remote transport: ibrc\n/w/src/host/transport/transport.cpp:nvshmemi_transport_init:275: init failed for transport: IBGDA\n"
      "/workspace/nvshmem_src/src/host/transport/transport.cpp:nvshmemi_transport_init:287: Unable to initialize any transports. returning error.\n"
      "/workspace/nvshmem_src/src/host/init/init.cu:989: non-zero status: 7 nvshmem detect topo failed\n", "train.log": summary((1, 255))},
     "rank 1: NVSHMEM:", ["Unable to initialize any transports"]),
    ("nnUNet 1674: a kernel's assertion, once for each thread",
     {"r3/stderr": "../aten/src/ATen/native/cuda/ScatterGatherKernel.cu:365: operator(): block: [6250,0,0], thread: [126,0,0] Assertion "
      "`idx_dim >= 0 && idx_dim < index_size && \"index out of bounds\"` failed.\n" * 500
      + raised("torch.AcceleratorError: CUDA error: device-side assert triggered\nCUDA kernel errors might be\nCompile with `TORCH_USE_CUDA_DSA`", prefix="[rank3]: "),
      "r0/stderr": watchdog(0)},
     "rank 3: a CUDA kernel's assertion failed (ScatterGatherKernel.cu:365): idx_dim >= 0", ["index out of bounds"]),
    ("simple_GRPO 46: an illegal memory access, by C++ alone",
     {"r5/stderr": "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: an illegal memory access was encountered\n"
      "CUDA kernel errors might be asynchronously reported\n", "r0/stderr": watchdog(0), "train.log": summary((0, -6), (5, -6))},
     "rank 5: c10::AcceleratorError: CUDA error: an illegal memory access", []),
    ("nnUNet 1519: NVLink", {"r2/error": recorded("torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"),
                             "r1/error": recorded(LOST)},
     "rank 2: torch.AcceleratorError: CUDA error: uncorrectable NVLink error", []),
    ("open-gpu-kernel-modules 1150: an Xid of the link explains the ranks' CUDA errors",
     {"dmesg.txt": "[19277.97] NVRM: Xid (PCI:0000:97:00): 145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a0c2)\n"
      "[19277.99] NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149\n",
      "r2/error": recorded("torch.AcceleratorError: CUDA error: unspecified launch failure")},
     "Xid (PCI:0000:97:00): 145, RLW_RXPIPE Fatal", []),
    ("an Xid that a program causes is not more than its exception",
     {"dmesg.txt": "[19277.97] NVRM: Xid (PCI:0000:97:00): 31, pid=12, name=python3, Ch 00000008, MMU Fault: ENGINE GRAPHICS\n",
      "r2/error": recorded("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")},
     "rank 2: torch.AcceleratorError: CUDA error: an illegal memory access", []),
    ("pytorch 72086: a segmentation fault with Python's own frames",
     {"r1/stderr": "Fatal Python error: Segmentation fault\n\nThread 0x00007f57168aa700 (most recent call first):\n  <no Python frame>\n\n"
      f'Current thread 0x00007f4ebf9d3740 (most recent call first):\n  File "{LIB}/deep_ep/buffers/elastic.py", line 331 in combine\n'
      f'  File "{LIB}/torchtitan/train.py", line 53 in step\n', "train.log": summary((0, -6), (1, -11))},
     "rank 1: Segmentation fault (deep_ep/buffers/elastic.py:331 in combine)", []),
    ("DeepEP 126: UCX's handler", {"r4/stderr": "[TENCENT64:5489 :0:5489] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x38)\n"},
     "rank 4: Segmentation fault: address not mapped", []),
    ("Out of /dev/shm: only a signal, and what the worker's handler said",
     {"r0/stderr": "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n",
      "train.log": summary((0, -7))},
     "rank 0: Unexpected bus error", ["shared memory"]),
    ("the kernel saw it", {"dmesg.log": "Nov 28 10:00:00 gpu-12 kernel: python3[3608001]: segfault at 0 ip 00007f sp 00007f error 4 in libnccl.so.2.27.5[7f3+1f]\n",
                           "train.log": summary((0, -6), (1, -11))}, "rank 1: killed by SIGSEGV: python3[3608001]: segfault at 0", ["libnccl.so.2.27.5"]),
    ("nccl 1814: a link, told in the exception of the watchdog",
     {"r4/stderr": "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank 4] Process group watchdog thread terminated "
      "with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error\nLast error:\n"
      "NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=1 vendor_err=129\nException raised from check at X.cpp:1\nframe #0: f\n",
      "r0/stderr": raised(LOST, prefix="[rank0]: "), "train.log": summary((4, -6), (0, 1))},
     "rank 4: c10::DistBackendError: NCCL error: remote process exited", ["NET/IB: Got completion", "RETRY_EXC_ERR(12)"]),
    ("glibc aborts", {"r6/stderr": "double free or corruption (!prev)\n", "train.log": summary((6, -6))}, "rank 6: double free or corruption (!prev)", []),
    ("an instruction that the processor lacks", {"train.log": summary((0, -4))}, "rank 0: killed by SIGILL", ["processor"]),
    ("legacy-rocm-build 4021: AMD", {"r0/stderr": " 33%|###   Memory access fault by GPU node-3 (Agent handle: 0x5a) on address 0x7098. Reason: Write access to a "
      "read-only page.\n", "train.log": summary((0, -6))}, "rank 0: Memory access fault by GPU node-3", ["read-only"]),
    ("vllm 20007: AMD's runtime, and what ended a rank", {"train.log": ":0:rocdevice.cpp            :3020: 5875275709338d us:  Callback: Queue 0x7f4580c00000 aborting with error : "
      "HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016\n" + summary((0, -15), (2, -6))},
     "ROCm aborted a queue: HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation", []),
    ("AMD's memory, told by the kernel", {"dmesg": "[12.5] amdgpu 0000:03:00.0: amdgpu: socket: 1, die: 0, 0 uncorrectable hardware errors detected in total in gfx block\n"
      "[1234.5] amdgpu 0000:03:00.0: amdgpu: socket: 0, die: 0, 2 new uncorrectable hardware errors detected in umc block\n", "r0/stderr": raised("torch.AcceleratorError: HIP error: unspecified launch failure\n"
      "HIP kernel errors might be asynchronously reported\nCompile with `TORCH_USE_HIP_DSA` to enable")}, "amdgpu 0000:03:00.0: amdgpu: socket: 0, die: 0, 2 new uncorrectable", []),
    ("a watchdog's log line, and the time-outs of others", {"train.log": "[rank3]:[E218 04:54:22.86 ProcessGroupNCCL.cpp:1895] [PG ID 2 PG GUID 5 Rank 3] Process group watchdog thread terminated with exception: "
      "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported\n\n" + watchdog(0)}, "rank 3: ", ["CUDA error: an illegal memory access was encountered"]),
    ("host assertions", {"r1/stderr": "python: /src/gloo/transport/tcp/device.cc:82: void gloo::f(): Assertion `rv != -1' failed.\n",
                         "train.log": summary((1, -6))}, "rank 1: assertion failed (device.cc:82): rv != -1", []),
    ("a shell that tells of a crash", {"train.log": steps(1, 2) + "Segmentation fault (core dumped)\n"}, "Segmentation fault (core dumped)", []),
    ("nccl: no interface", {"r0/stderr": "gpu-1:62:63 [1] misc/socket.cc:12 NCCL WARN Bootstrap : no socket interface found\n" + raised(LOST, prefix="[rank0]: ")},
     "rank 0: NCCL: Bootstrap : no socket interface found", []),
    # --- memory ---
    ("CUDA out of memory, with figures; the others lose their peer",
     {"slurm-3.out": steps(1, 2) + raised(GLOO, prefix="[rank0]:[rank0]: ")
      + raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.50 GiB. GPU 5 has a total capacity of 79.11 GiB", prefix="[rank5]:[rank5]: ")},
     "rank 5: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.50 GiB", ["79.11 GiB"]),
    ("MGSV 2: the kernel ended a rank", {"dmesg": "[Sat Nov 28 10:00:00 2026] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,task_memcg=/slurm,task=python,pid=3608002,uid=1\n"
      "[Sat Nov 28 10:00:00 2026] Memory cgroup out of memory: Killed process 3608002 (python) total-vm:9kB, anon-rss:123456kB, file-rss:0kB\n",
      "train.log": summary((0, -6), (2, -9))}, "rank 2: killed by SIGKILL: ", ["out of memory", "3608002"]),
    ("K-Net 30: Slurm's step ran out of memory", {"slurm-9.out": "slurmstepd-gpu20-15: error: Detected 1 oom-kill event(s) in StepId=9411285.0. Some of your processes may have "
      "been killed by the cgroup out-of-memory handler.\nsrun: error: gpu20-15: task 0: Out Of Memory\nsrun: launch/slurm: _step_signal: Terminating StepId=9411285.0\n"
      "slurmstepd-gpu20-15: error: *** STEP 9411285.0 ON gpu20-15 CANCELLED AT 2022-05-17T17:58:10 ***\n"},
     "out of memory: ", ["oom-kill event(s) in StepId=9411285.0"]),
    ("torchrun's line before its summary, cut off after it", {"train.log": "E0819 19:29:01.1 1 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) "
      "local_rank: 1 (pid: 1168) of binary: /opt/conda/bin/python\n"}, "rank 1: killed by SIGKILL", []),
    ("xpk 965: NCCL without room in /dev/shm, by torchrun's summary alone",
     {"train.log": summary((0, 1), trace="Traceback (most recent call last):\n    File \"/app/torchtitan/utils.py\", line 140, in set_determinism\n      "
      "torch.distributed.broadcast(seed_tensor, src=0)\n  torch.distributed.DistBackendError: NCCL error in: /p/NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.3\n"
      "  ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n  Last error:\n"
      "  Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)")},
     "rank 0: torch.distributed.DistBackendError: NCCL error in", ["NCCLUtils.cpp:77", "No space left on device"]),
    # --- exceptions ---
    ("torchtitan 2239: the Hub refuses a worker", {"r1/error": recorded(
        "huggingface_hub.errors.HfHubHTTPError: Caught HfHubHTTPError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        + f'  File "{HUB}", line 300, in f\n    response.raise_for_status()\n' * 9
        + "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/datasets/c4")},
     "rank 1: huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests", []),
    ("torchtitan 3338: a download's connection was reset; the others timed out",
     {"r3/stderr": chained(raised("ConnectionResetError: [Errno 104] Connection reset by peer", frame=f"{LIB}/urllib3/connectionpool.py", prefix="[rank3]: "),
                           raised("requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
                                  frame=f"{LIB}/requests/adapters.py", prefix="[rank3]: "), prefix="[rank3]: ", words=BETWEEN),
      "r0/stderr": watchdog(0)},
     "rank 3: requests.exceptions.ConnectionError: ('Connection aborted.'", []),
    ("a gated repository", {"r0/error": recorded("huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-6)\n\nCannot access gated repo for url "
      "https://huggingface.co/meta/resolve/main/config.json.\nAccess to model meta is restricted.")},
     "rank 0: huggingface_hub.errors.GatedRepoError: 403 Client Error.", ["Cannot access gated repo"]),
    ("torchtitan 2124: an exception of several lines", {"r0/stderr": raised(
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nLoweringException: AssertionError: expand size mismatch for _grouped_mm offs\n"
        "  target: aten._grouped_mm.default\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace", prefix="[rank0]: ")},
     "rank 0: torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: LoweringException: AssertionError: expand size mismatch", []),
    ("the same without prefixes, warnings after it", {"r0/stderr": raised(
        "torch._inductor.exc.InductorError: LoweringException: NoValidChoicesError: No choices to select.\n  target: flex_attention\n")
      + "[W1128 10:00:00 ProcessGroupNCCL.cpp:1479] Warning: WARNING: destroy_process_group() was not called\nand more of it\n"},
     "rank 0: torch._inductor.exc.InductorError: LoweringException: NoValidChoicesError: No choices to select.", []),
    ("torchtune 2572: Triton", {"r0/error": recorded("InductorError: OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 232448. "
      "Reducing block sizes or `num_stages` may help.")}, "rank 0: InductorError: OutOfResources: out of resource: shared memory, Required: 262144", []),
    ("inductor's subprocess", {"r0/stderr": raised("torch._inductor.exc.InductorError: SubprocException: An exception occurred in a subprocess:\n\nTraceback (most recent call last):\n"
      '  File "/opt/x/compiler.py", line 400, in make_cubin\n    run()\n' "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
      "ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'\n", prefix="[rank0]: ")},
     "rank 0: triton.runtime.errors.PTXASError: PTXAS error", ["sm_103a"]),
    ("torchtitan 2254: no message", {"r0/stderr": raised("AssertionError", prefix="[rank0]: ", frame=f"{LIB}/torchtitan/distributed/context_parallel/api.py",
                                                        source="assert isinstance(masks, dict)")},
     "rank 0: AssertionError (torchtitan/distributed/context_parallel/api.py:12 in train: assert isinstance(masks, dict))", []),
    ("torchtitan 774: KeyError, by torchrun's prefix and PyTorch's", {"slurm-4.out": raised("KeyError: 6", prefix="[rank3]:[rank3]: ", frame=f"{LIB}/torch/distributed/pipelining/schedules.py",
                                                                                  source="stage = stages[index]")
      + "[rank2]:[rank2]:E0103 05:54:18.99 4 site.py:1] something\n"},
     "rank 3: KeyError: 6 (torch/distributed/pipelining/schedules.py:12 in train: stage = stages[index])", []),
    ("nemo-run's prefix", {"train.log": raised("ValueError: bad", prefix="i.pretrain/0 [default0]:[rank8]: ")}, "rank 8: ValueError: bad", []),
    ("a logger's prefix", {"train.log": raised("ValueError: bad", prefix="2025-10-31 03:11:02,473 - SimpleTuner - INFO - [rank7]: ")}, "rank 7: ValueError: bad", []),
    ("Kubernetes' prefix", {"train.log": raised("ValueError: bad", prefix="2026-01-17T18:48:10.417752845+01:00 stderr F ")}, "ValueError: bad", []),
    *[(f"a wrapper's prefix {prefix!r}", {"train.log": steps(1) + raised(GLOO, prefix=prefix.replace("3", "0")) + raised("ValueError: bad\nat\n", prefix=prefix)}, begins, [])
      for prefix, begins in [
          ("[pod/train-3/pytorch] ", "ValueError: bad"), ("trainer-3  | ", "ValueError: bad"), ("trainer/3 ", "ValueError: bad"),
          ("Oct 24 18:00:01 gpu-3 torchrun[812]: ", "ValueError: bad"), ("2026-10-24 18:00:01,123 | ERROR | x:3 - ", "ValueError: bad"), ("> ", "ValueError: bad"),
          ("2019-06-02T16:13:44.884Z: [1,3]<stderr>:", "rank 3: ValueError: bad"), ("[1,mpirank:3,algo-1]<stderr>:", "rank 3: ValueError: bad"), ("rank3: ", "rank 3: ValueError: bad"),
      ]],
    ("a shell behind it", {"train.log": "".join(f"trainer-3  | {line}\n" for line in [*steps(1).replace("[rank0]:", "").splitlines(), "bash: line 1: 42 Segmentation fault", "Segmentation fault (core dumped)"])},
     "Segmentation fault", []),
    ("torchrun's summary behind it", {"train.log": steps(1) + summary((1, -9), (0, -6), prefix="trainer-3  | ")}, "rank 1: killed by SIGKILL", []),
    ("two tasks of mpirun line by line", {"train.log": "".join(a + b for a, b in zip(
        raised("ValueError: mine", prefix="[1,1]<stderr>:").splitlines(True), raised(GLOO, prefix="[1,0]<stderr>:").splitlines(True), strict=True))},
     "rank 1: ValueError: mine", []),
    ("Loki's records", {"train.log": "".join(json.dumps({"labels": {"pod": "a"}, "line": line}) + "\n" for line in raised("ValueError: bad").splitlines())},
     "ValueError: bad", []),
    ("a logger's record with all of a traceback", {"train.log": json.dumps({"level": "error", "message": "failed", "exc_info": raised("ValueError: bad")}) + "\n"},
     "ValueError: bad", []),
    ("Docker's file", {"train.log": "".join(json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "t"}) + "\n" for line in raised("ValueError: bad").splitlines())},
     "ValueError: bad", []),
    ("two ranks' tracebacks line by line", {"train.log": "".join(a + b for a, b in zip(
        raised("ValueError: mine", prefix="[rank1]: ").splitlines(True), raised(GLOO, prefix="[rank0]: ").splitlines(True), strict=True))},
     "rank 1: ValueError: mine", []),
    ("colours", {"train.log": raised("ValueError: bad", prefix="\x1b[31m[rank0]:\x1b[0m ")}, "rank 0: ValueError: bad", []),
    ("Rich's box", {"train.log": "╭──── Traceback (most recent call last) ────╮\n│ /app/train.py:12 in main      │\n│ ❱ 12 │   step()       │\n╰───────────────╯\nValueError: bad\n"},
     "ValueError: bad", []),
    ("an exception group", {"r0/stderr": "  + Exception Group Traceback (most recent call last):\n  |   File \"/app/a.py\", line 1, in f\n  |     g()\n  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
      "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File \"/app/b.py\", line 2, in g\n    |     h()\n    | ValueError: inner\n    +------------------------------------\n"},
     "rank 0: ValueError: inner", []),
    ("out of the first exception, a second", {"r2/stderr": chained(raised("ValueError: mine", prefix="[rank2]: "), raised(LOST, prefix="[rank2]: "), prefix="[rank2]: ", words=BETWEEN)},
     "rank 2: ValueError: mine", []),
    ("a stage of a pipeline that ran out of memory", {"r2/stderr": chained(raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB", prefix="[rank2]: "),
        raised("RuntimeError: \n            [Stage 1] failed to run forward:\n            args: ('Tensor(torch.Size([1, 2048]), grad=False)',)\n            kwargs: {}", prefix="[rank2]: "), prefix="[rank2]: ")},
     "rank 2: torch.OutOfMemoryError: CUDA out of memory.", []),
    ("want of memory under another name", {"r2/stderr": chained(raised("torch.OutOfMemoryError: CUDA out of memory."), raised("RuntimeError: training failed"))},
     "rank 2: torch.OutOfMemoryError: CUDA out of memory.", []),
    ("a full disk, then what the writer says", {"r0/stderr": chained(raised("OSError: [Errno 28] No space left on device"),
                                                                   raised("RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598"), words=BETWEEN)},
     "rank 0: OSError: [Errno 28] No space left on device", []),
    ("pytorch 152310: a checkpoint's exception names the rank", {"r0/stderr": raised("torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])\n"
      "Traceback (most recent call last): (RANK 3)\n  File \"/x/writer.py\", line 9, in write\n    f()\nOSError: [Errno 122] Disk quota exceeded", prefix="[rank0]: ")},
     "rank 3: OSError: [Errno 122] Disk quota exceeded", []),
    ("DeepEP 163: spawned processes", {"out.log": raised("torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 6 terminated with the following error:\n"
      + raised("RuntimeError: Failed: CUDA error /D/csrc/kernels/internode_ll.cu:341 'an illegal memory access was encountered'"))},
     "rank 6: RuntimeError: Failed: CUDA error /D/csrc/kernels/internode_ll.cu:341", []),
    ("a worker that exited says less than why", {"r0/stderr": chained(raised("RuntimeError: DataLoader worker (pid 1166833) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."),
                                                                    raised("RuntimeError: DataLoader worker (pid(s) 1166833) exited unexpectedly"))},
     "rank 0: RuntimeError: DataLoader worker (pid 1166833) is killed by signal: Bus error.", ["shared memory"]),
    ("a download by the exception's bare name", {"r3/error": recorded("ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"), "r0/error": recorded(GLOO)},
     "rank 3: ConnectionError: ('Connection aborted.'", []),
    ("a socket of Python is no rank's", {"r3/error": recorded("ConnectionResetError: [Errno 104] Connection reset by peer", time=1767000009), "r0/error": recorded(GLOO)},
     "rank 3: ConnectionResetError: [Errno 104]", []),
    ("fields that pydantic refuses", {"r0/stderr": raised("pydantic_core._pydantic_core.ValidationError: 1 validation error for Job\nlr\n  Input should be a valid number")},
     "rank 0: pydantic_core._pydantic_core.ValidationError: 1 validation error for Job lr Input should be a valid number", []),
    ("verl 2398: an exception that Ray reports", {"train.log": "(W pid=1) [2025-07-13 00:15:22,359 E 1 1962889] logging.cc:112: Unhandled exception: N3c105ErrorE. what(): CUDA error: an illegal memory access was encountered\n"},
     "CUDA error: an illegal memory access was encountered", []),
    ("a thread's exception and one at Python's end are no causes",
     {"r0/stderr": "Exception in thread Thread-1:\n" + raised("ValueError: of a thread") + raised("ValueError: mine")
      + "Exception ignored in: <function Pool.__del__>\n" + raised("ImportError: sys.meta_path is None")}, "rank 0: ValueError: mine", []),
    ("a thread's exception, where nothing else says why", {"r0/stderr": "Exception in thread Thread-1 (_save):\n" + raised("OSError: [Errno 28] No space left on device"), "train.log": summary((0, 1))},
     "rank 0: OSError: [Errno 28] No space left on device", []),
    ("lines of a logger beside it", {"r0/stderr": "W1128 import.py: UserWarning: an Error: nothing\nRuntimeError: only a message of a logger\n"
      + raised("moelab.errors.BadInput: unknown field 'x'") + "some more output\nValueError: not an exception either\n"},
     "rank 0: moelab.errors.BadInput: unknown field 'x'", []),
    ("an endless message", {"r0/error": recorded("ValueError: " + "x" * 10_000)}, "rank 0: ValueError: xxx", []),
    ("an older torch writes the message alone", {"r0/error": '{"message": "it broke"}'}, "rank 0: it broke", []),
    ("words that nobody has seen yet", {"r0/error": recorded("RuntimeError: some words of a communication library"), "train.log": summary((1, -9), (0, 1))},
     "rank 1: killed by SIGKILL (often the system running out of memory)", []),
    ("ranks that torchrun ended", {"r1/error": recorded("ValueError: mine"), "train.log": summary((0, -15), (1, 1))}, "rank 1: ValueError: mine", []),
    ("one that torchrun had to kill", {"r1/error": recorded("ValueError: mine"), "train.log":
      "W1128 api.py:1049] Unable to shutdown process 3608000 via 15, forcefully exiting via 9\n" + summary((0, -9), (1, 1))}, "rank 1: ValueError: mine", []),
    ("an abort says more than a lost peer", {"r1/error": recorded(GLOO), "train.log": summary((0, -6), (1, 1))}, "rank 0: killed by SIGABRT", []),
    # --- at the start ---
    ("the store cannot be reached", {"train.log": chained(raised("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500)."),
                                                        raised("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details."))},
     "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms", ["10.0.0.1, 29500"]),
    ("torchtitan 1679: an import, on all ranks", {f"r{r}/stderr": raised("ImportError: cannot import name 'ScheduleDualPipeV' from 'torch.distributed.pipelining.schedules' (/x.py)") for r in range(4)},
     "rank 0: ImportError: cannot import name 'ScheduleDualPipeV'", []),
    ("pytorch 176829: another NCCL", {"train.log": raised("ImportError: /usr/lib/libtorch_cuda.so: undefined symbol: ncclAlltoAll")}, "ImportError: /usr/lib/libtorch_cuda.so: undefined symbol: ncclAlltoAll", []),
    ("a script that does not parse", {"r0/stderr": '  File "/app/train.py", line 5\n    def f(\n         ^\nSyntaxError: \'(\' was never closed\n'},
     "rank 0: SyntaxError: '(' was never closed", ["/app/train.py", "line 5"]),
    ("a module that is not there", {"r0/stderr": "/usr/bin/python3: No module named torchtitan.train\n", "train.log": summary((0, 1))}, "rank 0: /usr/bin/python3: No module named torchtitan.train", []),
    ("torchtitan 2400: an option in a box", {"train.log": "╭─ Unrecognized options ──────────────────────╮\n│ Unrecognized options: --debug.deterministic │\n╰─────────────────╯\n" + summary((0, 2))},
     "Unrecognized options: --debug.deterministic", []),
    ("Vim4Path 2: argparse", {"train.log": "usage: main.py [-h]\nmain.py: error: unrecognized arguments: --local_rank=1\n" + summary((0, 2))}, "main.py: error: unrecognized arguments: --local_rank=1", []),
    ("no torchrun there", {"slurm-5.out": "/var/spool/slurmd/job05191/slurm_script: line 28: torchrun: command not found\n"}, "/var/spool/slurmd/job05191/slurm_script: line 28: torchrun: command not found", []),
    ("OpenRLHF 1040: the others never came", {"train.log": raised("torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.", prefix="[rank0]: ")},
     "rank 0: torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.", []),
    ("nccl 296: ranks do not agree", {"slurm-6.out": "gpu-1:62:63 [1] init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 39.\n"
      + raised("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.", prefix="[rank3]: ")},
     "NCCL: Mismatched collective detected", ["rank 39"]),
    ("nccl 1664: a link that gave up", {"r8/stderr": "host-8:984:1257 [4] NCCL WARN NET/IB: Got completion from peer 7.6.13.83<36315> with status=12 opcode=1 len=0 vendor err 129 (Send)\n" + raised(LOST, prefix="[rank8]: "),
                                     "r0/stderr": raised(GLOO, prefix="[rank0]: ")},
     "rank 8: NCCL: NET/IB: Got completion from peer 7.6.13.83<36315> with status=12", ["vendor err 129"]),
    ("nccl 905: a link that flaps, and those who wait for it", {"slurm-1.out": steps(1) + "gpu-1:62:63 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error\n"
      "gpu-2:62:63 [4] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got completion from peer gpu-1<37948> with error 12, opcode 2, len 1, vendor err 129\n" + watchdog(0)},
     "NCCL: NET/IB : Got async event : port error", []),
    ("AWS' network", {"slurm-1.out": steps(1) + "gpu-1:62:63 [1] NCCL WARN NET/OFI Request 0x7f completed with error. RC: 5. Error: 113 (unreachable remote), Completed length: 0\n" + watchdog(0)},
     "NCCL: NET/OFI Request 0x7f completed with error.", ["unreachable remote"]),
    ("GPUs that do not see each other", {"r3/stderr": "/nvshmem/src/host/mem/mem_heap.cpp:123: [GPU 3] Peer GPU 4 is not accessible, exiting ...\n", "train.log": summary((3, 255))}, "rank 3: NVSHMEM:", ["Peer GPU 4 is not accessible"]),
    ("a link to a process that gave up", {"slurm-1.out": watchdog(0) + "gpu-2:62:63 [4] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got completion from peer gpu-1<37948> with error 12, opcode 2\n"},
     "rank 0: a collective timed out", []),
    ("a library of another version", {"train.log": "python: symbol lookup error: /opt/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister\n" + summary((0, 127))}, "python: symbol lookup error: ", ["ncclCommWindowRegister"]),
    ("a library that is not there", {"train.log": "torchrun: error while loading shared libraries: libpython3.12.so.1.0: cannot open shared object file: No such file or directory\n"}, "torchrun: error while loading", ["libpython3.12"]),
    # --- containers, Slurm and others that start jobs ---
    ("pyxis 12: what enroot printed", {"slurm-1.out": "slurmstepd: error: pyxis: child 12004 failed with error code: 1\nslurmstepd: error: pyxis: failed to import docker image\nslurmstepd: error: pyxis: printing contents of log file ...\n"
      "slurmstepd: error: pyxis:     [INFO] Querying registry\nslurmstepd: error: pyxis:     mkdir: cannot create directory '/run/enroot': Permission denied\nsrun: error: gpu-1: task 0: Exited with exit code 1\n"},
     "pyxis: mkdir: cannot create directory", ["Permission denied"]),
    ("pyxis 6: without it", {"slurm-1.out": "slurmstepd: error: pyxis: seccomp filter failed\nsrun: error: gpu-1: task 0: Exited with exit code 1\n"}, "pyxis: seccomp filter failed", []),
    ("Apptainer", {"slurm-1.out": "FATAL:   While making image from oci registry: no space left on device\nsrun: error: gpu-1: task 0: Exited with exit code 255\n"}, "FATAL: While making image", []),
    ("Docker has no GPU", {"train.log": 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].\n'}, "Error response from daemon: could not select device driver", []),
    ("canu 1214: PBS", {"train.o7": steps(1) + "=>> PBS: job killed: walltime 86415 exceeded limit 86400\n"}, "PBS's time limit was reached: walltime 86415 exceeded limit 86400", []),
    ("LSF", {"train.log": steps(1) + "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 137.\n"}, "out of memory: TERM_MEMLIMIT: ", []),
    ("a task number before each line", {"train.log": summary((9, 1), (13, -9), prefix="1: ", local=8), "logs/node1/x/attempt_0/1/error.json": recorded(GLOO)}, "rank 13: killed by SIGKILL", []),
    ("torchrun's prefix has the local rank", {"slurm-1.out": raised("ValueError: mine", prefix="1: [default5]:") + summary((9, 1), (13, 1), prefix="1: ", local=8)},
     "rank 13: ValueError: mine", []),
    ("ranks of a second node, by torchrun's numbers", {"train.log": summary((9, 1), local=8), "logs/node1/x/attempt_0/1/error.json": recorded("ValueError: mine")}, "rank 9: ValueError: mine", []),
    ("lumen-rl: a node", {"train.log": "srun: error: Node failure on gpu-12\nsrun: Job step aborted: Waiting up to 92 seconds for job step to finish.\n"
      "slurmstepd: error: *** STEP 123.0 ON gpu-01 CANCELLED AT 2026-10-24T18:38:53 DUE TO NODE gpu-12 FAILURE ***\n" + raised(LOST, prefix="[rank0]: ")}, "node gpu-12 failed", []),
    ("zetta_utils 671: time", {"slurm-7.out": steps(1, 2) + "slurmstepd: error: *** JOB 494583 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
      + raised("torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15")}, "Slurm's time limit was reached", []),
    ("submitit 1613: preempted", {"slurm-8.out": "slurmstepd: error: *** JOB 37361369 ON learnfair5146 CANCELLED AT 2021-03-15T18:00:46 DUE TO PREEMPTION ***\n"}, "preempted by another job of Slurm", []),
    ("what is raised for the signal of a time limit", {"slurm-7.out": steps(1, 2) + "slurmstepd: error: *** STEP 494583.0 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
      + raised("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly", prefix="[rank2]: ")}, "Slurm's time limit was reached", []),
    ("a launch after a time limit", {"slurm-7.out": steps(1, 2) + "slurmstepd: error: *** STEP 494583.0 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
      + titan_line(99, "Starting job: x") + raised("ValueError: mine", prefix="[rank2]: ")}, "rank 2: ValueError: mine", []),
    ("a launch after one that trained to its end", {"slurm-1.out": steps(1, 2) + titan_line(9, "Training completed"),
      "slurm-2.out": titan_line(99, "Starting job: x") + raised("ValueError: mine", prefix="[rank2]: ")}, "rank 2: ValueError: mine", []),
    ("a container that was not there", {"train.log": "Error response from daemon: No such container: a\n" + raised("ValueError: mine", prefix="[rank2]: ")}, "rank 2: ValueError: mine", []),
    ("a thread of CUDA", {"train.log": steps(1, 2), "dmesg": "[1.3] cuda-EvtHandlr[44]: segfault at 0 ip 0 sp 0 error 4 in libcuda.so[7f]\n"}, "cuda-EvtHandlr[44]: segfault", []),
    ("a job that hung until its time limit", {"slurm-7.out": steps(1, 2) + raised("ValueError: mine", prefix="[rank2]: ")
      + "slurmstepd: error: *** STEP 494583.0 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"}, "rank 2: ValueError: mine", []),
    ("mpirun", {"train.log": steps(1) + "prterun noticed that process rank 3 with PID 1234 on node gpu-1 exited on signal 9 (Killed).\n"}, "rank 3 on node gpu-1 exited on signal 9", []),
    ("PALS", {"train.log": steps(1) + "x1921c0s1b0n0.hsn.cm.aurora.alcf.anl.gov: rank 11 died from signal 6 and dumped core\n"}, "x1921c0s1b0n0.hsn.cm.aurora.alcf.anl.gov: rank 11 died from signal 6", []),
    ("cancelled by hand", {"slurm-8.out": "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 by UID 1000 ***\n"}, "JOB 12 was cancelled", []),
    ("trixie 58: Slurm could not start it", {"slurm-8.out": "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired\n"}, "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired", []),
    ("other ranks go on for two steps", {"train.log": steps(1) + raised("ValueError: mine", prefix="[rank1]: ") + steps(2, 3)}, "rank 1: ValueError: mine", []),
    ("a code that is no signal's", {"train.log": summary((3, 255))}, "rank 3: ended with exit code 255", []),
    ("a signal without a name", {"train.log": summary((3, -40))}, "rank 3: killed by signal 40", []),
    ("a shell's code of a signal", {"train.log": summary((3, 137))}, "rank 3: killed by SIGKILL", []),
    ("ranks that srun starts itself", {"slurm-8.out": "srun: error: gpu-7: task 5: Segmentation fault (core dumped)\nsrun: error: gpu-8: tasks 8-15: Terminated\n"}, "task 5 on gpu-7: Segmentation fault (core dumped)", []),
]  # fmt: skip


@pytest.mark.parametrize(("files", "begins", "holds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_cause(tmp_path: Path, files: dict[str, str], begins: str, holds: list[str]) -> None:
    cause = reason(left(tmp_path, files))
    assert cause.startswith(begins), cause
    for part in holds:
        assert part.lower() in cause.lower(), cause


@pytest.mark.parametrize(
    "files",
    [
        {"train.log": steps(1) + raised("OSError: 503 Server Error") + steps(2, 3, 4, 5)},
        {"train.log": steps(1) + summary((0, 1)) + steps(1, 2, 3, 4)},
        {"train.log": steps(1) + "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n" + steps(1, 2, 3)},
        {"train.log": steps(1, 2) + watchdog(0) + "[titan] Training completed\n"},
        {"train.log": steps(1, 2) + "[titan] Training completed\n", "slurm-1.out": "FATAL:   no overlay\n" + raised("requests.exceptions.HTTPError: 503")},
        {"train.log": steps(1, 2), "dmesg": "[1.2] Out of memory: Killed process 77 (firefox) total-vm:9kB\n[1.3] nvidia-smi[44]: segfault at 0 ip 0 sp 0 error 4 in libc.so[7f]\n"},
        {"train.log": steps(1, 2), "slurm-1.out": "slurmstepd: error: pyxis: couldn't get list of existing containers\n"},
        {"train.log": steps(1, 2) + "gpu-1:62:63 [1] init.cc:12 NCCL WARN NET/IB : No device found, timeout ignored.\n"},
        {"train.log": steps(1, 2) + "Exception ignored in: <function Pool.__del__>\n" + raised("ImportError: sys.meta_path is None")},
        {"train.log": steps(1, 2), "dmesg": "[19277.97] NVRM: Xid (PCI:0000:97:00): 79, GPU has fallen off the bus.\n"},
        {"train.log": steps(1, 2) + "DeepEP initialized with NCCL version: 2.30.4 (loaded library)\n"},
    ],
    ids=["a retry that helped", "torchrun started it again", "Slurm started it again", "after the end", "before the end, elsewhere", "processes of others", "a container's warning", "a warning", "Python's end", "an old Xid", "a greeting"],
)  # fmt: skip
def test_what_a_job_got_over_is_no_failure(tmp_path: Path, files: dict[str, str]) -> None:
    (run,) = collect(left(tmp_path, files))
    assert run.status.state is State.UNKNOWN
    assert run.status.reason is None


def test_a_message_ends_with_its_paragraph(tmp_path: Path) -> None:
    left(tmp_path / "a", {"r1/stderr": raised("ValueError: first\nsecond line\n\nthird line")})
    assert reason(tmp_path / "a") == "rank 1: ValueError: first"
    message = "RuntimeError: CUDA error:\n  device-side assert\n\nCompile with `TORCH_USE_CUDA_DSA`\t."
    left(tmp_path / "b", {"r0/error": recorded(message)})
    assert reason(tmp_path / "b") == "rank 0: RuntimeError: CUDA error: device-side assert"


def test_a_killed_rank_is_not_given_the_words_of_another(tmp_path: Path) -> None:
    left(tmp_path, {"r0/error": recorded("RuntimeError: some words of a library"), "train.log": summary((1, -11))})
    assert reason(tmp_path) == "rank 1: killed by SIGSEGV"


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    second = "logs/none_x/attempt_1/0/stderr.log"
    left(tmp_path, {"r0/error": recorded("ValueError: of the first"), second: raised("ValueError: of the second")})
    assert reason(tmp_path) == "rank 0: ValueError: of the second"


def test_torch_writes_error_files_as_the_tests_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    left(tmp_path, {"r3/stdout": ""})
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "logs/none_x/attempt_0/3/error.json"))
    try:
        raise KeyError("x")
    except KeyError as error:
        ErrorHandler().record_exception(error)
    assert reason(tmp_path).startswith("rank 3: KeyError: 'x' (unit/test_failure_cases.py:")
    assert reason(tmp_path).endswith('raise KeyError("x"))')


@pytest.mark.parametrize(
    "noise",
    [
        GLOO,
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "RuntimeError: NCCL communicator was aborted on rank 0",
        "RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
    ],
)
def test_a_lost_peer_is_a_consequence(tmp_path: Path, noise: str) -> None:
    left(tmp_path, {"r0/error": recorded(noise, time=1)})
    assert reason(tmp_path).startswith(f"rank 0: {noise[:20]}")  # for want of a better one
    left(tmp_path, {"r1/error": recorded("torch.OutOfMemoryError: CUDA out of memory.", time=2)})
    assert reason(tmp_path) == "rank 1: torch.OutOfMemoryError: CUDA out of memory."


def test_the_earlier_of_two_causes_and_the_lower_rank_in_a_tie(tmp_path: Path) -> None:
    left(
        tmp_path, {"r10/error": recorded("ValueError: ten", time=50), "r2/error": recorded("ValueError: two", time=51)}
    )
    assert reason(tmp_path) == "rank 10: ValueError: ten"
    left(tmp_path, {"r2/error": recorded("ValueError: two", time=50), "r1/stderr": raised("ValueError: one")})
    assert reason(tmp_path) == "rank 2: ValueError: two"
    os.utime(tmp_path / "logs/none_x/attempt_0/1/stderr.log", (50.9, 50.9))  # of whole seconds the same
    assert reason(tmp_path) == "rank 1: ValueError: one"
    left(tmp_path, {"train.log": summary((2, 1), (1, 1), (10, 1))})
    assert reason(tmp_path) == "rank 10: ValueError: ten"  # as torchrun saw them


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "null", "{}", '{"message": {}}', '{"message": {"extraInfo": {}}}', '{"message": 5}',
     '{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}', "\udcff"],
)  # fmt: skip
def test_a_torn_error_file_falls_back_to_standard_error(tmp_path: Path, content: str) -> None:
    left(tmp_path, {"r0/stderr": raised("OSError: [Errno 28] No space left on device")})
    (tmp_path / "logs/none_x/attempt_0/0/error.json").write_text(content, errors="surrogateescape")
    assert reason(tmp_path) == "rank 0: OSError: [Errno 28] No space left on device"


def test_a_huge_standard_error_and_a_huge_log_are_read_from_their_end(tmp_path: Path) -> None:
    left(tmp_path / "logs", {"r0/stderr": ""})
    for file in (*tmp_path.glob("logs/**/stderr.log"), tmp_path / "train.log"):
        with file.open("wb") as stream:
            stream.write(raised("ValueError: long ago").encode())
            stream.truncate(40 * 2**30)  # sparse: 40 GiB that would not fit in memory
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n" + b"noise \xff\n" * 1000 + raised("ValueError: the cause").encode())
    assert str(failure.cause(tmp_path / "logs", "")) == "rank 0: ValueError: the cause"
    assert str(failure.cause(None, tail(file))) == "ValueError: the cause"


def test_a_line_of_megabytes_takes_no_longer_than_its_beginning() -> None:
    begun = time.process_time()
    cause = failure.cause(None, "x" * 3_000_000 + " segfault at python corrupt\n" + raised("ValueError: mine"))
    assert str(cause) == "ValueError: mine"
    assert time.process_time() - begun < 5


# --- the flight recorder ---


def dump(
    rank: int, *entries: tuple[int, str, str], group: str = "ep", ranks: str = "[0, 1, 2, 3]", **more: Any
) -> dict[str, Any]:
    """A dump as torch 2.14 writes it: (sequence number, operation, state) of each collective."""
    return {
        "version": "2.10",
        "pg_config": {"11": {"name": "11", "desc": group, "ranks": ranks}},
        "pg_status": {},
        "entries": [
            {"record_id": number, "pg_id": 11, "process_group": ("11", group), "collective_seq_id": number, "p2p_seq_id": 0,
             "op_id": number, "profiling_name": f"nccl:{operation}", "time_created_ns": 1000 + number, "input_sizes": [[4]],
             "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"], "state": state,
             "retired": state == "completed", "timeout_ms": 100000, "is_p2p": False, "frames": [], **more}
            for number, operation, state in entries
        ],
    }  # fmt: skip


def write_dumps(folder: Path, *dumps: dict[str, Any], as_json: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    for rank, content in enumerate(dumps):
        data = json.dumps(content).encode() if as_json else pickle.dumps(content, protocol=2)
        (folder / f"{'nccl_trace_rank_' if as_json else 'rank_'}{rank}").write_bytes(data)


DONE, WAITING = (215, "all_to_all", "completed"), (216, "all_to_all", "started")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_rank_that_did_not_enter_a_collective(tmp_path: Path, as_json: bool) -> None:
    left(tmp_path, {f"r{rank}/stderr": watchdog(rank) for rank in (0, 1, 3)})
    write_dumps(
        tmp_path / "comm_traces", *(dump(r, DONE, *([WAITING] if r != 2 else [])) for r in range(4)), as_json=as_json
    )
    assert reason(tmp_path) == "rank 2: did not enter all_to_all, number 216 of group ep, in which ranks 0-1, 3 waited"


def test_ranks_that_entered_different_collectives(tmp_path: Path) -> None:
    left(tmp_path, {"r0/stderr": watchdog(0)})
    other = dump(1, DONE, (216, "_allgather_base", "scheduled"))
    write_dumps(tmp_path / "t", *(other if rank == 1 else dump(rank, DONE, WAITING) for rank in range(4)))
    words = "all_to_all: ranks 0, 2-3; _allgather_base: rank 1"
    assert reason(tmp_path) == f"ranks disagree on collective number 216 of group ep: {words}"


def test_a_rank_without_a_dump_and_one_that_nobody_can_read(tmp_path: Path) -> None:
    left(tmp_path, {"r0/stderr": watchdog(0)})
    write_dumps(tmp_path / "t", *(dump(rank, DONE, WAITING) for rank in range(3)))
    words = "rank 3: left no flight-recorder dump, and may not have entered all_to_all, number 216"
    assert reason(tmp_path).startswith(words)
    (tmp_path / "t" / "rank_3").write_bytes(pickle.dumps(dump(3, DONE))[:-20])
    assert reason(tmp_path).startswith(words)


def test_groups_of_one_name_on_other_ranks_are_apart(tmp_path: Path) -> None:
    left(tmp_path, {"r0/stderr": watchdog(0)})
    pairs = [dump(0, DONE, WAITING, ranks="[0, 1]"), dump(1, DONE, ranks="[0, 1]")]
    write_dumps(
        tmp_path / "t", *pairs, *(dump(rank, (9, "all_reduce", "completed"), ranks="[2, 3]") for rank in (2, 3))
    )
    assert reason(tmp_path).startswith("rank 1: did not enter all_to_all, number 216")


def test_torchs_own_dump_is_read(tmp_path: Path) -> None:
    # Of torch 2.14 with gloo on one rank after all_reduce and barrier, both done.
    packed = (
        "eNptUslu1EAQ9Uz2yb6vhOwYDtEkIQrDiRMSsTQXJNRSZLUcuzPVwmO7uttBQYrEKQQ+jjMfwT9Adc84EQgf2rW86nr1ur7Ub3024nnetVBa5hl6bJC848Oj"
        "JtbYGJlFh8d5diU7aKEU8HCADIvKoq7AQRhwTiJ0jEPkDJGjouyjxmE2QPZFM8SRsmQzZMd5t8tTecmrdqNU0O+iTWRKjWN0eY0iTWyQtUJWGmnDRYalKEVC"
        "ZNJUxEZeCxwP6my5AlC5Mn/nJ85/08dWKwh1L1LxD2gyqBM5K4HIjJJC41ToU2fLSok4VwmXCU4HnhuMeJI3Q96k9VQeC615R+VlgbPQYA2nxFVUpoYXHZy7"
        "Y+MUMaBElHCn1zwbtpU3Bmj8Bdemn6aLF9k0+UcnrbOXrdNW6+zk1dnpMS6xWaddxZlrgRa9HNRcw+K4qEIrfZ55Yb1VAkz1eF7JVGadHoU116WT5vnrKE25"
        "EkkZC1x3USO7gsfEx8qUadz4Pvru/Y8s/PBrxY0is6IkseVnEupJ6Id+MCgEm3jIJOamoNRm6Dseb9M8Mvi0h8hL81i89VA8+ZjqV2+HPlCNvcBuhcAdp5OO"
        "gaimIsFdtlZxTaSOc1onolutANHea7ON/yAeN4Aw+2337EoYSTk8uHdi2hJiw7san52/+bTuufeSmpPK6H8rb32YDmpAKwD04DB3B/OwAIuwBMtBHUh/WKX/"
        "mhvYSXwZKVorhc+BtNRffzotgbQTsGmPLXts22MHdmGvDfttOLiHXnOgjqLEF4d/AJwiFpQ="
    )
    left(tmp_path, {"r0/stderr": watchdog(0)})
    (tmp_path / "rank_0").write_bytes(zlib.decompress(base64.b64decode(packed)))
    ((rank, _, entries),) = failure._dumps(tmp_path)
    assert (rank, [entry.operation for entry in entries]) == (0, ["all_reduce", "barrier"])
    assert reason(tmp_path).startswith("rank 0: a collective timed out")


def test_a_dump_calls_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path}/called",)

    left(tmp_path, {"r0/stderr": watchdog(0)})
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert reason(tmp_path).startswith("rank 0: a collective timed out")
    assert not (tmp_path / "called").exists()


# --- folders ---


def test_a_healthy_folder_is_one_run_with_the_loss_of_the_rank_that_has_it(tmp_path: Path) -> None:
    without = steps(1, 2, 3).replace("loss:  8.9", "loss: -1.0").replace("60.00GiB", "63.00GiB")
    left(tmp_path, {"r0/stderr": without, "r0/stdout": "", "r1/stderr": steps(1, 2, 3, rank=1)})
    (run,) = collect(tmp_path)
    assert run.status.state is State.UNKNOWN
    assert run.rows["loss"].tolist() == [8.99, 8.98, 8.97]
    assert run.rows["memory_gib"].tolist() == [63.0] * 3
    assert run.segments == 1


def test_a_log_beside_events_tells_how_it_ended(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step in (1, 2):
            writer.add_scalar("loss_metrics/global_avg_loss", 9 - step / 100, step)
            writer.add_scalar("lr/AdamW", 0.001, step)
    left(tmp_path, {"train.log": steps(1, 2, 3) + raised("ValueError: mine", prefix="[rank1]: ")})
    (run,) = collect(tmp_path)
    assert (run.status.reason, len(run.rows)) == ("rank 1: ValueError: mine", 3)
    assert run.rows["lr"].tolist()[:2] == pytest.approx([0.001] * 2)


def test_the_same_steps_in_two_logs_are_one_run_and_other_losses_are_refused(tmp_path: Path) -> None:
    left(tmp_path, {"train.log": steps(1, 2, 3), "slurm-1.out": "module load cuda\n" + steps(1, 2)})
    (run,) = collect(tmp_path)
    assert len(run.rows) == 3
    left(tmp_path, {"other.log": steps(11, 12)})
    with pytest.raises(BadInput, match=r"train\.log.*other\.log|other\.log.*train\.log"):
        collect(tmp_path)


def test_the_logs_of_single_ranks_are_one_run_with_the_memory_of_the_fullest(tmp_path: Path) -> None:
    fuller = steps(1, 2, 3, rank=1).replace("60.00GiB", "63.00GiB")
    (run,) = collect(left(tmp_path, {"out.0": steps(1, 2, 3), "out.1": fuller}))
    assert run.rows["memory_gib"].tolist() == [63.0] * 3


def test_of_two_runs_in_one_log_the_last_failed(tmp_path: Path) -> None:
    earlier = steps(1, 2).replace("loss:  8", "loss:  7").replace("2026-", "2025-")
    left(tmp_path, {"train.log": earlier + steps(1, 2) + raised("ValueError: mine")})
    runs = collect(tmp_path / "train.log")
    assert [(run.status.state, run.status.reason) for run in runs] == [
        (State.UNKNOWN, None),
        (State.FAILED, "ValueError: mine"),
    ]


def test_a_file_that_is_no_log_hides_none(tmp_path: Path) -> None:
    left(tmp_path, {"old.log": "PK\x03\x04"})
    with pytest.raises(BadInput, match=r"left out: .*old\.log is a zip archive"):
        collect(tmp_path)
    (run,) = collect(left(tmp_path, {"train.log": steps(1, 2, 3) + raised("ValueError: mine")}))
    assert (len(run.rows), run.status.reason) == (3, "ValueError: mine")
    assert "old.log is a zip archive" in run.notes[0]


def test_a_folder_of_logs_without_steps_or_failure_names_them(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing in it is a log"):
        collect(tmp_path)
    left(tmp_path, {"train.log": "starting\n {'loss': 7.2}\n"})
    with pytest.raises(BadInput, match=r"in train\.log either; these look like the Hugging Face Trainer's lines"):
        collect(tmp_path)


def test_a_single_log_of_a_job_that_failed_before_its_first_step(tmp_path: Path) -> None:
    (run,) = collect(left(tmp_path, {"slurm-1.out": raised("ValueError: bad", prefix="[rank1]: ")}) / "slurm-1.out")
    assert (run.status.state, run.status.reason, len(run.rows)) == (State.FAILED, "rank 1: ValueError: bad", 0)
    assert run.summary == "slurm-1: failed, 0 rows to step 0 in 0 segment(s); rank 1: ValueError: bad"
    assert run.to_json()["rows"] == []
