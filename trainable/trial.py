"""The Trainables that Ray Tune constructs, steps, saves, restores and resets, with one class per family of runs."""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

import ray
from pyarrow.fs import FileSystem, FileType
from ray import tune
from ray.tune.search.repeater import TRIAL_INDEX
from ray.util import get_node_ip_address

from trainable.backend.gpus import make_bundles, take_gpus
from trainable.config.base_config import BaseRunConfig
from trainable.config.own_parts import PartFile, find_place, register_file
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, list_outside_settings, resolve_key
from trainable.config.setting_types import flatten_settings
from trainable.files.json_values import read_object, write_object
from trainable.files.paths import check_tree
from trainable.runs.failures import (
    NODE_UNFIT,
    NON_FINITE,
    CheckpointError,
    Failure,
    NodeError,
    RunFailedError,
    call_with_retry,
    classify_failure,
)
from trainable.runs.orphans import MARK_ENV, terminate_orphans
from trainable.runs.records import carry_values, make_empty_row
from trainable.runs.run_files import METRICS_FILE, STATE_FOLDER, copy_run_files, list_states, read_rows
from trainable.runs.study_record import STUDY_FILE, is_run_id
from trainable.uploads import POINTER_FILE, POINTER_KEY, Uploads, read_pointer
from trainable.versions import check_versions

if TYPE_CHECKING:
    from trainable.ppo.trainer import PPOTrainer
    from trainable.runs.training import StepReport, TrainerFamily, TrainingLoop


RUN_KEY, SEED_KEY = "run", "seed"
"""The keys of a configuration that are not settings."""
_RUN_OPTIONS = (
    *("study", "family", "arm", "stop_rules", "code", "runs", "interrupts", "storage", "versions", "avoided_nodes"),
)
PICKLE_FILE = "_dict_checkpoint.pkl"
"""What Ray would unpickle."""


