"""The cause of failures as people reported them: what a job left, rebuilt from public threads, and what was wrong.

Names and numbers are changed.
"""

# ruff: noqa: E501 - lines of logs are as they were printed

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from stand_in import step_text, titan_line

from moelab.errors import BadInput
from moelab.runs import failure, flight_recorder
from moelab.runs.collect import collect
from moelab.runs.log_text import tail
from moelab.runs.status import State

LIB = "/opt/env/lib/python3.12/site-packages"
WATCHDOG = (
    "[rank{rank}]:[E218 04:54:22.86 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=216, OpType=ALLTOALL_BASE, NumelIn=1, NumelOut=1, Timeout(ms)=100000) ran for 100045 "
    "milliseconds before timing out.\n"
    "[rank{rank}]:[E218 04:54:22.87 ProcessGroupNCCL.cpp:1795] [PG ID 11 PG GUID 119(ep) Rank {rank}] Exception "
    "(either an error or timeout) detected by watchdog at work: 216, last enqueued NCCL work: 216, last completed NCCL "
    "work: 216.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 11 PG GUID 119(ep) Rank {rank}] Process group watchdog thread terminated with exception: "
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=216, OpType=ALLTOALL_BASE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=100000) ran for 100045 milliseconds before timing out.\n"
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f83 in /opt/libc10.so)\n"
)
TIMED_OUT = "a collective timed out: ALLTOALL_BASE (sequence number 216) of the expert-parallel group (ep) after 100 s"
LOST = "torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketPollConnect: connect to 10.0.0.3<44321> returned Connection refused, exceeded error retry count after 35 attempts"
GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.12]:51234"
HEADER = "Traceback (most recent call last):"
CAUSED = "The above exception was the direct cause of the following exception:"
BETWEEN = "During handling of the above exception, another exception occurred:"
TIME_LIMIT = "slurmstepd: error: *** STEP 494583.0 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
BY_SIGKILL = "killed by SIGKILL (often the system running out of memory)"


def watchdog(rank: int) -> str:
    return WATCHDOG.format(rank=rank)


def raised(
    error: str, *, prefix: str = "", frame: str = f"{LIB}/torchtitan/train.py", source: str = "self.step()"
) -> str:
    """A traceback as Python prints it, each line with a prefix."""
    lines = [HEADER, f'  File "{frame}", line 12, in train', f"    {source}", *error.split("\n")]
    return "".join(f"{prefix}{line}\n" for line in lines)


def chained(*tracebacks: str, prefix: str = "", words: str = CAUSED) -> str:
    return f"{prefix}\n{prefix}{words}\n{prefix}\n".join(tracebacks)


def mixed(*texts: str) -> str:
    """Texts of processes that write at the same time."""
    return "".join(map("".join, zip(*(text.splitlines(keepends=True) for text in texts), strict=True)))


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


OF_RANKS = "logs/none_x/attempt_0"
PLACES = {"err": f"{OF_RANKS}/{{}}/stderr.log", "out": f"{OF_RANKS}/{{}}/stdout.log", "json": f"{OF_RANKS}/{{}}/error.json",
          "log": "train.log", "slurm": "slurm-1.out", "dmesg": "dmesg"}  # fmt: skip


def left(folder: Path, files: dict[str, str]) -> Path:
    """Write what a job left: ``log``, or of rank 3 ``err3``; any other name is that of a file."""
    for name, text in files.items():
        kind = name.rstrip("0123456789")
        file = folder / PLACES.get(kind, name).format(name.removeprefix(kind))
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


# --- a line that says it all ---

