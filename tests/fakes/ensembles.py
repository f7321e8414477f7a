"""Train ensembles of toy tasks in tests."""

from typing import Any

from sandboxes.toys.ensemble import EnsembleTrainer

Rows = dict[int, list[dict[str, Any]]]


def run_ensemble(trainer: EnsembleTrainer) -> Rows:
    """Train every member to its end, without a failure, and return the rows by seed, without times."""
    rows: Rows = {seed: [] for seed in trainer.seeds}
    while trainer.seeds:
        result = trainer.step()
        assert not result.failures
        for seed, row in result.rows.items():
            rows[seed].append(drop_times(row))
    return rows


def drop_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("seconds")}
