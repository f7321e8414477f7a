"""Read the rows of a data file, .jsonl or .parquet."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainable.config.constants import DATA_SUFFIXES
from trainable.files.json_values import parse_json


class DataFileError(ValueError):
    """A data file or one of its rows cannot be used; the message names the file, the row and the field."""


def read_data_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with their places, such as `line 3`. Raises DataFileError."""
    if path.suffix not in DATA_SUFFIXES:
        raise DataFileError(f"{path}: a data file ends in {' or '.join(DATA_SUFFIXES)}.")
    try:
        if path.suffix == ".parquet":
            # Group by group, so that a large file does not become Python objects all at once.
            with pq.ParquetFile(path) as file:
                batches = (batch.to_pylist(maps_as_pydicts="strict") for batch in file.iter_batches(batch_size=256))
                for number, row in enumerate(itertools.chain.from_iterable(batches), start=1):
                    yield f"row {number}", row
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"line {number}", _parse_line(path, number, line)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataFileError(f"{path} cannot be read: {error}") from None


def _parse_line(path: Path, number: int, line: bytes) -> Any:
    try:
        return parse_json(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataFileError(f"{path}, line {number} is no JSON ({error}).") from None
    except ValueError as error:
        raise DataFileError(f"{path}, line {number}: {error}.") from None