class PPO(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """A PPO run as a Trainable: it takes settings, reports rows, and lets Tune manage its checkpoints.

    All keys of the configuration are settings, dotted ("actor.lr"), nested, or as published, except two. `seed` is the
    seed, to which Tune's Repeater adds the number of the repetition. A list of seeds trains these together, which only
    update rules and their companions can. `run` is a mapping with these optional keys:

        study, family, arm: names, for the columns of the rows and for `analysis.load`.
        stop_rules: names of the rules that the run applies before it writes a row, so that this row includes the final
            evaluation. Without them, a Stopper may end the trial (`tune_study.rules`).
        code: the texts of the files of plug-ins that the settings name, by file name.
        runs: run_id and seed of each run, and run_dir and checkpoint_dir if they are not in the trial's folder; and
            `parent` if it continues another run (see `TrainingLoop`).
        interrupts: paths of files. Once one of them exists, training stops after the current step.
        storage: URI of a folder to which checkpoints are uploaded while the run goes on, those of `trainer.save_freq`
            too, and from which a run of the same name continues, on any node and in another experiment, too. Without
            it, checkpoints stay on the node, or where Tune copies them.
        versions: versions of the driver, by package, for a trial on a cluster. If its node has other ones, lacks the
            model or a package, or does not see the study's folder, the failure is one of the node.
        avoided_nodes: Ray's ids of the nodes on which the trial is not placed.

    A result has the columns of the run's row. Since schedulers and searchers compare every result, columns that a step
    has not measured keep their last value (or `base_<column>` before the first, or else NaN). `carried` names these
    columns. `note` has events since the last result. `saved` is whether a checkpoint of this step is on the run's disk,
    `finished` whether the run has ended by itself, and `uploaded`, with a storage, the folder of a checkpoint that was
    uploaded since the last result, or empty. `done` is also True if Tune ends the trial. With a list of
    seeds, a result has the means over the runs, `rows` by run_id, and `failed` with the reason of each run that failed
    while others could continue.

    A failure that would occur again is a result, with `failure`, `failure_class`, `failure_trace` and `done`. Any other
    failure is raised as a RunFailedError, and `max_failures` decides.

    A run continues by itself from the newest complete checkpoint in its folder. `save_checkpoint` copies this folder,
    with hard links where the disk allows them, and `load_checkpoint` replaces it. With `storage`, a checkpoint of Tune
    only names an upload, of which the newest two are kept. No pickle is written or read.
    docs/ray_tune.md has examples.
    """

    family: str = "trainable.language_model:TRAINER"
    """ "module:NAME" of the TrainerFamily, imported in the process of the run because it needs torch."""
    config_class: type[BaseRunConfig] = RunConfig

    training: "TrainingLoop | None" = None
    _uploads: Uploads | None = None

    @classmethod
    def make_config(cls, config: Mapping[str, Any]) -> BaseRunConfig:
        """Parse and check the settings of a configuration. Raise ConfigError if it cannot be trained."""
        options = config.get(RUN_KEY, {})
        if unknown := [key for key in options if key not in _RUN_OPTIONS]:
            raise ConfigError(f"`{RUN_KEY}` has no key `{unknown[0]}`: choose from {', '.join(_RUN_OPTIONS)}.")
        for name, text in options.get("code", {}).items():
            register_file(PartFile(name, text))
        settings = {key: value for key, value in config.items() if key not in (RUN_KEY, SEED_KEY, TRIAL_INDEX)}
        config_class = cls.get_config_class(settings)
        fields = {resolve_key(key, config_class): value for key, value in flatten_settings(settings).items()}
        return apply_overrides(config_class.model_validate({}), fields)

    @classmethod
    def get_config_class(cls, settings: Mapping[str, Any]) -> type[BaseRunConfig]:
        """Return the class of the configuration with these settings."""
        return cls.config_class

    def load_family(self) -> "TrainerFamily":
        """Import the parts of the runs, in the process of the runs, since they need torch."""
        family: TrainerFamily = resolve_name(self.family)
        return family

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Request a CPU and a share of a GPU, or a bundle per GPU on one node, according to trainer.n_gpus_per_node.

        Tune calls this before anything starts, so settings that cannot be trained are rejected here. The Trainable and
        the first rank are in the first bundle.
        """
        trainer = cls.make_config(config).trainer
        bundles = [
            dict(bundle)
            for bundle in make_bundles(trainer.n_gpus_per_node, trainer.cpu_threads, has_ranks=trainer.has_ranks)
        ]
        selectors: dict[str, Any] = {}
        if avoided := config.get(RUN_KEY, {}).get("avoided_nodes"):
            selectors["bundle_label_selector"] = [{"ray.io/node-id": f"!in({','.join(avoided)})"}] * len(bundles)
        return tune.PlacementGroupFactory(bundles, strategy="STRICT_PACK", **selectors)

    def setup(self, config: dict[str, Any]) -> None:
        """Store the configuration, and mark this process and its children as belonging to the run.

        Runs begin in the first step, because Ray passes errors in `setup` on as text, without their kind.
        """
        self._configuration, self._options = config, dict(config.get(RUN_KEY, {}))
        self._runs = self._list_runs()
        self._last_values: dict[str, Any] = {}
        self._last_rows: dict[str, dict[str, Any]] = {}  # by run_id
        self._is_restored = self._has_failed = self._has_saved_for_drain = False
        self._notes: list[str] = []  # a list, since the thread of the uploads appends to it
        self._uploaded_version: tuple[int, int] = (0, 0)
        os.environ[MARK_ENV] = self._runs[0]["run_dir"]
        if ray.is_initialized():  # a trial may also be constructed without Ray
            take_gpus(ray.get_gpu_ids(), os.environ)

    def _list_runs(self) -> list[dict[str, Any]]:
        """List run_id, seed, run_dir and checkpoint_dir of each run."""
        seed = self._configuration.get(SEED_KEY, 0)
        self._has_seed_list = isinstance(seed, list | tuple)
        if not self._has_seed_list:
            seed = int(seed) + self._configuration.get(TRIAL_INDEX, 0)
        elif TRIAL_INDEX in self._configuration:
            raise ConfigError(
                "Repeater repeats a trial with other seeds, and a list of seeds has its own: type one seed."
            )
        own_runs = [{"run_id": self.trial_id, "seed": seed}]
        if self._has_seed_list:
            own_runs = [{"run_id": f"{self.trial_id}-s{number}", "seed": int(number)} for number in seed]
        runs = self._options.get("runs", own_runs)
        if [run["seed"] for run in runs] != [run["seed"] for run in own_runs]:
            raise ConfigError(f"The seeds of `{RUN_KEY}` / `runs` are not those of `{SEED_KEY}`.")
        self._has_study_folder = any("run_dir" in run for run in runs)
        folder = Path(self.logdir)
        return [
            {
                "run_dir": str(folder / "runs" / run["run_id"]),
                "checkpoint_dir": str(folder / "saved" / run["run_id"]),
                **run,
            }
            for run in runs
        ]

    def step(self) -> dict[str, Any]:
        """Train to the next rows, which are on disk before they are reported. Raises RunFailedError."""
        try:
            report = self.begin().step()
            is_leaving = not self._has_saved_for_drain and self._is_node_draining()
            if is_leaving:
                self._has_saved_for_drain = True
                self.begin().write_states()
                self._notes.append("the node is drained, so a state is saved")
                report = replace(report, is_saved=True)
            uploaded = self._upload(waits=is_leaving)
            if not self._has_seed_list and report.failures:
                (words,) = report.failures.values()
                return self._make_failure_result(Failure(NON_FINITE, words, is_retried=False))
            return self._make_result(report) | ({} if self._uploads is None else {"uploaded": uploaded})
        except Exception as error:
            # Read from disk, since the error may have occurred before the runs were loaded.
            has_rows = any(read_rows(Path(run["run_dir"]) / METRICS_FILE) for run in self._runs)
            failure = classify_failure(error, has_rows)
            # A plug-in that cannot be imported fails on every node.
            lacks_package = isinstance(error, ImportError) and not find_place(error)
            if "versions" in self._options and (lacks_package or isinstance(error, NodeError)):
                node_id = ray.get_runtime_context().get_node_id()
                failure = failure._replace(
                    kind=NODE_UNFIT,
                    message=f"no run is placed on the node {get_node_ip_address()} ({node_id[:6]}) again: {error}",
                    is_retried=True,
                    node_id=node_id,
                )
        if failure.is_retried:
            # Without the cause, since only text and flags can be sent to the driver. The traceback is included as text.
            raise RunFailedError(failure)
        return self._make_failure_result(failure)

    def begin(self) -> "TrainingLoop":
        """Lock the runs and continue them from their newest checkpoints. Later calls return the same loop."""
        if self.training is not None:
            return self.training
        if "versions" in self._options:
            self._check_node()
        # An earlier process of this trial may have died on this node, while its children still occupy a GPU.
        terminate_orphans(Path(self._runs[0]["run_dir"]))
        settings = self.make_config(self._configuration)
        # Imported here, because Ray's driver imports this module, too, and should not load torch.
        from trainable.runs.training import TrainingLoop

        family = self.load_family()
        self.training, patience = None, settings.trainer.disk_patience
        # Repeats an operation on the storage while the storage does not answer.
        retry = partial(call_with_retry, patience=patience, notify=self._notes.append, place="the storage")
        if (uri := self._options.get("storage")) is not None:
            self._uploads = retry(partial(Uploads, uri, self.trial_name, retry))
        # Continue the first usable checkpoint in the storage, newest first, unless the one on this disk is newer.
        uploads, local_step = self._uploads, self._find_newest_state()
        for stored in () if uploads is None or self._is_restored else reversed(uploads.earlier_checkpoints):
            if stored.newest_step < local_step:
                break
            try:
                retry(partial(self._fetch, stored.folder))
                self.training = TrainingLoop(family, settings, self._runs, self._options, must_continue=True)
                break
            except FileNotFoundError as error:  # a RuntimeError is retried, and then there is a newer one
                raise RuntimeError(f"{stored.folder} was removed by an earlier start while it was fetched") from error
            except CheckpointError as error:
                self._notes.append(f"{stored.folder} is not used: {error}")
        if self.training is None:
            self.training = TrainingLoop(
                family, settings, self._runs, self._options, self._is_restored, self._is_restored
            )
        if not self._has_seed_list:
            (run,) = self.training.runs.values()
            for row in run.rows:
                self._last_values |= row
        return self.training

    def _check_node(self) -> None:
        """Raise NodeError if this node has other packages than the driver, or does not see the study."""
        check_versions(self._options["versions"])
        uri = self._options.get("storage") or Path(self._runs[0]["run_dir"]).parents[1].as_uri()
        try:
            filesystem, path = FileSystem.from_uri(uri)
            is_visible = filesystem.get_file_info(f"{path}/{STUDY_FILE}").type == FileType.File
        except OSError as error:
            text = str(error)
            if isinstance(error, PermissionError) or "ACCESS_DENIED" in text or "credentials" in text.lower():
                raise NodeError(f"it may not read {uri} ({text}): give it the credentials of the driver") from None
            raise  # a storage that does not answer is no fault of the node
        if not is_visible:
            raise NodeError(
                f"it does not see the study in {uri}: type --output with a folder that all nodes share, or --storage "
                f"with a bucket or a shared folder"
            )

    def _is_node_draining(self) -> bool:
        """Check whether the node of this trial, on a cluster, is about to be taken away."""
        if "versions" not in self._options:
            return False
        # No public function of Ray tells this; Ray Train and Ray Data read it here, too.
        return ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes()

    def _make_result(self, report: "StepReport") -> dict[str, Any]:
        """Make the result that Tune records. Its `training_iteration` counts steps of the runs across restarts."""
        self._last_rows |= report.rows
        rows = [row for run_id, row in self._last_rows.items() if run_id not in report.failures]
        row = _average_rows(rows) if self._has_seed_list else next(iter(report.rows.values()), {})
        result = {
            **self._complete_row({**row, **{name: None for name in self._last_values if name not in row}}),
            "training_iteration": report.step_count,
            "note": "; ".join(filter(None, [self._take_notes(), report.note])),
            "saved": report.is_saved,
            "finished": report.is_over,
            "done": report.is_over,
        }
        if self._has_seed_list:
            result |= {"step": report.last_step, "rows": report.rows, "failed": report.failures}
        return result

    def _take_notes(self) -> str:
        """Return the events since the last result. The thread of the uploads may add further ones meanwhile."""
        num_notes = len(self._notes)
        notes = "; ".join(self._notes[:num_notes])
        del self._notes[:num_notes]
        return notes

    def _complete_row(self, row: Mapping[str, Any], failure: Failure | None = None) -> dict[str, Any]:
        """Fill a row so that each column so far has a value: Tune's files only have the columns of the first result."""
        words = ("", "", "") if failure is None else (failure.message, failure.kind, failure.trace)
        result = carry_values(row, self._last_values)
        if not (self._options.get("stop_rules") or result.get("stop_rule")):
            result.pop("stop_rule", None)  # its presence would mean that the run applies the rules itself
        return {**result, **dict(zip(("failure", "failure_class", "failure_trace"), words, strict=True))}

    def _make_failure_result(self, failure: Failure) -> dict[str, Any]:
        self._has_failed = True
        # Schedulers refuse a result without their metric, also if the settings or an import are why the run failed.
        columns = make_empty_row() if self.config_class is RunConfig else {}
        with suppress(Exception):
            columns = resolve_name(self.family).make_empty_row(self.make_config(self._configuration))
        names = {name: self._options.get(name, "") for name in ("study", "arm")}
        identity = {**names, **{name: self._runs[0][name] for name in ("run_id", "seed")}, "step": None}
        row = self._complete_row({**columns, **identity, **dict.fromkeys(self._last_values)}, failure)
        row |= {"training_iteration": self.iteration + 1, "note": self._take_notes(), "saved": False}
        return {**row, "finished": True, "done": True}

    def _fetch(self, folder: str) -> None:
        """Replace the lines and states of the runs from a checkpoint in the storage."""
        uploads = self._uploads
        assert uploads is not None
        with tune.Checkpoint(uploads.get_path(folder), uploads.filesystem).as_directory() as path:
            self._copy_runs(Path(path), allows_other_seeds=False)

    def _find_newest_state(self) -> int:
        """Find the newest step of which a run has a rolling checkpoint on this disk, or 0."""
        names = (name for run in self._runs for name in list_states(Path(run["run_dir"])))
        return max((int(name.removeprefix("step_")) for name in names), default=0)

    def _upload(self, *, waits: bool) -> str:
        """Upload the newest states beside the next steps; return the folder of a checkpoint whose upload has ended.

        One upload begins when the previous one has ended, so a slow storage has fewer checkpoints. waits: whether to
        upload the current lines, too, and to wait for the end. The folder is relative to `storage`.
        """
        uploads, folder = self._uploads, ""
        if uploads is None:
            return folder
        if uploads.finish(waits=waits):
            folder = uploads.folder
        if uploads.is_pending:
            return folder
        saved_folders = {
            path: f"runs/{run['run_id']}/{path.name}"
            for run in self._runs
            for path in sorted(Path(run["checkpoint_dir"]).glob("global_step_*"))
        }
        row_files = [Path(run["run_dir"], METRICS_FILE) for run in self._runs]
        version = self._find_newest_state(), sum(path.stat().st_size for path in row_files if path.exists())
        has_new_state, snapshot = version[0] != self._uploaded_version[0], Path(self.logdir, "upload")
        if has_new_state or (waits and version != self._uploaded_version):
            shutil.rmtree(snapshot, ignore_errors=True)
            self._copy_runs_to(snapshot)
            self._uploaded_version = version
            uploads.begin(snapshot, saved_folders)
        elif saved_folders:
            uploads.begin(None, saved_folders)
        if waits and uploads.finish(waits=True):
            folder = uploads.folder
        return folder and f"{self.trial_name}/{folder}"

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write what is needed to continue on any node: the lines and the newest state of each run, by seed.

        For runs of a study on this machine, the checkpoint only names their folders, and with a storage, only the
        uploaded checkpoint.
        """
        if not self._has_failed:  # a failed run keeps the states before the failure
            self.begin().write_states()
        if self._options.get("storage") is not None:
            self._upload(waits=True)
            folder = "" if self._uploads is None else self._uploads.folder
            write_object(Path(checkpoint_dir, POINTER_FILE), {POINTER_KEY: folder} if folder else {})
        elif self._has_study_folder:
            write_object(Path(checkpoint_dir, POINTER_FILE), {str(run["seed"]): run["run_id"] for run in self._runs})
        else:
            self._copy_runs_to(Path(checkpoint_dir))

    def _copy_runs_to(self, folder: Path) -> None:
        """Copy the lines, and the newest and the best state, of each run to a folder, by seed."""
        if self.training is not None:
            for run in self.training.runs.values():
                run.copy_to(folder / str(run.seed))
            return
        for entry in self._runs:  # a run that failed before it began keeps its earlier files
            source = Path(entry["run_dir"])
            if source.is_dir():
                copy_run_files(source, folder / str(entry["seed"]), list_states(source), links=True)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continue from a checkpoint, possibly of a trial with other settings (population-based training)."""
        if Path(checkpoint_dir, POINTER_FILE).exists() and (self._has_study_folder or "storage" in self._options):
            return  # the runs continue in their own folders, or from their newest upload
        self.cleanup()
        self._copy_runs(Path(checkpoint_dir), allows_other_seeds=True)
        self._is_restored = True

    def _copy_runs(self, checkpoint_dir: Path, *, allows_other_seeds: bool) -> None:
        """Replace the lines and states of the runs from a checkpoint. Raise CheckpointError if it is of other runs."""
        folders = _find_run_folders(checkpoint_dir)
        # Some of the seeds of a checkpoint may continue.
        if all(run["seed"] in folders for run in self._runs):
            sources = [folders[run["seed"]] for run in self._runs]
        elif allows_other_seeds and len(folders) == len(self._runs):
            sources = list(folders.values())
        else:
            seeds = ", ".join(str(run["seed"]) for run in self._runs)
            raise CheckpointError(f"{checkpoint_dir} has no runs of the seeds {seeds}.")
        for run, source in zip(self._runs, sources, strict=True):
            # Without links, since Tune may write into the files of its checkpoint again.
            copy_run_files(source, Path(run["run_dir"]), list_states(source), links=False)

    def restore(self, checkpoint_path: Any) -> None:
        """Restore like Tune, but refuse a checkpoint with PICKLE_FILE, which Tune would unpickle. Ours have none."""
        checkpoint = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        if isinstance(checkpoint, str):
            checkpoint = tune.Checkpoint(checkpoint)
        # Of this trial, there may be a newer upload than the one that the checkpoint names.
        stored, uri = _follow_pointer(checkpoint), self._options.get("storage")
        is_own = uri and stored.path.startswith(f"{FileSystem.from_uri(uri)[1]}/{self.trial_name}/")
        if stored is not checkpoint and not is_own:
            checkpoint = checkpoint_path = stored
        if checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{PICKLE_FILE}").type != FileType.NotFound:
            raise CheckpointError(f"{checkpoint} has a pickle, {PICKLE_FILE}, which none of this project has.")
        super().restore(checkpoint_path)

    @classmethod
    def from_checkpoint(cls, checkpoint: tune.Checkpoint, **settings: object) -> "PPOTrainer":
        """Load the trainer of a checkpoint, to sample, evaluate or probe. `trainer.close()` frees its engine.

        settings: settings to change, such as **{"trainer.device": "cpu"}. For toy families, the result is the trainer
        of all seeds. Raises CheckpointError if the runs of the checkpoint have no state of the same step, if a state is
        damaged, or if settings name a file, a folder, an address or a variable that `settings` does not repeat.
        """
        from trainable.runs.checkpoint import iter_checkpoints, read_checkpoint
        from trainable.runs.run import TrainerState

        family: TrainerFamily = resolve_name(cls.family)
        with _follow_pointer(checkpoint).as_directory() as folder:
            run_folders = _find_run_folders(Path(folder).absolute()).values()
            states_by_step = [dict(iter_checkpoints(run_folder / STATE_FOLDER)) for run_folder in run_folders]
            common_steps = set.intersection(*map(set, states_by_step)) if states_by_step else set()
            if not common_steps:
                raise CheckpointError(
                    f"{checkpoint} has no state of the same step for each run: a run failed, has gone on and replaced "
                    f"it, or ended with trainer.keep_last=false."
                )
            states = [TrainerState(*read_checkpoint(paths[max(common_steps)])) for paths in states_by_step]
        configs = [
            cls.get_config_class(state.values["settings"]).model_validate(state.values["settings"]) for state in states
        ]
        changes = {resolve_key(key, type(configs[0])): value for key, value in settings.items()}
        _check_outside_values(configs[0], changes)
        trainer = family.make_trainer(apply_overrides(configs[0], changes), [config.seed for config in configs])
        trainer.load_states(states)
        return cast("PPOTrainer", getattr(trainer, "trainer", trainer))  # unwrap the trainer of a PPO run

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Close these runs, and prepare the process for the runs of `new_config`, which build everything anew."""
        self.cleanup()
        self.setup(new_config)
        return True  # tells Ray that the process can be used again

    def cleanup(self) -> None:
        """Close the runs, and wait for the pending upload."""
        if self.training is not None:
            self.training.close()
            self.training = None
        if self._uploads is not None:
            self._uploads.close()
            self._uploads, self._uploaded_version = None, (0, 0)


def _follow_pointer(checkpoint: tune.Checkpoint) -> tune.Checkpoint:
    """Find the checkpoint in the storage of a study that a checkpoint names; return any other checkpoint itself."""
    with suppress(FileNotFoundError):
        if path := read_pointer(checkpoint.filesystem, checkpoint.path):
            return tune.Checkpoint(path, checkpoint.filesystem)
    return checkpoint


def _find_run_folders(checkpoint_dir: Path) -> dict[int, Path]:
    """Find the folders of the runs in a checkpoint, by seed. Raise UnsafePathError if one is behind a symbolic link."""
    root, pointer = checkpoint_dir, checkpoint_dir / POINTER_FILE
    if pointer.exists():
        # Tune writes a checkpoint of a study to <study>/<trial>/checkpoint_<N>.
        root, names = checkpoint_dir.absolute().parent.parent, read_object(pointer)
        run_ids = {int(seed): str(names[seed]) for seed in filter(str.isdecimal, names)}
        folders = {seed: root / "runs" / run_id for seed, run_id in run_ids.items() if is_run_id(run_id)}
    else:
        folders = {int(path.name): path for path in checkpoint_dir.iterdir() if path.name.isdecimal()}
    check_tree(root, trees=folders.values())
    return dict(sorted(folders.items()))


def _check_outside_values(config: BaseRunConfig, changes: Mapping[str, object]) -> None:
    """Raise CheckpointError if settings of a checkpoint name something outside of it that `changes` do not repeat."""
    values = flatten_settings(config.model_dump(mode="json"))
    defaults = flatten_settings(type(config).model_validate({}).model_dump(mode="json"))
    models = list_outside_settings(type(config), "model")
    for name in list_outside_settings(type(config)):
        is_known = values[name] == defaults[name] or (name in models and not os.path.exists(str(values[name])))
        if name not in changes and not is_known:
            raise CheckpointError(
                f"The checkpoint names what lies outside of it: {name}={values[name]}. If you trust who wrote it, "
                f'repeat that value: from_checkpoint(checkpoint, **{{"{name}": {values[name]!r}}}).'
            )


def _average_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Average each numeric column over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name != SEED_KEY:
                values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}
