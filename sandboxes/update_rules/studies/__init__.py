"""The studies of update rules."""

from sandboxes.update_rules.studies import age_not_capacity, entropy_mechanism, matched_updates, off_policy, published

# Studies without a published counterpart.
_PREDICTIONS = (entropy_mechanism.STUDY, matched_updates.STUDY, age_not_capacity.STUDY, off_policy.STUDY)
STUDIES = (published.SINGLE, published.DELAYS, *published.EVIDENCE, *_PREDICTIONS)
SUITES = {
    "sandbox-evidence": tuple(study.name for study in published.EVIDENCE),
    "sandbox-all": (*(study.name for study in STUDIES), "grpo-entropy-sokoban"),
}
