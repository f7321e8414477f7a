"""Write the file of a new study: which settings vary, and over which values."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.study import make_grid_axis
from search_spaces.language_model.family import PPO
from trainable.config.command_lines import format_command
from trainable.config.run_config import RunConfig, apply_overrides, resolve_key
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import is_study_name
from tune_study.plan.typed_settings import check_varied

PRESETS = tuple(name for name, preset in PPO.presets.items() if not preset.variant_of)

_FILE = '''"""{question}"""

from search_spaces.declaration.study import {imports}
from search_spaces.language_model.common import SWEEP_SETTINGS
from search_spaces.language_model.family import PPO

{constants}STUDY = Study(
    name="{name}",  # names the folder of the results
    family=PPO,  # fine-tunes a language model, with any setting of `python -m tune_study settings --all`
    question=__doc__,  # stands above the report
    # The arms. `{option}` of the command line chooses {choice}.
    axis={axis},
    # Settings of all arms, as --set takes them; the preset has the others.
    fixed_settings={{**SWEEP_SETTINGS, "actor.entropy_coeff": 0.0, "filter.rollout_filter_value": 1.0}},
    baseline={baseline},  # the arm that the others are compared with{contrasts}
)
'''


def parse_factors(assignments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse the values of each --vary KEY=VALUE,VALUE,..., by setting, as they were typed.

    Raises PlanError or ConfigError if a setting or a value does not exist or is given twice.
    """
    if not assignments:
        raise PlanError("A study varies at least one setting: type --vary KEY=VALUES, like --vary actor.lr=1e-4,3e-4.")
    factors: dict[str, tuple[str, ...]] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        values = tuple(value.strip() for value in text.split(","))
        if len(values) < 2 or not all(values):
            raise PlanError(
                f"--vary {format_value(assignment)} does not have two values or more: type --vary KEY=VALUE,VALUE, "
                "like --vary actor.lr=1e-4,3e-4,1e-3."
            )
        setting = resolve_key(key.strip(), RunConfig)
        if setting == "seed":
            raise PlanError("Seeds are no axis: type --seeds N when you run the study.")
        duplicates = [f"the value {value}" for number, value in enumerate(values) if value in values[:number]]
        if twice := [f"the setting {setting}"] if setting in factors else duplicates:
            raise PlanError(f"--vary has {format_value(twice[0])} twice: give it once.")
        factors[setting] = values
    base = apply_overrides(RunConfig(), PPO.presets["laptop"].settings)
    for arm in itertools.product(*factors.values()):
        check_varied(base, dict(zip(factors, arm, strict=True)))
    return factors


def format_study(name: str, factors: Mapping[str, tuple[str, ...]]) -> str:
    """Format a file that declares the study `name` over the values of each setting in `factors`."""
    grids = {setting: f"({', '.join(map(json.dumps, values))})" for setting, values in factors.items()}
    fields = {"name": name, "constants": "", "contrasts": "", "option": "--values", "choice": "others"}
    if len(factors) == 1:
        ((setting, grid),) = grids.items()
        presets = ", ".join(f"{json.dumps(preset)}: {grid}" for preset in PRESETS)
        fields["axis"] = f"Axis({json.dumps(setting)}, {{{presets}}})"
        fields["question"] = f"Does {setting} change the success of the policy?"
        fields["imports"], baseline = "Axis, Study", factors[setting][0]
    else:
        lines = "".join(f"\n    {json.dumps(key)}: {grid}," for key, grid in grids.items())
        fields["constants"] = f"FACTORS = {{{lines}\n}}\n\n"
        fields["axis"] = "make_grid_axis(FACTORS)"
        fields["contrasts"] = (
            "\n    contrasts=make_grid_contrasts(FACTORS),  # main effects"
            "\n    interactions=make_grid_interactions(FACTORS),"
        )
        fields["option"], fields["choice"] = "--arms", "some of them"
        fields["question"] = f"How do {' and '.join(factors)} change the success of the policy?"
        fields["imports"] = "Study, make_grid_axis, make_grid_contrasts, make_grid_interactions"
        baseline = make_grid_axis(factors).grids[PRESETS[0]][0]
    return _FILE.format(**fields, baseline=json.dumps(baseline))


def write_study_file(name: str, assignments: Sequence[str], path: Path | None) -> tuple[Path, str]:
    """Write the file of a new study; return its path and the command that runs it.

    path: the file; None for NAME.py in the current folder. Raises PlanError if the name is taken or the file exists.
    """
    if not is_study_name(name) or name in STUDIES or name in SUITES:
        problem = "is a study of this package" if name in STUDIES or name in SUITES else "is no name of a study"
        raise PlanError(
            f"{format_value(name)} {problem}: type another one, of lower-case words joined by hyphens, like my-lr."
        )
    factors = parse_factors(assignments)
    path = path or Path(f"{name.replace('-', '_')}.py")
    if path.suffix != ".py":
        raise PlanError(f"--to {format_value(str(path), 1000)} does not end in .py: type the name of a Python file.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(format_study(name, factors))
    except FileExistsError:
        raise PlanError(
            f"{format_value(str(path), 1000)} exists and is left unchanged: type --to with another file."
        ) from None
    except OSError as error:
        raise PlanError(f"{format_value(str(path), 1000)} cannot be written: {error.strerror}.") from None
    return path, format_command("run", path)
