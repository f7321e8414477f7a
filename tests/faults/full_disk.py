"""A study on a disk that fills up while it runs. Needs its own mount namespace: `unshare -rm python -m ...`.

Usage: full_disk MOUNT KEEP PATIENCE. Mounts a small disk at MOUNT, runs the study there, fills the disk once rows are
written, and makes room again: after FULL_SECONDS if PATIENCE is longer, and otherwise after the command has ended. Then
resumes the study if it has not completed, copies the folders to KEEP, and prints its observations as JSON.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.kills import RUN, STEPS, InterruptedStudy, wait_for

SIZE = "80m"
FULL_SECONDS = 4.0
CHUNK_BYTES = 1 << 16


def fill_disk(path: Path) -> None:
    """Write to a file until the disk is full."""
    with path.open("ab", buffering=0) as file:
        size = CHUNK_BYTES
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


def run_on_full_disk(mount: Path, copy_folder: Path, patience: float) -> dict[str, object]:
    """Run a study on a disk that fills up, as the docstring of the module describes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(mount)], check=True)
    log_folder = copy_folder.parent
    study = InterruptedStudy(mount, STEPS, [f"--set=trainer.disk_patience={patience}"])
    study.log_folder = log_folder
    driver = study.start()
    wait_for(lambda: study.count_rows() >= 4, driver)
    fill_disk(mount / "filler")
    rows_when_full = study.count_rows()
    observations: dict[str, object] = {"rows_when_full": rows_when_full}
    if patience > FULL_SECONDS:
        time.sleep(FULL_SECONDS)
        observations["is_waiting"] = driver.poll() is None
        observations["rows_while_full"] = study.count_rows()
    else:
        driver.wait(120)
        statuses = study.folder.glob("runs/*/status.json")
        observations["statuses"] = [json.loads(path.read_text()) for path in sorted(statuses)]
    (mount / "filler").unlink()
    observations["code"] = driver.wait(120)
    study.log.close()
    if observations["code"]:
        second_driver = study.start()
        observations["code_again"] = second_driver.wait(120)
        study.log.close()
    observations["left"] = study.wait_and_count_orphans()
    shutil.copytree(mount / RUN, copy_folder / RUN)
    return observations


if __name__ == "__main__":
    print(json.dumps(run_on_full_disk(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))))
