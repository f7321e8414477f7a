"""`python -m tune_study`."""

from tune_study.cli import main

main()
