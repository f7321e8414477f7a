"""How does one update rule behave on one task? Any combination: `--set task=token_reversal --set method=TPO`."""

from sandboxes.toys.study import SMOKE_SETTINGS
from sandboxes.update_rules.family import make_sandbox_study

STUDY = make_sandbox_study(
    name="sandbox",
    question="How does one update rule behave on one task?",
    arms={"single": {}},
    baseline="single",
    fixed_settings={},
    setting="combination",
    run_template="sandbox_{task}_{method}",
    smoke_settings=SMOKE_SETTINGS,
)
