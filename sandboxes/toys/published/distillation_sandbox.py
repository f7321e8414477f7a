"""The tables of the on-policy distillation sandbox (github.com/deepakvijaykee/rl-experiments), each cell once.

Each row has three seeds, 0 to 2; the number after "+/-" is the sample standard deviation. Rows at the switch and
variances are printed as means alone. What is expected was written down before our ten seeds were compared with a cell,
but after single runs of the exact loss had been seen.
"""

from collections.abc import Iterable, Mapping, Sequence

from sandboxes.toys.published.cells import MEAN_ALONE, NO_EXPECTATION, NOT_DISTINGUISHABLE, PER_SEED, Cell, Conditions

SOURCE = "the documents of the on-policy distillation sandbox"
NUM_SEEDS = 3

_ERROR, _ENTROPY = "final_test_error", "final_entropy"
_DIAGNOSTICS = ("last_reverse_kl", "last_top1_agreement", "last_overlap_at_k", "last_reward")
_MASSES = ("last_student_topk_mass", "last_teacher_topk_mass")

_SHARED_SETTINGS: Mapping[str, object] = {
    "task": "reversal",
    "method": "OPDReverseKL",
    "batch_size": 64,
    "lr": 1e-3,
    "vocab_size": 8,
    "seq_len": 8,
    "max_seq_len": 0,
    "d_model": 64,
    "nhead": 2,
    "num_layers": 2,
    "teacher_epsilon": 1e-3,
    "teacher_temperature": 1.0,
    "special_token_weight": 0.02,
    "clip_epsilon": 0.2,
    "overlap_k": 4,
    "top_k": 2,
    "top_k_support": "student",
    "normalize_top_k": False,
    "warmup_steps": 0,
    "sequence_mean": False,
    "measures_variance": False,
    "trainer.total_training_steps": 300,
    "trainer.test_freq": 20,
}
STUDY_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "opd-variance": {
        "vocab_size": 2,
        "batch_size": 16,
        "d_model": 32,
        "num_layers": 1,
        "max_seq_len": 64,
        "overlap_k": 2,
        "measures_variance": True,
        "trainer.total_training_steps": 60,
        "trainer.test_freq": 1,
    },
    "opd-topk-stability": {},
    "opd-cold-start": {},
    "opd-warmup": {"trainer.test_freq": 10},
    "opd-soft-teacher": {"task": "soft_reversal", "trainer.test_freq": 10},
}
_HORIZONS = (4, 8, 16, 32, 64)
_SUPPORTS = ("student", "teacher", "intersection")


def _make_top_k_settings(k: int, warmup: int = 0) -> Mapping[str, object]:
    return {"method": "OPDTopKReverseKL", "top_k": k, "warmup_steps": warmup}


ARM_SETTINGS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "opd-variance": {
        f"{name}-h{horizon}": {"method": method, "seq_len": horizon}
        for name, method in (
            ("full_vocab_rkl", "OPDReverseKL"),
            ("token_pg", "OPDPG"),
            ("sequence_pg", "OPDSequencePG"),
        )
        for horizon in _HORIZONS
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
            for support in _SUPPORTS
            for warmup in (0, 100, 200, 250)
        },
    },
}
"""Settings of each published arm, by study."""


def make_conditions(study: str, arm: str) -> Conditions:
    """All settings of the published runs of an arm."""
    return Conditions({**_SHARED_SETTINGS, **STUDY_SETTINGS[study], **ARM_SETTINGS[study][arm]})


