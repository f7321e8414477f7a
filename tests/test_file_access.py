"""Files of a study are opened only through `trainable.files`, which follows no links."""

import ast
from collections.abc import Iterator

import pytest

from tests.test_architecture import MODULES

CHECKED_PACKAGES = ("analysis", "trainable.runs", "tune_study.folder", "tune_study.tune")
CHECKED_MODULES = (
    "tune_study.commands.probe",
    "tune_study.commands.reading.alarms",
    "tune_study.commands.reading.plot_gradients",
)
OPENING_NAMES = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "read_parquet", "copyfile", "copy"}
EXEMPTIONS = {
    # `check_tree` has checked the folder before.
    "trainable.runs.run_files": 2,
    # Templates and recordings of the package itself.
    "analysis.gallery.pages": 1,
    "analysis.gallery.recordings": 1,
    # Ray's copy of an error in this process's own session folder.
    "tune_study.tune.callbacks": 1,
}
"""Number of calls that may open a file by other means, by module."""


def list_opening_calls(source: str) -> Iterator[str]:
    """The calls in `source` that open a file by other means than `trainable.files`.

    `atomic_write` yields a new file under the name `temp_path`, which may be opened by any means.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "open":
            yield ast.unparse(node)
        elif isinstance(function, ast.Attribute) and function.attr in OPENING_NAMES:
            receiver = ast.unparse(function.value)
            is_other_copy = function.attr == "copy" and receiver != "shutil"
            if receiver != "temp_path" and not is_other_copy:
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.startswith(CHECKED_PACKAGES) or name in CHECKED_MODULES]
)
def test_files_of_a_study_are_opened_by_one_module(module: str) -> None:
    calls = list(list_opening_calls(MODULES[module].read_text(encoding="utf-8")))
    assert len(calls) == EXEMPTIONS.get(module, 0), calls


@pytest.mark.parametrize(
    "line", ["open('x')", "path.open()", "path.read_text()", "(folder / 'x').write_bytes(b'')", "pd.read_parquet(path)"]
)
def test_a_call_that_opens_a_file_is_noticed(line: str) -> None:
    assert list(list_opening_calls(line))
    assert not list(list_opening_calls("temp_path.open('w')\nread_bytes(path)\nopen_regular(path, 'rb')\nrows.copy()"))
