"""What each node of a cluster must have before a study starts there, looked at by a small task on the node itself."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from rich.filesize import decimal

import trainable
from trainable.config.run_config import RunConfig
from trainable.runs.failures import StorageError
from trainable.storage.uris import below
from tune_study.folder.outputs import versions
from tune_study.host.machine import available_memory, gpu_memory
from tune_study.placement.memory_plan import Card
from tune_study.placement.models import check_model
from tune_study.placement.resources import check_engines
from tune_study.plan.study_plan import PlanError, StudyPlan
from tune_study.tune.cluster import Node, fit

_PATIENCE_S = 180.0
_PACKAGES = ("tune_study", "trainable", "search_spaces", "analysis")
_DRIVERS = ("python", "ray", "tune_study", "code")
"""What the driver must have as its nodes do: it needs no torch, and may have another build."""


class Question(NamedTuple):
    """What a node is asked.

    marker: a file that it should see, by its path or by its URI in a storage. stored: the URI of the study there; None
    without a storage. models: that runs load. settings: of a run, as JSON.
    """

    marker: str
    stored: str | None
    models: tuple[str, ...]
    settings: dict[str, Any] | None


class Answer(NamedTuple):
    """What a node has.

    versions: of packages, and `code`, a sum over our sources. sees: empty, or why it does not see the marker. lacks:
    empty, or what is wrong with its models and engines. free: bytes for scratch folders. memory: bytes that new
    processes can take. gpus: MiB of each GPU, as far as known.
    """

    versions: dict[str, str]
    sees: str
    lacks: str
    free: int
    memory: int
    gpus: tuple[int, ...]


def code_sum() -> str:
    """Twelve hex digits over our own sources: of one commit the same everywhere, however it was installed."""
    found = hashlib.sha256()
    root = Path(trainable.__file__).parent.parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def answer(question: Question) -> Answer:
    """What the machine of this process has; run on a node."""
    try:
        if question.settings is not None:
            config = RunConfig.model_validate(question.settings)
            for model in question.models:
                check_model(model, os.environ, config.model.chat_format)
            check_engines(config)
        lacks = ""
    except PlanError as error:
        lacks = str(error)
    free = 0 if question.stored is None else _free_for(question.stored)
    memory = [entry.total for entry in gpu_memory() if entry.total is not None]
    return Answer({**versions(), "code": code_sum()}, _sees(question), lacks, free, available_memory(), tuple(memory))


def _sees(question: Question) -> str:
    if question.stored is None:
        return "" if os.path.exists(question.marker) else "it is not there"
    from trainable.storage.remote import get_bytes, open_place, plain

    try:
        get_bytes(open_place(question.marker))
    except (OSError, StorageError) as error:
        return plain(error)
    return ""


def _free_for(uri: str) -> int:
    """Bytes free in the scratch folder of a study's runs on this machine."""
    from trainable.storage.mirror import scratch

    folder = scratch(uri, os.environ)
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free


