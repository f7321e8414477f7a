"""Questions about documents: read the rows of a data file, checking each field."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trainable.envs.data_rows import DataFileError, read_data_rows
from trainable.files.json_values import parse_json


@dataclass(frozen=True)
class Question:
    """A question, its papers by id, and the passages that answer it, each from a paper if the file is correct."""

    text: str
    papers: Mapping[str, str]
    evidence: tuple[str, ...]


def _parse_text(value: object) -> object:
    """Parse a value that may be JSON text. Other text is returned as is, and is then rejected by its type."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode("utf-8", "replace"))
    except ValueError:
        return value


_WRAP_PROMPT = BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value)


class _Row(BaseModel):
    # Numbers are not accepted as text, and additional columns are not an error.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Message(_Row):
    role: str
    content: str


class _Paper(_Row):
    paper_id: str = Field(validation_alias=AliasChoices("paperId", "paper_id"), min_length=1)
    text: str
    title: str | None = None
    abstract: str | None = None

    def format(self) -> str:
        """Join title, abstract and text, with headings that the tools of the REPL recognize."""
        title = f"# {self.title}" if self.title else ""
        abstract = f"## Abstract\n{self.abstract}" if self.abstract else ""
        return "\n\n".join(block for block in (title, abstract, self.text) if block)


class _Selection(_Row):
    text: str = Field(min_length=1)


class _Evidence(_Row):
    selections: list[_Selection]


_EvidenceList = Annotated[list[_Evidence], BeforeValidator(_parse_text)]
_Context = Annotated[dict[str, str], BeforeValidator(_parse_text)]


class _RewardSpec(_Row):
    evidence: _EvidenceList | None = None


class _Fields(_Row):
    """Fields that may be in a row or in its extra_info."""

    context_text: _Context | None = None
    context: _Context | None = None
    reward_spec: Annotated[_RewardSpec | None, BeforeValidator(_parse_text)] = None


class _QuestionRow(_Fields):
    question: str | None = None
    prompt: Annotated[list[_Message], _WRAP_PROMPT] = []
    papers: list[_Paper] | None = None
    evidence: _EvidenceList | None = None
    extra_info: Annotated[_Fields | None, BeforeValidator(_parse_text)] = None

    def make_question(self) -> Question:
        """Make the question of the row. ValueError that names the field that is missing or empty."""
        last_prompt = next((message.content for message in reversed(self.prompt) if message.role == "user"), "")
        text = self.question or last_prompt
        if not text.strip():
            raise ValueError("field `question`: a text, or a `prompt` whose last user message has one, is needed")
        question = Question(text, self._find_papers(), self._find_evidence())
        if not any(passage in paper for passage in question.evidence for paper in question.papers.values()):
            raise ValueError("field `reward_spec`: no passage of the evidence occurs in a paper word for word")
        return question

    def _find_papers(self) -> dict[str, str]:
        if self.papers:
            papers = {paper.paper_id: paper.format() for paper in self.papers}
            if len(papers) < len(self.papers):
                raise ValueError("field `papers`: two papers have the same id")
            return papers
        extra = self.extra_info or _Fields()
        context = self.context_text or self.context or extra.context_text or extra.context
        if not context:
            raise ValueError("field `papers`: a list of papers is needed, or `context_text` with texts by id")
        return context

    def _find_evidence(self) -> tuple[str, ...]:
        extra = self.extra_info or _Fields()
        specs = [spec.evidence for spec in (self.reward_spec, extra.reward_spec) if spec is not None]
        evidence = next((items for items in (*specs, self.evidence) if items is not None), None)
        texts = [selection.text for item in evidence or () for selection in item.selections]
        if not texts:
            raise ValueError("field `reward_spec`: `evidence` with at least one selection is needed")
        return tuple(dict.fromkeys(texts))


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a .jsonl or .parquet file. DataFileError that names file, row and field.

    docs/tree_grpo.md has the fields of a row; others are ignored. Source: rlm_grpo of deepakvijaykee/rl-experiments.
    """
    questions: list[Question] = []
    for place, content in read_data_rows(path):
        try:
            questions.append(_QuestionRow.model_validate(_drop_missing(content)).make_question())
        except ValidationError as error:
            raise DataFileError(f"{path}, {place}: {_describe(error)}.") from None
        except ValueError as error:
            raise DataFileError(f"{path}, {place}: {error}.") from None
    if not questions:
        raise DataFileError(f"{path} has no row: each row is a question with its papers and evidence.")
    return questions


def _drop_missing(value: Any) -> Any:
    """Drop fields that are null: in a table, every row has the fields of all rows."""
    if isinstance(value, dict):
        return {name: _drop_missing(item) for name, item in value.items() if item is not None}
    return [_drop_missing(item) for item in value] if isinstance(value, list) else value


def _describe(error: ValidationError) -> str:
    """Format the first problem, as `field papers[2].text: Input should be a valid string`."""
    problem = error.errors(include_url=False, include_context=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    return f"field `{field or 'the row'}`: {problem['msg'][0].lower()}{problem['msg'][1:]}"
