"""Pack the recorded study from a results/<run> folder into an archive, and unpack it into another one.

`python -m tune_study.demo.archive results/<run>` makes the archive again. It holds what the runs wrote, without
checkpoints; tables, figures and the report are made from it.
"""

import io
import sys
import tarfile
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from trainable.files.json_values import format_object
from trainable.runs.run_files import EPISODES_FILE, LEVELS_FILE, METRICS_FILE
from trainable.runs.study_record import RUN_FILE, SCHEMA, STATUS_FILE, STUDY_FILE, StudyRecord, read_record

ARCHIVE = Path(__file__).with_name("recorded_study.tar.xz")
_RUN_FILES = (RUN_FILE, STATUS_FILE, METRICS_FILE, LEVELS_FILE, EPISODES_FILE)


def pack(folder: Path, archive: Path = ARCHIVE) -> int:
    """Write the study in `folder`, results/<run>, to an archive, and return its size in bytes.

    The same study gives the same bytes. Raises FileNotFoundError if a run has not ended.
    """
    study = read_record(StudyRecord, folder)
    # Files of one kind beside each other compress better. study.json comes first, since it is read alone.
    names = [f"runs/{entry.run_id}/{name}" for name in _RUN_FILES for entry in study.runs]
    contents = {name: (folder / name).read_bytes() for name in names}
    contents = {STUDY_FILE: format_object(asdict(replace(study, recorded=study.command))).encode(), **contents}
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return archive.stat().st_size


def unpack(folder: Path, archive: Path = ARCHIVE) -> None:
    """Unpack the recorded study into `folder`, which appears only when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp_folder, tarfile.open(archive, "r:xz") as tar:
        tar.extractall(Path(temp_folder) / folder.name, filter="data")
        (Path(temp_folder) / folder.name).rename(folder)


def read_recorded_study(archive: Path = ARCHIVE) -> StudyRecord:
    """Read study.json of the recorded study, without unpacking the rest."""
    with tarfile.open(archive, "r:xz") as tar, tempfile.TemporaryDirectory() as folder:
        tar.extract(STUDY_FILE, folder, filter="data")
        return read_record(StudyRecord, Path(folder))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Type the folder of the study to record: python -m tune_study.demo.archive out/results/RUN")
    print(f"{ARCHIVE.name}: {pack(Path(sys.argv[1])):,} bytes, schema {SCHEMA}")
