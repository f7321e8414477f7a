"""What a study can resolve, before it is run: the power of its planned seeds under the noise of recorded runs."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.data.compare import get_margin
from analysis.data.families import get_family
from analysis.data.replicates import find_replicates
from analysis.stats.noise import fit_variance_prior
from analysis.stats.power import find_detectable_difference
from analysis.stats.sequential import find_fewest_seeds

MAX_SUGGESTED_SEEDS = 20


def find_resolved_difference(study: Mapping[str, Any], num_seeds: int) -> float:
    """The smallest true difference between an arm and the baseline that is resolved with a probability of .8.

    study: content of study.json. num_seeds: seeds per arm. NaN if no run with the study's environment, preset, primary
    outcome and steps is recorded, or if there is nothing to compare. The variance is that of the recorded runs, and
    its degrees of freedom are theirs and those of the planned runs. The baseline may have further seeds, see
    `extra_seeds` of study.json. The test is the first step of Holm's method.
    """
    num_arms = len(study["axis"]["values"])
    # Arms of several seeds are compared over the seeds that they share with the baseline.
    num_baseline_seeds = 1 + _count_further_baseline_seeds(study) if num_seeds == 1 else num_seeds
    values = [np.array(entry.values) for entry in find_replicates(study, get_family(study).primary_column)]
    prior = fit_variance_prior([entry.var(ddof=1) for entry in values], [len(entry) - 1 for entry in values])
    if prior is None or num_arms < 2:
        return math.nan
    df = prior.max_df + (num_seeds - 1) * (num_arms - 1)
    se = math.sqrt(prior.variance * (1 / num_seeds + 1 / num_baseline_seeds))
    return find_detectable_difference(se, df, num_arms - 1)


def _count_further_baseline_seeds(study: Mapping[str, Any]) -> int:
    return len(study.get("extra_seeds", {}).get(study["baseline"], ()))


def describe_power(study: Mapping[str, Any]) -> str:
    """One line on what the planned seeds resolve; empty if the study has nothing to compare."""
    num_seeds, num_arms = len(study["seeds"]), len(study["axis"]["values"])
    if num_arms < 2 or study.get("baseline") is None:
        return ""
    if study.get("max_seeds") is not None:
        return (
            f"Power: seeds are added to open arms, up to {study['max_seeds']} per arm; the test at every look can "
            f"decide from {find_fewest_seeds(num_arms - 1)} seeds on"
        )
    column = get_family(study).primary_column
    num_further = _count_further_baseline_seeds(study)
    baseline_text = f" and {num_seeds + num_further} of the baseline" if num_further and num_seeds == 1 else ""
    seeds_text = f"with {num_seeds} seed{'s' if num_seeds > 1 else ''} per arm{baseline_text}"
    difference = find_resolved_difference(study, num_seeds)
    if math.isnan(difference):
        consequence = (
            "one seed gives numbers without intervals"
            if num_seeds + num_further == 1
            else "it is estimated from the runs themselves"
        )
        return f"Power: not known before the runs, because none like these are recorded; {consequence}"
    text = (
        f"Power: {seeds_text}, a difference of {difference:.2g} in {column} is resolved with a probability of 80 % "
        f"({num_arms - 1} comparison{'s' if num_arms > 2 else ''}, noise of recorded runs)"
    )
    margin = get_margin(study, column)
    enough = next(
        (seeds for seeds in range(1, MAX_SUGGESTED_SEEDS + 1) if find_resolved_difference(study, seeds) <= margin), None
    )
    if enough is None or enough <= num_seeds:
        return text
    return f"{text}; for {margin:g}, type --seeds {enough}"
