"""From a plan to its start: what this machine, or each node of a cluster, must have is checked before anything runs."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
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
from tune_study.ray_here import held
from tune_study.resources import Allotment, Gpu
from tune_study.run import choose_wandb, execute_held


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


class Ready(NamedTuple):
    """A study that may start: everything that it needs was found."""

    plan: StudyPlan
    allotment: Allotment
    wandb_mode: str
    room: Budget


def start(plans: Sequence[StudyPlan], asked: Asked, visible: tuple[Gpu, ...], dry_run: bool, console: Console) -> int:
    """Print the plans, or check what all need and run one after another; the exit code: 0 if that of all is.

    visible: the GPUs of this machine. PlanError, before anything starts, for what cannot be run.
    """
    with cluster.joined(asked.address) as nodes:
        ready = []
        for number, plan in enumerate(plans):
            if dry_run and len(plans) > 1:
                describe.say(console, _of_several(plans, number))
            found = _prepared(plan, asked, visible, nodes, console if dry_run else None)
            ready += [found] if found is not None else []
        return _run_all(ready, asked, console) if ready else 0


def _of_several(plans: Sequence[StudyPlan], number: int) -> str:
    return f"Study {number + 1} of {len(plans)}: {plans[number].study.name}"


def _prepared(
    plan: StudyPlan, asked: Asked, visible: tuple[Gpu, ...], nodes: tuple[Node, ...] | None, only_print: Console | None
) -> Ready | None:
    """A study whose needs are met, or PlanError; where it is only to be printed, None, and it may need what is not."""
    allotment = _allotted(plan, asked, visible, nodes, only_print is not None)
    mode = choose_wandb(asked.wandb, plan)
    room = disk.budget(plan, allotment, os.environ)
    used = tuple(gpu for gpu in visible if gpu.id in allotment.gpus)
    card = memory_plan.find_card(asked.gpu_memory_gib, used)
    memory = memory_plan.plan_memory(plan, allotment, card, os.environ)
    if only_print is not None:
        names = tuple(gpu.name for gpu in used)
        describe.print_plan(only_print, plan, allotment, room_line(plan, room), memory, names)
        return None
    if nodes is None:
        _check_machine(plan, allotment, room, memory, used)
    else:
        _check_cluster(plan, allotment, asked, room, nodes)
    outputs.check_writable(plan.output)
    if plan.storage is None:
        disk.check(room)
    return Ready(plan, allotment, mode, room)


def _run_all(ready: Sequence[Ready], asked: Asked, console: Console) -> int:
    """Run studies one after another in one Ray, an interrupt being the end; then an index of several."""
    plans, code = [study.plan for study in ready], 0
    with held([plan.folder for plan in plans], console, here=asked.address is None) as ray:
        for number, (plan, allotment, mode, room) in enumerate(ready):
            if len(plans) > 1:
                describe.say(console, _of_several(plans, number))
            describe.say(console, f"preset {plan.preset}: {plan.preset_reason}")
            describe.say(console, room_line(plan, room))
            code = max(code, execute_held(plan, allotment, mode, console, asked.skipped, ray))
            left = [later.study.name for later in plans[number + 1 :]]
            # An interrupt is one for all studies, also where it came as the last runs of this one ended.
            if code == _INTERRUPTED or (left and interrupt_of(plan.folder).is_visible):
                code = _INTERRUPTED
                if left:
                    describe.say(console, f"Not started: {', '.join(left)}. The same command goes on with all of them.")
                break
    return max(code, int(len(plans) > 1 and not _indexed(plans[0].output, console)))


def _indexed(output: Path, console: Console) -> bool:
    """Whether an index of all studies in the output folder could be written."""
    try:
        describe.say(console, f"Index: {outputs.write_index(output)}")
    except (OSError, ValueError) as error:
        print(f"The reports are there, but no index of them could be written: {error}", file=sys.stderr)
        return False
    return True


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
    family = plan.study.family
    for config in {spec.arm: spec.config for spec in plan.runs}.values():
        arm = flat_settings(config.model_dump())
        for setting in family.files:
            if arm[setting] is not None:
                check_file(setting, arm[setting])
        for setting in family.models if plan.model is None and family.loads(config) else ():
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
