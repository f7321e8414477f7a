"""A study on Ray nodes in networks of their own, which are killed, cut off, drained and added. The storage is S3."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.fakes.plans import plan_study, train_without_ray
from tests.fakes.s3_server import _ENVIRONMENT as CREDENTIALS
from tests.fakes.trials import drop_times
from tests.tune_study.cluster.test_cluster import CPU_SETTINGS, RAY_ENVIRONMENT, ROOT
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord, read_record
from tune_study.plan.study_plan import StudyPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 70
HEAD, WORKER, DRIVER, S3_PORT, RAY_PORT = "10.77.0.1", "10.77.0.2", "10.77.0.3", 9077, 6377
CUT_S = 60
SETTINGS = {
    **CPU_SETTINGS,
    "trainer.total_training_steps": str(STEPS),
    "trainer.resume_every": "2",
    "trainer.save_freq": "-1",
}
_SERVER = f"""
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

make_server("0.0.0.0", {S3_PORT}, DomainDispatcherApplication(create_backend_app), threaded=True).serve_forever()
"""
_FORWARDER = f"""
import asyncio

async def copy(reader, writer):
    while content := await reader.read(65536):
        writer.write(content)
        await writer.drain()
    writer.close()

async def serve(reader, writer):
    other_reader, other_writer = await asyncio.open_connection("{HEAD}", {S3_PORT})
    await asyncio.gather(copy(reader, other_writer), copy(other_reader, writer), return_exceptions=True)

async def main():
    await (await asyncio.start_server(serve, "127.0.0.1", {S3_PORT})).serve_forever()

asyncio.run(main())
"""
"""Makes the server of the head reachable as 127.0.0.1 of the other network: plain HTTP is for this machine only."""


class Networks(NamedTuple):
    """Names of the network namespaces of three machines, and the environment of all processes in them."""

    head: str
    worker: str
    driver: str
    environment: dict[str, str]

    def start(self, network: str, *words: str, **options: object) -> subprocess.Popen[bytes]:
        """Start a command in a network and in a process namespace of its own: its end is the end of all it started."""
        isolation = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
        if network != self.head:  # with a temporary folder of its own, as on another machine
            isolation += ["sh", "-c", 'mount -t tmpfs tmpfs /tmp && exec "$@"', "sh"]
        command = ["ip", "netns", "exec", network, *isolation, *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=self.environment, **{**quiet, **options})


def may_make_networks() -> bool:
    command = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    if not may_make_networks():
        pytest.skip("this user may not make network namespaces")
    head, worker, driver = (f"ts-{name}-{os.getpid()}" for name in ("head", "worker", "driver"))
    # Without what a study in this process has set: its Ray listens on the loopback address only.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    made = Networks(head, worker, driver, {**environment, **CREDENTIALS, **RAY_ENVIRONMENT})
    with ExitStack() as stack:
        for name in (head, worker, driver):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", head, "link", "add", "switch", "type", "bridge")
        for name in (worker, driver):
            port = name.partition("-")[2]
            run("ip", "link", "add", port, "netns", head, "type", "veth", "peer", "name", "cable", "netns", name)
            run("ip", "-n", head, "link", "set", port, "master", "switch", "up")
        for name, device, address in ((head, "switch", HEAD), (worker, "cable", WORKER), (driver, "cable", DRIVER)):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
        for name, code in ((head, _SERVER), (worker, _FORWARDER), (driver, _FORWARDER)):
            stack.enter_context(ending(made.start(name, sys.executable, "-c", code)))
        wait_in(
            made, head, f"FileSystem.from_uri('s3://shelf?{QUERY}&allow_bucket_creation=true')[0].create_dir('shelf')"
        )
        yield made


QUERY = f"scheme=http&endpoint_override=127.0.0.1:{S3_PORT}"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def wait_in(networks: Networks, network: str, statement: str) -> None:
    """Repeat a statement with pyarrow's FileSystem in a network until it succeeds."""
    code = f"from pyarrow.fs import FileSystem\n{statement}"
    while networks.start(network, sys.executable, "-c", code).wait():
        time.sleep(0.2)


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill a process, and with it its namespace, at the end of the block."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


RAY_PROGRAM = str(Path(sys.executable).with_name("ray"))
RAY_START = (RAY_PROGRAM, "start", "--block", "--object-store-memory=150000000")


@contextmanager
def start_head(networks: Networks, cpus: int) -> Iterator[None]:
    """Start the head of a cluster."""
    # Not Ray's own folder: there, the address of this cluster would be that of every later `ray.init`.
    with tempfile.TemporaryDirectory(prefix="ts-", ignore_cleanup_errors=True) as folder:
        words = [
            "--head",
            f"--num-cpus={cpus}",
            f"--port={RAY_PORT}",
            f"--node-ip-address={HEAD}",
            f"--temp-dir={folder}",
        ]
        with ending(networks.start(networks.head, *RAY_START, *words, "--include-dashboard=false")):
            wait_for_nodes(networks, 1)
            yield


