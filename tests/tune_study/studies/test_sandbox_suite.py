"""The smoke form of every study of update rules, as one suite with an index. Takes minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from search_spaces.catalog import STUDIES, SUITES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run_smoke(output: Path, name: str, *words: str) -> str:
    command = [sys.executable, "-m", "tune_study", "run", name, "--smoke", "--output", str(output), *words]
    process = subprocess.run([*command, "--preset", "laptop"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_suite_runs_every_study_in_one_ray_and_writes_an_index(tmp_path: Path) -> None:
    output_text = run_smoke(tmp_path, "sandbox-all")
    assert output_text.count("Starting Ray") == 1
    assert f"Index: {tmp_path}/index.html" in output_text
    page = (tmp_path / "index.html").read_text()
    folders = {read_study_name(path.parent): path.parent for path in (tmp_path / "results").glob("*/study.json")}
    assert set(folders) == set(SUITES["sandbox-all"])
    for name, folder in folders.items():
        assert f'href="results/{folder.name}/report.html"' in page
        trials = pd.read_parquet(folder / "trials.parquet")
        assert trials["arm"].nunique() == len(trials) == len(STUDIES[name].axis.grids["laptop"])
        assert set(trials["status"]) <= {"completed", "early_stopped"}


def read_study_name(folder: Path) -> str:
    return str(json.loads((folder / "study.json").read_text())["name"])
