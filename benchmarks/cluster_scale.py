"""Simulate studies of 100 and 1,000 runs on 8 and 64 nodes that are preempted. Prints a JSON object.

The driver, Tune, Ray, the uploads and the fetches are real; the storage is a local S3-compatible server that counts its
requests. Only the training is not: a step waits, writes lines, and a small state when one is due, whose upload takes as
long as that of a 3B model. Time is compressed: --wait-seconds stand for --step-seconds. A node is taken away without a
notice, so its run ends at random, once in --preempted-hours on average. There is one run per node.

CPU seconds are those of the driver's process alone (Linux only). What costs real time instead of compressed time is
measured by itself: one round of the driver's copies without news, and the files that Tune copies with its state.
docs/cluster.md derives from it what an hour costs. The second simulation takes a quarter of an hour.
Run: python benchmarks/cluster_scale.py [--runs 100 1000 --nodes 8 64]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

from machine import describe
from options import make_parser, parse_count
from pyarrow.fs import FileSystem
from rich.console import Console

from search_spaces.catalog import STUDIES
from trainable.files.json_lines import append_line, read_lines
from trainable.runs.run_files import CHECKSUMS_FILE, METRICS_FILE, STATE_FOLDER, copy_run_files, list_states
from trainable.trial import PPO
from trainable.uploads import Uploads
from tune_study.folder import storage
from tune_study.folder.outputs import write_study
from tune_study.folder.storage import StoredStudy
from tune_study.host.interrupt import make_interrupt
from tune_study.placement.resources import preflight
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.tune.local_ray import LocalRay, prepare_environment
from tune_study.tune.session import StudySession, SuiteContext

CHECKPOINT_BYTES = 74e9
"""Of policy and critic of 3B parameters."""
NUM_COLUMNS = 66
"""Columns of a row, which then has 2.2 kB, as the rows of `kl` on the laptop have on average."""
OPTIONS_ENV = "CLUSTER_SCALE_OPTIONS"
SERVER = """
import json
from collections import Counter
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

application, counts = DomainDispatcherApplication(create_backend_app), Counter()

def count(environ, start_response):
    path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
    if path == "/counts":
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(counts).encode()]
    if "list-type" in environ["QUERY_STRING"]:
        kind = "any LIST"
    elif "/start_" in path:
        kind = f"checkpoint {method}"
    elif "/runs/" in path or "/logs/" in path or path.endswith(("study.json", "driver.json")):
        kind = f"driver {method}"
    else:
        kind = f"tune {method}"
    counts[f"{kind} requests"] += 1
    length = environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or 0
    counts[f"{kind} bytes"] += int(length)

    def answer(status, headers, *rest):
        counts[f"{kind} answer bytes"] += int(dict(headers).get("Content-Length", 0)) if method == "GET" else 0
        return start_response(status, headers, *rest)

    return application(environ, answer)

server = make_server("127.0.0.1", 0, count, threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class Options:
    """What the fake runs read from their environment. folder: where they count what they do."""

    folder: str
    wait_seconds: float
    upload_steps: float
    preempted_steps: float
    steps_per_checkpoint: int


class FakeLoop:
    """The training of a run: steps that wait. It is its own and only run, too."""

    def __init__(self, run: dict[str, Any], num_steps: int, options: Options) -> None:
        self.run_dir, self.seed, self.run_id = Path(run["run_dir"]), int(run["seed"]), run["run_id"]
        self.num_steps, self.options, self.runs = num_steps, options, {int(run["seed"]): self}
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.step_index = max((int(name.removeprefix("step_")) for name in list_states(self.run_dir)), default=0)
        self.end = read_lines(self.run_dir / METRICS_FILE).end
        starts = Path(options.folder, f"{self.run_id}.starts")
        with starts.open("a") as file:
            file.write("x")
        self.random = random.Random(f"{self.run_id}-{starts.stat().st_size}")

    def step(self) -> SimpleNamespace:
        """Wait, write a row, and a state if one is due. Or end the process, as if its node were gone."""
        time.sleep(self.options.wait_seconds)
        with Path(self.options.folder, f"{self.run_id}.steps").open("a") as file:
            file.write("x")
        if self.random.random() < 1 / self.options.preempted_steps:
            os._exit(1)
        self.step_index += 1
        row = {"run_id": self.run_id, "step": self.step_index, "seed": self.seed, "arm": "", "study": "kl"}
        row |= {f"quantity_{number}": self.random.random() for number in range(NUM_COLUMNS)}
        self.end = append_line(self.run_dir / METRICS_FILE, row, self.end)
        is_over = self.step_index == self.num_steps
        is_saved = is_over or self.step_index % self.options.steps_per_checkpoint == 0
        if is_saved:
            self.write_states()
        rows = {self.run_id: row}
        return SimpleNamespace(
            rows=rows,
            failures={},
            last_step=self.step_index,
            step_count=self.step_index,
            is_over=is_over,
            note="",
            is_saved=is_saved,
        )

    def write_states(self) -> None:
        """Write a state with next to nothing in it, unless the step has one."""
        folder = self.run_dir / STATE_FOLDER / f"step_{self.step_index}"
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / CHECKSUMS_FILE).write_text("{}")

    def copy_to(self, folder: Path) -> None:
        """Copy the lines and the newest state."""
        copy_run_files(self.run_dir, folder, list_states(self.run_dir)[-1:], links=True)

    def close(self) -> None:
        """Do nothing."""


