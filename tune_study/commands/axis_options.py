"""The flags that studies declare for the values of their axes, as options of a command."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from typer import Option

from search_spaces.declaration.study import Study

VALUES_OPTION = "--values"
"""The option for the values of any study's axis; some studies have a published one beside it."""


def add_axis_options(studies: Iterable[Study]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command an option for each flag that one of `studies` declares for its axis.

    The command takes them together, as `axes`: flag -> the text that was typed, None where nothing was. They stand
    where `axes` stands among its parameters, each in both spellings (--kl-values, --kl_values).
    """
    studies_by_flag: dict[str, list[Study]] = {}
    for study in studies:
        if study.axis.option != VALUES_OPTION:
            studies_by_flag.setdefault(study.axis.option, []).append(study)
    parameter_names = {flag: flag.strip("-").replace("-", "_") for flag in studies_by_flag}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run_with_axes(**arguments: Any) -> None:
            command(axes={flag: arguments.pop(name) for flag, name in parameter_names.items()}, **arguments)

        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None,
                annotation=Annotated[str | None, Option(*_make_spellings(flag), metavar="LIST", help=_format_help(studies_by_flag[flag]))],
            )
            for flag, name in parameter_names.items()
        ]  # fmt: skip
        signature = inspect.signature(command)
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
        position = [each.name for each in parameters].index("axes")
        parameters[position : position + 1] = options
        run_with_axes.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run_with_axes

    return decorate


def _make_spellings(flag: str) -> list[str]:
    """The flag as it is declared, and with the other sign between its words."""
    bare_flag = flag.removeprefix("--")
    return list(dict.fromkeys([flag, f"--{bare_flag.replace('_', '-')}", f"--{bare_flag.replace('-', '_')}"]))


def _format_help(studies: list[Study]) -> str:
    """What the flag takes: of one study by its axis, of several in general."""
    axis = studies[0].axis
    example = ",".join((*axis.value_groups, *axis.grids["laptop"])[:2])
    if len(studies) == 1:
        return f"Study {studies[0].name}: values of {axis.setting}, like {example}."
    return f"Studies {studies[0].name}, {studies[1].name}{', ...' * (len(studies) > 2)}: arms by name, like {example}."