#: Where it was reported, what the cause begins with, and lines in which the rest of the cause stands between «».
LINES: list[tuple[str, str, str]] = [
    ("DeepEP 137", "", "«DeepEP dispatch NVL receiver timeout, channel: 5, RDMA: 1, nvl: 0, src RDMA: 1, src nvl: 7, start: 0, end: 0»"),
    ("DeepEP V1", "", "«DeepEP timeout check failed: rank = 3, thread = 7, value = 1024)»"),
    ("DeepEP 202: no transport", "NVSHMEM: ", "WARN: init failed for remote transport: ibrc\n/w/src/transport.cpp:nvshmemi_transport_init:275: init failed for transport: IBGDA\n"
     "«/w/src/transport.cpp:nvshmemi_transport_init:287: Unable to initialize any transports. returning error.»\n/w/src/init.cu:989: non-zero status: 7 nvshmem detect topo failed"),
    ("GPUs that do not see each other", "NVSHMEM: ", "«/nvshmem/src/host/mem/mem_heap.cpp:123: [GPU 3] Peer GPU 4 is not accessible, exiting ...»"),
    ("DeepEP 126: UCX", "", "[TENCENT64:5489 :0:5489] Caught signal 11 («Segmentation fault: address not mapped to object at address 0x38»)"),
    ("a full /dev/shm", "", "ERROR: «Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).»"),
    ("a thread of CUDA", "", "[1.3] «cuda-EvtHandlr[44]: segfault at 0 ip 0 sp 0 error 4 in libcuda.so»[7f]"),
    ("a host's assertion", "assertion failed (device.cc:82): ", "python: /src/gloo/transport/tcp/device.cc:82: void gloo::f(): Assertion `«rv != -1»' failed."),
    ("a shell", "", "«Segmentation fault (core dumped)»"),
    ("K-Net 30: Slurm's step", "out of memory: ", "«slurmstepd-gpu20-15: error: Detected 1 oom-kill event(s) in StepId=9411285.0». Some of your processes may have been killed by the cgroup out-of-memory handler.\n"
     "srun: error: gpu20-15: task 0: Out Of Memory\nslurmstepd-gpu20-15: error: *** STEP 9411285.0 ON gpu20-15 CANCELLED AT 2022-05-17T17:58:10 ***"),
    ("Slurm's task", "out of memory: task 0 on ", "srun: error: «gpu20-15»: task 0: Out Of Memory"),
    ("submitit 1613", "preempted by another job of Slurm", "slurmstepd: error: *** JOB 37361369 ON learnfair5146 CANCELLED AT 2021-03-15T18:00:46 DUE TO PREEMPTION ***"),
    ("cancelled by hand", "JOB 12 was cancelled", "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 by UID 1000 ***"),
    ("trixie 58", "", "«srun: error: Task launch for 36.0 failed on node cn131: Job credential expired»"),
    ("srun's own ranks", "task 5 on gpu-7: ", "srun: error: gpu-7: task 5: «Segmentation fault (core dumped)»\nsrun: error: gpu-8: tasks 8-15: Terminated"),
    ("pyxis 12: what enroot printed", "pyxis: ", "slurmstepd: error: pyxis: child 12004 failed with error code: 1\nslurmstepd: error: pyxis: failed to import docker image\n"
     "slurmstepd: error: pyxis: printing contents of log file ...\nslurmstepd: error: pyxis:     [INFO] Querying registry\n"
     "slurmstepd: error: pyxis:     «mkdir: cannot create directory '/run/enroot': Permission denied»\nsrun: error: gpu-1: task 0: Exited with exit code 1"),
    ("pyxis 6: without it", "", "slurmstepd: error: «pyxis: seccomp filter failed»\nsrun: error: gpu-1: task 0: Exited with exit code 1"),
    ("a library of another version", "", "«python: symbol lookup error: /opt/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister»"),
    ("no library", "", "«torchrun: error while loading shared libraries: libpython3.12.so.1.0: cannot open shared object file: No such file or directory»"),
    ("no torchrun", "", "«/var/spool/slurmd/job05191/slurm_script: line 28: torchrun: command not found»"),
    ("no module", "", "«/usr/bin/python3: No module named torchtitan.train»"),
    ("Vim4Path 2: argparse", "", "usage: main.py [-h]\n«main.py: error: unrecognized arguments: --local_rank=1»"),
    ("torchtitan 2400", "", "╭─ Unrecognized options ──────────────────────╮\n│ «Unrecognized options: --debug.deterministic» │\n╰─────────────────╯"),
    ("torchtune 2093: of 2023, behind a progress bar", "rank 13: a collective timed out: ALLREDUCE (sequence number 21668) after 1801 s", " 33%|###  | 24/72 [01:08<00:00][E ProcessGroupNCCL.cpp:475] [Rank 13] "
     "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=21668, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800522 milliseconds before timing out."),
    ("ms-swift 7992", "rank 0: NCCL's watchdog got stuck for 480 s in a CUDA or NCCL call", "[rank0]:[E205 18:11:06.37 ProcessGroupNCCL.cpp:1870] [PG ID 14 PG GUID 117(EXPERT) Rank 0] ProcessGroupNCCL's watchdog "
     "got stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically"),
    ("torchrun before its summary", f"rank 1: {BY_SIGKILL}", "E0819 19:29:01.1 1 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 1168) of binary: /opt/conda/bin/python"),
]  # fmt: skip


@pytest.mark.parametrize(("begins", "text"), [row[1:] for row in LINES], ids=[row[0] for row in LINES])
def test_a_line_that_says_it_all(tmp_path: Path, begins: str, text: str) -> None:
    cause = begins + text.partition("«")[2].partition("»")[0]
    text = text.replace("«", "").replace("»", "")
    assert reason(left(tmp_path, {"log": f"{steps(1)}{text}\n"})) == cause


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (255, "ended with exit code 255"),
        (-40, "killed by signal 40"),
        (137, BY_SIGKILL),  # a shell's code of a signal
        (-4, "killed by SIGILL (an instruction that the processor does not have)"),
        (-7, "killed by SIGBUS (often no space left in /dev/shm)"),
    ],
)
def test_an_exit_code(tmp_path: Path, code: int, words: str) -> None:
    assert reason(left(tmp_path, {"log": summary((3, code))})) == f"rank 3: {words}"


# --- what stands in front of each line ---


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank3]: ",
        "\x1b[31m[rank3]:\x1b[0m ",
        "i.pretrain/0 [default0]:[rank3]: ",  # nemo-run's
        "2025-10-31 03:11:02,473 - SimpleTuner - INFO - [rank3]: ",
    ],
)
def test_two_ranks_that_write_at_once_by_what_stands_in_front(tmp_path: Path, prefix: str) -> None:
    lost = raised(GLOO, prefix=prefix.replace("3", "0"))
    left(tmp_path, {"log": steps(1) + mixed(raised("ValueError: mine", prefix=prefix), lost)})
    assert reason(tmp_path) == "rank 3: ValueError: mine"


# --- what a job left ---

