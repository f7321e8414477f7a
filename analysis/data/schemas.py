"""Columns and types of the tables that the runs of a family write."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from trainable.families import FAMILIES, Family
from trainable.families import get_family as get_named_family
from trainable.runs.records import GRADIENT_COLUMNS, GRADIENT_GROUP_COLUMNS, ROW_COLUMNS, STOP_COLUMNS, Column
from trainable.runs.study_record import StudyRecord

Row = dict[str, Any]
Schema = dict[str, str]

TEXT, FLOAT, INT, NULLABLE_INT, BOOL = "str", "float64", "int64", "Int64", "bool"
TIME = "datetime64[us, UTC]"
CATEGORY = "category"
"""Text stored once per distinct value, for frames with many rows. Categories are sorted."""
# Columns whose type does not follow from their unit.
_DTYPE_OVERRIDES = {
    "seed": INT,
    "step": INT,
    "steps_done": INT,
    "steps_total": NULLABLE_INT,
    "stop_step": NULLABLE_INT,
    "group": INT,
    "prefilter": BOOL,
    "uses_training_batch": BOOL,
}


def _make_schema(*column_groups: Iterable[Column]) -> Schema:
    """Map columns of records.py to dtypes: text without a unit, a time if the unit is UTC, otherwise a number."""
    return {
        column.name: _DTYPE_OVERRIDES.get(column.name) or {"": TEXT, "UTC": TIME}.get(column.unit, FLOAT)
        for group in column_groups
        for column in group
    }


_RUN_SCHEMA = _make_schema(column for column in ROW_COLUMNS if column.name != "step")
_AXIS_SCHEMA = {"axis_setting": TEXT, "axis_value": FLOAT}
_DETAIL_SCHEMAS = {
    "levels": {
        **{name: CATEGORY if dtype == TEXT else dtype for name, dtype in _RUN_SCHEMA.items()},
        "step": INT,
        "split": CATEGORY,
        "mode": CATEGORY,
        "level": INT,
        "cluster": INT,
        "success": BOOL,
    },
    "gradients": _make_schema(ROW_COLUMNS, GRADIENT_COLUMNS),
    "gradient_groups": {
        **_make_schema(ROW_COLUMNS),
        "source": TEXT,
        "prefilter": BOOL,
        "bucket": TEXT,
        **_make_schema(GRADIENT_GROUP_COLUMNS),
    },
}


@cache
def get_schemas(family: str) -> Mapping[str, Schema]:
    """Return columns and types of each frame of a family, by name. Frames that only other families fill are empty."""
    declared = get_named_family(family)
    return {
        "trials": {**_RUN_SCHEMA, **_AXIS_SCHEMA, **_make_schema(declared.trial_columns)},
        "steps": _make_schema(ROW_COLUMNS, declared.step_columns, STOP_COLUMNS),
        **_DETAIL_SCHEMAS,
    }


def get_family(study: StudyRecord) -> Family:
    """Return the family named in study.json. ValueError if it is unknown."""
    if study.family not in FAMILIES:
        raise ValueError(
            f"study.json of `{study.name}` names the family {study.family!r}, which this version cannot read. "
            f"Known families: {', '.join(FAMILIES)}."
        )
    return get_named_family(study.family)
