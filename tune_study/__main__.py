"""`python -m tune_study`."""

import sys

try:
    from tune_study.commands.cli import main
except ModuleNotFoundError as error:
    # The interpreter lacks our dependencies, or their installation is under way. A missing module of ours is a bug.
    if (error.name or "").split(".")[0] in ("tune_study", "trainable", "search_spaces", "analysis"):
        raise
    print(
        f"tune_study: {sys.executable} has no package {error.name}. Run `make setup`, wait until it has ended, and "
        f"type `source .venv/bin/activate`; or type `{sys.executable} -m pip install -e .` in the checkout.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

main()
