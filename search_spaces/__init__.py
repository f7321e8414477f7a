"""All studies by name."""

from search_spaces import entropy, gradient_analysis, kl, smoke, top_p
from search_spaces.family import Family
from search_spaces.language_model import PPO
from search_spaces.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (kl.STUDY, entropy.STUDY, top_p.STUDY, gradient_analysis.STUDY, smoke.smoke(), smoke.SMOKE_ALL)
}

FAMILIES: dict[str, Family] = {family.name: family for family in (PPO,)}
