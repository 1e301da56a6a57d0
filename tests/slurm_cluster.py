"""A real Slurm on this machine for tests: munged, slurmctld and one slurmd for each node, all in one short folder.

    with slurm_cluster(nodes=2, cpus=4) as cluster:
        cluster.run("sbatch", "--parsable", "script.sh")
        cluster.kill_node("n1")

Every process that belongs to it carries ``SLURM_CONF`` of its folder in its environment: by that the last ones are
found and killed, whatever a test did. Nodes have names of their own (UTS namespaces) where the caller is root; else all
have this machine's, and a job that resolves a node's name fails.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
FIRST_PORT, LAST_PORT = 20_000, 32_000  # below the ports that Linux gives out by itself
LOCK = Path(tempfile.gettempdir()) / f"moelab-slurm-{os.getuid()}.lock"

CONTROLLER = "ctl"
CREDENTIAL_S = 5  # also what a requeued job waits

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
MailProg=/bin/true
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire={credential_s}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=1
JobRequeue=1
KillWait=10
SlurmctldTimeout=30
GresTypes=gpu
{settings}
NodeName=n[0-{last}] NodeHostname=n[0-{last}] NodeAddr=127.0.0.1 Port=[{first_node_port}-{last_node_port}] {resources}
PartitionName=main Nodes=n[0-{last}] Default=YES MaxTime=INFINITE State=UP
"""
DEFAULTS = {"MinJobAge": "3600", "SlurmdTimeout": "30", "BatchStartTimeout": "30"}


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=_path())]
    return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else None


