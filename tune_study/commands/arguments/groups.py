"""Groups of options that several commands share: dataclasses whose fields are annotated with options of Typer.

A command receives a group as one argument. Typer reads the options of a command from its signature, in which those of
the group take the place of that argument.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

from typer import Option

from search_spaces.declaration.study import Study

VALUES_OPTION = "--values"
"""The option for the values of any study's axis; some studies have a published one in addition."""

Command = Callable[..., None]


def expand_groups(command: Command) -> Command:
    """Give a command the options of its groups, the parameters whose types are dataclasses.

    All parameters become keyword-only, because one with a default may then precede one without.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += [option for _, _, option in _list_options(groups[name])]
        else:
            parameters.append(_make_parameter(name, parameter.default, hints[name]))

    @functools.wraps(command)
    def run_with_groups(**arguments: Any) -> None:
        for name, group in groups.items():
            values: dict[str, Any] = {}
            for field, flag, option in _list_options(group):
                value = arguments.pop(option.name)
                if flag is None:
                    values[field] = value
                else:
                    values.setdefault(field, {})[flag] = value
            arguments[name] = group(**values)
        command(**arguments)

    run_with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run_with_groups


def _list_options(group: Any) -> Iterator[tuple[str, str | None, inspect.Parameter]]:
    """(field, flag, parameter of the command) of each option. A field with several options has a value per flag."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        (options,) = hints[field.name].__metadata__
        if isinstance(options, dict):
            for flag, option in options.items():
                name = flag.removeprefix("--").replace("-", "_")
                yield field.name, flag, _make_parameter(name, None, Annotated[str | None, option])
        else:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield field.name, None, _make_parameter(field.name, default, hints[field.name])


def _make_parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def make_axis_options(studies: Iterable[Study]) -> dict[str, Any]:
    """The options for the values of an axis by flag: --values, and every flag that one of `studies` declares.

    Each has both spellings (--kl-values, --kl_values).
    """
    help_text = "Values of the study's axis, for any study; see `list`."
    options = {VALUES_OPTION: Option(VALUES_OPTION, metavar="LIST", help=help_text)}
    studies_by_flag: dict[str, list[Study]] = {}
    for study in studies:
        studies_by_flag.setdefault(study.axis.option, []).append(study)
    for flag, flag_studies in studies_by_flag.items():
        if flag != VALUES_OPTION:
            bare_flag = flag.removeprefix("--")
            spellings = dict.fromkeys([flag, f"--{bare_flag.replace('_', '-')}", f"--{bare_flag.replace('-', '_')}"])
            options[flag] = Option(*spellings, metavar="LIST", help=_format_help(flag_studies))
    return options


def _format_help(studies: list[Study]) -> str:
    """Help text of a flag: the axis if one study declares it, else that it takes named arms."""
    axis = studies[0].axis
    example = ",".join((*axis.value_groups, *axis.grids["laptop"])[:2])
    if len(studies) == 1:
        return f"Study {studies[0].name}: values of {axis.setting}, for example {example}."
    names = f"{studies[0].name}, {studies[1].name}{', ...' * (len(studies) > 2)}"
    kinds = "arms or groups" if axis.value_groups else "arms"
    return f"Studies {names}: names of {kinds}, for example {example}."
