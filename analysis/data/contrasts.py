"""The contrasts that a study declares: named comparisons, each over pairs of arms that differ in one respect only."""

from collections import Counter
from collections.abc import Sequence

from trainable.runs.study_record import DeclaredContrast, StudyRecord


def read_contrasts(study: StudyRecord) -> list[DeclaredContrast]:
    """Read and check the contrasts of study.json; an empty list if it declares none.

    A contrast that needs all of its pairs is left out if the study lacks one of their arms.

    Raises ValueError if a name or a pair occurs twice (the pair would have double weight), if an arm is compared with
    itself, or if the pairs cancel each other.
    """
    names = [contrast.name for contrast in study.contrasts]
    for contrast in study.contrasts:
        name, pairs = contrast.name, contrast.pairs
        if names.count(name) > 1:
            raise ValueError(f"study.json of `{study.name}` has two contrasts named {name!r}: give each its own name.")
        # A pair in reverse order is the same pair; a pair of one arm with itself has a set of size 1.
        invalid_pairs = [
            pair for pair in pairs if sum(set(pair) == set(other) for other in pairs) > 1 or len(set(pair)) < 2
        ]
        if invalid_pairs:
            first, second = invalid_pairs[0]
            problem = f"{first} with itself" if first == second else f"{first} with {second} twice"
            raise ValueError(
                f"The contrast {name!r} of `{study.name}` pairs {problem}: list each pair of different arms once."
            )
        # Pairs may form a circle, such as A with B, B with C, and C with A: their mean is 0 whatever the outcomes.
        if not any(compute_arm_weights(pairs).values()):
            raise ValueError(
                f"The contrast {name!r} of `{study.name}` compares nothing: in its {len(pairs)} pairs every arm is "
                "as often first as second. Give pairs that differ in the same way."
            )
    arms = set(study.axis.values)
    return [
        contrast
        for contrast in study.contrasts
        if not contrast.needs_all_pairs or arms.issuperset(arm for pair in contrast.pairs for arm in pair)
    ]


def compute_arm_weights(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Compute the weight of each arm in the mean over `pairs` of the first arm minus the second.

    >>> compute_arm_weights([("a", "c"), ("b", "c")])
    {'a': 0.5, 'b': 0.5, 'c': -1.0}
    """
    counts = Counter(first for first, _ in pairs)
    counts.subtract(second for _, second in pairs)
    return {arm: count / len(pairs) for arm, count in counts.items()}
