"""Find the study that RUN names on the command line: a local folder, or the URI of a study in a storage.

A study in a storage is copied to this machine, without its checkpoints.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from trainable.config.setting_types import format_value, is_loopback
from trainable.files.paths import check_tree
from trainable.runs.run_files import is_locked
from trainable.runs.study_record import STUDY_FILE
from tune_study.folder.origin import NOTHING, list_plan_values, list_typed_before
from tune_study.folder.study_file import (
    NO_OVERRIDES,
    check_same_storage,
    check_storage_usable,
    check_unchanged,
    merge_with_folder,
    plan_from_folder,
    read_study,
)
from tune_study.host.console import print_error
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy
from tune_study.plan.storage_uri import check_uri, is_uri, join_uri, split_uri
from tune_study.plan.study_plan import StudyPlan


def parse_storage_uri(text: str) -> str:
    """Parse --storage, a URI or a path, into a URI without a trailing slash.

    Raises PlanError for an empty text, and for a URI with credentials, which study.json would make public.
    """
    if not text.strip():
        raise PlanError("--storage is empty: type a URI such as s3://bucket/folder, or a folder that all nodes share.")
    _check_uri(text)  # before a path becomes a URI
    uri = text if is_uri(text) else Path(os.path.abspath(os.path.expanduser(text))).as_uri()
    _check_uri(uri)
    return uri.rstrip("/")


def _check_uri(uri: str) -> None:
    check_uri(uri)
    query = dict(parse_qsl(urlsplit(uri).query)) if is_uri(uri) else {}
    endpoint = query.get("endpoint_override", "").removeprefix("http://")
    is_plain = query.get("scheme") == "http" or query.get("endpoint_override", "").startswith("http://")
    if is_plain and not is_loopback(urlsplit(f"//{endpoint}").hostname):
        raise PlanError(
            f"{format_value(uri, 1000)} would send credentials without encryption: leave scheme=http and http:// out, "
            "which are accepted for this machine (127.0.0.1) only."
        )


def _split_study_uri(uri: str) -> tuple[str, str]:
    """Split a study's URI into (URI of the storage, name of the study). Raises PlanError if it is invalid."""
    _check_uri(uri)
    root, name = split_uri(uri)
    if not name:
        raise PlanError(
            f"{format_value(uri, 1000)} names no study: type <storage>/<run>, as `run --storage` printed it."
        )
    return root, name


def _check_local_path(text: str) -> Path:
    """Return the folder that RUN names. Raises PlanError without its text if it may be a bad URI with a key."""
    folder = Path(text)
    if not folder.is_dir():
        _check_uri(text)
    return folder


def merge_with_existing(plan: StudyPlan, extend: bool, is_real: bool) -> StudyPlan:
    """Merge `plan` with the study in its storage, if there is one, else with the study in its local folder.

    plan, extend: see `merge_with_folder`. is_real: False for a dry run, which does not access the storage.
    """
    # The local folder comes first: it may record the storage, which need not be typed again.
    local_plan = merge_with_folder(plan, extend)
    if local_plan.storage is None or not is_real:
        return local_plan
    with _fetch_plan(join_uri(local_plan.storage, local_plan.run)) as folder:
        if folder is None:
            return local_plan
        # While the plans are compared, the temporary copy stands in for the study's folder.
        known = list_plan_values(local_plan) | list_typed_before(plan.folder)
        stored_plan = merge_with_folder(replace(plan, folder=folder, storage=None), extend, known)
    return replace(stored_plan, folder=plan.folder, storage=local_plan.storage)


def plan_resume(
    text: str,
    overrides: Mapping[str, object] = NO_OVERRIDES,
    own_study: OwnStudy | None = None,
    *,
    is_real: bool,
    allowed: frozenset[str] = NOTHING,
) -> StudyPlan:
    """Plan the continuation of the study that RUN (`text`) names, as it was started.

    A study named by a URI is continued in the current folder. overrides, own_study, allowed: see `plan_from_folder`.
    is_real: False for a dry run, which does not access the storage of a local study.

    Raises PlanError if there is no such study, or if its declaration has changed since it was started.
    """
    local_plan: StudyPlan | None = None
    if is_uri(text):
        uri, (root, name) = text, _split_study_uri(text)
        local_folder = Path.cwd() / "results" / name
        _check_local_folder(local_folder, root)
        allowed |= list_typed_storage(uri)
    else:
        local_plan = plan_from_folder(_check_local_path(text), overrides, own_study=own_study, allowed=allowed)
        local_folder = local_plan.folder
        check_tree(local_folder, trees=[local_folder])
        check_storage_usable(local_plan)
        if local_plan.storage is None or not is_real:
            check_unchanged(local_plan)
            return local_plan
        root, uri = local_plan.storage, join_uri(local_plan.storage, local_plan.run)
    with _fetch_plan(uri, is_checked=local_plan is not None) as folder:
        if folder is not None:
            # The copy is of the study that this user may have started here.
            known = allowed | list_typed_before(local_folder)
            plan = plan_from_folder(folder, overrides, own_study=own_study, allowed=known)
        elif local_plan is not None:
            plan = local_plan
        else:
            raise _refuse_uri(uri)
        check_unchanged(plan)
    return replace(plan, folder=local_folder, storage=root)


