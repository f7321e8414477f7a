"""Decide which things outside of a study's folder may be used because the folder names them.

A folder may come from somebody else and is not trusted. Its settings of the type `Outside` (addresses, environment
variables, files, models) and its storage are used only if this user's own study wrote the folder in its place, if the
installed package declares the same value, or if the user types it again.

A folder could claim any origin, so the values with which a user's studies were started are recorded in the user's state
folder, by the path of the study.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from search_spaces.declaration.study import Study
from trainable.config.base_config import BaseRunConfig
from trainable.config.command_lines import quote_argument
from trainable.config.constants import SHIPPED_MODELS, TEACHERS
from trainable.config.run_config import list_outside_settings
from trainable.config.setting_types import format_value
from trainable.files.json_values import find_object, write_object
from trainable.runs.study_record import StudyRecord, WandbTarget, find_record
from tune_study.plan.errors import PlanError
from tune_study.plan.storage_uri import check_uri, is_same_folder
from tune_study.plan.study_plan import StudyPlan, make_arm_config, make_base_config

NOTHING: frozenset[str] = frozenset()
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def find_state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Find the folder where this project records the user's studies; it may not exist yet."""
    home = Path(environ.get("HOME", "~")).expanduser()
    return home / (environ.get("XDG_STATE_HOME") or ".local/state") / "tune_study"


def list_outside_values(configs: Iterable[BaseRunConfig]) -> frozenset[str]:
    """List what runs name outside of their folder, each as SETTING=VALUE.

    Shipped models and hub ids, which only the local cache can resolve, are left out: they contact nothing and open no
    path that somebody else chose.
    """
    names = set()
    for config in configs:
        models = list_outside_settings(type(config), "model")
        for setting in list_outside_settings(type(config)):
            value = attrgetter(setting)(config)
            is_name = setting in models and (
                value in (*SHIPPED_MODELS, *TEACHERS)
                or (value is not None and _HUB_ID.fullmatch(value) and not os.path.exists(value))
            )
            if value is not None and not is_name:
                names.add(f"{setting}={value}")
    return frozenset(names)


def list_plan_values(plan: StudyPlan) -> frozenset[str]:
    """List what a study names outside of its folder, each as SETTING=VALUE: in its runs, as its storage and for W&B."""
    # Seeds share their settings.
    names = list_outside_values({spec.arm: spec.config for spec in plan.runs}.values())
    names |= {f"storage={plan.storage}"} if plan.storage else set()
    return names | ({f"wandb={plan.wandb.mode}"} if plan.wandb.mode == "online" else set())


def find_last_wandb(folder: Path) -> tuple[WandbTarget | None, str]:
    """Find where the last start of the study in `folder` logged to W&B, if this one may, else the reason why not.

    The target is None without a start, and if rows would leave this machine because somebody else's folder says so.
    """
    study = find_record(StudyRecord, folder)
    target = study.starts[-1].wandb if study is not None and study.starts else None
    if target is None:
        return None, ""
    if target.mode != "online" or f"wandb={target.mode}" in list_typed_before(folder):
        return target, ""
    return (
        None,
        f"W&B: off. This study was started elsewhere with --wandb {target.mode}: type that to log it from here.",
    )


def _list_declared_values(study: Study, preset: str) -> frozenset[str]:
    """List what the declaration of a study, which the user installed or typed, names outside of its folder."""
    base_config = make_base_config(study, preset)
    arms = study.axis.grids.get(preset, ())
    return list_outside_values([base_config, *(make_arm_config(study, base_config, value) for value in arms)])


def remember_origin(plan: StudyPlan) -> None:
    """Record in the user's state folder that this user's study writes this folder, and what it names outside."""
    names = list_plan_values(plan)
    # What a file of the user declares now, it may not declare any more when the study continues.
    if plan.source is None and not names - _list_declared_values(plan.study, plan.preset):
        return
    path = _find_record(plan.folder)
    with suppress(OSError):  # without a writable home folder, such values must be typed again
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_object(path, {"folder": os.path.realpath(plan.folder), "values": sorted(names)})


def list_typed_before(folder: Path) -> frozenset[str]:
    """Read the values with which this user's study in `folder` was started; empty for somebody else's folder."""
    record = find_object(_find_record(folder)) or {}
    return frozenset(map(str, record.get("values", ())))


def _find_record(folder: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
    return find_state_folder() / "studies" / f"{digest}.json"


def check_outside_values(plan: StudyPlan, study: Study, allowed: frozenset[str]) -> None:
    """Raise PlanError if a plan that was read from its folder names something outside that may not be used.

    study: the declaration. allowed: the values typed in this command, each as SETTING=VALUE.
    """
    named = list_plan_values(replace(plan, storage=None))  # `find_usable_storage` decides on the storage
    if not named:
        return
    if foreign := named - allowed - _list_declared_values(study, plan.preset) - list_typed_before(plan.folder):
        values = ", ".join(format_value(value, 1000) for value in sorted(foreign))
        options = " ".join(f"--allow {quote_argument(format_value(value, 1000))}" for value in sorted(foreign))
        raise PlanError(
            f"{format_value(plan.folder, 1000)} names what lies outside of it: {values}. You did not start this study "
            f"in this place, so nothing is read from there or sent to it. If you trust who wrote it, type {options}."
        )


def find_usable_storage(folder: Path, uri: str | None, allowed: frozenset[str] = NOTHING) -> tuple[str | None, str]:
    """Return (the storage `uri` of study.json if it may be used, "") or (None, a sentence that says why not).

    How it is reached (another endpoint, no encryption, another library) is as the user typed it, now or at the start.
    Raises PlanError for a URI with credentials, because messages would repeat them.
    """
    if uri is None:
        return None, ""
    check_uri(uri)
    typed_uris = [value.removeprefix("storage=") for value in allowed if value.startswith("storage=")]
    for typed_uri in typed_uris:
        if is_same_folder(uri, typed_uri):
            return typed_uri, ""  # with the typed query instead of the file's
    if f"storage={uri}" in list_typed_before(folder):
        return uri, ""
    return None, (
        f"Its storage, {format_value(uri, 1000)}, is not contacted, because you did not start this study in this "
        "place: type the URI of the study in the place of its folder, <storage>/<run>, to use it."
    )
