"""Pack the recorded study from a results/<run> folder into an archive, and unpack it into another one.

`python -m tune_study.demo.archive results/<run>` makes the archive again. It holds what the runs wrote, without
checkpoints; tables, figures and the report are made from it.
"""

import io
import re
import sys
import tarfile
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from trainable.files.json_values import format_object
from trainable.runs.run_files import EPISODES_FILE, LEVELS_FILE, METRICS_FILE
from trainable.runs.study_record import RUN_FILE, SCHEMA, STATUS_FILE, STUDY_FILE, StudyRecord, read_record
from tune_study.plan.errors import PlanError

ARCHIVE = Path(__file__).with_name("recorded_study.tar.xz")
_RUN_FILES = (RUN_FILE, STATUS_FILE, METRICS_FILE, LEVELS_FILE, EPISODES_FILE)
_ABSOLUTE_PATH = re.compile(rb"[\"'=\s](/[\w.-]+/[\w./-]+)")
_MAX_BYTES = 2_000_000
"""Maximum size of the archive, which is part of every installation."""


def pack(folder: Path, archive: Path = ARCHIVE) -> int:
    """Write the study in `folder`, results/<run>, to an archive, and return its size in bytes.

    The same study gives the same bytes. Raises PlanError if a run has not ended, if a file names a path of this
    machine, or if the archive would have more than 2 MB.
    """
    study = read_record(StudyRecord, folder)
    contents = {STUDY_FILE: format_object(asdict(replace(study, recorded=study.command))).encode()}
    for entry in study.runs:
        for name in _RUN_FILES:
            path = f"runs/{entry.run_id}/{name}"
            if not (folder / path).is_file():
                raise PlanError(f"{folder / path} is missing: only a study whose runs have all ended can be recorded.")
            contents[path] = (folder / path).read_bytes()
    for name, content in contents.items():
        if match := _ABSOLUTE_PATH.search(content):
            raise PlanError(f"{name} names {match[1].decode()}: run the study with a relative --output, such as `out`.")
    data = _compress(contents)
    if len(data) > _MAX_BYTES:
        raise PlanError(f"The archive would have {len(data):,} bytes, more than {_MAX_BYTES:,}: record fewer runs.")
    archive.write_bytes(data)
    return len(data)


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


def _compress(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=9) as tar:
        # Files of one kind beside each other compress better. study.json comes first, since it is read alone.
        for name in sorted(contents, key=lambda name: (name != STUDY_FILE, name.rpartition("/")[2], name)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(contents[name]), 0o644
            tar.addfile(entry, io.BytesIO(contents[name]))
    return buffer.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Type the folder of the study to record: python -m tune_study.demo.archive out/results/RUN")
    try:
        print(f"{ARCHIVE.name}: {pack(Path(sys.argv[1])):,} bytes, schema {SCHEMA}")
    except (PlanError, OSError, ValueError) as error:
        sys.exit(str(error))