def _refuse_uri(uri: str) -> PlanError:
    return PlanError(
        f"{format_value(uri, 1000)} contains no study: type <storage>/<run>, as `run --storage` printed it."
    )


def _check_local_folder(folder: Path, root: str) -> None:
    """Raise PlanError if the local folder for a study in a storage holds a study with another storage or none."""
    if (folder / STUDY_FILE).exists():
        check_same_storage(folder, root)


@contextmanager
def _fetch_plan(uri: str, *, is_checked: bool = True) -> Iterator[Path | None]:
    """Yield a temporary copy of study.json and every run.json of the study at `uri`; None if there is no study.

    The study may have been continued elsewhere, with more arms or seeds than the local folder has. Errors in the body
    name the URI instead of the copy. is_checked: first check that the storage can be written.
    """
    from tune_study.folder import storage

    root, name = split_uri(uri)
    if is_checked:
        storage.check_storage(root)
    with tempfile.TemporaryDirectory() as temp_dir:
        folder = Path(temp_dir) / "results" / name
        try:
            storage.fetch_study(uri, folder, storage.PLAN_NAMES)
            yield folder if (folder / STUDY_FILE).exists() else None
        except PlanError as error:
            raise PlanError(str(error).replace(str(folder), uri)) from None


@contextmanager
def open_for_reading(text: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, whether a driver is running it) of the study that RUN names.

    A study in a storage is copied to a temporary folder, so that reading leaves no files behind. A local folder is read
    directly: the storage that it records is not contacted, and stderr says that it may be newer.
    """
    if is_uri(text):
        from tune_study.folder import storage

        _, name = _split_study_uri(text)
        with tempfile.TemporaryDirectory() as temp_dir:
            folder = Path(temp_dir) / "results" / name
            storage.fetch_study(text, folder)
            if not (folder / STUDY_FILE).exists():
                raise _refuse_uri(text)
            yield folder, bool(storage.find_driver(text))
        return
    folder = _check_local_path(text)
    study = read_study(folder)
    check_tree(folder, [folder / "runs" / entry.run_id for entry in study.runs])
    has_driver = is_locked(folder)
    if study.storage is not None and not has_driver:
        check_uri(study.storage)  # before a message repeats it
        print_error(
            f"The folder is read. The storage of the study, {format_value(study.storage, 1000)}, may be newer: type "
            f"<storage>/<run> in the place of the folder to read it."
        )
    yield folder, has_driver


def fetch_for_writing(text: str) -> Path:
    """Return the folder of the study that RUN names, for tables and a report to be written there.

    A study named by a URI is copied to results/<run> in the current folder. Raises PlanError if there is no such study,
    and UnsafePathError if its folder contains a symbolic link.
    """
    if not is_uri(text):
        folder = _check_local_path(text)
        read_study(folder)  # before the links, so that the error for a folder without a study says so
        check_tree(folder, trees=[folder])
        return folder
    from tune_study.folder import storage

    root, name = _split_study_uri(text)
    folder = Path.cwd() / "results" / name
    _check_local_folder(folder, root)
    check_tree(folder, trees=[folder])
    storage.fetch_study(text, folder)
    read_study(folder)  # PlanError if the storage contains no study of this name
    return folder


def list_typed_storage(text: str) -> frozenset[str]:
    """Return the storage that RUN, as typed, names if it is a URI, in the form that `plan_from_folder` takes."""
    return frozenset({f"storage={_split_study_uri(text)[0]}"}) if is_uri(text) else NOTHING


def push_results(folder: Path, text: str) -> str:
    """Copy tables and report to the storage if RUN (`text`) names a study there; return an error text or ""."""
    if not is_uri(text):
        return ""
    from tune_study.folder import storage

    return storage.push_results(folder, text)