_INITIAL_WEIGHTS = (
    "the exact loss leaves its plateau near step 200 with some initial weights, and after step 300 with others; the "
    "three published seeds are three draws of initial weights, and their mean error is below .01 at step 300"
)
_AFTER_THE_PLATEAU = f"most of the steps have the exact loss, or one that is close to it; {_INITIAL_WEIGHTS}"
_BY_THE_SWITCH = f"the state at the switch is that of the exact loss; {_INITIAL_WEIGHTS}"
_RATIONALES: Mapping[tuple[str, str], str] = {
    **{(study, "full_vocab_rkl"): _INITIAL_WEIGHTS for study in ("opd-topk-stability", "opd-cold-start", "opd-warmup")},
    **{("opd-soft-teacher", f"T{temperature}_full"): _INITIAL_WEIGHTS for temperature in (1.0, 0.5)},
    **{("opd-warmup", f"k8_warm{warmup}"): _AFTER_THE_PLATEAU for warmup in range(0, 300, 50)},
    **{("opd-warmup", f"k4_warm{warmup}"): _BY_THE_SWITCH for warmup in (200, 250)},
}
"""For each arm without an expectation, why there is none. Of all other arms, no difference was expected."""


def _make_cells(
    study: str, section: str, columns: Sequence[str], rows: Iterable[tuple[str, tuple[float, ...]]]
) -> tuple[Cell, ...]:
    """Cells of some columns of a table. rows: by arm, the mean and the standard deviation of each column, in order."""
    return tuple(
        _make_cell(study, section, column, arm, numbers[2 * index], numbers[2 * index + 1])
        for index, column in enumerate(columns)
        for arm, numbers in rows
    )


def _make_mean_cells(study: str, section: str, column: str, rows: Iterable[tuple[str, float]]) -> tuple[Cell, ...]:
    """Cells of a column of which only the mean over the seeds is published."""
    return tuple(_make_cell(study, section, column, arm, mean, float("nan"), MEAN_ALONE) for arm, mean in rows)


def _make_cell(study: str, section: str, column: str, arm: str, mean: float, std: float, kind: str = PER_SEED) -> Cell:
    rationale = _RATIONALES.get((study, arm), "")
    return Cell(
        (study,),
        arm,
        column,
        mean,
        std,
        NUM_SEEDS,
        section,
        kind,
        NO_EXPECTATION if rationale else NOT_DISTINGUISHABLE,
        rationale,
        make_conditions(study, arm),
    )


VARIANCE = _make_mean_cells("opd-variance", "variance", "gradient_variance", (
    ("full_vocab_rkl-h4", 1.19e-4),
    ("full_vocab_rkl-h8", 5.36e-5),
    ("full_vocab_rkl-h16", 2.91e-5),
    ("full_vocab_rkl-h32", 1.27e-5),
    ("full_vocab_rkl-h64", 6.93e-6),
    ("token_pg-h4", 5.44e-4),
    ("token_pg-h8", 2.32e-4),
    ("token_pg-h16", 1.11e-4),
    ("token_pg-h32", 5.64e-5),
    ("token_pg-h64", 2.50e-5),
    ("sequence_pg-h4", 4.73e-2),
    ("sequence_pg-h8", 2.24e-1),
    ("sequence_pg-h16", 1.75e+0),
    ("sequence_pg-h32", 1.42e+1),
    ("sequence_pg-h64", 8.89e+1),
))  # fmt: skip

TOPK_STABILITY = (
    *_make_cells("opd-topk-stability", "top-k stability", (_ERROR, _ENTROPY), (
        ("full_vocab_rkl", (0.0045, 0.0069, 0.0868, 0.0494)),
        ("sampled_pg", (0.6350, 0.0057, 1.6018, 0.0297)),
        ("topk_rkl_k1", (0.8619, 0.0065, 2.1971, 0.0000)),
        ("topk_rkl_k2", (0.8538, 0.0051, 2.1972, 0.0000)),
        ("topk_rkl_k4", (0.8491, 0.0367, 2.1972, 0.0000)),
    )),
    *_make_cells("opd-topk-stability", "top-k stability, step 280", _DIAGNOSTICS, (
        ("full_vocab_rkl", (0.7436, 0.6037, 0.9212, 0.0684, 0.5301, 0.0270, 0.8939, 0.0835)),
        ("sampled_pg", (4.9129, 0.0184, 0.3613, 0.0170, 0.4899, 0.0398, 0.2578, 0.0167)),
        ("topk_rkl_k1", (5.7917, 0.0010, 0.1419, 0.0285, 0.3913, 0.0020, 0.1087, 0.0141)),
        ("topk_rkl_k2", (5.7913, 0.0007, 0.1276, 0.0439, 0.4365, 0.1227, 0.1087, 0.0141)),
        ("topk_rkl_k4", (5.7902, 0.0005, 0.1517, 0.0130, 0.5145, 0.0384, 0.1074, 0.0137)),
    )),
    *_make_cells("opd-topk-stability", "support, step 280", _MASSES, (
        ("topk_rkl_k1", (0.1130, 0.0003, 0.1419, 0.0284)),
        ("topk_rkl_k2", (0.2242, 0.0002, 0.2552, 0.0517)),
        ("topk_rkl_k4", (0.4469, 0.0002, 0.5299, 0.0417)),
    )),
)  # fmt: skip

