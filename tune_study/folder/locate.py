"""A study by its name on the command line: a folder here, or a URI in a storage, of which a copy is made here."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainable.config.setting_types import shown
from trainable.runs.failures import StorageError
from trainable.storage.uris import below, check_uri, is_uri, parent
from tune_study.folder import outputs
from tune_study.folder.study_file import NOT_MOVED, check_storage, check_unchanged, join, plan_from_folder, read_study
from tune_study.plan.study_plan import PlanError, StudyPlan


def storage_uri(text: str) -> str:
    """The URI of --storage, a path made one; PlanError for one that carries credentials."""
    if not text.strip():
        raise PlanError("--storage is empty: type a URI such as s3://bucket/folder, or a folder that all nodes share.")
    uri = text if is_uri(text) else Path(os.path.abspath(os.path.expanduser(text))).as_uri()
    _checked(uri)
    return uri.rstrip("/")


def _checked(uri: str) -> None:
    try:
        check_uri(uri)
    except StorageError as error:
        raise PlanError(str(error)) from None


def _split(uri: str) -> tuple[str, str]:
    """(URI of the storage, name of the study) of a study's URI; PlanError."""
    _checked(uri)
    root, name = parent(uri)
    if not name:
        raise PlanError(f"{shown(uri, 1000)} names no study: type <storage>/<run>, as `run --storage` printed it.")
    return root, name


def joined(plan: StudyPlan, extend: bool, real: bool) -> StudyPlan:
    """`plan` as it can be run (see `continuing.join`): against its folder here, or its newer one in storage.

    real: False for a dry run, which looks into no storage.
    """
    here = join(plan, extend)
    if here.storage is None or not real:
        return here
    from tune_study.folder import storage

    storage.check_storage(here.storage)
    with _newer(here, here.storage) as folder:
        if folder is None:
            return here
        with _told_as(folder, below(here.storage, here.run)):
            there = join(replace(plan, output=folder.parent.parent, storage=None), extend)
        return replace(there, output=plan.output, storage=here.storage)


@contextmanager
def _told_as(folder: Path, uri: str) -> Iterator[None]:
    """PlanErrors of a copy in `folder`, which is gone when they are read, speak of the study at `uri`."""
    try:
        yield
    except PlanError as error:
        raise PlanError(str(error).replace(str(folder), uri)) from None


def resumed(text: str, placed: Mapping[str, object] = NOT_MOVED, *, real: bool) -> StudyPlan:
    """The plan of the study that RUN names, as it was started, and nothing of it declared otherwise; PlanError.

    placed: see `continuing.plan_from_folder`. real: see `joined`.
    """
    if is_uri(text):
        return _resumed_from(text, placed)
    plan = plan_from_folder(Path(text), placed)
    if plan.storage is None or not real:
        check_unchanged(plan)
        return plan
    from tune_study.folder import storage

    storage.check_storage(plan.storage)
    with _newer(plan, plan.storage) as folder:
        with _told_as(folder or plan.folder, below(plan.storage, plan.run) if folder else str(plan.folder)):
            newest = plan if folder is None else plan_from_folder(folder, placed)
            check_unchanged(newest)
        return replace(newest, output=plan.output, storage=plan.storage)


def _resumed_from(uri: str, placed: Mapping[str, object]) -> StudyPlan:
    """The plan of the study at `uri`, to go on in the current folder."""
    from tune_study.folder import storage

    root, name = _split(uri)
    output = Path.cwd()
    _check_here(output / "results" / name, root)
    here = output / "results" / name
    if (here / "study.json").exists() and storage.is_newest(uri, here):
        return replace(resumed(str(here), placed, real=False), storage=root)
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(empty) / "results" / name
        if not storage.fetch_study(uri, folder):
            raise PlanError(f"{shown(uri, 1000)} holds no study: type <storage>/<run>, as `run --storage` printed it.")
        with _told_as(folder, uri):
            plan = plan_from_folder(folder, placed)
            check_unchanged(plan)
        return replace(plan, output=output, storage=root)


def _check_here(folder: Path, root: str) -> None:
    """PlanError where the folder here, which a study in storage would be copied to, holds another one."""
    if (folder / "study.json").exists():
        check_storage(plan_from_folder(folder), root)


@contextmanager
def _newer(plan: StudyPlan, root: str) -> Iterator[Path | None]:
    """A folder with study.json and run.json of the study in storage, where it was run elsewhere since; else None."""
    from tune_study.folder import storage

    uri = below(root, plan.run)
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(empty) / "results" / plan.run
        yield None if storage.is_newest(uri, plan.folder) or not storage.fetch_study(uri, folder) else folder


@contextmanager
def looked_at(text: str) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is being run) of the study that RUN names; one in storage is copied for the moment only."""
    if not is_uri(text):
        folder = Path(text)
        if not read_study(folder).get("storage"):
            yield folder, outputs.is_running(folder)
            return
        text = plan_from_folder(folder).stored or text
    from tune_study.folder import storage

    _, name = _split(text)
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(empty) / "results" / name
        storage.fetch_whole(text, folder)
        if not (folder / "study.json").exists():
            raise PlanError(f"{shown(text, 1000)} holds no study: type <storage>/<run>, as `run --storage` printed it.")
        yield folder, storage.is_run(text)


def copied(text: str) -> Path:
    """The folder of the study that RUN names, to be written in, with the newest rows of its storage if it has one.

    One that is named by a URI is copied to results/<run> below the current folder. PlanError, also for a folder with a
    symbolic link in it.
    """
    if not is_uri(text):
        folder = Path(text)
        outputs.refuse_links_in(folder)
        if read_study(folder).get("storage"):
            plan = plan_from_folder(folder)
            _fetch(plan.stored or "", folder)
        return folder
    root, name = _split(text)
    folder = Path.cwd() / "results" / name
    _check_here(folder, root)
    outputs.refuse_links_in(folder)
    _fetch(text, folder)
    read_study(folder)
    return folder


def _fetch(uri: str, folder: Path) -> None:
    from tune_study.folder import storage

    storage.fetch_whole(uri, folder)


def copied_back(folder: Path) -> str:
    """Copy tables and report of a study to its storage, if it has one; what went wrong, or nothing."""
    if not read_study(folder).get("storage"):
        return ""
    from tune_study.folder import storage

    return storage.copy_up(plan_from_folder(folder))