class FakeRun(PPO):
    """A trial whose training is a FakeLoop. All else is that of a trial with a storage."""

    def begin(self) -> Any:
        """Continue from the newest checkpoint in the storage."""
        if self.training is None:
            options = Options(**json.loads(os.environ[OPTIONS_ENV]))

            def upload(operation: Callable[[], None]) -> None:
                time.sleep(options.upload_steps * options.wait_seconds)
                operation()

            self._uploads = Uploads(self._options["storage"], self.trial_name, upload)
            if self._uploads.earlier_checkpoints:
                self._fetch(self._uploads.earlier_checkpoints[-1].folder)
            num_steps = self.make_config(self._configuration).trainer.total_training_steps
            training: Any = FakeLoop(self._runs[0], num_steps, options)
            self.training = training
        return self.training


@contextmanager
def start_server() -> Iterator[str]:
    """Start the server and yield the query of its URIs."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            query = f"scheme=http&endpoint_override=127.0.0.1:{int(server.stdout.readline())}"
            FileSystem.from_uri(f"s3://shelf?{query}&allow_bucket_creation=true")[0].create_dir("shelf")
            yield query
        finally:
            server.terminate()


def read_counts(query: str) -> Counter[str]:
    """Requests and bytes so far, by what they were for."""
    with urlopen(f"http://{query.rpartition('=')[2]}/counts") as answer:
        return Counter(json.loads(answer.read()))


def read_memory_megabytes() -> float:
    """The peak of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))


