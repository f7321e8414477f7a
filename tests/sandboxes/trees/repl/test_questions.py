"""Tests of files of questions: every documented form of a row, and every mistake named with its place."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sandboxes.trees.repl.questions import Question, read_questions
from trainable.envs.data_rows import DataFileError

PAPERS = [
    {"paperId": "p1", "text": "One two.", "title": "A title", "abstract": "Short."},
    {"paper_id": "p2", "text": "Three."},
]
CONTEXT = {"p1": "# A title\n\n## Abstract\nShort.\n\nOne two.", "p2": "Three."}


def make_evidence(*passages: str) -> list[dict[str, Any]]:
    return [{"selections": [{"text": passage} for passage in passages]}]


EVIDENCE = [*make_evidence("One two.", "Three."), *make_evidence("Three.")]
QUESTION = Question("Who?", CONTEXT, ("One two.", "Three."))
ROW = {"question": "Who?", "papers": PAPERS, "evidence": EVIDENCE}
SPEECHES = (("user", "When?"), ("assistant", "?"), ("user", "Who?"))
MESSAGES = [{"role": role, "content": content} for role, content in SPEECHES]


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in ROW.items() if name not in names}


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {**ROW, "another": 1, "question": "Who?", "prompt": "not this"},
        {**without("question"), "prompt": "Who?"},
        {**without("question"), "prompt": MESSAGES},
        {**without("papers"), "context_text": CONTEXT},
        {**without("papers"), "context_text": json.dumps(CONTEXT)},
        {**without("papers"), "context": CONTEXT},
        {**without("papers"), "extra_info": {"context_text": CONTEXT}},
        {**without("papers"), "extra_info": json.dumps({"context": json.dumps(CONTEXT)})},
        {**without("evidence"), "reward_spec": {"evidence": EVIDENCE}},
        {**without("evidence"), "reward_spec": json.dumps({"evidence": EVIDENCE})},
        {**without("evidence"), "extra_info": {"reward_spec": json.dumps({"evidence": EVIDENCE})}},
        {**ROW, "evidence": json.dumps(EVIDENCE)},
    ],
)
def test_every_form_of_a_row_is_read(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read_questions(write_lines(tmp_path / "a.jsonl", row)) == [QUESTION]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert read_questions(tmp_path / "a.parquet") == [QUESTION]


def test_rows_keep_their_order_and_a_map_of_a_parquet_file_is_a_context(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({**ROW, "question": str(number)} for number in range(5)))
    path.write_text("\n" + path.read_text())
    assert [question.text for question in read_questions(path)] == list("01234")
    rows = [{**ROW, "question": str(number)} for number in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [question.text for question in read_questions(tmp_path / "a.parquet")][-1] == "599"
    columns = {
        "question": pa.array(["Who?"]),
        "context": pa.array([list(CONTEXT.items())], pa.map_(pa.string(), pa.string())),
        "evidence": pa.array([json.dumps(EVIDENCE)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert read_questions(tmp_path / "a.parquet") == [QUESTION]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "question": 3}, "field `question`: input should be a valid string"),
        ({**ROW, "question": " "}, "field `question`: a text, or a `prompt`"),
        ({**without("question"), "prompt": [{"role": "user"}]}, "field `prompt[0].content`: field required"),
        (without("papers"), "field `papers`: a list of papers is needed"),
        ({**ROW, "papers": [{"paperId": "p1"}]}, "field `papers[0].text`: field required"),
        ({**ROW, "papers": [PAPERS[0], PAPERS[0]]}, "field `papers`: two papers have the same id"),
        ({**without("papers"), "context_text": "no JSON"}, "field `context_text`: input should be a valid dictionary"),
        ({**without("papers"), "context": {"a": 1}}, "field `context.a`: input should be a valid string"),
        (without("evidence"), "field `reward_spec`: `evidence` with at least one selection"),
        ({**ROW, "evidence": make_evidence("nowhere")}, "field `reward_spec`: no passage of the evidence"),
        ([1], "field `the row`: input should be a valid dictionary"),
    ],
)
def test_a_wrong_row_is_named_with_its_field(tmp_path: Path, row: object, message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROW, row)
    with pytest.raises(DataFileError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}, line 2: {message}")


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    (tmp_path / "b.jsonl").write_bytes(b"{")
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.jsonl").write_text("[" * 100_000)
    problems = {"a.parquet": "cannot be read", "b.jsonl": "line 1 is no JSON", "c.jsonl": "has no row"}
    problems |= {"a.txt": "a data file ends in .jsonl or .parquet", "d.jsonl": "line 1: brackets are nested too deeply"}
    for name, message in problems.items():
        with pytest.raises(DataFileError, match=f"{name}.* {message}"):
            read_questions(tmp_path / name)