def ask(nodes: Sequence[Node], question: Question) -> dict[Node, Answer]:
    """The answer of each node, or PlanError naming one that gives none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": place}
        asked[node] = ray.remote(answer).options(**options).remote(question)
    return {node: _answered(node, reference) for node, reference in asked.items()}


def _answered(node: Node, reference: Any) -> Answer:
    import ray

    try:
        found = ray.get(reference, timeout=_PATIENCE_S)
    except ray.exceptions.GetTimeoutError:
        reason = f"it did not answer within {_PATIENCE_S:g} s"
    except ray.exceptions.RayError as error:
        reason = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
    else:
        return Answer(*found)
    raise PlanError(
        f"The node {node.name} cannot run a study: {reason}. Install the same tune_study there as here, as in "
        f"docs/cluster.md."
    )


def check_nodes(plan: StudyPlan, nodes: Sequence[Node]) -> dict[Node, Answer]:
    """What the nodes that could hold a run have; PlanError, naming the node, for what would make a run fail there."""
    models, settings = tuple[str, ...](), None
    if plan.model is not None:
        models, settings = (
            tuple(dict.fromkeys(spec.ppo.model.path for spec in plan.runs)),
            plan.ppo.model_dump(mode="json"),
        )
    with _marker(plan) as marker:
        question = Question(marker, plan.stored, models, settings)
        answers = ask(nodes, question)
    check_versions({**versions(), "code": code_sum()}, {node.name: found.versions for node, found in answers.items()})
    for node, found in answers.items():
        if found.sees:
            raise PlanError(_unseen(plan, node, found.sees))
        if found.lacks:
            raise PlanError(f"On the node {node.name}: {found.lacks}")
    return answers


def _unseen(plan: StudyPlan, node: Node, reason: str) -> str:
    if plan.stored is not None:
        return (
            f"The node {node.name} cannot read --storage {plan.storage}: {reason}. Give the node the same access as "
            f"this machine has: its network, and credentials in the environment that `ray start` is typed in."
        )
    stored = "" if plan.study.family.seeds_together else ", or --storage with a bucket or a shared folder"
    return (
        f"The node {node.name} does not see the folder {plan.output} of this machine, where every run writes: type "
        f"--output with a folder that all nodes share{stored}."
    )


@contextmanager
def _marker(plan: StudyPlan) -> Iterator[str]:
    """A new file where the runs are to write, for as long as nodes look for it: its path or URI."""
    name = f".tune_study-{uuid4().hex}"
    if plan.storage is None:
        folder = next(place for place in (plan.folder, *plan.folder.parents) if place.is_dir())
        path = folder / name
        try:
            path.touch()
        except OSError as error:
            raise PlanError(f"{folder} cannot be written ({error.strerror}): type another --output.") from None
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
        return
    from trainable.storage.remote import put_bytes, remove_file
    from tune_study.folder.storage import opened

    uri = below(plan.storage, name)
    put_bytes(opened(uri), b"")
    try:
        yield uri
    finally:
        with contextlib.suppress(OSError):
            remove_file(opened(uri))


def check_versions(here: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> None:
    """PlanError where nodes have different packages, or others than the driver in what both run.

    here: name -> version of the driver. nodes: name of the node -> its versions.
    """
    first = next(iter(nodes))
    for node, found in nodes.items():
        for package in sorted(nodes[first].keys() | found.keys()):
            pairs = [("this machine", here)] if package in _DRIVERS else []
            for other, theirs in [*pairs, (first, nodes[first])]:
                if theirs.get(package) != found.get(package):
                    raise PlanError(
                        f"The node {node} has {package} {found.get(package, 'not')} and {other} "
                        f"{theirs.get(package, 'not')}: rows would depend on where a run is. Install the same on all "
                        f"nodes, as in docs/cluster.md."
                    )


def check_scratch(uri: str, runs: int, size: int | None) -> None:
    """PlanError where this machine has too little disk for the states of `runs` at once, of `size` bytes a run."""
    free = _free_for(uri)
    if size is not None and free < runs * size:
        raise PlanError(
            f"This machine has {decimal(free)} free for the states of up to {runs} runs until they are in the storage, "
            f"which take {decimal(runs * size)}: set TUNE_STUDY_SCRATCH to a folder on a larger disk, or type "
            f"--max-concurrent with a smaller number."
        )


def check_room(answers: Mapping[Node, Answer], n_gpus: float, most: int, scratch: int | None, host: int) -> None:
    """PlanError where a node has too little disk for what its runs keep there, or too little memory.

    n_gpus: of a run. most: runs at once on a node. scratch, host: bytes of disk (None: not known) and of memory a run.
    """
    for node, found in answers.items():
        a_node = min(fit(node, n_gpus), most)
        if scratch is not None and found.free < a_node * scratch:
            raise PlanError(
                f"The node {node.name} has {decimal(found.free)} free for the states of up to {a_node} runs, which "
                f"take {decimal(a_node * scratch)}: set TUNE_STUDY_SCRATCH there to a folder on a larger disk, or type "
                f"--max-concurrent with a smaller number."
            )
        if host * a_node > found.memory:
            raise PlanError(
                f"{a_node} runs at once keep {decimal(host * a_node)} in the memory of the node {node.name}, which has "
                f"{decimal(found.memory)} available: type --max-concurrent with a smaller number."
            )


def smallest_card(answers: Mapping[Node, Answer]) -> Card | None:
    """The smallest GPU of the nodes, or None where one does not say."""
    known = [found.gpus for found in answers.values()]
    if not known or not all(known):
        return None
    return Card(min(min(sizes) for sizes in known) * 2**20, "the smallest of the nodes, as nvidia-smi says", True)