def plan_study(folder: Path, uri: str, num_runs: int, num_steps: int) -> StudyPlan:
    """Plan a study of fake runs, of five arms if they can have equally many."""
    study = STUDIES["kl"]
    study = replace(study, family=replace(study.family, trainable="cluster_scale:FakeRun"))
    settings = {"trainer.total_training_steps": num_steps}
    arms = ("0", "0.01", "0.03", "0.1", "0.3") if num_runs % 5 == 0 else ("0",)
    return replace(make_plan(study, "laptop", "", settings, arms, num_runs // len(arms), folder), storage=uri)


def simulate(num_runs: int, num_nodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one study, in this process, and return what was counted."""
    from tune_study.tune.callbacks import Recorder
    from tune_study.tune.run import make_study_tuner

    with tempfile.TemporaryDirectory() as name, start_server() as query:
        folder = Path(name)
        upload_seconds = CHECKPOINT_BYTES / args.gigabytes_per_second / 1e9
        (folder / "counts").mkdir()
        steps_per_checkpoint = max(1, round(args.checkpoint_seconds / args.step_seconds))
        options = {
            "folder": str(folder / "counts"),
            "wait_seconds": args.wait_seconds,
            "upload_steps": upload_seconds / args.step_seconds,
            "preempted_steps": args.preempted_hours * 3600 / args.step_seconds,
            "steps_per_checkpoint": steps_per_checkpoint,
        }
        os.environ[OPTIONS_ENV] = json.dumps(options)
        plan = plan_study(folder, f"s3://shelf/scale?{query}", num_runs, args.steps)
        resource_plan = preflight(plan, None, (), 1, None, is_real=True)
        resource_plan = resource_plan._replace(max_concurrent=num_nodes, cpus=num_nodes)
        storage.SYNC_SECONDS = 1e6  # the copies are measured below, since they do not follow the compressed time
        console = Console(quiet=True)
        stored_study = StoredStudy(plan)
        with stored_study.keep_synced(), LocalRay([folder], console) as ray_context:
            write_study(plan)
            stored_study.push()
            suite = SuiteContext(ray_context, make_interrupt(plan.folder))
            session = StudySession(plan, resource_plan, console, suite, stored_study)
            session.begin()
            with ray_context.acquire(resource_plan):
                recorder = Recorder(session)
                counts, cpu, start = read_counts(query), time.process_time(), time.perf_counter()
                make_study_tuner(session, recorder).fit()
                wall_seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        counts = read_counts(query) - counts
        stored_study.push()
        cpu = time.process_time()
        stored_study.push()
        idle_push_cpu_seconds = time.process_time() - cpu
        files = storage.StoredFolder(plan.study_uri).list_files()
        tune_files = {
            path: entry.size
            for path, entry in files.items()
            if not path.startswith(("runs/", "logs/", "study.json", "driver.json")) and "/start_" not in path
        }
        num_starts, num_steps = (
            sum(path.stat().st_size for path in (folder / "counts").glob(f"*.{kind}")) for kind in ("starts", "steps")
        )
        statuses = Counter(recorder._statuses.get(run.run_id).status for run in plan.runs)
        row_bytes = (plan.get_run_dir(plan.runs[0].run_id) / METRICS_FILE).stat().st_size / args.steps
    num_results = num_runs * args.steps
    return {
        "runs": num_runs,
        "nodes": num_nodes,
        "steps_per_run": args.steps,
        "statuses": dict(statuses),
        "starts": num_starts,
        "steps_repeated": num_steps - num_results,
        "wall_seconds": round(wall_seconds, 1),
        "driver_cpu_seconds": round(cpu_seconds, 1),
        "driver_cpu_seconds_per_result": round(cpu_seconds / num_results, 5),
        "driver_peak_megabytes": round(read_memory_megabytes()),
        "idle_push_cpu_seconds": round(idle_push_cpu_seconds, 3),
        "tune_files": len(tune_files),
        "tune_megabytes": round(sum(tune_files.values()) / 1e6, 1),
        "row_bytes": round(row_bytes),
        "requests": dict(sorted((name, count) for name, count in counts.items() if count)),
    }


def main() -> None:
    """Print the measurements of each pair of --runs and --nodes."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=parse_count, nargs="+", default=[100, 1000], help="numbers of runs")
    parser.add_argument("--nodes", type=parse_count, nargs="+", default=[8, 64], help="as many numbers of nodes")
    parser.add_argument("--steps", type=parse_count, default=20, help="steps of a run")
    parser.add_argument("--step-seconds", type=float, default=120.0, help="seconds of a real step")
    parser.add_argument("--wait-seconds", type=float, default=0.5, help="seconds that a simulated step takes")
    parser.add_argument("--checkpoint-seconds", type=float, default=300.0, help="trainer.resume_seconds")
    parser.add_argument("--preempted-hours", type=float, default=2.0, help="mean hours until a node is taken away")
    parser.add_argument("--gigabytes-per-second", type=float, default=1.0, help="of an upload, in real time")
    args = parser.parse_args()
    if len(args.runs) != len(args.nodes):
        parser.error("--runs and --nodes have different lengths: type as many numbers of nodes as of runs")
    prepare_environment((), has_storage=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Ray prints a line per process that ends
        simulations = [simulate(*pair, args) for pair in zip(args.runs, args.nodes, strict=True)]
    print(json.dumps({"benchmark": "cluster_scale", **describe(), "options": vars(args), "simulations": simulations}))


if __name__ == "__main__":
    sys.modules["cluster_scale"] = sys.modules["__main__"]
    main()