BAD = raised("ValueError: bad")
MINE_1, MINE_2 = (raised("ValueError: mine", prefix=f"[rank{rank}]: ") for rank in (1, 2))
#: Where it was reported; the files; the cause, or how it begins where it ends with dots.
CASES: list[tuple[str, dict[str, str], str]] = [
    # --- a collective timed out ---
    ("LlamaFactory 7396: the watchdog, no traceback", {"err0": watchdog(0), "err1": watchdog(1), "log": summary((1, -6), (0, -6))}, f"rank 0: {TIMED_OUT}"),
    ("a group's rank is not the job's, and another group's line is not the group's",
     {"slurm": "[rank9]:[E218 04:54:22.86 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=_REDUCE_SCATTER_BASE, NumelIn=8, NumelOut=1, "
      "Timeout(ms)=600000) ran for 600061 milliseconds before timing out.\n[rank9]:[E218 04:54:22.87 ProcessGroupNCCL.cpp:2268] [PG ID 3 PG GUID 51(mesh_fsdp) Rank 1]  failure detected by watchdog at work sequence id: 7 "
      "PG status: last enqueued work: 9, last completed work: 6\n[rank9]:[E218 04:54:22.88 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 9] Received a dump signal due to a collective timeout from this local rank\n"},
     "rank 9: a collective timed out: _REDUCE_SCATTER_BASE (sequence number 7) of the FSDP group (fsdp) after 600 s"),
    # --- kernels and native code ---
    ("torchtitan 3877: DeepEP V2 combine at EP 64, then what a trapped kernel leaves",
     {**{f"out{r}": f"DeepEP combine (scale-up wait) timeout, scale-out: 6/8, scale-up: {r}/8, channel: 0, lane: 3, recv: 0, tail: -1 (wait=0)\n" * 999 for r in range(3)},
      **{f"json{r}": recorded("torch.AcceleratorError: CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronous") for r in range(3)}},
     "rank 0: DeepEP combine (scale-up wait) timeout, scale-out: 6/8, scale-up: 0/8, channel: 0, lane: 3, recv: 0, tail: -1 (wait=0)"),
    ("Megatron-Bridge 1335: DeepEP waits on the host", {"err0": raised(LOST, prefix="[rank0]: "), "err4": raised("RuntimeError: DeepEP error: timeout (dispatch CPU)", prefix="[rank4]: ")},
     "rank 4: RuntimeError: DeepEP error: timeout (dispatch CPU)"),
    ("nnUNet 1674: a kernel's assertion, once for each thread",
     {"err3": "../aten/src/ATen/native/cuda/ScatterGatherKernel.cu:365: operator(): block: [6250,0,0], thread: [126,0,0] Assertion `idx_dim >= 0 && \"index out of bounds\"` failed.\n" * 500
      + raised("torch.AcceleratorError: CUDA error: device-side assert triggered\nCUDA kernel errors might be\nCompile with `TORCH_USE_CUDA_DSA`", prefix="[rank3]: "), "err0": watchdog(0)},
     'rank 3: a CUDA kernel\'s assertion failed (ScatterGatherKernel.cu:365): idx_dim >= 0 && "index out of bounds"'),
    ("simple_GRPO 46: an illegal memory access, by C++ alone",
     {"err5": "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported\n",
      "err0": watchdog(0), "log": summary((0, -6), (5, -6))}, "rank 5: c10::AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("a watchdog's log line, and the time-outs of others", {"log": "[rank3]:[E218 04:54:22.86 ProcessGroupNCCL.cpp:1895] [PG ID 2 PG GUID 5 Rank 3] Process group watchdog thread terminated with exception: "
      "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported\n\n" + watchdog(0)}, "rank 3: CUDA error: an illegal memory access was encountered"),
    ("open-gpu-kernel-modules 1150: an Xid of the link explains the ranks' CUDA errors",
     {"dmesg.txt": "[19277.97] NVRM: Xid (PCI:0000:97:00): 145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a0c2)\n[19277.99] NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149\n",
      "json2": recorded("torch.AcceleratorError: CUDA error: unspecified launch failure")}, "Xid (PCI:0000:97:00): 145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a0c2)"),
    ("an Xid that a program causes is not more than its exception", {"dmesg": "[19277.97] NVRM: Xid (PCI:0000:97:00): 31, pid=12, name=python3, Ch 00000008, MMU Fault: ENGINE GRAPHICS\n",
      "json2": recorded("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")}, "rank 2: torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("pytorch 72086: a segmentation fault with Python's own frames",
     {"err1": "Fatal Python error: Segmentation fault\n\nThread 0x00007f57168aa700 (most recent call first):\n  <no Python frame>\n\n"
      f'Current thread 0x00007f4ebf9d3740 (most recent call first):\n  File "{LIB}/deep_ep/buffers/elastic.py", line 331 in combine\n'
      f'  File "{LIB}/torchtitan/train.py", line 53 in step\n', "log": summary((0, -6), (1, -11))}, "rank 1: Segmentation fault (deep_ep/buffers/elastic.py:331 in combine)"),
    ("the kernel saw it", {"dmesg.log": "Nov 28 10:00:00 gpu-12 kernel: python3[3608001]: segfault at 0 ip 00007f sp 00007f error 4 in libnccl.so.2.27.5[7f3+1f]\n", "log": summary((0, -6), (1, -11))},
     "rank 1: killed by SIGSEGV: python3[3608001]: segfault at 0 ip 00007f sp 00007f error 4 in libnccl.so.2.27.5"),
    ("MGSV 2: the kernel ended a rank", {"dmesg": "[Sat Nov 28 10:00:00 2026] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,task_memcg=/slurm,task=python,pid=3608002,uid=1\n"
      "[Sat Nov 28 10:00:00 2026] Memory cgroup out of memory: Killed process 3608002 (python) total-vm:9kB, anon-rss:123456kB, file-rss:0kB\n", "log": summary((0, -6), (2, -9))},
     "rank 2: killed by SIGKILL: out of memory: oom-kill:constraint=CONSTRAINT_MEMCG task=python,pid=3608002"),
    # --- links ---
    ("nccl 1814: a link, told in the exception of the watchdog",
     {"err4": "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank 4] Process group watchdog thread terminated "
      "with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error\nLast error:\n"
      "NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=1 vendor_err=129\nException raised from check at X.cpp:1\nframe #0: f\n",
      "err0": raised(LOST, prefix="[rank0]: "), "log": summary((4, -6), (0, 1))},
     "rank 4: c10::DistBackendError: NCCL error: remote process exited or there was a network error, NCCL version 2.27.5 Last error: "
     "NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=1 vendor_err=129"),
    ("nccl 1664: a link that gave up", {"err8": "host-8:984:1257 [4] NCCL WARN NET/IB: Got completion from peer 7.6.13.83<36315> with status=12 opcode=1 len=0 vendor err 129 (Send)\n" + raised(LOST, prefix="[rank8]: "),
      "err0": raised(GLOO, prefix="[rank0]: ")}, "rank 8: NCCL: NET/IB: Got completion from peer 7.6.13.83<36315> with status=12 opcode=1 len=0 vendor err 129 (Send) (host host-8, GPU 4)"),
    ("nccl 905: a link that flaps, and those who wait for it", {"slurm": steps(1) + "gpu-1:62:63 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error\n"
      "gpu-2:62:63 [4] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got completion from peer gpu-1<37948> with error 12, opcode 2, len 1, vendor err 129\n" + watchdog(0)},
     "NCCL: NET/IB : Got async event : port error (host gpu-1, GPU 0)"),
    ("AWS' network", {"slurm": steps(1) + "gpu-1:62:63 [1] NCCL WARN NET/OFI Request 0x7f completed with error. RC: 5. Error: 113 (unreachable remote), Completed length: 0\n" + watchdog(0)},
     "NCCL: NET/OFI Request 0x7f completed with error. RC: 5. Error: 113 (unreachable remote), Completed length: 0 (host gpu-1, GPU 1)"),
    ("a link to a process that gave up", {"slurm": watchdog(0) + "gpu-2:62:63 [4] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got completion from peer gpu-1<37948> with error 12, opcode 2\n"}, f"rank 0: {TIMED_OUT}"),
    ("nccl: no interface", {"err0": "gpu-1:62:63 [1] misc/socket.cc:12 NCCL WARN Bootstrap : no socket interface found\n" + raised(LOST, prefix="[rank0]: ")},
     "rank 0: NCCL: Bootstrap : no socket interface found (host gpu-1, GPU 1)"),
    ("nccl 296: ranks do not agree", {"slurm": "gpu-1:62:63 [1] init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 39.\n"
      + raised("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.", prefix="[rank3]: ")},
     "NCCL: Mismatched collective detected, please check your collective calls at and around rank 39. (host gpu-1, GPU 1)"),
    # --- exceptions ---
    ("CUDA out of memory; the others lose their peer",
     {"slurm": steps(1, 2) + raised(GLOO, prefix="[rank0]:[rank0]: ")
      + raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.50 GiB. GPU 5 has a total capacity of 79.11 GiB", prefix="[rank5]:[rank5]: ")},
     "rank 5: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.50 GiB. GPU 5 has a total capacity of 79.11 GiB"),
    ("xpk 965: NCCL without room in /dev/shm, by torchrun's summary alone",
     {"log": summary((0, 1), trace=HEADER + "\n    File \"/app/torchtitan/utils.py\", line 140, in set_determinism\n      torch.distributed.broadcast(seed_tensor, src=0)\n"
      "  torch.distributed.DistBackendError: NCCL error in: /p/NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.3\n"
      "  ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n  Last error:\n"
      "  Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)")},
     "rank 0: torch.distributed.DistBackendError: NCCL error in NCCLUtils.cpp:77: unhandled system error, NCCL version 2.27.3 Last error: "
     "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)"),
    ("tracebacks of several ranks in torchrun's summary", {"log": summary((0, 1), (1, 1), trace=f'{HEADER}\n    File "/a.py", line 1, in f\n      g()\n  ValueError: mine')}, "rank 1: ValueError: mine"),
    ("torchtitan 2239: the Hub refuses a worker", {"json1": recorded(
        "huggingface_hub.errors.HfHubHTTPError: Caught HfHubHTTPError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        + f'  File "{LIB}/huggingface_hub/utils/_http.py", line 300, in f\n    response.raise_for_status()\n' * 9
        + "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/datasets/c4")},
     "rank 1: huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/datasets/c4"),
    ("torchtitan 3338: a download's connection was reset; the others timed out",
     {"err3": chained(raised("ConnectionResetError: [Errno 104] Connection reset by peer", frame=f"{LIB}/urllib3/connectionpool.py", prefix="[rank3]: "),
                      raised("requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
                             frame=f"{LIB}/requests/adapters.py", prefix="[rank3]: "), prefix="[rank3]: ", words=BETWEEN), "err0": watchdog(0)},
     "rank 3: requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"),
    ("a download by the exception's bare name", {"json3": recorded("ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'reset by peer'))"), "json0": recorded(GLOO)},
     "rank 3: ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'reset by peer'))"),
    ("a socket of Python is no rank's", {"json3": recorded("ConnectionResetError: [Errno 104] Connection reset by peer", time=1767000009), "json0": recorded(GLOO)},
     "rank 3: ConnectionResetError: [Errno 104] Connection reset by peer"),
    ("a gated repository", {"json0": recorded("huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-6)\n\nCannot access gated repo for url "
      "https://huggingface.co/meta/resolve/main/config.json.\nAccess to model meta is restricted.")},
     "rank 0: huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-6) Cannot access gated repo for url "
     "https://huggingface.co/meta/resolve/main/config.json. Access to model meta is restricted."),
    ("a message ends with its paragraph", {"err1": raised("ValueError: first\nsecond line\n\nthird line")}, "rank 1: ValueError: first"),
    ("boilerplate behind a message", {"json0": recorded("RuntimeError: CUDA error:\n  device-side assert\n\nCompile with `TORCH_USE_CUDA_DSA`\t.")}, "rank 0: RuntimeError: CUDA error: device-side assert"),
    ("torchtitan 2124: an exception of several lines", {"err0": raised(
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nLoweringException: AssertionError: expand size mismatch for _grouped_mm offs\n"
        "  target: aten._grouped_mm.default\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace", prefix="[rank0]: ")},
     "rank 0: torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: LoweringException: AssertionError: expand size mismatch for _grouped_mm offs target: aten._grouped_mm.default"),
    ("the same without prefixes, warnings after it", {"err0": raised("torch._inductor.exc.InductorError: LoweringException: NoValidChoicesError: No choices to select.\n  target: flex_attention\n")
      + "[W1128 10:00:00 ProcessGroupNCCL.cpp:1479] Warning: WARNING: destroy_process_group() was not called\nand more of it\n"},
     "rank 0: torch._inductor.exc.InductorError: LoweringException: NoValidChoicesError: No choices to select. target: flex_attention"),
    ("inductor's subprocess", {"err0": raised("torch._inductor.exc.InductorError: SubprocException: An exception occurred in a subprocess:\n\nTraceback (most recent call last):\n"
      '  File "/opt/x/compiler.py", line 400, in make_cubin\n    run()\n' "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
      "ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'\n", prefix="[rank0]: ")},
     "rank 0: triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error `ptxas` stderr: ptxas fatal : Value 'sm_103a' is not defined for option 'gpu-name'"),
    ("torchtitan 2254: no message", {"err0": raised("AssertionError", prefix="[rank0]: ", frame=f"{LIB}/torchtitan/distributed/context_parallel/api.py", source="assert isinstance(masks, dict)")},
     "rank 0: AssertionError (torchtitan/distributed/context_parallel/api.py:12 in train: assert isinstance(masks, dict))"),
    ("torchtitan 774: KeyError, by torchrun's prefix and PyTorch's", {"slurm": raised("KeyError: 6", prefix="[rank3]:[rank3]: ", frame=f"{LIB}/torch/distributed/pipelining/schedules.py",
      source="stage = stages[index]") + "[rank2]:[rank2]:E0103 05:54:18.99 4 site.py:1] something\n"},
     "rank 3: KeyError: 6 (torch/distributed/pipelining/schedules.py:12 in train: stage = stages[index])"),
    ("fields that pydantic refuses", {"err0": raised("pydantic_core._pydantic_core.ValidationError: 1 validation error for Job\nlr\n  Input should be a valid number")},
     "rank 0: pydantic_core._pydantic_core.ValidationError: 1 validation error for Job lr Input should be a valid number"),
    ("an endless message", {"json0": recorded("ValueError: " + "x" * 10_000)}, "rank 0: ValueError: xxx…"),
    ("an older torch writes the message alone", {"json0": '{"message": "it broke"}'}, "rank 0: it broke"),
    # --- chains of exceptions, and whose counts ---
    ("out of the first exception, a second", {"err2": chained(MINE_2, raised(LOST, prefix="[rank2]: "), prefix="[rank2]: ", words=BETWEEN)}, "rank 2: ValueError: mine"),
    ("a stage of a pipeline that ran out of memory", {"err2": chained(raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB", prefix="[rank2]: "),
        raised("RuntimeError: \n            [Stage 1] failed to run forward:\n            args: ('Tensor(torch.Size([1, 2048]), grad=False)',)\n            kwargs: {}", prefix="[rank2]: "), prefix="[rank2]: ")},
     "rank 2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB"),
    ("want of memory under another name", {"err2": chained(raised("torch.OutOfMemoryError: CUDA out of memory."), raised("RuntimeError: training failed"))}, "rank 2: RuntimeError: training failed, caused by torch.OutOfMemoryError: CUDA out of memory."),
    ("a full disk, then what the writer says", {"err0": chained(raised("OSError: [Errno 28] No space left on device"),
        raised("RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598"), words=BETWEEN)}, "rank 0: OSError: [Errno 28] No space left on device"),
    ("a worker that exited says less than why", {"err0": chained(raised("RuntimeError: DataLoader worker (pid 1166833) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."),
        raised("RuntimeError: DataLoader worker (pid(s) 1166833) exited unexpectedly"))},
     "rank 0: RuntimeError: DataLoader worker (pid 1166833) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."),
    ("the store cannot be reached", {"log": chained(raised("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500)."),
        raised("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details."))},
     "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500)."),
    ("pytorch 152310: a checkpoint's exception names the rank", {"err0": raised("torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])\n"
      "Traceback (most recent call last): (RANK 3)\n  File \"/x/writer.py\", line 9, in write\n    f()\nOSError: [Errno 122] Disk quota exceeded", prefix="[rank0]: ")}, "rank 3: OSError: [Errno 122] Disk quota exceeded"),
    ("a thread's exception and one at Python's end are no causes", {"err0": "Exception in thread Thread-1:\n" + raised("ValueError: of a thread") + raised("ValueError: mine")
      + "Exception ignored in: <function Pool.__del__>\n" + raised("ImportError: sys.meta_path is None")}, "rank 0: ValueError: mine"),
    ("a thread's exception, where nothing else says why", {"err0": "Exception in thread Thread-1 (_save):\n" + raised("OSError: [Errno 28] No space left on device"), "log": summary((0, 1))},
     "rank 0: OSError: [Errno 28] No space left on device"),
    ("lines of a logger beside it", {"err0": "W1128 import.py: UserWarning: an Error: nothing\nRuntimeError: only a message of a logger\n"
      + raised("moelab.errors.BadInput: unknown field 'x'") + "some more output\nValueError: not an exception either\n"}, "rank 0: moelab.errors.BadInput: unknown field 'x'"),
    ("words that nobody has seen yet", {"json0": recorded("RuntimeError: some words of a communication library"), "log": summary((1, -9), (0, 1))}, f"rank 1: {BY_SIGKILL}"),
    ("a killed rank is not given the words of another", {"json0": recorded("RuntimeError: some words of a library"), "log": summary((1, -11))}, "rank 1: killed by SIGSEGV"),
    ("ranks that torchrun ended", {"json1": recorded("ValueError: mine"), "log": summary((0, -15), (1, 1))}, "rank 1: ValueError: mine"),
    ("one that torchrun had to kill", {"json1": recorded("ValueError: mine"), "log": "W1128 api.py:1049] Unable to shutdown process 3608000 via 15, forcefully exiting via 9\n" + summary((0, -9), (1, 1))}, "rank 1: ValueError: mine"),
    ("an abort says more than a lost peer", {"json1": recorded(GLOO), "log": summary((0, -6), (1, 1))}, "rank 0: killed by SIGABRT"),
    ("only the last attempt counts", {"json0": recorded("ValueError: of the first"), "logs/none_x/attempt_1/0/stderr.log": raised("ValueError: of the second")}, "rank 0: ValueError: of the second"),
    # --- numbers of ranks on several nodes ---
    ("without torchrun's summary", {"logs/x/attempt_0/1/stderr.log": raised("ValueError: mine", prefix="[rank9]: "), "logs/x/attempt_0/1/error.json": recorded(GLOO)}, "rank 9: ValueError: mine"),
    ("by folders alone", {**{f"logs/node{node}/x/attempt_0/{rank}/stderr.log": "" for node in (0, 1) for rank in (0, 1)}, "logs/node1/x/attempt_0/1/error.json": recorded("ValueError: mine")}, "rank 3: ValueError: mine"),
    ("of a second node alone", {"log": summary((9, 1), local=8), "json1": recorded("ValueError: mine")}, "rank 9: ValueError: mine"),
    ("by torchrun's numbers", {"log": summary((9, 1), local=8), "logs/node1/x/attempt_0/1/error.json": recorded("ValueError: mine")}, "rank 9: ValueError: mine"),
    ("a task number before each line", {"log": summary((9, 1), (13, -9), prefix="1: ", local=8), "logs/node1/x/attempt_0/1/error.json": recorded(GLOO)}, f"rank 13: {BY_SIGKILL}"),
    ("torchrun's prefix has the local rank", {"slurm": raised("ValueError: mine", prefix="1: [default5]:") + summary((9, 1), (13, 1), prefix="1: ", local=8)}, "rank 13: ValueError: mine"),
    # --- Slurm, and what a later launch did ---
    ("lumen-rl: a node", {"log": "srun: error: Node failure on gpu-12\nsrun: Job step aborted: Waiting up to 92 seconds for job step to finish.\n"
      "slurmstepd: error: *** STEP 123.0 ON gpu-01 CANCELLED AT 2026-10-24T18:38:53 DUE TO NODE gpu-12 FAILURE ***\n" + raised(LOST, prefix="[rank0]: ")}, "node gpu-12 failed"),
    ("zetta_utils 671: time", {"slurm": steps(1, 2) + TIME_LIMIT + raised("torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15")}, "Slurm's time limit was reached"),
    ("what is raised for the signal of a time limit", {"slurm": steps(1, 2) + TIME_LIMIT + raised("concurrent.futures.process.BrokenProcessPool: A process was terminated abruptly", prefix="[rank2]: ")}, "Slurm's time limit was reached"),
    ("a job that hung until its time limit", {"slurm": steps(1, 2) + MINE_2 + TIME_LIMIT}, "rank 2: ValueError: mine"),
    ("a launch after a time limit", {"slurm": steps(1, 2) + TIME_LIMIT + titan_line(99, "Starting job: x") + MINE_2}, "rank 2: ValueError: mine"),
    ("a launch after one that trained to its end", {"slurm": steps(1, 2) + titan_line(9, "Training completed"),
      "slurm-2.out": titan_line(99, "Starting job: x") + MINE_2}, "rank 2: ValueError: mine"),
    ("a container that was not there", {"log": "Error response from daemon: No such container: a\n" + MINE_2}, "rank 2: ValueError: mine"),
    ("other ranks go on for two steps", {"log": steps(1) + MINE_1 + steps(2, 3)}, "rank 1: ValueError: mine"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "cause"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_cause(tmp_path: Path, files: dict[str, str], cause: str) -> None:
    shown = reason(left(tmp_path, files))
    assert shown.startswith(cause[:-1]) if cause.endswith("…") else shown == cause


GOT_OVER: dict[str, dict[str, str]] = {
    "a retry that helped": {"log": steps(1) + raised("OSError: 503 Server Error") + steps(2, 3, 4, 5)},
    "torchrun started it again": {"log": steps(1) + summary((0, 1)) + steps(1, 2, 3, 4)},
    "Slurm started it again": {"log": steps(1) + TIME_LIMIT + steps(1, 2, 3)},
    "after the end": {"log": steps(1, 2) + watchdog(0) + "[titan] Training completed\n"},
    "before the end, elsewhere": {"log": steps(1, 2) + "[titan] Training completed\n", "slurm": raised("requests.exceptions.HTTPError: 503")},
    "processes of others": {"log": steps(1, 2), "dmesg": "[1.2] Out of memory: Killed process 77 (firefox) total-vm:9kB\n[1.3] nvidia-smi[44]: segfault at 0 ip 0 sp 0 error 4 in libc.so[7f]\n"},
    "a container's warning": {"log": steps(1, 2), "slurm": "slurmstepd: error: pyxis: couldn't get list of existing containers\n"},
    "a warning": {"log": steps(1, 2) + "gpu-1:62:63 [1] init.cc:12 NCCL WARN NET/IB : No device found, timeout ignored.\n"},
    "Python's end": {"log": steps(1, 2) + "Exception ignored in: <function Pool.__del__>\n" + raised("ImportError: sys.meta_path is None")},
    "a thread's end": {"log": steps(1, 2) + "Exception in thread Thread-1:\n" + raised("ValueError: of a thread")},
    "an old Xid": {"log": steps(1, 2), "dmesg": "[19277.97] NVRM: Xid (PCI:0000:97:00): 79, GPU has fallen off the bus.\n"},
    "a greeting": {"log": steps(1, 2) + "DeepEP initialized with NCCL version: 2.30.4 (loaded library)\n"},
}  # fmt: skip


@pytest.mark.parametrize("name", GOT_OVER)
def test_what_a_job_got_over_is_no_failure(tmp_path: Path, name: str) -> None:
    (run,) = collect(left(tmp_path, GOT_OVER[name]))
    assert (run.status.state, run.status.reason) == (State.UNKNOWN, None)


@pytest.mark.parametrize(
    "noise",
    [
        GLOO,
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited",
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",  # OpenRLHF 1040
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "RuntimeError: NCCL communicator was aborted on rank 0",
        "RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
    ],
)
def test_a_lost_peer_is_a_consequence(tmp_path: Path, noise: str) -> None:
    left(tmp_path, {"json0": recorded(noise, time=1)})
    assert reason(tmp_path).startswith(f"rank 0: {noise[:20]}")  # for want of a better one
    left(tmp_path, {"json1": recorded("torch.OutOfMemoryError: CUDA out of memory.", time=2)})
    assert reason(tmp_path) == "rank 1: torch.OutOfMemoryError: CUDA out of memory."


def test_the_earlier_of_two_causes_and_the_lower_rank_in_a_tie(tmp_path: Path) -> None:
    left(tmp_path, {f"json{rank}": recorded(f"ValueError: {rank}", time=60 - rank) for rank in (2, 10)})
    assert reason(tmp_path) == "rank 10: ValueError: 10"
    left(tmp_path, {"json2": recorded("ValueError: 2", time=50), "err1": raised("ValueError: 1")})
    assert reason(tmp_path) == "rank 2: ValueError: 2"
    os.utime(tmp_path / OF_RANKS / "1/stderr.log", (50.9, 50.9))  # of whole seconds the same
    assert reason(tmp_path) == "rank 1: ValueError: 1"
    left(tmp_path, {"log": summary((2, 1), (1, 1), (10, 1))})
    assert reason(tmp_path) == "rank 10: ValueError: 10"  # as torchrun saw them


# --- files ---


def test_torch_writes_error_files_as_the_tests_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    left(tmp_path, {"out3": ""})
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / OF_RANKS / "3/error.json"))
    try:
        raise KeyError("x")
    except KeyError as error:
        ErrorHandler().record_exception(error)
    assert reason(tmp_path).startswith("rank 3: KeyError: 'x' (unit/test_failure_cases.py:")
    assert reason(tmp_path).endswith('raise KeyError("x"))')


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "3", '{"message": {}}', '{"message": {"extraInfo": {}}}', '{"message": 5}',
     '{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}', "\udcff"],
)  # fmt: skip
def test_a_torn_error_file_falls_back_to_standard_error(tmp_path: Path, content: str) -> None:
    left(tmp_path, {"err0": raised("OSError: [Errno 28] No space left on device")})
    (tmp_path / OF_RANKS / "0/error.json").write_text(content, errors="surrogateescape")
    assert reason(tmp_path) == "rank 0: OSError: [Errno 28] No space left on device"


