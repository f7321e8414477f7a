"""Every study of update rules by its command in its smoke form, and the suite with its index. Minutes."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from search_spaces import STUDIES, SUITES

pytestmark = pytest.mark.slow

ALONE = [name for name, study in STUDIES.items() if study.smoke and name not in SUITES["sandbox-evidence"]]


def smoke(output: Path, name: str, *words: str) -> str:
    command = [sys.executable, "-m", "tune_study", "run", name, "--smoke", "--output", str(output), *words]
    done = subprocess.run([*command, "--preset", "laptop"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_suite_runs_every_study_and_writes_an_index(tmp_path: Path) -> None:
    out = smoke(tmp_path, "sandbox-evidence", "--seeds", "2")
    assert f"Index: {tmp_path}/index.html" in out
    page = (tmp_path / "index.html").read_text()
    for name in SUITES["sandbox-evidence"]:
        folder = tmp_path / "results" / name.replace("-", "_")
        assert f'href="results/{folder.name}/report.html"' in page
        trials = pd.read_parquet(folder / "trials.parquet")
        assert len(trials) == 2 * len(STUDIES[name].axis.grids["laptop"])
        assert set(trials["status"]) <= {"completed", "early_stopped"}


@pytest.mark.parametrize("name", ALONE)
def test_every_other_study_has_a_smoke_form(tmp_path: Path, name: str) -> None:
    smoke(tmp_path, name)
    (tables,) = tmp_path.glob("results/*/trials.parquet")
    trials = pd.read_parquet(tables)
    assert trials["arm"].nunique() == len(STUDIES[name].axis.grids["laptop"])
    assert set(trials["status"]) <= {"completed", "early_stopped"}
