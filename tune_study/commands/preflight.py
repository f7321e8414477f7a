"""From a plan to its start: what this machine, or each node of a cluster, must have is checked before anything runs."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.filesize import decimal

from tune_study.commands import describe
from tune_study.commands.suites import Ready, of_several, run_ready, run_suite
from tune_study.folder import outputs
from tune_study.host.console import say
from tune_study.host.gpus import Gpu, cpu_count
from tune_study.placement import disk, memory_plan, resources
from tune_study.placement.disk import DiskBudget
from tune_study.placement.memory_plan import MemoryPlan
from tune_study.placement.models import check_file, check_model
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import StudyPlan, flat_settings
from tune_study.tune import cluster
from tune_study.tune.cluster import Node
from tune_study.tune.run import choose_wandb


class Asked(NamedTuple):
    """What was typed of where and how to run: --gpus, --gpu-memory-gib, --max-concurrent, --wandb, --address.

    skipped: the statuses of --skip-statuses.
    """

    gpus: str | None
    gpu_memory_gib: float | None
    max_concurrent: int | None
    wandb: str | None
    address: str | None
    skipped: tuple[str, ...] = outputs.ENDED


class _Needs(NamedTuple):
    """What a study gets and takes. used: the GPUs of this machine among what it gets."""

    allotment: Allotment
    room: DiskBudget
    memory: MemoryPlan | None
    used: tuple[Gpu, ...]


def start(plans: Sequence[StudyPlan], asked: Asked, visible: tuple[Gpu, ...], dry_run: bool, console: Console) -> int:
    """Print the plans, or check what all need and run one after another; the exit code: 0 if that of all is.

    visible: the GPUs of this machine. PlanError, before anything starts, for what cannot be run.
    """
    takes_gpus = any(plan.model is not None for plan in plans)

    def of(plan: StudyPlan) -> Asked:
        """--gpus is for the studies of a suite that take some."""
        return asked._replace(gpus=None) if takes_gpus and plan.model is None else asked

    with cluster.joined(asked.address) as nodes:
        if dry_run:
            for number, plan in enumerate(plans):
                if len(plans) > 1:
                    say(console, of_several(plans, number))
                _print(plan, of(plan), visible, nodes, console)
            return 0
        found = [_ready(plan, of(plan), visible, nodes) for plan in plans]
        if len(plans) == 1:
            return run_ready(found[0], console, asked.skipped)
        disk.check_together([study.room for study in found if study.plan.storage is None])

        def ready(plan: StudyPlan) -> Ready:
            return _ready(plan, of(plan), visible, nodes)

        return run_suite(plans, ready, console, asked.skipped, here=nodes is None)


def why_not_paper(plans: Sequence[StudyPlan], asked: Asked, visible: tuple[Gpu, ...], command: str) -> str:
    """Why `plans` do not fit the GPUs of this machine, and the command that would; nothing where they fit.

    command: what was typed, to which options are added.
    """
    for plan in plans:
        memory = _needs(plan, asked, visible, None, dry_run=True).memory
        too_much, ways = ("", []) if memory is None else memory_plan.why_not(memory, plan.study)
        if too_much:
            instead = f"this would fit: {command} --preset paper {ways[0]}" if ways else "no setting makes it fit"
            return f"{too_much}; {instead}"
    return ""


def _print(
    plan: StudyPlan, asked: Asked, visible: tuple[Gpu, ...], nodes: tuple[Node, ...] | None, console: Console
) -> None:
    """What would run; the machine may lack it."""
    choose_wandb(asked.wandb, plan)
    needs = _needs(plan, asked, visible, nodes, dry_run=True)
    names = tuple(gpu.name for gpu in needs.used)
    describe.print_plan(console, plan, needs.allotment, room_line(plan, needs.room), needs.memory, names)


def _ready(plan: StudyPlan, asked: Asked, visible: tuple[Gpu, ...], nodes: tuple[Node, ...] | None) -> Ready:
    """A study whose needs are met; PlanError where they are not."""
    mode = choose_wandb(asked.wandb, plan)
    outputs.refuse_links(plan)
    needs = _needs(plan, asked, visible, nodes, dry_run=False)
    if nodes is None:
        _check_machine(plan, needs)
    else:
        _check_cluster(plan, needs.allotment, asked, needs.room, nodes)
    outputs.check_writable(plan.output)
    if plan.storage is None:
        disk.check(needs.room)
    return Ready(plan, needs.allotment, mode, needs.room, room_line(plan, needs.room))


def _needs(
    plan: StudyPlan, asked: Asked, visible: tuple[Gpu, ...], nodes: tuple[Node, ...] | None, dry_run: bool
) -> _Needs:
    allotment = _allotted(plan, asked, visible, nodes, dry_run)
    room = disk.budget(plan, allotment, os.environ)
    used = tuple(gpu for gpu in visible if gpu.id in allotment.gpus)
    card = memory_plan.find_card(asked.gpu_memory_gib, used)
    return _Needs(allotment, room, memory_plan.plan_memory(plan, allotment, card, os.environ), used)


def _allotted(
    plan: StudyPlan, asked: Asked, visible: tuple[Gpu, ...], nodes: tuple[Node, ...] | None, dry_run: bool
) -> Allotment:
    """What the study gets of the cluster, or of this machine."""
    if nodes is not None and asked.address is not None:
        return cluster.allot(plan, asked.address, nodes, asked.gpus, asked.max_concurrent)
    cores = cpu_count()
    return resources.preflight(plan, asked.gpus, visible, cores, asked.max_concurrent, real=not dry_run)


def room_line(plan: StudyPlan, room: DiskBudget) -> str:
    """The disk budget in a line, or where a storage takes the states how much of it."""
    if plan.stored is None:
        return disk.line(room)
    size = "of unknown size" if room.total is None else f"up to {decimal(room.total)}"
    return f"storage: {plan.stored}, {size}"


def _check_machine(plan: StudyPlan, needs: _Needs) -> None:
    """PlanError for what this machine lacks."""
    _check_files(plan)
    if plan.model is not None:
        check_model(plan.model, os.environ, plan.ppo.model.chat_format)
        resources.check_engines(plan.ppo)
    if needs.memory is not None:
        memory_plan.check(needs.memory, plan, needs.used)
    if plan.stored is not None:
        from tune_study.commands.node_checks import check_scratch

        check_scratch(plan.stored, needs.allotment.max_concurrent, disk.scratch_bytes(needs.room))


def _check_files(plan: StudyPlan) -> None:
    """PlanError for a file, a folder or, of a family that `StudyPlan.model` does not name one of, a model not here."""
    family = plan.study.family
    for config in {spec.arm: spec.config for spec in plan.runs}.values():
        arm = flat_settings(config.model_dump())
        for setting in family.files:
            if arm[setting] is not None:
                check_file(setting, arm[setting])
        for setting in family.models if plan.model is None and family.loads(config) else ():
            check_model(arm[setting], os.environ, option=f"--set {setting}=")


def _check_cluster(
    plan: StudyPlan, allotment: Allotment, asked: Asked, room: DiskBudget, nodes: tuple[Node, ...]
) -> None:
    """PlanError for what a node lacks on which a run could be."""
    from tune_study.commands import node_checks

    answers = node_checks.check_nodes(plan, cluster.usable(nodes, plan.base.trainer.n_gpus_per_node))
    card = None if asked.gpu_memory_gib else node_checks.smallest_card(answers)
    memory = memory_plan.plan_memory(
        plan, allotment, card or memory_plan.find_card(asked.gpu_memory_gib, ()), os.environ
    )
    if memory is not None:
        memory_plan.check_fits(memory, plan.study)
    scratch = None if plan.storage is None else disk.scratch_bytes(room)
    n_gpus, host = plan.base.trainer.n_gpus_per_node, 0 if memory is None else memory.host
    node_checks.check_room(answers, n_gpus, allotment.a_node, scratch, host)