@contextmanager
def start_node(networks: Networks, network: str, address: str, cpus: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start another node of the cluster and wait until it has joined."""
    count = len(list_nodes(networks)) + 1
    words = [f"--num-cpus={cpus}", f"--address={HEAD}:{RAY_PORT}", f"--node-ip-address={address}"]
    with ending(networks.start(network, *RAY_START, *words)) as node:
        wait_for_nodes(networks, count)
        yield node


def list_nodes(networks: Networks) -> list[list[str]]:
    """List id and address of the nodes that Ray counts as alive."""
    code = (
        f"from ray._raylet import GcsClient\n"
        f"for node in GcsClient(address='{HEAD}:{RAY_PORT}').get_all_node_info().values():\n"
        f"    if node.state == 0: print(node.node_id.hex(), node.node_manager_address)"
    )
    output = networks.start(networks.head, sys.executable, "-c", code, stdout=subprocess.PIPE).communicate()[0]
    return [line.split() for line in output.decode().splitlines()]


def wait_for_nodes(networks: Networks, count: int) -> None:
    while len(list_nodes(networks)) != count:
        time.sleep(0.2)


def type_in(networks: Networks, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a command of ours in the head's network, in the process namespace of all: Ray looks for its processes."""
    folder.mkdir(exist_ok=True)
    command = ["ip", "netns", "exec", networks.head, sys.executable, "-m", "tune_study", *words]
    command += ["--address", f"{HEAD}:{RAY_PORT}"]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, cwd=folder, env=networks.environment, stdout=output, stderr=output)


