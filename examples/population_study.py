"""Does population-based training of (learning rate, KL coefficient) beat the best constant arm at an equal budget?

    python examples/population_study.py OUTPUT --seeds 5        # 80 runs of 60 steps: about half an hour on two cores

Declared before the first run. Per seed, eight members start at the points of GRID, with that seed, and train the same
number of steps (`laptop`), once with constant settings and once under synchronous population-based training: every
INTERVAL steps the worst quarter continues from copies of the best quarter, with other settings. In both conditions the
member with the best late validation (the mean of the last three) is chosen, and its success on the test levels,
sampled, is the outcome. The differences of the seeds are averaged, with t intervals over seeds and Holm's correction
for both contrasts. Two outcomes count as equal if the 90 % interval of their difference lies within MARGIN.

1. Population-based training minus the best constant member of the same seed.
2. Population-based training minus the best constant arm: the point with the best late validation on average over seeds.
"""

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from analysis.stats.estimates import holm_adjust, mean_over_seeds
from trainable.runs.run_files import METRICS_FILE, read_rows
from tune_study import PPO, param_space

GRID = [{"actor.lr": lr, "actor.kl_loss_coef": kl} for lr in (1e-4, 3e-4, 1e-3, 3e-3) for kl in (0.01, 0.1)]
INTERVAL, MARGIN = 10, 0.05
MUTATIONS = {"actor.lr": tune.loguniform(1e-4, 3e-3), "actor.kl_loss_coef": tune.loguniform(0.01, 1)}


class Member(NamedTuple):
    """What a trial has reached. point: its place in GRID at the start. config: its settings at the end."""

    point: int
    late_validation: float
    test_success: float
    config: dict[str, Any]


def make_space(seed: int, steps: int, levels: int) -> dict[str, Any]:
    """The parameter space of one condition and seed: a trial per point of the grid."""
    settings = {"trainer.total_training_steps": steps, "trainer.test_freq": 5, "actor.use_kl_loss": True}
    settings |= {"env.val_env_groups": levels, "env.test_env_groups": levels}
    space = param_space("kl", "laptop", values=("0.1",), **settings)
    for name in MUTATIONS:
        space[name] = tune.sample_from(lambda config, name=name: GRID[config["run"]["arm"]][name])
    return {**space, "seed": seed, "run": {**space["run"], "arm": tune.grid_search(list(range(len(GRID))))}}


def train(name: str, seed: int, steps: int, levels: int, output: Path, scheduler: Any = None) -> list[Member]:
    """Train the members of one condition and seed. The rows in a checkpoint are those of its weights, if copied too."""
    path = output / f"{name}-s{seed}"
    if tune.Tuner.can_restore(path):  # what has ended is not trained again
        return read_members(tune.Tuner.restore(str(path), trainable=PPO).get_results(), seed)
    tuner = tune.Tuner(
        PPO,
        param_space=make_space(seed, steps, levels),
        tune_config=tune.TuneConfig(metric="val_success", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(name=f"{name}-s{seed}", storage_path=str(output), verbose=0),
    )
    return read_members(tuner.fit(), seed)


def read_members(results: tune.ResultGrid, seed: int) -> list[Member]:
    """What the trials of an experiment have reached. Raise RuntimeError if one of them has failed or has not ended."""
    members = []
    for result in results:
        if result.error is not None or not (result.metrics or {}).get("finished"):
            raise RuntimeError(f"A trial in {results.experiment_path} has not ended: remove that folder and try again.")
        rows = read_rows(Path(result.checkpoint.path, str(seed), METRICS_FILE))
        validations = [row["val_success"] for row in rows if row.get("val_success") is not None]
        late_validation = float(np.mean(validations[-3:]))
        point = result.config["run"]["arm"]  # of a copy, that of its donor
        members.append(Member(point, late_validation, rows[-1]["test_success"], result.config))
    return sorted(members, key=lambda member: member.point)  # a restored experiment has another order


def choose(members: list[Member]) -> Member:
    """The member with the best late validation."""
    return max(members, key=lambda member: member.late_validation)


def describe(name: str, differences: np.ndarray, p: float) -> str:
    """A contrast in a line. differences: by seed. p: Holm's."""
    estimate, narrow = mean_over_seeds(differences), mean_over_seeds(differences, 0.9)
    is_equal = narrow.low > -MARGIN and narrow.high < MARGIN
    verdict = "resolved" if p < 0.05 else f"equal within {MARGIN}" if is_equal else "open"
    interval = f"[{estimate.low:+.3f}, {estimate.high:+.3f}]"
    return f"{name}: {estimate.value:+.3f} {interval} over {estimate.n} seeds, Holm p {p:.3g}, {verdict}"


def main() -> None:
    """Train both conditions for each seed, print each choice, and then the contrasts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--levels", type=int, default=512, help="validation and test levels")
    options = parser.parse_args()
    constants: list[list[Member]] = []
    chosen: list[Member] = []
    for seed in range(options.seeds):
        arguments = seed, options.steps, options.levels, options.output.resolve()
        constants.append(train("constant", *arguments))
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (Tune draws from it)
        scheduler = PopulationBasedTraining(
            time_attr="step", perturbation_interval=INTERVAL, hyperparam_mutations=MUTATIONS, synch=True
        )
        chosen.append(choose(train("population", *arguments, scheduler)))
        for name, member in (("constant", choose(constants[-1])), ("population", chosen[-1])):
            settings = ", ".join(f"{key} {member.config[key]:.3g}" for key in MUTATIONS)
            late, test = f"{member.late_validation:.3f}", f"{member.test_success:.3f}"
            print(f"seed {seed} {name}: {settings}; late {late}, test {test}", flush=True)
    late_means = np.mean([[member.late_validation for member in members] for members in constants], axis=0)
    best_point = int(np.argmax(late_means))
    print(f"best constant arm: {GRID[best_point]}")
    tests = np.array([member.test_success for member in chosen])
    contrasts = {
        "population minus best constant member of its seed": tests
        - [choose(members).test_success for members in constants],
        "population minus best constant arm": tests - [members[best_point].test_success for members in constants],
    }
    p_values = holm_adjust([mean_over_seeds(differences).p for differences in contrasts.values()])
    for (name, differences), p in zip(contrasts.items(), p_values, strict=True):
        print(describe(name, differences, p))


if __name__ == "__main__":
    main()
