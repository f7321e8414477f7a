"""A study on a disk that fills up while it runs. Run in a mount namespace of its own: `unshare -rm python -m ...`.

Usage: full_disk MOUNT KEEP PATIENCE. Mounts a small disk at MOUNT, runs the study there, fills the disk once rows are
written, and makes room again: after a while where PATIENCE outlasts it, else after the command has ended. Then goes
on with the study where it has not completed, copies all to KEEP, and prints what it saw as JSON.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.kills import RUN, STEPS, Tormented, wait_for

SIZE = "80m"
FULL_S = 4.0
CHUNK = 1 << 16


def fill(path: Path) -> None:
    """Write until nothing fits any more."""
    with path.open("ab", buffering=0) as file:
        size = CHUNK
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


def watch(mount: Path, keep: Path, patience: float) -> dict[str, object]:
    """See the module."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(mount)], check=True)
    log_folder = keep.parent
    study = Tormented(mount, STEPS, [f"--set=trainer.disk_patience={patience}"])
    study.log_folder = log_folder
    driver = study.start()
    wait_for(lambda: study.rows() >= 4, driver)
    fill(mount / "filler")
    at_full = study.rows()
    seen: dict[str, object] = {"rows_when_full": at_full}
    if patience > FULL_S:
        time.sleep(FULL_S)
        seen["is_waiting"] = driver.poll() is None
        seen["rows_while_full"] = study.rows()
    else:
        driver.wait(120)
        statuses = study.folder.glob("runs/*/status.json")
        seen["statuses"] = [json.loads(path.read_text()) for path in sorted(statuses)]
    (mount / "filler").unlink()
    seen["code"] = driver.wait(120)
    study.log.close()
    if seen["code"]:
        again = study.start()
        seen["code_again"] = again.wait(120)
        study.log.close()
    seen["left"] = study.all_gone()
    shutil.copytree(mount / RUN, keep / RUN)
    return seen


if __name__ == "__main__":
    print(json.dumps(watch(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))))
