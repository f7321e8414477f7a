"""The configuration of a run whose trainer is a command of yours, and the words of that command."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from trainable.config.base_config import EXECUTION_SETTINGS, BaseRunConfig, BaseTrainerConfig, SettingsSection
from trainable.config.command_lines import quote_argument, split_words
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import (
    SECRET_NAME,
    Common,
    NonNegative,
    Outside,
    ParseNull,
    Patience,
    flatten_settings,
    is_pattern,
    require,
)

Value = bool | int | float | str | None
"""The value of a setting of yours."""
SETTINGS_SECTION = "args"
"""The section of a configuration with the settings of yours."""
CONSOLE = "{console}"
"""The value of `command.logs` for commands that print their measurements."""

_FIELD = re.compile(r"\{([\w.+~/@-]+)\}")
_SEED_FIELD = re.compile(r"\{seed\*(\d+)\+(\d+)\}")
_FLAGS, _OVERRIDES = "{flags}", "{overrides}"
_HYDRA_WORD = re.compile(r"[\w./:+-]+", re.ASCII)
"""A value that Hydra reads as it is, without quotes."""
_PLACES = ("output", "console", "settings_file", "run", "attempt", "gpu_ids")
_RUN_FIELDS = ("seed", "steps", "gpus", "cpus", *_PLACES)
_CHECKPOINT_FIELDS = ("checkpoint", "step")


class CommandSection(SettingsSection):
    """The command of a run, where it writes, and how it continues. The texts are templates, see `fill_words`."""

    run: Annotated[str, Outside("program")] = ""
    """the command and its arguments, without a shell: `python train.py --beta {beta} --output_dir {output}`"""
    resume: Annotated[str, Outside("program")] = ""
    """further arguments to continue from a checkpoint, such as `--resume_from_checkpoint {checkpoint}`"""
    checkpoints: Annotated[str, Outside("program")] = ""
    """the checkpoints that the command writes, such as `{output}/checkpoint-{step}`. Without {step}: a file or folder
    from which the command continues by itself. Empty: it starts from the beginning"""
    logs: Annotated[str, Outside("program")] = CONSOLE
    """the files with the measurements, with wildcards, or {console} for what the command prints"""
    columns: tuple[str, ...] = ()
    """measurements by our names, such as [val_success=eval/accuracy], besides those that are known"""
    environment: Annotated[tuple[str, ...], Outside("program")] = ()
    """variables of the command besides those of the study, such as [WANDB_MODE=offline]"""
    folder: Annotated[str, Outside("program")] = "."
    """the folder in which the command runs"""
    retry: Annotated[str, require(is_pattern, "must be a regular expression")] = ""
    """pattern of the exit code and the last lines of the console after which a failed run is repeated, such as
    `exit code 75|NCCL`; runs whose process a signal has ended always are"""
    stop_seconds: Patience = 30.0
    """seconds from SIGTERM to SIGKILL when a rule or the study stops the command"""

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        names = [assignment.partition("=")[0] for assignment in self.environment]
        return {
            f"environment: {assignment} has no name and value: type NAME=VALUE": "=" not in assignment[1:]
            for assignment in self.environment
        } | {
            f"environment: the value of {name} would be written to the study's folder, and it looks like a secret: "
            f"leave it out and type `export {name}=...` before the study starts, which the command inherits": bool(
                SECRET_NAME.search(name)
            )
            for name in names
        }


class CommandRunnerConfig(BaseTrainerConfig):
    """Length, machine and records of a run."""

    total_training_steps: Common[int] = Field(100, ge=1)
    """training steps, as the log counts them; a command that goes on is stopped there"""
    n_gpus_per_node: Common[NonNegative] = Field(0, le=64, description="GPUs per run, which the command alone sees")
    num_cpus: Common[int] = Field(1, ge=1, le=1024, description="CPUs per run")
    test_freq: Literal[1] = Field(1, description="every row of the log may have a validation")
    save_freq: Literal[-1] = Field(-1, description="the command writes its own checkpoints")
    resume_every: Literal[1] = Field(1, description="each row records the newest checkpoint of the command")
    resume_seconds: Annotated[NonNegative | None, ParseNull] = Field(None, description="no effect: see resume_every")
    disk_patience: Patience = Field(600.0, description="seconds to wait for space on a full disk")
    device: Literal["auto"] = Field("auto", description="the command chooses")
    ray_num_cpus: int = Field(64, ge=1, description="CPUs that Ray may use")
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = ("console", "tensorboard")
    """add wandb to log to it offline; console and tensorboard are always on"""

    @property
    def cpu_threads(self) -> int:
        """CPUs that a run reserves."""
        return self.num_cpus

    @property
    def has_ranks(self) -> bool:
        """See `BaseTrainerConfig`: the command starts the processes of its GPUs itself."""
        return False


class CommandConfig(BaseRunConfig):
    """The settings of a run whose trainer is a command. `make_config_class` adds a section with yours."""

    declared_sections: ClassVar[frozenset[str]] = frozenset({SETTINGS_SECTION})
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "trainer": (*EXECUTION_SETTINGS, "n_gpus_per_node", "num_cpus", "test_freq"),
            "command": ("folder", "retry", "stop_seconds"),
        }
    )

    seed: int = Field(0, ge=0, le=400, description="the seed of the run, {seed} in the command")
    # Made when they are needed: nearly all processes that know this class train no command.
    command: CommandSection = Field(default_factory=CommandSection)
    trainer: CommandRunnerConfig = Field(default_factory=CommandRunnerConfig)
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        known = {*_RUN_FIELDS, *self.settings}
        texts = " ".join((self.command.run, self.command.resume, *self.command.environment))
        takes_all = any(field in texts for field in (_FLAGS, _OVERRIDES, "{settings_file}"))
        unused = [] if takes_all else [name for name in self.settings if f"{{{name}}}" not in texts]
        logs = self.command.logs
        fields = {
            "run": known,
            "resume": {*known, *_CHECKPOINT_FIELDS},
            "logs": known,
            "checkpoints": {"output", "step"},
            "environment": known,
        }
        wrong_fields = {
            f"command.{name} has the field {{{field}}}: choose from {', '.join(sorted(allowed))}": True
            for name, allowed in fields.items()
            for field in _FIELD.findall(str(getattr(self.command, name)).replace(_FLAGS, "").replace(_OVERRIDES, ""))
            if field not in allowed
        }
        return wrong_fields | {
            f"command.logs={logs} is the same file for all runs: let each run write below {{output}}, its own folder, "
            "and read the logs from there": not any(field in logs for field in (CONSOLE, "{output}", "{run}")),
            f"the command does not use the setting {(*unused, '')[0]}, so that its values would change nothing: write "
            f"{{{(*unused, '')[0]}}} into the command": bool(unused) and bool(self.command.run),
        }

    @property
    def nested_settings(self) -> dict[str, Any]:
        """Your settings, nested by the dots in their names."""
        section = getattr(self, SETTINGS_SECTION, None)
        return {} if section is None else section.model_dump(mode="json")

    @property
    def settings(self) -> dict[str, Value]:
        """Your settings by their names."""
        return flatten_settings(self.nested_settings)

    def fill_words(self, template: str, fields: Mapping[str, object]) -> list[str]:
        """Split a template into words, as a shell does, and fill in the fields of each.

        {NAME} is the value of your setting NAME. {flags} stands for those that the template does not name, each as
        `--NAME VALUE`, and {overrides} for the same as `NAME=VALUE`, with the quotes that Hydra needs. {seed}, {steps},
        {gpus} and {cpus} are numbers of the run, and {seed*10+3} is ten times the seed, plus 3. fields: further ones:
        {output}, a folder of the run, {run}, its name, {gpu_ids}, its GPUs such as 0,1, {attempt}, the number of the
        start, {console}, the file with what the command prints, {settings_file}, a JSON file with your settings, and
        to continue, {checkpoint} and {step}.
        """
        named = _FIELD.findall(template)
        others = {name: value for name, value in self.settings.items() if name not in named and value is not None}
        words: list[str] = []
        for word in split_words(template):
            if word == _FLAGS:
                words += [text for name, value in others.items() for text in (f"--{name}", format_argument(value))]
            elif word == _OVERRIDES:
                words += [f"{name}={_quote_for_hydra(format_argument(value))}" for name, value in others.items()]
            else:
                words.append(self.fill_word(word, fields))
        return words

    def fill_word(self, word: str, fields: Mapping[str, object]) -> str:
        """Fill in the fields of one word, see `fill_words`."""
        trainer = self.trainer
        numbers = {"seed": self.seed, "steps": trainer.total_training_steps, "cpus": trainer.num_cpus}
        values = {**self.settings, **numbers, "gpus": f"{trainer.n_gpus_per_node:g}", **fields}
        word = _SEED_FIELD.sub(lambda match: str(self.seed * int(match[1]) + int(match[2])), word)
        return _FIELD.sub(lambda match: format_argument(values[match[1]]), word)

    def format_command(self) -> str:
        """Format the command as it would be typed, with {output} and other folders of the run as they are."""
        places = {name: f"{{{name}}}" for name in _PLACES}
        return " ".join(map(quote_argument, self.fill_words(self.command.run, places)))

    def describe(self) -> Iterator[str]:
        """Describe where the measurements of a run are, and how it continues."""
        section = self.command
        yield f"Logs: {section.logs}" + f"; by our names: {', '.join(section.columns)}" * bool(section.columns)
        if not section.checkpoints:
            yield "Checkpoints: none, so that a killed run begins anew"
        elif not section.resume:
            yield f"Checkpoints: {section.checkpoints}, from which the command continues by itself"
        else:
            yield f"Checkpoints: {section.checkpoints}, with which a run continues by {section.resume}"

    def explain_obstacle(self) -> str:
        """Explain in a sentence why the command cannot start on this machine; empty if it can."""
        program = next(iter(split_words(self.command.run)), "")
        folder = Path(self.command.folder)
        if not folder.is_dir():
            return f"command.folder={folder} is no folder of this machine: correct it in the file of the study."
        if shutil.which(program) or shutil.which(str(folder / program)):
            return ""
        return (
            f"command.run begins with {program or 'no word'}, which is no program of this machine: type its path, or "
            "install it."
        )


def format_argument(value: object) -> str:
    """Format a value as a word of a command line: `1e-06`, `True`, `null`."""
    return "null" if value is None else str(value)


def _quote_for_hydra(text: str) -> str:
    """Quote a value for Hydra, unless it is a word or a list, as it is typed there."""
    return text if _HYDRA_WORD.fullmatch(text) or text.startswith("[") else "'" + text.replace("'", r"\'") + "'"


def make_config_class(settings: Mapping[str, Value], varied: Mapping[str, Sequence[str]]) -> type[CommandConfig]:
    """Make the class of the configurations of a command with these settings, by dotted name, and their defaults.

    varied: the values of settings that a study varies, as they are typed. A whole number of which one value is none is
    a float. Raises ValueError for the name of a field that every run has.

    Example:
        >>> config = make_config_class({"lr": 1e-5, "model.beta": 0}, {"model.beta": ("0", "0.1")})()
        >>> config.settings
        {'lr': 1e-05, 'model.beta': 0.0}
    """
    if taken := sorted({*settings} & {*_RUN_FIELDS, *_CHECKPOINT_FIELDS, "flags", "overrides"}):
        raise ValueError(f"settings has {taken[0]}, which is a field of every run: give the setting another name.")
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *parents, leaf = name.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = (_find_type(value, varied.get(name, ())), value)
    section_class = _make_section(SETTINGS_SECTION, tree)
    fields: dict[str, Any] = {SETTINGS_SECTION: (section_class, section_class())}
    config_class = create_model("CommandConfig", __base__=CommandConfig, __doc__=CommandConfig.__doc__, **fields)
    config_class.aliases = MappingProxyType({name: f"{SETTINGS_SECTION}.{name}" for name in settings})
    return config_class


def _make_section(name: str, tree: Mapping[str, Any]) -> type[SettingsSection]:
    fields: dict[str, Any] = {}
    for key, entry in tree.items():
        if isinstance(entry, Mapping):
            section = _make_section(key, entry)
            entry = (section, section())
        fields[key] = entry
    return create_model(name, __base__=SettingsSection, __doc__="Settings of the command.", **fields)


def _find_type(value: Value, typed: Sequence[str]) -> Any:
    # A text may be the program itself, or an argument that names a file.
    if value is None:
        return Annotated[str | None, ParseNull, Outside("program")]
    if isinstance(value, str):
        return Annotated[str, Outside("program")]
    is_number = type(value) is int and not all(re.fullmatch(r"[+-]?\d+", text.strip()) for text in typed)
    return float if is_number else type(value)