def type_on_third_machine(networks: Networks, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a command of ours on the machine of the driver, beside a Ray node there without CPUs."""
    folder.mkdir(exist_ok=True)
    node = [*RAY_START, "--num-cpus=0", f"--address={HEAD}:{RAY_PORT}", f"--node-ip-address={DRIVER}"]
    command = [sys.executable, "-m", "tune_study", *words, "--address", f"{HEAD}:{RAY_PORT}"]
    wait = "until ls /tmp/*/ray_current_cluster 2> /dev/null; do sleep 0.2; done"
    script = f"{shlex.join(node)} > /dev/null 2>&1 &\n{wait}\n{shlex.join(command)}"
    with (folder / "output").open("ab") as output:
        options = {"cwd": folder, "stdout": output, "stderr": output}
        return networks.start(networks.driver, "sh", "-c", script, **options)


@pytest.fixture(scope="module")
def local_plan(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    """The same study, run on this machine without Ray and without a kill."""
    return train_without_ray(plan_study(tmp_path_factory.mktemp("local"), **SETTINGS), STEPS)


def find_newest_step(networks: Networks, plan: StudyPlan) -> int:
    """The largest step of a checkpoint in the storage."""
    code = (
        f"import re\nfrom tune_study.folder.storage import StoredFolder\n"
        f"names = StoredFolder('s3://shelf/two/{plan.run}?{QUERY}').list_files()\n"
        f"steps = re.findall(r'state/step_(\\d+)/checksums', ' '.join(names))\n"
        f"print(max(map(int, steps), default=0))"
    )
    command = ["ip", "netns", "exec", networks.head, sys.executable, "-c", code]
    return int(subprocess.run(command, env=networks.environment, capture_output=True, text=True, check=True).stdout)


def wait_for_step(networks: Networks, plan: StudyPlan, step: int, driver: subprocess.Popen[bytes]) -> None:
    while find_newest_step(networks, plan) < step:
        assert driver.poll() is None, "the driver has ended"


def test_a_study_survives_the_kills_of_its_worker_its_driver_and_a_node(
    networks: Networks, local_plan: StudyPlan, tmp_path: Path
) -> None:
    options = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    uri = f"s3://shelf/two?{QUERY}"
    words = ["run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", "--seeds", "1", "--storage", uri, *options]
    with start_head(networks, cpus=1), start_node(networks, networks.worker, WORKER, cpus=1) as worker:
        first = type_in(networks, tmp_path / "first", *words)
        wait_for_step(networks, local_plan, 4, first)
        (process,) = find_trials(worker)
        process.kill()
        wait_for_step(networks, local_plan, 8, first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        while find_trials(worker):  # Ray ends them
            time.sleep(0.2)
        second = type_in(networks, tmp_path / "second", "resume", uri.replace("two", f"two/{local_plan.run}"))
        while not find_trials(worker):
            assert second.poll() is None, (tmp_path / "second" / "output").read_text()
        wait_for_step(networks, local_plan, 14, second)
        worker.kill()  # the node, with all of its processes
        assert second.wait(timeout=900) == 0, (tmp_path / "second" / "output").read_text()
    output = (tmp_path / "first" / "output").read_text() + (tmp_path / "second" / "output").read_text()
    assert "failed, retrying: process died" in (tmp_path / "first" / "output").read_text()
    assert "failed, retrying: process died" in (tmp_path / "second" / "output").read_text()
    assert "training continues after step" in output
    check_rows(tmp_path / "second", local_plan)


def check_rows(folder: Path, local_plan: StudyPlan) -> None:
    for spec in local_plan.runs:
        run_dir = folder / "results" / local_plan.run / "runs" / spec.run_id
        status = read_record(StatusRecord, run_dir)
        assert status.status == "completed"
        rows, expected_rows = (
            read_rows(path / METRICS_FILE) for path in (run_dir, local_plan.get_run_dir(spec.run_id))
        )
        assert [drop_times(row) for row in rows] == [drop_times(row) for row in expected_rows]


def test_a_study_on_a_third_machine_survives_a_cut_network_a_drained_node_and_uses_an_added_one(
    networks: Networks, local_plan: StudyPlan, tmp_path: Path
) -> None:
    options = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    words = ["run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", "--seeds", "1", *options]
    output = tmp_path / "third" / "output"

    def wait_for(*texts: str) -> None:
        while not all(text in output.read_text() for text in texts):
            assert study.poll() is None, output.read_text()
            time.sleep(0.2)

    with start_head(networks, cpus=0), ExitStack() as stack:
        words += ["--storage", f"s3://shelf/three?{QUERY}", "--wait-for-nodes"]
        study = stack.enter_context(ending(type_on_third_machine(networks, tmp_path / "third", *words)))
        wait_for("The study waits for one.")
        worker = stack.enter_context(start_node(networks, networks.worker, WORKER, cpus=2))  # a node is added
        wait_for("0.1 seed 0 step 5/", "0 seed 0 step 5/")
        cut(networks, CUT_S)
        while worker.poll() is None and "0.1 seed 0 step 10/" not in output.read_text():
            time.sleep(0.2)
        if worker.poll() is not None:  # Ray gives a node up that does not answer for some 50 seconds
            worker = stack.enter_context(start_node(networks, networks.worker, WORKER, cpus=2))
        wait_for("0.1 seed 0 step 35/", "0 seed 0 step 35/")
        (node_id,) = [node_id for node_id, address in list_nodes(networks) if address == WORKER]
        drain = ["drain-node", "--address", f"{HEAD}:{RAY_PORT}", "--node-id", node_id, "--reason-message", "a test"]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "60"]
        assert networks.start(networks.head, RAY_PROGRAM, *drain).wait() == 0
        wait_for("the node is drained")
        worker.kill()
        stack.enter_context(start_node(networks, networks.worker, WORKER, cpus=2))
        assert study.wait(timeout=900) == 0, output.read_text()

    check_rows(tmp_path / "third", local_plan)


def cut(networks: Networks, seconds: float) -> None:
    """Unplug the network of the worker for a while."""
    for state in ("down", "up"):
        run("ip", "-n", networks.worker, "link", "set", "cable", state)
        time.sleep(seconds if state == "down" else 0)


def find_trials(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes on a node that train."""
    trials = []
    for process in psutil.Process(node.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::PPO"):
                trials.append(process)
    return trials


def test_a_slurm_job_of_two_nodes_starts_ray_on_both_and_runs_the_command(networks: Networks, tmp_path: Path) -> None:
    """With programs that do what `scontrol` and `srun` would do, and a token that the script makes."""
    isolate = "unshare --pid --mount-proc --fork --kill-child --mount"
    hide = 'mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray; "$@"; exit $?'  # each node has a /tmp/ray of its own
    programs = {
        "scontrol": f"printf '{HEAD}\\n{WORKER}\\n'",
        "srun": f"shift 2\nip netns exec {networks.worker} {isolate} sh -c '{hide}' sh \"$@\" > /dev/null 2>&1 &\n"
        f"exec ip netns exec {networks.head} {isolate} sh -c '{hide}' sh \"$@\"",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {**SETTINGS, "trainer.total_training_steps": "2"}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words = ["run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", "--seeds", "1", *options]
    environment = {
        **networks.environment,
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "two",
        "SLURM_JOB_NUM_NODES": "2",
    }
    script = ROOT / "examples" / "cluster" / "slurm.sh"
    output = subprocess.run(["bash", script, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    # Not by its exit code: at the end Ray fails if one of its processes takes long to stop.
    (line,) = [line for line in output.stdout.splitlines() if line.startswith("Ray cluster auto: ")]
    assert all(f"{address} (" in line for address in (HEAD, WORKER))
    folder = tmp_path / "results" / "kl_sweep_sokoban-tiny"
    assert [read_record(StatusRecord, run_dir).status for run_dir in folder.glob("runs/*")] == ["completed"] * 2
    assert (folder / "report.html").exists()
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
