"""A real Slurm of several machines on one: a controller and nodes, each with namespaces of its own.

    with Cluster(folder, nodes=4) as cluster: cluster.lose("n2"); cluster.boot("n2")

A machine is a pid, network, mount, host name and IPC namespace below one `unshare` process; killing that one process is
a power cut: all its processes are gone, and its address falls silent. The machines share the file system and one
network (a bridge on the controller). Nothing outside `folder` is written; the processes die with the
one that made them.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare", "setpriv")
TOOLS = ("sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")
NETWORK = "10.77.0"
SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
# Process 1 of a machine: bash, because it buries the orphans it is left with.
INIT = """
hostname "$1"; ip link set lo up
mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/resolv.conf" /etc/resolv.conf
touch "$2/$1.up"; while :; do sleep 1000 & wait $!; done
"""
CONFIG = """
ClusterName=test
SlurmctldHost=ctl({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
JobRequeue=1
ReturnToService=2
SlurmdTimeout=4
MessageTimeout=3
SlurmctldTimeout=10
KillWait=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE,GANG
GresTypes=gpu
NodeName=n[1-{nodes}] NodeAddr={network}.[11-{last}] CPUs=64 RealMemory=512000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=cancels Nodes=ALL PriorityTier=1 PreemptMode=CANCEL MaxTime=INFINITE State=UP
PartitionName=suspends Nodes=ALL PriorityTier=1 PreemptMode=SUSPEND OverSubscribe=FORCE:1 MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of several machines needs Linux and root"
    tools = [tool for tool in NEEDED if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not found; `apt-get install slurm-wlm munge iproute2` brings them"
    tried = subprocess.run(["unshare", *SPACES, "--fork", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


class Cluster:
    def __init__(self, folder: Path, nodes: int):
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self.small = folder / "small"
        """A disk of a few megabytes, seen by all machines."""
        self._machines: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._machines):
            self._kill(name)
        if self.small.is_mount():
            subprocess.run(["umount", str(self.small)], check=True)

    def run(self, *words: str, on: str = "ctl") -> str:
        """A command on a machine; its output."""
        done = subprocess.run([*self._inside(on), *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def boot(self, name: str) -> None:
        self._machine(name)
        self._plug_in(name)
        self.run("slurmd", "-N", name, "-f", str(self.folder / "slurm.conf"), on=name)

    def lose(self, name: str) -> None:
        """Power cut."""
        self._kill(name)

    def unplug(self, name: str) -> None:
        """The cable is out; all processes live on."""
        self.run("ip", "link", "set", f"v{name}", "down")

    def plug(self, name: str) -> None:
        self.run("ip", "link", "set", f"v{name}", "up")

    def throttle(self, name: str, rate: str) -> None:
        """What the node sends and receives is held to a rate such as 20mbit."""
        for machine, device in (("ctl", f"v{name}"), (name, "eth0")):
            limit = ("tbf", "rate", rate, "burst", "32kb", "latency", "50ms")
            self.run("tc", "qdisc", "add", "dev", device, "root", *limit, on=machine)

    def unthrottle(self, name: str) -> None:
        for machine, device in (("ctl", f"v{name}"), (name, "eth0")):
            self.run("tc", "qdisc", "del", "dev", device, "root", on=machine)

    def processes(self, name: str, words: str) -> list[int]:
        """Ids, as this process sees them, of a machine's processes whose command line holds the words."""
        space = os.readlink(f"/proc/{self._init(name)}/ns/pid")
        found = []
        for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if os.readlink(f"/proc/{pid}/ns/pid") == space and words in line:
                    found.append(int(pid))
            except OSError:
                continue
        return sorted(found)

    def _start(self) -> None:
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        names = {"ctl": 1} | {name: 10 + number for number, name in enumerate(self.nodes, start=1)}
        hosts = ["127.0.0.1 localhost", *(f"{NETWORK}.{number} {name}" for name, number in names.items())]
        self._write("hosts", "\n".join(hosts) + "\n")
        self._write("resolv.conf", "")
        self._write(
            "slurm.conf",
            CONFIG.format(network=NETWORK, folder=self.folder, nodes=len(self.nodes), last=10 + len(self.nodes)),
        )
        for number in range(8):  # Slurm counts them; no device is behind them
            os.mknod(self.folder / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        self._write("gres.conf", f"Name=gpu File={self.folder}/gpu[0-7]\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self.small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(self.small)], check=True)
        self._tools()
        self._machine("ctl")
        bridge = "ip link add br0 type bridge forward_delay 0 && ip addr add {0}.1/24 dev br0 && ip link set br0 up"
        self.run("sh", "-c", bridge.format(NETWORK))
        files = {"key": key, "socket": "munge.socket", "pid": "munged.pid", "log": "munged.log", "seed": "munged.seed"}
        options = [
            f"--{what}{'' if what == 'socket' else '-file'}={self.folder / name}" for what, name in files.items()
        ]
        self.run("munged", *options)
        self.run("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for name in self.nodes:
            self.boot(name)
        wait_for(
            lambda: self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split() == self.nodes, 30
        )

    def _tools(self) -> None:
        """Slurm's commands for whoever has the folder `bin` first in PATH; they run on the controller."""
        (self.folder / "bin").mkdir()
        for tool in TOOLS:
            path = self.folder / "bin" / tool
            enter = f'nsenter -t "$(cat {self.folder}/ctl.pid)" {" ".join(SPACES)} --wd="$PWD"'
            plain = f'PATH="${{PATH#{self.folder}/bin:}}"'  # a job must not find these
            path.write_text(f'#!/bin/sh\nexec {enter} env {plain} SLURM_CONF={self.folder}/slurm.conf {tool} "$@"\n')
            path.chmod(0o755)

    def _machine(self, name: str) -> None:
        (self.folder / f"{name}.up").unlink(missing_ok=True)
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, "--fork", "--kill-child=KILL", "--mount-proc"]
        with (self.folder / f"{name}.init.log").open("wb") as log:
            self._machines[name] = subprocess.Popen(
                [*words, "bash", "-c", INIT, "init", name, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for((self.folder / f"{name}.up").exists, 10)
        # Its process 1, as this process sees it: by now the one child of `unshare`.
        pid = self._machines[name].pid
        self._write(f"{name}.pid", Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())

    def _init(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def _plug_in(self, name: str) -> None:
        number = 10 + int(name[1:])
        add = f"ip link add v{name} type veth peer name eth0 netns {self._init(name)}"
        subprocess.run(["nsenter", "-t", str(self._init("ctl")), "--net", *add.split()], check=True)
        self.run("ip", "link", "set", f"v{name}", "master", "br0", "up")
        self.run("sh", "-c", f"ip addr add {NETWORK}.{number}/24 dev eth0 && ip link set eth0 up", on=name)

    def _inside(self, name: str) -> list[str]:
        enter = ["nsenter", "-t", str(self._init(name)), *SPACES, "--wd=/"]
        path = os.environ["PATH"].removeprefix(f"{self.folder}/bin:")  # the commands themselves
        return [*enter, "env", f"PATH={path}", f"SLURM_CONF={self.folder}/slurm.conf"]

    def _kill(self, name: str) -> None:
        machine = self._machines.pop(name)
        machine.send_signal(signal.SIGKILL)  # and with it, by --kill-child, process 1 and all others
        machine.wait()

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


def wait_for(condition, seconds: float, what: object = None) -> None:
    """Until the condition holds; a failure names it, or `what` (called) where given."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what() if callable(what) else what or condition}"
        time.sleep(0.1)
