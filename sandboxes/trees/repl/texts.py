"""The texts of an episode with a REPL: what the policy reads, and how its code and answers are recognized."""

import ast
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from trainable.config.setting_types import PromptStyle

Role = Literal["root", "child"]

FENCE = "```"
BLOCK_START = f"{FENCE}repl\n"
NO_BLOCK_PROBLEM = f"There was no block of code. Write exactly one, from {FENCE}repl to {FENCE}."
# Any pair of fences, of which only one that begins with ```repl on a separate line has code. Blanks after the tag are
# invisible.
_BLOCK = re.compile(r"```repl[^\S\n]*\n(.*?)```|```.*?```", re.DOTALL)
_FINAL_LINE = re.compile(r"^[ \t]*FINAL(_VAR)?\((.*)\)[ \t]*$", re.MULTILINE)

_TOOLS = (
    "context: a dictionary with the text of each paper by its id",
    "list_papers(): the ids of all papers",
    "search(text, keyword, window=300): the surroundings of each occurrence of a keyword in a text",
    "get_paper_abstract(paper_id), extract_section(paper_id, section): parts of a paper",
    "SHOW_VARS(): the variables that you have set",
)
_QUERY_TOOLS = (
    "rlm_query(prompt, context=None): the final answer of an assistant with a REPL of its own to a question about "
    "context, which is a text, texts by id, or None for all papers",
    "rlm_query_batched(prompts, context_list): the same for several questions at once",
)
_ANSWER_TOOLS = ("FINAL(x): end with the answer x", "FINAL_VAR(name): end with the value of the variable of this name")


class ReplyContent(NamedTuple):
    """What a reply contains: the code of its only block, a FINAL(answer), a FINAL_VAR(variable), or why it has none.

    Exactly one of them is not None.
    """

    code: str | None = None
    answer: str | None = None
    variable: str | None = None
    problem: str | None = None


def parse_reply(text: str) -> ReplyContent:
    """Read a reply: exactly one block that begins with ```repl, or none and a line FINAL(...) or FINAL_VAR(...)."""
    blocks = [block[1] for block in _BLOCK.finditer(text) if block[1] is not None]
    if len(blocks) == 1:
        return ReplyContent(code=blocks[0])
    if blocks:
        return ReplyContent(problem=f"There were {len(blocks)} blocks of code, and none ran. Write exactly one.")
    if match := _FINAL_LINE.search(text):
        content = _unquote(match[2].strip())
        return ReplyContent(variable=content) if match[1] else ReplyContent(answer=content)
    return ReplyContent(problem=NO_BLOCK_PROBLEM)


def _unquote(text: str) -> str:
    """Evaluate a text in quotes; return any other text unchanged."""
    if text[:1] in ("'", '"'):
        try:
            value = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return text
        return value if isinstance(value, str) else text
    return text


def format_instructions(role: Role, max_turns: int, style: PromptStyle) -> str:
    """Format the system message of a root, which may call children, or of a child.

    max_turns: replies per episode. The compact style is one word that a tiny policy knows.
    """
    if style == "compact":
        return "Papers" if role == "root" else "Paper"
    task, answer = "You answer one question about the texts that you are given.", ""
    if role == "root":
        task = "You answer a question about papers by quoting the passages that answer it, word for word."
        answer = " The answer is a list of texts: FINAL(['first passage', 'second passage'])."
    tools = (*_TOOLS, *(_QUERY_TOOLS if role == "root" else ()), *_ANSWER_TOOLS)
    tool_list = "\n".join(f"- {tool}" for tool in tools)
    return (
        f"{task} You do not see the texts: you read them with Python code. Each of your replies has exactly one block "
        f"of code, which begins with {FENCE}repl and ends with {FENCE}. You then see what it printed, and its error. "
        f"Variables stay between replies. There are no imports, files or networks; re, math, json, itertools and "
        f"Counter are there already. You have {max_turns} replies.{answer}\n\nYou can use:\n{tool_list}"
    )


def format_task(question: str, papers: Mapping[str, str], style: PromptStyle) -> str:
    """Format the first user message: the question, and the sizes of the papers instead of their texts."""
    if style == "compact":
        return f"{' '.join(papers)}\n{question}\n"
    sizes = "\n".join(f"- {name}: {len(text)} characters" for name, text in papers.items())
    return f"The variable `context` has {len(papers)} texts:\n{sizes}\n\nQuestion: {question}"


def format_observation(text: str, turns_left: int, style: PromptStyle) -> str:
    """Format a later user message: the result of the last reply, and how many replies are left."""
    if style == "compact":
        return f"{text}\n"
    plural = "reply is" if turns_left == 1 else "replies are"
    return f"{text}\n\n{turns_left} {plural} left."


def format_output(stdout: str, stderr: str, max_chars: int) -> str:
    """Format what code printed, and its error, cut to `max_chars` together, of which the error gets at least half."""
    printed, error = stdout.rstrip(), f"Error: {stderr.rstrip()}" if stderr.strip() else ""
    error_chars = max(max_chars // 2, max_chars - len(printed))
    blocks = [_cut(printed, max_chars - min(len(error), error_chars)), _cut(error, error_chars)]
    return "\n".join(block for block in blocks if block) or "(no output)"


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[{len(text) - max_chars} of {len(text)} characters are left out]"