@contextmanager
def slurm_cluster(
    *, nodes: int, gpus: int = 0, cpus: int = 64, settings: dict[str, str] | None = None
) -> Iterator[SlurmCluster]:
    """Start a cluster of nodes n0, n1, … with fake GPUs, and stop it with all that it left.

    Args:
        nodes: number of slurmd.
        gpus: of each node, symbolic links to /dev/null.
        cpus: of each node, declared, whatever this machine has.
        settings: lines of slurm.conf, over :data:`DEFAULTS`.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # socket paths are limited to 107 bytes
    cluster = SlurmCluster(folder, tuple(f"n{index}" for index in range(nodes)))
    try:
        with _port_lock():
            _configure(folder, nodes, gpus, cpus, {**DEFAULTS, **(settings or {})})
            cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


class SlurmCluster:
    """A running cluster, all of it in ``folder``, with its daemons' logs; commands with ``env`` speak to it."""

    def __init__(self, folder: Path, nodes: tuple[str, ...]) -> None:
        self.folder, self.nodes = folder, nodes
        self.env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        munge = self.folder / "munge"
        files = ("--key-file", "key"), ("--socket", "munge.socket"), ("--pid-file", "pid"), ("--seed-file", "seed")
        paths = [f"{option}={munge / name}" for option, name in files]
        self._start("munged", "munged", "--foreground", "--force", *paths, f"--log-file={self.folder}/log/munged")
        self.wait_for(lambda: (munge / "munge.socket").exists(), what="munged to listen")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), what="all nodes to be idle")

    def stop(self) -> None:
        """Cancel all jobs, end the daemons and kill what is left; never raises for a cluster that is already broken."""
        with suppress(subprocess.SubprocessError, AssertionError):
            self.cancel_all()
        for name in reversed(list(self._daemons)):
            self._end(name, signal.SIGTERM)
        _signal(self.processes(), signal.SIGKILL)

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until the queue is empty; a slurmstepd outlives its slurmd."""
        self.run("scancel", f"--user={os.getuid()}")
        self.wait_for(lambda: not self.active(), seconds=20, what="cancelled jobs to end")

    def run(self, *arguments: str | Path, check: bool = True) -> str:
        """Standard output of a command that speaks to this cluster, without white space around it."""
        done = subprocess.run(
            [str(one) for one in arguments], env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{arguments}: {done.stderr}"
        return done.stdout.strip()

    def active(self) -> list[str]:
        """Ids of the jobs that are waiting, running or completing."""
        return self.run("squeue", "-h", "-o", "%i", "-t", "PD,CF,R,S,CG").split()

    def states(self) -> dict[str, str]:
        """Each node's state as sinfo says it, such as ``idle``, ``drained`` or ``down*``."""
        listed = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False)  # a controller that is starting refuses
        return dict(line.split(maxsplit=1) for line in listed.splitlines())

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of ``scontrol show job``; the first ``=`` of each word ends its name."""
        words = self.run("scontrol", "show", "job", job_id, "-o").split(" ")
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, happened: Callable[[], object], *, seconds: float = 90, what: str = "it") -> None:
        """Poll until something is true; the error shows what the controller logged last."""
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                log = self.folder / "log" / "slurmctld"
                raise AssertionError(f"waited for {what}\n{log.read_text()[-3000:] if log.exists() else ''}")
            time.sleep(0.05)

    def wait_for_state(self, job_id: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states, such as ``RUNNING``; its fields then."""
        self.wait_for(lambda: self.job(job_id)["JobState"] in states, what=f"{job_id} to be {' or '.join(states)}")
        return self.job(job_id)

    def start_controller(self) -> None:
        """Start slurmctld; a slurmd that finds none at its start asks again only a minute later."""
        self._start("slurmctld", *self._named(CONTROLLER), "slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        port = int(re.search(r"SlurmctldPort=(\d+)", (self.folder / "slurm.conf").read_text())[1])
        self.wait_for(lambda: not _is_free(port), what="slurmctld to listen")  # sinfo would try again for seconds
        self.wait_for(self.states, what="slurmctld to answer")

    def stop_controller(self) -> None:
        """End slurmctld: clients find nobody; its jobs run on.

        Killed, it would have forgotten which jobs run, and start them again; nodes that have them are then drained.
        """
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._start(node, *self._named(node), "slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"])

    def return_nodes(self, *nodes: str) -> None:
        """Start the slurmd of lost nodes and let them take jobs, a little later.

        A node that was lost is told to end its job when it is back. For :data:`CREDENTIAL_S` from then it launches no
        task of that job, requeued or not: "Job credential revoked".
        """
        for node in nodes:
            self.drain_node(node, "returning")
            self.start_node(node)
        self.wait_for(lambda: {self.states()[node] for node in nodes} == {"drain"}, what="nodes to return")
        time.sleep(CREDENTIAL_S + 2)
        for node in nodes:
            self.resume_node(node)

    def kill_slurmd(self, node: str) -> None:
        """Kill a node's daemon alone: what runs there runs on, and Slurm believes the node lost."""
        self._end(node, signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and every process of its jobs, as when a machine loses its power; needs root.

        All are stopped first: a slurmstepd would still report the death of its task.
        """
        namespace = _uts_namespace(self._daemons[node].pid)
        assert namespace not in ("", _uts_namespace(os.getpid())), "nodes have no names of their own: not root"
        there = [process for process, *_ in processes() if _uts_namespace(process) == namespace]
        _signal(there, signal.SIGSTOP)
        _signal(there, signal.SIGKILL)
        self._end(node, signal.SIGKILL)

    def drain_node(self, node: str, reason: str = "test") -> None:
        """Let a node finish what it runs and take no more."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def resume_node(self, node: str) -> None:
        """Let a drained or lost node take jobs again."""
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def processes(self) -> list[int]:
        """Every living process of this cluster: daemons, steps, tasks and commands."""
        mine = [one for one, _, variables in processes() if variables.get("SLURM_CONF") == self.env["SLURM_CONF"]]
        return [process for process in mine if process != os.getpid()]

    def _named(self, host: str) -> tuple[str, ...]:
        """Words before a command that give it a host name, and all names of the cluster to resolve."""
        if os.getuid():
            return ()
        script = f'hostname {host} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        return ("unshare", "--uts", "--mount", "sh", "-c", script, "sh")

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                arguments,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self._daemons.pop(name)
        with suppress(ProcessLookupError):
            daemon.send_signal(number)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _configure(folder: Path, nodes: int, gpus: int, cpus: int, settings: dict[str, str]) -> None:
    for name in ("munge", "state", "spool", "log", "dev"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = " ".join(f"n{index}" for index in range(nodes))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {CONTROLLER} {names}\n")
    for index in range(gpus):
        (folder / "dev" / f"nvidia{index}").symlink_to("/dev/null")
    devices = f"NodeName=n[0-{nodes - 1}] Name=gpu Type=b200 File={folder}/dev/nvidia[0-{gpus - 1}]\n" if gpus else ""
    (folder / "gres.conf").write_text(f"AutoDetect=off\n{devices}")
    sockets = 2 if cpus % 2 == 0 else 1
    cores = f"CPUs={cpus} Boards=1 SocketsPerBoard={sockets} CoresPerSocket={cpus // sockets} ThreadsPerCore=1"
    first = _free_ports(nodes + 1)
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(
            folder=folder,
            credential_s=CREDENTIAL_S,
            host=CONTROLLER if os.getuid() == 0 else socket.gethostname().split(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            port=first,
            first_node_port=first + 1,
            last_node_port=first + nodes,
            last=nodes - 1,
            resources=f"{cores} RealMemory=512000 {f'Gres=gpu:b200:{gpus}' if gpus else ''} State=UNKNOWN",
            settings="\n".join(f"{key}={value}" for key, value in settings.items()),
        )
    )


@contextmanager
def _port_lock() -> Iterator[None]:
    """Two clusters that start at once would choose the same ports."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_ports(count: int) -> int:
    """The first of so many consecutive free ports."""
    for first in range(FIRST_PORT, LAST_PORT - count, count):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise AssertionError(f"no {count} consecutive free ports between {FIRST_PORT} and {LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _uts_namespace(process: int) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/uts").readlink())
    except OSError:
        return ""


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
