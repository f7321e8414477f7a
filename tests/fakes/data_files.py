"""Small files of prompts and answers."""

import json
from pathlib import Path


def write_sums(path: Path, count: int = 20, **fields: str) -> Path:
    """Write the sums of two numbers below `count` as prompts with answers. fields: other names of the two fields."""
    names = {"prompt": "prompt", "answer": "answer", **fields}
    pairs = [(left, right) for left in range(count) for right in range(count)]
    rows = [{names["prompt"]: f"{left} + {right} =", names["answer"]: str(left + right)} for left, right in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
