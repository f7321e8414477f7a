"""From a plan to its start: what this machine, or each node of a cluster, must have is checked before anything runs."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.filesize import decimal

from tune_study import cluster, describe, disk, memory_plan, outputs, resources
from tune_study.cluster import Node
from tune_study.disk import Budget
from tune_study.interrupt import interrupt_of
from tune_study.memory_plan import MemoryPlan
from tune_study.models import check_file, check_model, check_trainable
from tune_study.plan import StudyPlan, flat_settings
from tune_study.resources import Allotment, Gpu
from tune_study.run import choose_wandb, execute


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


def start(plan: StudyPlan, asked: Asked, visible: tuple[Gpu, ...], dry_run: bool, console: Console) -> int:
    """Print the plan, or check what it needs and run it; the exit code. PlanError for what cannot be run.

    visible: the GPUs of this machine.
    """
    with cluster.joined(asked.address) as nodes:
        allotment = _allotted(plan, asked, visible, nodes, dry_run)
        mode = choose_wandb(asked.wandb, plan)
        room = disk.budget(plan, allotment, os.environ)
        used = tuple(gpu for gpu in visible if gpu.id in allotment.gpus)
        card = memory_plan.find_card(asked.gpu_memory_gib, used)
        memory = memory_plan.plan_memory(plan, allotment, card, os.environ)
        if dry_run:
            names = tuple(gpu.name for gpu in used)
            describe.print_plan(console, plan, allotment, room_line(plan, room), memory, names)
            return 0
        if nodes is None:
            _check_machine(plan, allotment, room, memory, used)
        else:
            _check_cluster(plan, allotment, asked, room, nodes)
        outputs.check_writable(plan.output)
        if plan.storage is None:
            disk.check(room)
        describe.say(console, f"preset {plan.preset}: {plan.preset_reason}")
        describe.say(console, room_line(plan, room))
        return execute(plan, allotment, mode, console, asked.skipped)


def start_all(
    plans: Sequence[StudyPlan], asked: Asked, visible: tuple[Gpu, ...], dry_run: bool, console: Console
) -> int:
    """`start` one study after another, an interrupt being the end; the exit code: 0 if that of all is."""
    code = 0
    for number, plan in enumerate(plans):
        if len(plans) > 1:
            describe.say(console, f"Study {number + 1} of {len(plans)}: {plan.study.name}")
        code = max(code, start(plan, asked, visible, dry_run, console))
        left = [later.study.name for later in plans[number + 1 :]]
        # An interrupt is one for all studies, also where it came as the last runs of this one ended.
        if code == _INTERRUPTED or (left and not dry_run and interrupt_of(plan.folder).is_visible):
            if left:
                describe.say(console, f"Not started: {', '.join(left)}. The same command goes on with all of them.")
            return _INTERRUPTED
    if len(plans) > 1 and not dry_run:
        describe.say(console, f"Index: {outputs.write_index(plans[0].output)}")
    return code


_INTERRUPTED = 130


def _allotted(
    plan: StudyPlan, asked: Asked, visible: tuple[Gpu, ...], nodes: tuple[Node, ...] | None, dry_run: bool
) -> Allotment:
    """What the study gets of the cluster, or of this machine."""
    if nodes is not None and asked.address is not None:
        return cluster.allot(plan, asked.address, nodes, asked.gpus, asked.max_concurrent)
    cores = resources.cpu_count()
    return resources.preflight(plan, asked.gpus, visible, cores, asked.max_concurrent, real=not dry_run)


def room_line(plan: StudyPlan, room: Budget) -> str:
    """The disk budget in a line, or where a storage takes the states how much of it."""
    if plan.stored is None:
        return disk.line(room)
    size = "of unknown size" if room.total is None else f"up to {decimal(room.total)}"
    return f"storage: {plan.stored}, {size}"


def _check_machine(
    plan: StudyPlan, allotment: Allotment, room: Budget, memory: MemoryPlan | None, used: tuple[Gpu, ...]
) -> None:
    """PlanError for what this machine lacks."""
    check_trainable(plan.study.trainable)
    _check_files(plan)
    if plan.model is not None:
        check_model(plan.model, os.environ, plan.ppo.model.chat_format)
        resources.check_engines(plan.ppo)
    if memory is not None:
        memory_plan.check(memory, plan, used)
    if plan.stored is not None:
        from tune_study.node_checks import check_scratch

        check_scratch(plan.stored, allotment.max_concurrent, disk.scratch_bytes(room))


def _check_files(plan: StudyPlan) -> None:
    """PlanError for a file, a folder or, of a family that `StudyPlan.model` does not name one of, a model not here."""
    for arm in {spec.arm: flat_settings(spec.config.model_dump()) for spec in plan.runs}.values():
        for setting in plan.study.family.files:
            if arm[setting] is not None:
                check_file(setting, arm[setting])
        for setting in plan.study.family.models if plan.model is None else ():
            check_model(arm[setting], os.environ, option=f"--set {setting}=")


def _check_cluster(plan: StudyPlan, allotment: Allotment, asked: Asked, room: Budget, nodes: tuple[Node, ...]) -> None:
    """PlanError for what a node lacks on which a run could be."""
    from tune_study import node_checks

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
