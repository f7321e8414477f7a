"""A trainer of somebody else, as a script: it writes rows and checkpoints, resumes, fails and has children.

Its rewards are functions of seed, step and --beta. Each step takes the seconds of the variable SLEEP.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def compute_reward(seed: int, step: int, beta: float) -> float:
    """The reward of a step."""
    return min(1.0, step / 20 + beta + random.Random(1000 * seed + step).random() / 10)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--first-step", type=int, default=1, help="how the log calls the first step")
    parser.add_argument("--every", type=int, default=1, help="steps between rows")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--resume-if-there", type=Path)
    parser.add_argument("--fail-at", type=int, help="fail at this step, unless it was resumed")
    parser.add_argument("--signal", type=int, default=0, help="fail by this signal")
    parser.add_argument("--message", default="ValueError: a fault")
    parser.add_argument("--daemon", action="store_true", help="start a process in a session of its own")
    args = parser.parse_args()
    if args.resume_if_there is not None and args.resume_if_there.exists():
        args.resume = args.resume_if_there
    first = 0 if args.resume is None else json.loads((args.resume / "state.json").read_text())["step"]
    print(f"beta {args.beta} from step {first}, {os.environ.get('WORD', 'no word')}", flush=True)
    if args.daemon:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (args.output / "daemon").write_text(str(process.pid))
    for step in range(first + 1, args.steps + 1):
        time.sleep(float(os.environ.get("SLEEP", 0)))
        if step == args.fail_at and args.resume is None:
            print(args.message, flush=True)
            if args.signal:
                os.kill(os.getpid(), args.signal)
                signal.pause()
            sys.exit(3)
        if step % args.every == 0:
            reward = compute_reward(args.seed, step, args.beta)
            row = {"step": step - 1 + args.first_step, "reward": reward, "entropy": 1 / step}
            if step % 2 == 0:
                row["accuracy"] = reward / 2
            with (args.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        if step % 2 == 0:
            folder = args.output / f"checkpoint-{step}"
            folder.mkdir(exist_ok=True)
            (folder / "state.json").write_text(json.dumps({"step": step}))


if __name__ == "__main__":
    main()