def test_a_huge_standard_error_and_a_huge_log_are_read_from_their_end(tmp_path: Path) -> None:
    left(tmp_path, {"err0": "", "log": ""})
    for file in (tmp_path / OF_RANKS / "0/stderr.log", tmp_path / "train.log"):
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


def dump(*entries: tuple[int, str, str], ranks: str = "[0, 1, 2, 3]") -> dict[str, Any]:
    """A dump as torch 2.14 writes it: (sequence number, operation, state) of each collective."""
    return {
        "version": "2.10",
        "pg_config": {"11": {"name": "11", "desc": "ep", "ranks": ranks}},
        "pg_status": {},
        "entries": [
            {"record_id": number, "pg_id": 11, "process_group": ("11", "ep"), "collective_seq_id": number, "p2p_seq_id": 0,
             "op_id": number, "profiling_name": f"nccl:{operation}", "time_created_ns": 1000 + number, "input_sizes": [[4]],
             "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"], "state": state,
             "retired": state == "completed", "timeout_ms": 100000, "is_p2p": False, "frames": []}
            for number, operation, state in entries
        ],
    }  # fmt: skip


DONE, WAITING = (215, "all_to_all", "completed"), (216, "all_to_all", "started")
WAITS, MISSES = dump(DONE, WAITING), dump(DONE)
OTHER = dump(DONE, (216, "_allgather_base", "scheduled"))
ELSEWHERE = dump((9, "all_reduce", "completed"), ranks="[2, 3]")
CUT_OFF = pickle.dumps(MISSES)[:-20]
SILENT = "rank 3: left no flight-recorder dump, and may not have entered all_to_all, number 216 of group ep, in which ranks 0-2 waited"


