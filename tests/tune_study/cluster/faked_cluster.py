"""A fake cluster of two nodes in separate processes on this machine, each with two CPUs and two declared GPUs.

The second node has its own view of the file system, in which one folder is a different one, as on another machine.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_HEAD = """
import sys
from ray.cluster_utils import Cluster

resources = {"num_cpus": int(sys.argv[1]), "num_gpus": int(sys.argv[2])}
cluster = Cluster(initialize_head=True, head_node_args={**resources, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

# The fake node of Ray itself. `Cluster.add_node` would start it with the file system of this process.
_NODE = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

parameters = RayParams(
    gcs_address=sys.argv[1], num_cpus=int(sys.argv[2]), num_gpus=int(sys.argv[3]), object_store_memory=150 * 2**20,
    node_manager_port=0, min_worker_port=0, max_worker_port=0, include_log_monitor=False,
)
node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
print(node.node_id, flush=True)
sys.stdin.read()
node.kill_all_processes(check_alive=False)
"""

_ELSEWHERE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"']


def can_hide_folder(folder: Path) -> bool:
    """Return whether this user may start a process with its own view of the file system."""
    try:
        process = subprocess.run([*_ELSEWHERE, str(folder), "true"], capture_output=True)
    except FileNotFoundError:
        return False
    return process.returncode == 0


@contextmanager
def start_faked_cluster(environment: dict[str, str], hidden: Path) -> Iterator[str]:
    """Start a cluster and yield its address. environment: that of its processes. hidden: the folder that differs."""
    hiding_command = [*_ELSEWHERE, str(hidden)] if can_hide_folder(hidden) else []
    with start_head(environment, 2, 2) as address, start_node(environment, address, 2, 2, hiding_command):
        yield address


@contextmanager
def start_head(environment: dict[str, str], cpus: int, gpus: int) -> Iterator[str]:
    """Start the head of a cluster and yield its address."""
    with _start_program([], _HEAD, environment, str(cpus), str(gpus)) as head:
        yield _read_line(head)


@contextmanager
def start_node(
    environment: dict[str, str], address: str, cpus: int, gpus: int = 0, prefix: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Add a node to a cluster; yield Ray's id of it and its process. prefix: a command that starts the process."""
    with _start_program([*prefix], _NODE, environment, address, str(cpus), str(gpus)) as node:
        node_id = _read_line(node)
        assert node_id, "the node did not start"
        yield node_id, node


@contextmanager
def _start_program(
    prefix: list[str], code: str, environment: dict[str, str], *words: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a program that runs until its standard input is closed, at the end of the block."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *words],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield process


def _read_line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()
