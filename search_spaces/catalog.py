"""All studies, suites and families, by name."""

import importlib
from itertools import chain
from pkgutil import resolve_name

from search_spaces.declaration.study import Study
from search_spaces.gallery import (
    filter_price,
    group_size,
    kl_form,
    lora,
    losses,
    normalisation,
    remedies,
    reuse,
    void_turns,
)
from search_spaces.language_model import (
    collapse_gradients,
    distill,
    entropy,
    filter_under_noise,
    gradient_analysis,
    grpo_entropy_sokoban,
    kl,
    learning_rate,
    mismatch,
    smoke,
    top_p,
)
from trainable.families import FAMILIES as FAMILY_NAMES
from trainable.families import Family, get_family

_SANDBOXES = ("update_rules.studies", "distillation.studies", "vector_rewards.study", "pedagogy.study", "trees.study")
"""The modules below `sandboxes` that declare studies (STUDIES) and parts of suites (SUITES)."""
_SANDBOX_MODULES = [importlib.import_module(f"sandboxes.{name}") for name in _SANDBOXES]

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        kl.STUDY,
        entropy.STUDY,
        top_p.STUDY,
        gradient_analysis.STUDY,
        learning_rate.STUDY,
        collapse_gradients.STUDY,
        filter_under_noise.STUDY,
        mismatch.STUDY,
        distill.STUDY,
        grpo_entropy_sokoban.STUDY,
        smoke.SMOKE_STUDY,
        smoke.SMOKE_ALL_STUDY,
        remedies.STUDY,
        kl_form.STUDY,
        losses.STUDY,
        filter_price.STUDY,
        normalisation.STUDY,
        group_size.STUDY,
        reuse.STUDY,
        lora.STUDY,
        void_turns.STUDY,
        *chain.from_iterable(module.STUDIES for module in _SANDBOX_MODULES),
    )
}


TRAINERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ragen": ("search_spaces.ragen:make_ragen_study", (kl.STUDY.name, top_p.STUDY.name))
}
"""For each other trainer, the function, as "module:NAME", that makes its study of one of ours, and their names."""


def get_declaration(name: str) -> Study | None:
    """Get a study of this package by its name, which for another trainer is like kl-ragen; None if there is none."""
    stem, _, trainer = name.rpartition("-")
    if trainer in TRAINERS and stem in TRAINERS[trainer][1]:
        study: Study = resolve_name(TRAINERS[trainer][0])(STUDIES[stem])
        return study
    return STUDIES.get(name)


SUITES: dict[str, tuple[str, ...]] = {}
"""The studies of each suite, by its name; `run` trains them one after another."""
for _name, _studies in chain.from_iterable(module.SUITES.items() for module in _SANDBOX_MODULES):
    SUITES[_name] = (*SUITES.get(_name, ()), *_studies)

FAMILIES: dict[str, Family] = {name: get_family(name) for name in FAMILY_NAMES}
"""The families, by the name that study.json stores."""
