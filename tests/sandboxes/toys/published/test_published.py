"""Tests of the published numbers: that they stay as they were compared, and that our studies have their settings."""

import hashlib
import json
from pathlib import Path

from sandboxes.toys.published import cells
from sandboxes.toys.published.cells import CELLS, POOLED, list_conditions
from search_spaces.catalog import STUDIES

DIGESTS = {
    "distillation_sandbox": "68017a0ac62737f8c4e804e7c231fef4e94c26545b283942b5a0addb5be3ad84",
    "update_rule_sandbox": "0201499523e7390ca128e9267b13ae265379a48f1261c64a718d6b8c4c08b358",
}
"""SHA-256 of the recorded numbers when they were last compared with a second typing of the printed tables."""
SETTINGS_DIGEST = "52a508222c2886607ede3c5960581f9db97c3070c1407f0d8c733e562a131c77"
"""SHA-256 of the settings of our arms when they were last compared with those of the published runs."""


def test_recorded_numbers_stay_as_they_were_compared_with_the_printed_ones_and_are_of_columns() -> None:
    for source, digest in DIGESTS.items():
        content = (Path(cells.__file__).parent / f"{source}.csv").read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, source
    for cell in CELLS:
        family = STUDIES[cell.studies[0]].family
        columns = family.step_columns if cell.kind == POOLED else family.trial_columns
        assert cell.column in {column.name for column in columns}


def test_our_arms_keep_the_settings_of_the_published_ones() -> None:
    conditions = {f"{study}/{cell.arm}": list_conditions(study, cell.arm) for cell in CELLS for study in cell.studies}
    assert conditions["influence/TPO"]["inner_epochs"] == 4
    assert "clip_high" not in conditions["influence/TPO"]  # which this rule does not read
    assert hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest() == SETTINGS_DIGEST
