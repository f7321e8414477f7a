"""Compare studies: the settings in which they differ, and the outcomes of the arms that they share."""

import json
import math
from collections.abc import Mapping

import pandas as pd

from analysis.data.compare import (
    TEST_COLUMNS,
    add_adjusted_p_values,
    collect_joint_outcomes,
    compare_with_baseline,
    get_margin,
    label_arm,
    list_arms,
    require_single_study,
    select_runs,
)
from analysis.data.frames import StudyFrames
from analysis.data.run_files import flatten_config
from analysis.data.schemas import Row
from analysis.sweep.verdicts import name_verdict
from trainable.runs.study_record import StudyRecord

ARM_COLUMNS = (
    *("study", "arm", "other_arm", "reference", "other", "reference_runs", "other_runs"),
    *("reference_stopped", "other_stopped", "column", *TEST_COLUMNS, "seeds", "basis"),
    *("p_holm", "p_equal_holm", "verdict"),
)


def compare_settings(studies: Mapping[str, StudyRecord]) -> pd.DataFrame:
    """List the settings that are not the same in all studies: a row each, with its value in every study as JSON.

    Compares the settings that all arms of a study share, and its preset. A study that lacks a setting has empty text.
    The row is left out if all other studies have the default, since the study then does what the default does, or comes
    from a version without this setting.
    """
    values = {label: {"preset": study.preset, **flatten_config(study.settings)} for label, study in studies.items()}
    defaults = {label: flatten_config(study.defaults) for label, study in studies.items()}
    rows = []
    for setting in dict.fromkeys(name for settings in values.values() for name in settings):
        texts = {label: json.dumps(own[setting]) if setting in own else "" for label, own in values.items()}
        # NaN, for a missing default, equals no value.
        owners = [
            (own[setting], defaults[label].get(setting, math.nan)) for label, own in values.items() if setting in own
        ]
        is_new = len(owners) < len(values) and all(value == default for value, default in owners)
        if len(set(texts.values())) > 1 and not is_new:
            rows.append({"setting": setting, **texts})
    return pd.DataFrame(rows, columns=["setting", *values])


def find_common_arms(reference: StudyFrames, other: StudyFrames) -> list[tuple[str, str]]:
    """Pair the arms that two studies share, by name.

    Within one axis, arms are shared if their values are equal: `0.1` is `0.10`. Between different axes, such as `kl`
    and `top-p`, arms are shared if their runs have the same settings.
    """
    is_same_axis = reference.studies[0].axis.setting == other.studies[0].axis.setting

    def get_key(frames: StudyFrames, arm: str) -> str | float:
        run = select_runs(frames, arm).iloc[0]
        if not is_same_axis:
            return str(run["config_hash"])
        return arm if math.isnan(run["axis_value"]) else float(run["axis_value"])

    others = {key: arm for arm in list_arms(other) if (key := get_key(other, arm)) != ""}
    keys = {arm: get_key(reference, arm) for arm in list_arms(reference)}
    return [(arm, others[key]) for arm, key in keys.items() if key in others]


def compare_arms(studies: Mapping[str, StudyFrames]) -> pd.DataFrame:
    """Compare the arms that the first study shares with each other study: a row per pair, other minus first.

    * study: label of the other study; arm, other_arm: name of the arm in the first study and in the other.
    * reference, other: mean outcome in the first study and in the other; reference_runs, other_runs: number of scored
      runs; reference_stopped, other_stopped: how many of these a rule stopped.
    * The columns of a test, with the noise estimated from all arms of all studies. Runs of the same seed are paired.
      p_holm and p_equal_holm are corrected over all rows. verdict: `better` or `worse` refers to the other study.

    Raises ValueError if the studies are of different families, so that outcomes are not comparable, or share no arm.
    """
    (reference_label, reference), *others = studies.items()
    families = {require_single_study(frames).families[0].name: label for label, frames in studies.items()}
    if len(families) > 1:
        described = ", ".join(f"{label} is of the family {name}" for name, label in families.items())
        raise ValueError(f"These studies have different outcomes ({described}): compare studies of one family.")
    (family,) = reference.families
    column = family.primary_column
    pairs = [
        (label, arm, other_arm) for label, frames in others for arm, other_arm in find_common_arms(reference, frames)
    ]
    if not pairs:
        raise ValueError(
            "These studies have no arm in common: studies of one axis are compared at equal values, and studies of "
            "different axes at arms with equal settings."
        )
    outcomes = collect_joint_outcomes(studies, column, len(pairs))
    margin = get_margin(reference.studies[0], column)
    rows: list[Row] = []
    for label, arm, other_arm in pairs:
        names = (label_arm(label, other_arm), label_arm(reference_label, arm))
        rows.append(
            {
                "study": label,
                "arm": arm,
                "other_arm": other_arm,
                **_describe_side("reference", reference, arm, outcomes.get_values(names[1])),
                **_describe_side("other", studies[label], other_arm, outcomes.get_values(names[0])),
                "column": column,
                **compare_with_baseline(outcomes, *names, margin),
            }
        )
    table = add_adjusted_p_values(pd.DataFrame(rows), column)
    verdicts = [name_verdict(row, family) for row in table.to_dict("records")]
    return table.assign(verdict=verdicts)[list(ARM_COLUMNS)]


def _describe_side(name: str, frames: StudyFrames, arm: str, values: "pd.Series[float]") -> Row:
    runs = select_runs(frames, arm, scored_only=True)
    return {
        name: float(values.mean()) if len(values) else math.nan,
        f"{name}_runs": len(runs),
        f"{name}_stopped": int((runs["status"] == "early_stopped").sum()),
    }
