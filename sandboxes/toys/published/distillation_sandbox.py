"""The tables of the on-policy distillation sandbox (github.com/deepakvijaykee/rl-experiments), each cell once.

Each row has three seeds, 0 to 2; the number after "+/-" is the sample standard deviation. Rows at the switch and
variances are printed as means only. Expectations were written down before our ten seeds were compared with a cell, but
after single runs of the exact loss had been seen.
"""

from collections.abc import Mapping

from sandboxes.toys.published.cells import read_cells

SOURCE = "the documents of the on-policy distillation sandbox"

_SHARED_SETTINGS: Mapping[str, object] = {
    "task": "reversal", "method": "OPDReverseKL", "batch_size": 64, "lr": 1e-3, "vocab_size": 8, "seq_len": 8,
    "max_seq_len": 0, "d_model": 64, "nhead": 2, "num_layers": 2, "teacher_epsilon": 1e-3, "teacher_temperature": 1.0,
    "special_token_weight": 0.02, "clip_epsilon": 0.2, "overlap_k": 4, "top_k": 2, "top_k_support": "student",
    "normalize_top_k": False, "warmup_steps": 0, "sequence_mean": False, "measures_variance": False,
    "trainer.total_training_steps": 300, "trainer.test_freq": 20,
}  # fmt: skip
STUDY_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "opd-variance": {
        "vocab_size": 2, "batch_size": 16, "d_model": 32, "num_layers": 1, "max_seq_len": 64, "overlap_k": 2,
        "measures_variance": True, "trainer.total_training_steps": 60, "trainer.test_freq": 1,
    },
    "opd-topk-stability": {},
    "opd-cold-start": {},
    "opd-warmup": {"trainer.test_freq": 10},
    "opd-soft-teacher": {"task": "soft_reversal", "trainer.test_freq": 10},
}  # fmt: skip


_ESTIMATORS = {"full_vocab_rkl": "OPDReverseKL", "token_pg": "OPDPG", "sequence_pg": "OPDSequencePG"}


def _make_top_k_settings(k: int, warmup: int = 0) -> Mapping[str, object]:
    return {"method": "OPDTopKReverseKL", "top_k": k, "warmup_steps": warmup}


ARM_SETTINGS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "opd-variance": {
        f"{name}-h{horizon}": {"method": method, "seq_len": horizon}
        for name, method in _ESTIMATORS.items()
        for horizon in (4, 8, 16, 32, 64)
    },
    "opd-topk-stability": {
        "full_vocab_rkl": {},
        "sampled_pg": {"method": "OPDPG"},
        **{f"topk_rkl_k{k}": _make_top_k_settings(k) for k in (1, 2, 4)},
    },
    "opd-cold-start": {
        "full_vocab_rkl": {},
        **{f"cold_topk_k{k}": _make_top_k_settings(k) for k in (1, 2, 4)},
        **{f"warm_topk_k{k}": _make_top_k_settings(k, 100) for k in (1, 2, 4)},
    },
    "opd-warmup": {
        "full_vocab_rkl": {},
        **{f"k{k}_warm{warmup}": _make_top_k_settings(k, warmup) for k in (4, 8) for warmup in range(0, 300, 50)},
    },
    "opd-soft-teacher": {
        **{f"T{temperature}_full": {"teacher_temperature": temperature} for temperature in (1.0, 0.5)},
        **{
            f"T{temperature}_{support}_warm{warmup}": {
                **_make_top_k_settings(4, warmup),
                "teacher_temperature": temperature,
                "top_k_support": support,
            }
            for temperature in (1.0, 0.5)
            for support in ("student", "teacher", "intersection")
            for warmup in (0, 100, 200, 250)
        },
    },
}
"""Settings of each published arm, by study."""


def make_conditions(study: str, arm: str) -> Mapping[str, object]:
    """Return all settings of the published runs of an arm."""
    return {**_SHARED_SETTINGS, **STUDY_SETTINGS[study], **ARM_SETTINGS[study][arm]}


CELLS = read_cells("distillation_sandbox.csv", make_conditions)
"""All distinct cells of the tables, in their order."""
