"""A Slurm of two nodes on this machine, as an ordinary process tree: its own folder, ports and configuration, no service.

It needs Debian's slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins, and runs without munge (`auth/none`).
"""
import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

NODES = ("a", "b")
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def program(name):
    """Debian's name ends with -wlm, because another package has a program of the plain name."""
    return shutil.which(f"{name}-wlm", path=_PATH) or shutil.which(name, path=_PATH)


def missing():
    """A sentence about what is not installed; empty where everything is."""
    names = [name for name in ("slurmctld", "slurmd", "sbatch", "squeue", "sinfo") if not program(name)]
    if not names and not list(pathlib.Path("/usr/lib").glob("*/slurm*/select_cons_tres.so")):
        names = ["Slurm's plugins"]
    return f"{', '.join(names)} missing: apt-get install slurmctld slurmd slurm-client slurm-wlm-basic-plugins" if names else ""


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def descendants(of):
    """All processes below one, the nearest first."""
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [of]
    for one in found:
        found += children.get(one, [])
    return found[1:]


class Cluster:
    """Two nodes of one core each. `with Cluster(folder) as cluster:` starts and ends them."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.processes = {}

    def __enter__(self):
        for name in ("state", "spool-a", "spool-b"):
            (self.folder / name).mkdir(parents=True)
        control, *ports = _free_ports(1 + len(NODES))
        host = socket.gethostname()
        user = "root" if os.geteuid() == 0 else os.environ.get("USER", "nobody")
        lines = [
            "ClusterName=lockstep", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={control}", f"SlurmUser={user}", f"SlurmdUser={user}",
            "AuthType=auth/none", "CredType=cred/none", "MpiDefault=none", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "ReturnToService=2", "SlurmdTimeout=10", "MessageTimeout=10",
            "SchedulerParameters=sched_min_interval=100000,sched_interval=2", "MaxArraySize=100001", "MaxJobCount=100001", "KillWait=1",
            f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/spool-%n", f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid", f"SlurmctldLogFile={self.folder}/slurmctld.log", f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            *[f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN" for name, port in zip(NODES, ports)],
            f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"]
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text("\n".join(lines) + "\n")
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _PATH}
        # Processes that a node leaves behind become children of this one, which can end them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._before = set(descendants(os.getpid()))
        self.start("slurmctld", [program("slurmctld"), "-D"])
        for name in NODES:
            self.start(name, [program("slurmd"), "-D", "-N", name])
        self.wait(lambda: self.say("sinfo", "-h", "-o", "%t").split() == ["idle"], "its nodes are not idle")
        return self

    def start(self, name, command):
        with open(self.folder / f"{name}.out", "ab") as output:
            self.processes[name] = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def start_node(self, name):
        """Starts a node that was killed."""
        self.start(name, [program("slurmd"), "-D", "-N", name])

    def kill_node(self, name):
        """kill -9 of a node's slurmd alone: its steps go on."""
        self.processes[name].kill()
        self.processes[name].wait()

    def say(self, command, *words):
        return subprocess.run([program(command), *words], env=self.environment, capture_output=True, text=True).stdout

    def submit(self, *words, cwd=None, **environment):
        """The number of the job that sbatch, called in the folder `cwd`, makes of these words."""
        done = subprocess.run([program("sbatch"), "--parsable", "--output", f"{self.folder}/job-%A_%a.out", *words],
                              cwd=cwd, env={**self.environment, **environment}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()

    def wait(self, condition, what, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                log = self.folder / "slurmctld.log"
                raise TimeoutError(f"after {seconds} s {what}:\n{log.read_text()[-3000:] if log.exists() else ''}")
            time.sleep(0.1)

    def finish(self, *jobs, seconds=120):
        """Waits until these jobs have left the queue."""
        self.wait(lambda: not self.say("squeue", "-h", "-j", ",".join(jobs)).strip(), f"jobs {', '.join(jobs)} have not ended", seconds)

    def __exit__(self, *_):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        for _ in range(20):
            left = [one for one in descendants(os.getpid()) if one not in self._before]
            for one in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not left:
                return
            time.sleep(0.05)
