"""Looks at a study whose seeds are not fixed: which arms get more seeds after a look, and how many."""

from tune_study.plan.study_plan import StudyPlan, add_seeds


def plan_next_look(plan: StudyPlan, max_concurrent: int) -> tuple[StudyPlan | None, str]:
    """The plan with more seeds for the open arms and the baseline, and a line on why, or on why there is none.

    Args:
        plan: a plan with `max_seeds`, all of whose runs have ended and have tables.
        max_concurrent: number of runs at once. An arm gets as many seeds as can be trained at once, since a look after
            each of them would leave slots empty, and at least as many as the test needs for any verdict.

    The plan is None if no arm is open, or if the open arms have `max_seeds` seeds.
    """
    from analysis.data.load import load  # imports pandas
    from analysis.report.pages import list_open_arms  # imports Matplotlib
    from analysis.stats.sequential import find_fewest_seeds

    # `set_max_seeds` has checked both.
    assert plan.max_seeds is not None
    assert plan.baseline is not None
    open_arms = list_open_arms(load(plan.folder))
    if not open_arms:
        return None, "No compared arm is open: no seed is added."
    counts = {arm: len(plan.seeds) + len(plan.extra_seeds.get(arm, ())) for arm in open_arms}
    target = max(
        max(counts.values()) + max(max_concurrent // (len(open_arms) + 1), 1), find_fewest_seeds(len(plan.values) - 1)
    )
    target = min(target, plan.max_seeds)
    arms_text = f"Open: {', '.join(open_arms)}"
    if min(counts.values()) >= target:
        return None, f"{arms_text}, after {target} seeds per arm, the maximum (--max-seeds)."
    subject = "This arm" if len(open_arms) == 1 else "These arms"
    next_plan = add_seeds(plan, dict.fromkeys([*open_arms, plan.baseline], range(target)))
    return next_plan, f"{arms_text}. {subject} and the baseline get the seeds 0 to {target - 1}."