COLD_START = (
    *_make_cells("opd-cold-start", "cold start", (_ERROR, _ENTROPY), (
        ("full_vocab_rkl", (0.0010, 0.0012, 0.0608, 0.0227)),
        ("cold_topk_k1", (0.8670, 0.0136, 2.1971, 0.0001)),
        ("cold_topk_k2", (0.8666, 0.0190, 2.1972, 0.0001)),
        ("cold_topk_k4", (0.8448, 0.0230, 2.1972, 0.0000)),
        ("warm_topk_k1", (0.7981, 0.0166, 2.1969, 0.0001)),
        ("warm_topk_k2", (0.7749, 0.0440, 2.1971, 0.0001)),
        ("warm_topk_k4", (0.6963, 0.0166, 1.9873, 0.0185)),
    )),
    *_make_cells("opd-cold-start", "cold start, step 280", _DIAGNOSTICS, (
        ("full_vocab_rkl", (0.6645, 0.5742, 0.9355, 0.0609, 0.5415, 0.0299, 0.8971, 0.0827)),
        ("cold_topk_k1", (5.7899, 0.0014, 0.1432, 0.0158, 0.4508, 0.0456, 0.1094, 0.0220)),
        ("cold_topk_k2", (5.7906, 0.0006, 0.1491, 0.0079, 0.4316, 0.0220, 0.1107, 0.0209)),
        ("cold_topk_k4", (5.7904, 0.0002, 0.1549, 0.0041, 0.4740, 0.0421, 0.1100, 0.0214)),
        ("warm_topk_k1", (5.7837, 0.0013, 0.1940, 0.0502, 0.5099, 0.0698, 0.1107, 0.0209)),
        ("warm_topk_k2", (5.7832, 0.0025, 0.2389, 0.0127, 0.4468, 0.0630, 0.1113, 0.0220)),
        ("warm_topk_k4", (5.1169, 0.0304, 0.2747, 0.0285, 0.5535, 0.0249, 0.2083, 0.0108)),
    )),
)  # fmt: skip

WARMUP = (
    *_make_cells("opd-warmup", "warm-up", (_ERROR, _ENTROPY), (
        ("full_vocab_rkl", (0.0022, 0.0020, 0.0682, 0.0298)),
        ("k4_warm0", (0.8484, 0.0142, 2.1972, 0.0000)),
        ("k4_warm50", (0.7760, 0.0122, 2.1972, 0.0000)),
        ("k4_warm100", (0.7068, 0.0435, 1.9846, 0.0153)),
        ("k4_warm150", (0.7148, 0.0318, 2.0090, 0.0510)),
        ("k4_warm200", (0.6131, 0.0688, 1.9049, 0.0580)),
        ("k4_warm250", (0.0079, 0.0064, 0.1808, 0.1172)),
        ("k8_warm0", (0.3322, 0.0259, 0.9376, 0.0476)),
        ("k8_warm50", (0.3029, 0.0492, 0.8470, 0.1497)),
        ("k8_warm100", (0.1643, 0.1480, 0.5225, 0.3742)),
        ("k8_warm150", (0.0279, 0.0369, 0.1882, 0.1468)),
        ("k8_warm200", (0.0022, 0.0023, 0.0779, 0.0342)),
        ("k8_warm250", (0.0011, 0.0010, 0.0692, 0.0327)),
    )),
    *_make_mean_cells("opd-warmup", "warm-up, at the switch", "switch_test_error", (
        ("k4_warm50", 0.7495),
        ("k4_warm100", 0.6160),
        ("k4_warm150", 0.5830),
        ("k4_warm200", 0.5144),
        ("k4_warm250", 0.2620),
        ("k8_warm50", 0.7495),
        ("k8_warm100", 0.6160),
        ("k8_warm150", 0.5830),
        ("k8_warm200", 0.5144),
        ("k8_warm250", 0.2620),
    )),
    *_make_mean_cells("opd-warmup", "warm-up, since the switch", "error_since_switch", (
        ("k4_warm50", 0.0265),
        ("k4_warm100", 0.0907),
        ("k4_warm150", 0.1318),
        ("k4_warm200", 0.0988),
        ("k4_warm250", -0.2541),
        ("k8_warm50", -0.4466),
        ("k8_warm100", -0.4518),
        ("k8_warm150", -0.5551),
        ("k8_warm200", -0.5122),
        ("k8_warm250", -0.2609),
    )),
)  # fmt: skip

