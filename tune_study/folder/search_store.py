"""The Optuna storage of a search, which optuna-dashboard opens. It is made from the rows and never read here."""

import tempfile
from pathlib import Path

from trainable.files.paths import read_bytes, write_text
from tune_study.plan.study_plan import StudyPlan

STORE_FILE = "optuna.journal"
"""The storage in the folder of a search, in Optuna's journal format: lines of JSON."""


def write_search_store(plan: StudyPlan) -> Path:
    """Write the points of a search that have ended as an Optuna study, and return the path of its storage.

    The file is replaced as a whole. Raises OSError if it cannot be written.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from analysis.data.load import load  # imports pandas
    from analysis.search.points import make_points
    from analysis.search.trials import make_optuna_study

    assert plan.search is not None
    frames = load(plan.folder)
    (family,) = frames.families
    path = plan.folder / STORE_FILE
    # Optuna puts a lock beside the file, so it writes in a folder of its own.
    with tempfile.TemporaryDirectory() as temp_dir:
        temp_path = Path(temp_dir) / STORE_FILE
        storage = JournalStorage(JournalFileBackend(str(temp_path)))
        make_optuna_study(plan.search, make_points(frames), family.is_higher_better, storage=storage, name=plan.run)
        write_text(path, read_bytes(temp_path).decode())
    return path
