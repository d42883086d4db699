"""A real Slurm on this machine for the length of a test session: one controller, two nodes, no systemd, no munge.

Both nodes are this host under two names, each with four pretended CPUs and four pretended GPUs, so that the
scheduler behaves as on a cluster while everything runs on whatever cores there are. Needs root and Debian's
packages slurmctld, slurmd and slurm-client.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from launching import LAUNCHER_VARIABLES

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
NODES = ("n1", "n2")
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}

# cred_expire and the scheduler's intervals make a requeue take seconds instead of minutes;
# config_overrides lets a node have more CPUs than the machine.
_CONF = """\
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=3
MinJobAge=300
MailProg=/bin/true
PropagateResourceLimits=NONE
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=4 Sockets=1 CoresPerSocket=4 "
    "ThreadsPerCore=1 RealMemory=4000 Gres=gpu:4 State=UNKNOWN"
)


class CannotStartError(Exception):
    """Slurm is not installed, this is not root, or a daemon did not come up; the message says which."""


@dataclass(frozen=True)
class Job:
    """What `scontrol show job` says about a job."""

    state: str
    exit_code: int
    exit_signal: int
    restarts: int
    reason: str
    nodes: str


class Cluster:
    """The running Slurm. Make it with `Cluster.start`, end it with `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # What a surrounding job or launcher left would change what is tested.
        foreign = (*LAUNCHER_VARIABLES, "SBATCH_", "SRUN_", "DISTMLP_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self.environment = {**kept, "SLURM_CONF": str(folder / "slurm.conf")}

    @classmethod
    def start(cls, folder: Path) -> Cluster:
        """Configure and start the daemons below `folder`; raises CannotStartError, with nothing left running."""
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise CannotStartError(f"not installed: {', '.join(missing)} (slurmctld slurmd slurm-client)")
        if os.geteuid() != 0:
            raise CannotStartError("the daemons need root")
        cluster = cls(folder)
        cluster._configure()
        try:
            cluster.run(["slurmctld", "-f", cluster.environment["SLURM_CONF"]])
            for node in NODES:
                cluster.start_node(node)
            wait_for(lambda: cluster.run(["sinfo", "-h", "-t", "idle", "-o", "%D"]).strip() == "2", 20, "idle nodes")
        except (AssertionError, subprocess.SubprocessError) as error:
            logs = "\n".join(cluster.logs())
            cluster.stop()
            raise CannotStartError(f"{error}\n{logs}") from error
        return cluster

    def _configure(self) -> None:
        for name in ("state", "log", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        controller_port, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            _NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports, strict=True)
        )
        # MPICH names its shared memory after the job: an id of an earlier cluster would meet what a killed job left.
        first_job = int(time.time()) % 60_000_000 + 1
        (self.folder / "slurm.conf").write_text(
            _CONF.format(
                host=host, folder=self.folder, controller_port=controller_port, nodes=nodes, first_job=first_job
            )
        )
        devices = "NodeName=n[1-2] Name=gpu File=/dev/tty[0-3]\n"  # any device files: nothing opens them
        (self.folder / "gres.conf").write_text(devices)

    def start_node(self, node: str) -> None:
        """Also one that was lost: with ReturnToService=2 it serves again once it reports."""
        self.run(["slurmd", "-f", self.environment["SLURM_CONF"], "-N", node])

    def lose_node(self, node: str, job_id: str) -> None:
        """As if its power failed while it ran `job_id` alone: nothing there says goodbye. The controller is told, which
        would take minutes to find out."""
        pid_file = self.folder / f"slurmd-{node}.pid"
        lost = [int(pid_file.read_text())]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                title, variables = ((process / name).read_bytes() for name in ("cmdline", "environ"))
                of_job = f"SLURM_JOB_ID={job_id}".encode() in variables.split(b"\0")
                if of_job or title.startswith(f"slurmstepd: [{job_id}.".encode()):
                    lost.append(int(process.name))
        for pid in lost:
            _signal(pid, signal.SIGKILL)
        pid_file.unlink()
        self.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=lost"])

    def stop(self) -> None:
        """End all jobs, then the daemons, and wait until they are gone."""
        subprocess.run(["scancel", "--full", "--user=root"], env=self.environment, capture_output=True, timeout=20)
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid") if path.read_text().strip()]
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while any(_signal(pid, 0) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            _signal(pid, signal.SIGKILL)

    def logs(self) -> Iterator[str]:
        """The last lines of every daemon's log, for a failure's message."""
        for path in sorted((self.folder / "log").glob("*.log")):
            yield f"{path.name}: " + " | ".join(path.read_text(errors="replace").splitlines()[-8:])

    def run(self, command: list[str], timeout: float = 60, **variables: str) -> str:
        """Standard output of a Slurm command; fails the test with its error output when it does not return 0."""
        result = self.call(command, timeout, **variables)
        assert result.returncode == 0, f"{' '.join(command)}: exit {result.returncode}: {result.stderr}"
        return result.stdout

    def call(self, command: list[str], timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command under this Slurm, with `variables` added to its environment."""
        environment = self.environment | variables
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )

    def submit(self, *arguments: str, **variables: str) -> str:
        """`sbatch`: the id of the submitted job."""
        return self.run(["sbatch", "--parsable", *arguments], **variables).strip()

    def job(self, job_id: str) -> Job:
        """The present state of a job, or of one task of an array."""
        text = self.run(["scontrol", "--oneliner", "show", "job", job_id])
        fields = dict(re.findall(r"(\w+)=(\S*)", text))
        code, _, number = fields["ExitCode"].partition(":")
        return Job(
            fields["JobState"], int(code), int(number), int(fields["Restarts"]), fields["Reason"], fields["NodeList"]
        )

    def wait(self, job_id: str, timeout: float = 60) -> Job:
        """Wait until the job has ended for good; fails the test after `timeout` seconds."""
        wait_for(lambda: self.job(job_id).state in FINAL, timeout, f"end of job {job_id}", self._explain(job_id))
        return self.job(job_id)

    def _explain(self, job_id: str) -> Callable[[], str]:
        return lambda: "\n".join([str(self.job(job_id)), *self.logs(), self._output(job_id)])

    def _output(self, job_id: str) -> str:
        """The end of what the job printed."""
        path = re.search(r"StdOut=(\S+)", self.run(["scontrol", "--oneliner", "show", "job", job_id]))
        if not path or not Path(path[1]).exists():
            return "it printed nothing"
        return "it printed: " + Path(path[1]).read_text(errors="replace")[-2000:]


def wait_for(done: Callable[[], bool], timeout: float, what: str, explain: Callable[[], str] = str) -> None:
    """Poll until `done()`; raises AssertionError naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, f"no {what} within {timeout:.0f} s: {explain()}"
        time.sleep(0.1)


def _signal(pid: int, number: int) -> bool:
    """Send a signal; whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:  # all open at once, so that they differ
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
