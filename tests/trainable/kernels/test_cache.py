"""What a run records does not depend on whether its kernels were compiled or come from numba's cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import sys
from pathlib import Path
from search_spaces.catalog import STUDIES
from tests.trainable.config.test_conditions import train
from tune_study.plan.study_plan import make_plan

settings = {
    "env.env_groups": 2, "env.group_size": 4, "env.val_env_groups": 8, "env.test_env_groups": 8,
    "actor.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 4, "trainer.total_training_steps": 6,
    "trainer.test_freq": 2,
}
config = make_plan(STUDIES["kl"], "laptop", "a test", settings, None, 1, Path("out")).ppo_config
print(*train(config), sep="\\n")
"""


def train_with_cache(folder: Path) -> str:
    """Train in another process, whose kernels are in `folder`, and return what it records."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    result = subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, text=True, check=True)
    return result.stdout


@pytest.mark.slow
def test_rows_do_not_depend_on_what_is_compiled_and_what_comes_from_the_cache(tmp_path: Path) -> None:
    compiled_rows = train_with_cache(tmp_path)
    indexes = sorted(tmp_path.rglob("*.nbi"))
    assert len(indexes) > 20
    assert train_with_cache(tmp_path) == compiled_rows
    for index in indexes[::2]:
        index.unlink()
    assert train_with_cache(tmp_path) == compiled_rows
