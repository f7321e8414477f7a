"""What does one update rule do on one task? Any combination: `--set task=token_reversal --set method=TPO`."""

from search_spaces.sandbox.family import SMOKE, sandbox_study

STUDY = sandbox_study(
    name="sandbox",
    question="What does one update rule do on one task?",
    arms={"single": {}},
    baseline="single",
    fixed={},
    setting="combination",
    run="sandbox_{task}_{method}",
    smoke=SMOKE,
)