SOFT_TEACHER = _make_cells("opd-soft-teacher", "soft teacher", (_ERROR, _ENTROPY), (
    ("T1.0_full", (0.5112, 0.0993, 1.9169, 0.0676)),
    ("T1.0_student_warm0", (0.8351, 0.0151, 2.1972, 0.0000)),
    ("T1.0_student_warm100", (0.7288, 0.0245, 2.1972, 0.0000)),
    ("T1.0_student_warm200", (0.6945, 0.0058, 2.1968, 0.0000)),
    ("T1.0_student_warm250", (0.7160, 0.0100, 2.1945, 0.0008)),
    ("T1.0_teacher_warm0", (1.0000, 0.0000, 1.8517, 0.0075)),
    ("T1.0_teacher_warm100", (0.9999, 0.0002, 1.8601, 0.0114)),
    ("T1.0_teacher_warm200", (1.0000, 0.0000, 1.8572, 0.0282)),
    ("T1.0_teacher_warm250", (0.9173, 0.0639, 2.0375, 0.0306)),
    ("T1.0_intersection_warm0", (1.0000, 0.0000, 1.7644, 0.0462)),
    ("T1.0_intersection_warm100", (1.0000, 0.0000, 2.0131, 0.0192)),
    ("T1.0_intersection_warm200", (0.8585, 0.0135, 2.1413, 0.0410)),
    ("T1.0_intersection_warm250", (0.7424, 0.0143, 2.1577, 0.0195)),
    ("T0.5_full", (0.2658, 0.0476, 1.3172, 0.0428)),
    ("T0.5_student_warm0", (0.8471, 0.0236, 2.1972, 0.0000)),
    ("T0.5_student_warm100", (0.7292, 0.0079, 2.1971, 0.0000)),
    ("T0.5_student_warm200", (0.7085, 0.0329, 2.1666, 0.0301)),
    ("T0.5_student_warm250", (0.6773, 0.0204, 2.1519, 0.0133)),
    ("T0.5_teacher_warm0", (0.6768, 0.0022, 1.9047, 0.0052)),
    ("T0.5_teacher_warm100", (0.6836, 0.0098, 1.9455, 0.0061)),
    ("T0.5_teacher_warm200", (0.6651, 0.0337, 1.9887, 0.0102)),
    ("T0.5_teacher_warm250", (0.7358, 0.0270, 2.0624, 0.0168)),
    ("T0.5_intersection_warm0", (0.6631, 0.0109, 2.1002, 0.0091)),
    ("T0.5_intersection_warm100", (0.6358, 0.0043, 2.1744, 0.0009)),
    ("T0.5_intersection_warm200", (0.6394, 0.0380, 2.1768, 0.0104)),
    ("T0.5_intersection_warm250", (0.7131, 0.0435, 2.1792, 0.0106)),
))  # fmt: skip

CELLS: tuple[Cell, ...] = (*VARIANCE, *TOPK_STABILITY, *COLD_START, *WARMUP, *SOFT_TEACHER)