@pytest.mark.parametrize(
    ("dumps", "name", "cause"),
    [
        *[([WAITS, WAITS, MISSES, WAITS], name, "rank 2: did not enter all_to_all, number 216 of group ep, in which ranks 0-1, 3 waited")
          for name in ("comm_traces/rank_{}", "comm_traces/nccl_trace_rank_{}.json")],
        ([*[WAITS] * 5, MISSES, *[WAITS] * 6], "t/rank_{}", "rank 5: did not enter all_to_all, number 216 of group ep, in which ranks 0-4, 6-11 waited"),
        ([WAITS, OTHER, WAITS, WAITS], "t/rank_{}", "ranks disagree on collective number 216 of group ep: all_to_all: ranks 0, 2-3; _allgather_base: rank 1"),
        ([WAITS] * 3, "t/rank_{}", SILENT),
        ([WAITS, WAITS, WAITS, CUT_OFF], "t/rank_{}", SILENT),
        ([dump(DONE, WAITING, ranks="[0, 1]"), dump(DONE, ranks="[0, 1]"), ELSEWHERE, ELSEWHERE], "t/rank_{}",
         "rank 1: did not enter all_to_all, number 216 of group ep, in which rank 0 waited"),  # a group of the same name on other ranks
    ],
)  # fmt: skip
def test_the_rank_that_did_not_enter_a_collective(tmp_path: Path, dumps: list[Any], name: str, cause: str) -> None:
    left(tmp_path, {f"err{rank}": watchdog(rank) for rank in (0, 1, 3)})
    for rank, content in enumerate(dumps):
        file = tmp_path / name.format(rank)
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps(content).encode() if file.suffix else pickle.dumps(content, protocol=2)
        file.write_bytes(content)
    assert reason(tmp_path) == cause


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
    left(tmp_path, {"err0": watchdog(0)})
    (tmp_path / "rank_0").write_bytes(zlib.decompress(base64.b64decode(packed)))
    entered = [(entry.rank, entry.operation) for entry in flight_recorder._entries(tmp_path) if entry.number]
    assert entered == [(0, "all_reduce"), (0, "barrier")]
    assert reason(tmp_path) == f"rank 0: {TIMED_OUT}"


