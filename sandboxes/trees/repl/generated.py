"""Questions about several short papers whose evidence is known, so that everything runs without a data set."""

import numpy as np

from sandboxes.trees.repl.questions import Question

THINGS = (
    "bridge", "canal", "castle", "church", "factory", "garden", "harbor", "hotel", "library", "market",
    "mill", "museum", "palace", "school", "station", "temple", "theater", "tower", "tunnel", "wall",
)  # fmt: skip
PROPERTIES = ("deep", "high", "long", "wide")
MIN_NUMBER, MAX_NUMBER = 10, 99


def make_question(seed: int, num_papers: int = 3, num_sentences: int = 4) -> Question:
    """A question about a thing, whose evidence is every sentence that begins with it.

    One to all of the papers have one sentence of evidence each. In the others, and beside it, sentences are about other
    things; some of them only mention the thing, so that a search for its name finds too much.

    Args:
        seed: the question is a function of it and of the sizes.
        num_papers: at least 1.
        num_sentences: sentences of a paper, at least 2.

    Example:
        >>> question = make_question(0)
        >>> question.text
        'Quote every sentence about the factory.'
        >>> question.evidence
        ('The factory is 17 metres deep.',)
    """
    rng = np.random.default_rng(seed)
    thing, *others = (THINGS[number] for number in rng.permutation(len(THINGS)))
    sentences = _draw_sentences(thing, num_papers, rng)
    num_evidence = int(rng.integers(1, num_papers + 1))
    with_evidence = set(rng.permutation(num_papers)[:num_evidence].tolist())
    with_mention = set(rng.permutation(num_papers)[: int(rng.integers(0, num_papers + 1))].tolist())
    papers, evidence = {}, []
    for number in range(num_papers):
        lines = []
        if number in with_evidence:
            lines.append(sentences[number])
            evidence.append(sentences[number])
        if number in with_mention:
            lines.append(f"The {others[number % len(others)]} stands near the {thing}.")
        while len(lines) < num_sentences:
            (line,) = _draw_sentences(others[int(rng.integers(len(others)))], 1, rng)
            lines.append(line)
        papers[f"p{number + 1}"] = "\n".join(lines[place] for place in rng.permutation(num_sentences))
    return Question(f"Quote every sentence about the {thing}.", papers, tuple(evidence))


def _draw_sentences(thing: str, count: int, rng: np.random.Generator) -> list[str]:
    """Different sentences about a thing."""
    numbers = MIN_NUMBER + rng.choice(MAX_NUMBER - MIN_NUMBER + 1, size=count, replace=False)
    return [f"The {thing} is {number} metres {PROPERTIES[rng.integers(len(PROPERTIES))]}." for number in numbers]
