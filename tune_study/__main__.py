"""`python -m tune_study`."""

from tune_study.commands.cli import main

main()