def test_a_dump_calls_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path}/called",)

    left(tmp_path, {"err0": watchdog(0)})
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert reason(tmp_path) == f"rank 0: {TIMED_OUT}"
    assert not (tmp_path / "called").exists()


def test_a_pickle_that_asks_for_gigabytes_gets_none(tmp_path: Path) -> None:
    left(tmp_path, {f"err{rank}": watchdog(rank) for rank in (0, 1, 3)})
    for rank, content in enumerate([WAITS, WAITS, MISSES, WAITS]):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(content))
    for name, content in {
        "rank_4": b"\x80\x02Nr\xff\xff\xff\x7f.",  # the last of two billion places of its memo
        "rank_5": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"),  # a text of a terabyte
        "rank_6": b"[" * 1_000_000,
        "rank_7.json": b'{"a":' * 100_000,
    }.items():
        (tmp_path / name).write_bytes(content)
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert reason(tmp_path).startswith("rank 2: did not enter all_to_all")
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert used <= max(begun, flight_recorder._MOST_MEMORY >> 10)


# --- divergence, broken lines, chains ---


def test_torchtitans_non_finite_stop_is_a_divergence(tmp_path: Path) -> None:
    """pytorch/torchtitan#4226: the words stand in a kernel's assertion, once for each thread."""
    words = "Loss or gradient norm is not finite on at least one rank at step 4"
    kernel = "/pytorch/aten/src/ATen/native/cuda/TensorCompare.cu:112: _assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] "
    trapped = raised("torch.AcceleratorError: CUDA error: device-side assert triggered", prefix="[rank0]: ")
    (run,) = collect(left(tmp_path, {"log": steps(1, 2, 3) + f"{kernel}Assertion `{words}` failed.\n" * 4 + trapped}))
    assert run.diverged == run.status.reason == f"a CUDA kernel's assertion failed (TensorCompare.cu:112): {words}"
    assert run.to_json()["diverged"] == run.diverged


