"""All studies by name."""

from search_spaces import entropy, gradient_analysis, grpo_entropy_sokoban, kl, smoke, top_p
from search_spaces.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        kl.STUDY,
        entropy.STUDY,
        top_p.STUDY,
        gradient_analysis.STUDY,
        smoke.smoke(),
        smoke.SMOKE_ALL,
        grpo_entropy_sokoban.STUDY,
    )
}
