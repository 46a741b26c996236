"""A SLURM cluster of the tests' own: a controller and two nodes on this machine, nothing outside one folder.

Each node is a namespace with a host name, an address and processes of its own, so that what works only where all
processes are on one host fails here as on a real cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NODES = {"n1": "127.0.0.1", "n2": "127.0.0.2"}
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "unshare", "hostname", "mount")
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
# How long a requeued job waits is cred_expire, too; usually 120 seconds.
AuthInfo=socket={root}/munge,cred_expire=5
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/%n.spool
SlurmdPidFile={root}/%n.pid
SlurmdLogFile={root}/%n.log
# No control groups: a container may not make any.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
# More processors than there are: the tests' ranks are tiny.
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
FirstJobId={job}
"""


_NAMESPACE = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
# The shell stays as the first process of the namespace, where it collects the others.
_NODE = 'hostname "$1" && mount --bind "$0/hosts" /etc/hosts && slurmd -D -f "$0/slurm.conf"; exit 1'


def missing() -> str:
    """Why there can be no cluster here, "" where there can."""
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    if os.getuid():
        return "only root can start a SLURM cluster of its own"
    tried = subprocess.run([*_NAMESPACE, "hostname", "n1"], capture_output=True, text=True, check=False)
    return f"no namespaces for the nodes here: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """Two nodes, n1 and n2, of four processors each, that run jobs of root; SLURM_CONF leads every command to it."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm"))  # a socket's path must be short
        self.root.chmod(0o755)
        self.conf = self.root / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self.processes: list[subprocess.Popen] = []
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        key = self.root / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "munge", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={self.root / name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.wait_for(lambda: (self.root / "munge").exists(), "munged listens")
        (self.root / "hosts").write_text(
            Path("/etc/hosts").read_text() + "".join(f"{address} {name}\n" for name, address in NODES.items())
        )
        port, *ports = _free_ports(1 + len(NODES))
        # Lightning makes a port out of a job's number: not the same for two clusters on one machine.
        conf = CONF.format(root=self.root, host=socket.gethostname(), port=port, job=port % 9000 + 100)
        for (name, address), own in zip(NODES.items(), ports, strict=True):
            conf += f"NodeName={name} NodeAddr={address} Port={own} CPUs=4 State=UNKNOWN\n"
        conf += f"PartitionName=all Nodes={','.join(NODES)} Default=YES State=UP\n"
        self.conf.write_text(conf)
        (self.root / "state").mkdir()
        self._daemon("slurmctld", "-D", "-f", str(self.conf))
        for name in NODES:
            self._daemon(*_NAMESPACE, "sh", "-c", _NODE, str(self.root), name)
        self.wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(NODES)), "all nodes idle")

    def _daemon(self, *command: str) -> None:
        with open(self.root / f"{len(self.processes)}.out", "wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.root, start_new_session=True,
                env=self.environment,
            )  # fmt: skip
        self.processes.append(process)

    def run(self, *command: str) -> str:
        """What a command of SLURM's prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=20)
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Number and state of everything that is queued or runs."""
        return self.run("squeue", "--noheader", "--format", "%i %T").splitlines()

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows about a job, for some minutes after its end too."""
        return dict(
            field.split("=", 1) for field in self.run("scontrol", "show", "job", number).split() if "=" in field
        )

    def wait_for(self, condition: Callable[[], object], what: str, limit: float = 60) -> None:
        end = time.monotonic() + limit
        while not condition():
            ended = [process.args for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < end, f"waited in vain until {what}; ended: {ended}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The end of what each program has written."""
        files = sorted([*self.root.glob("*.log"), *self.root.glob("*.out")])
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def stop(self) -> None:
        """End all programs, and with the nodes everything that runs on them."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.jobs():  # a test has failed, and an srun or salloc that it left would wait for its job
                self.run("scancel", "--user", "root")
                time.sleep(3)
        for process in reversed(self.processes):
            process.send_signal(signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.root, ignore_errors=True)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