@pytest.mark.parametrize("width", [72, 80, 100, 120, 132])
@pytest.mark.parametrize("quoted", ["", "> "])
def test_a_cause_whose_lines_a_terminal_broke(tmp_path: Path, width: int, quoted: str) -> None:
    """modelscope/ms-swift#5409: a watchdog's lines of a terminal, broken in the middle of a word."""
    lines = [line for rank in (0, 1) for line in watchdog(rank).splitlines()]
    broken = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    left(tmp_path, {"log": steps(1, 2, 3) + "".join(f"{quoted}{line}\n" for line in broken)})
    assert reason(tmp_path).startswith("rank 0: a collective timed out: ALLTOALL_BASE (sequence number 216) of the")


def test_lines_of_one_length_are_not_joined(tmp_path: Path) -> None:
    frame = (
        f'  File "{LIB}/torch/nn/modules/module.py", line 1775, in _wrapped_call_impl\n    return self._call(*args)\n'
    )
    waits = "".join(
        f"DeepEP dispatch NVL receiver timeout, channel: {n}, RDMA: 1, nvl: 0, src nvl: 7\n" for n in range(9)
    )
    left(tmp_path, {"log": steps(1) + waits + f"{HEADER}\n{frame * 9}ValueError: mine\n"})
    assert reason(tmp_path) == "ValueError: mine"


def test_what_a_kernel_prints_from_each_thread_is_read_in_a_moment() -> None:
    begun = time.process_time()
    line = "DeepEP combine (scale-up wait) timeout, scale-out: 6/8, scale-up: 0/8, channel: 0, lane: 3"
    assert str(failure.cause(None, f"{line}\n" * 100_000)) == line
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("first", "last", "cause"),
    [
        ("KeyError: 'lr'", "RuntimeError: cannot build the optimizer", "RuntimeError: cannot build the optimizer, caused by KeyError: 'lr' (torchtitan/train.py:12 in train: self.step())"),
        ("OSError: [Errno 28] No space left", "RuntimeError: saving failed: No space left", "RuntimeError: saving failed: No space left"),
        ("ValueError: bad", GLOO, "ValueError: bad"),
        (GLOO, "ValueError: bad", "ValueError: bad"),
    ],
)  # fmt: skip
def test_the_first_of_a_chain_stands_beside_the_last_unless_one_is_a_consequence(
    tmp_path: Path, first: str, last: str, cause: str
) -> None:
    left(tmp_path, {"err1": chained(raised(first), raised(last))})
    assert reason(tmp_path) == f"rank 1: {cause}"
    left(tmp_path, {"err1": chained(raised(first), raised("ValueError: between"), raised("TypeError: last"))})
    assert (", caused by" in reason(tmp_path), "between" in reason(tmp_path)) == (True, first == GLOO)


# --- folders ---


def test_the_logs_of_ranks_are_one_run_with_the_loss_of_the_rank_that_has_it(tmp_path: Path) -> None:
    without = steps(1, 2, 3).replace("loss:  8.9", "loss: -1.0").replace("60.00GiB", "63.00GiB")
    left(tmp_path, {"err0": without, "out0": "", "err1": steps(1, 2, 3, rank=1)})
    left(tmp_path / "flat", {"out.0": without, "out.1": steps(1, 2, 3, rank=1)})
    for folder in (tmp_path / "logs", tmp_path / "flat"):
        (run,) = collect(folder)
        assert (run.status.state, run.segments) == (State.UNKNOWN, 1)
        assert run.rows[["loss", "memory_gib"]].values.tolist() == [[loss, 63.0] for loss in (8.99, 8.98, 8.97)]


def test_a_log_beside_events_tells_how_it_ended(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step in (1, 2):
            writer.add_scalar("loss_metrics/global_avg_loss", 9 - step / 100, step)
            writer.add_scalar("lr/AdamW", 0.001, step)
    left(tmp_path, {"log": steps(1, 2, 3) + MINE_1})
    (run,) = collect(tmp_path)
    assert (run.status.reason, len(run.rows)) == ("rank 1: ValueError: mine", 3)


def test_several_logs_of_a_folder_are_one_run_unless_their_losses_differ(tmp_path: Path) -> None:
    left(tmp_path, {"log": steps(1, 2, 3), "slurm": "module load cuda\n" + steps(1, 2)})
    (run,) = collect(tmp_path)
    assert (len(run.rows), run.segments) == (3, 1)
    left(tmp_path, {"slurm-2.out": steps(4, 5)})  # a requeued job goes on in a file of its own
    assert collect(tmp_path)[0].rows["step"].tolist() == [1, 2, 3, 4, 5]
    left(tmp_path, {"other.log": steps(1, 2, 3).replace("loss:  8", "loss:  7").replace("2026-", "2025-")})
    with pytest.raises(BadInput, match=r"two runs, of which one has a loss of 7\.99 at step 1 and another 8\.99"):
        collect(tmp_path)


def test_what_is_no_log_hides_none_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing in it is a log"):
        collect(tmp_path)
    left(tmp_path, {"log": "starting\nstep: 1  los\n"})
    with pytest.raises(BadInput, match=r"in train\.log, and no TensorBoard events; there are step lines, but"):
        collect(tmp_path)
    (run,) = collect(left(tmp_path, {"log": steps(1, 2, 3) + BAD}))
    assert (len(run.rows), run.status.reason) == (3, "ValueError: bad")


def test_a_single_log_of_a_job_that_failed_before_its_first_step(tmp_path: Path) -> None:
    (run,) = collect(left(tmp_path, {"slurm": raised("ValueError: bad", prefix="[rank1]: ")}) / "slurm-1.out")
    assert (run.status.state, run.status.reason, len(run.rows)) == (State.FAILED, "rank 1: ValueError: bad", 0)
    assert run.summary == "slurm-1: failed, 0 rows to step 0 in 0 segment(s); rank 1: ValueError: bad"
    assert run.to_json()["rows"] == []
