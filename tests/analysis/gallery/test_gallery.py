"""Tests of recordings, of runs that are read at a budget, and of the pages: every number follows from the rows."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.gallery import pages
from analysis.gallery.budgets import cut_at_budgets
from analysis.gallery.recordings import RECORDINGS, make_portable, read_recording, write_recording
from analysis.gallery.transfer import compare_places
from analysis.report.pages import summarize_study
from analysis.sweep.contrasts import compute_contrasts
from tests.analysis.sweep.test_symptoms import write_collapse
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

DOCS = Path(__file__).parents[3] / "docs" / "findings"
MAX_BYTES = 10_000_000
"""Maximum size of all recordings together."""
ENDS = {"none": (0.60, 0.62, 0.58), "a-long": (0.80, 0.85, 0.78), "b-long": (0.40, 0.35, 0.44)}
LENGTHS = {"none": 30, "a-long": 60, "b-long": 60}


def make_frames(folder: Path, *others: FakeRun) -> StudyFrames:
    runs = [
        FakeRun(
            arm,
            seed,
            steps=LENGTHS[arm],
            success=(0.3, end),
            rows={"optimizer_steps": 4 if arm == "none" else 3},
            settings={"trainer.total_training_steps": LENGTHS[arm]},
        )
        for arm, ends in ENDS.items()
        for seed, end in enumerate(ends)
    ]
    contrasts = [{"name": "a against b", "pairs": [["a-long", "b-long"]]}]
    extra = {"contrasts": contrasts, "command": f"python -m tune_study run filter --output {folder}"}
    return load(
        write_study(
            folder, [*runs, *others], FakeStudy(baseline="none", values=tuple(ENDS), total_steps=60, extra=extra)
        )
    )


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    return make_frames(tmp_path_factory.mktemp("study"))


def test_a_recording_gives_the_same_verdicts_and_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    # Beside success before training, its first validations are a collapse.
    collapsing_run = FakeRun("none", 3, steps=30, success=(0.6, 0.05), settings={"trainer.total_training_steps": 30})
    frames = make_frames(tmp_path / "study", collapsing_run)
    (study,) = frames.studies
    settings = {**study.settings, "model": {**study.settings["model"], "path": "/home/me/models/wide"}}
    frames = replace(frames, study=replace(study, model="/home/me/models/wide", settings=settings))
    size = write_recording(frames, tmp_path / "recorded")
    recorded = read_recording(tmp_path / "recorded")
    assert size == sum(path.stat().st_size for path in (tmp_path / "recorded").iterdir())
    expected, summary = summarize_study(frames), summarize_study(recorded)
    for arm, expected_arm in zip(summary["arms"], expected["arms"], strict=True):
        assert arm["verdict"] == expected_arm["verdict"]
        np.testing.assert_allclose(arm["difference"], expected_arm["difference"], atol=1e-6)
        np.testing.assert_allclose(arm["high"], expected_arm["high"], atol=1e-6)
    assert summary["runs"] == expected["runs"]
    assert [run["collapsed"] for run in summary["runs"]].count(True) == 1
    assert recorded.studies[0].command == "python -m tune_study run filter"
    assert recorded.studies[0].model == "wide"
    for path in (tmp_path / "recorded").iterdir():
        for place in (str(frames.folders[0].parents[1]), "/home/me"):
            assert place.encode() not in path.read_bytes()


def test_a_long_run_is_read_where_it_has_spent_what_the_baseline_spent(frames: StudyFrames) -> None:
    cut = cut_at_budgets(frames)
    runs = {(run["arm"], run["seed"]): run for run in to_records(cut.runs)}
    # The baseline makes 30 steps with 4 updates each, the others 3 updates in each step.
    assert runs["a at equal training steps", 0]["steps_done"] == 30
    assert runs["a at equal optimizer steps", 0]["steps_done"] == 40
    assert runs["a at equal optimizer steps", 0]["total_optimizer_steps"] == 120
    assert not any(arm.endswith("-long") for arm, _ in runs)
    for seed in range(3):
        steps = frames.get_run_steps(f"arma-long-seed{seed}")
        curve = steps.dropna(subset="val_success").set_index("step")["val_success"]
        for budget, steps_at in (("training", (15, 20, 25, 30)), ("optimizer", (20, 80 / 3, 100 / 3, 40))):
            late = runs[f"a at equal {budget} steps", seed]["late_val_success"]
            assert late == pytest.approx(np.interp(steps_at, curve.index, curve).mean())
    table = compute_contrasts(cut).set_index(["column", "contrast"])
    row = table.loc["late_val_success", "a at equal optimizer steps, against none"]
    expected = np.mean([runs["a at equal optimizer steps", s]["late_val_success"] for s in range(3)])
    expected -= np.mean([runs["none", s]["late_val_success"] for s in range(3)])
    assert row["difference"] == pytest.approx(expected)
    assert (
        row["difference"] > 0 > table.loc["late_val_success", "b at equal optimizer steps, against none"]["difference"]
    )


def test_a_run_that_never_reaches_a_budget_is_left_out(frames: StudyFrames) -> None:
    steps = frames.steps.copy()
    steps.loc[steps["arm"] == "b-long", "optimizer_steps"] = 1
    cut = cut_at_budgets(replace(frames, steps=steps))
    arms = set(cut.trials["arm"])
    assert "b at equal training steps" in arms
    assert "b at equal optimizer steps" not in arms


def test_a_study_agrees_with_itself_and_disagrees_with_its_mirror(frames: StudyFrames) -> None:
    trials = frames.trials.assign(late_val_success=1 - frames.trials["late_val_success"])
    table = compare_places(frames, {"same": frames, "mirror": replace(frames, trials=trials)}).set_index("place")
    same, mirror = table.loc["same"], table.loc["mirror"]
    assert (same["arms"], same["contrasts"]) == (3, 1)
    assert (same["rho"], same["same"], same["opposite"]) == (pytest.approx(1), 1, 0)
    assert (mirror["rho"], mirror["same"], mirror["opposite"]) == (pytest.approx(-1), 0, 1)
    assert same["same_fraction_low"] > 0 == mirror["same_fraction_low"]


TEMPLATE = """{% set s = record(FOLDER) %}
{% set order = 1 %}
{% set estimates = {FOLDER: 2} %}
{% set title = "Filters" %}
{% set symptoms = "updates are noisy; groups are dropped" %}
{% set advice = [("Take the first.", s, "a against b")] %}
{% set verdict %}The first ends {{ s.difference("a against b") }}
above the second ({{ s.p("a against b") }}).{% endset %}
{% set claims %}* Somebody says so.{% endset %}
{% set reading %}{{ s.table() }}

{{ s.arm_table() }}{% endset %}
{% set limits %}* One game.{% endset %}
"""


def test_a_recording_of_outcomes_gives_the_same_agreement_and_cost(frames: StudyFrames, tmp_path: Path) -> None:
    whole_size, size = (write_recording(frames, tmp_path, only) for only in (False, True))
    recorded = pages.Recorded("outcomes", read_recording(tmp_path))
    assert recorded.frames.levels.empty, "those of the whole recording are gone"
    assert size < whole_size
    table = compare_places(frames, {"recorded": recorded.frames})
    pd.testing.assert_frame_equal(table, compare_places(frames, {"recorded": frames}))
    assert recorded.core_seconds == pytest.approx(frames.steps["cpu_seconds_step"].sum() / 2)


def test_quoted_numbers_are_those_of_the_rows(frames: StudyFrames) -> None:
    recorded = pages.Recorded("study", frames)
    steps = frames.steps[frames.steps["arm"] == "a-long"]
    for first, is_used in ((0, steps["step"] > 50), (10, steps["step"] <= 10)):
        assert recorded.mean_column("train_reward", "a-long", first) == pytest.approx(
            steps[is_used]["train_reward"].mean()
        )
    ends = recorded.by_seed("val_success", "none", 30)
    assert ends == {seed: pytest.approx(recorded.by_seed("final_val_success", "none")[seed]) for seed in range(3)}
    assert recorded.by_seed("val_success", "none", 60) == {}, "its runs end at step 30"
    assert recorded.success_at("none", 30) == pytest.approx(np.mean(list(ends.values())))
    assert recorded.success_at("none", 60, "optimizer_steps") == pytest.approx(recorded.success_at("none", 15))
    means = [frames.runs_by_arm[arm]["late_val_success"].mean() for arm in ("a-long", "b-long")]
    assert recorded.gap("a-long", "b-long") == f"{means[0] - means[1]:+.3f}"
    assert recorded.judge(["a against b"])[:2] == ("holds", f"{means[0]:.3f} (without {means[1]:.3f})")
    failing = replace(frames, trials=frames.trials.assign(base_val_success=0.9))
    assert pages.Recorded("study", failing).judge(["a against b"])[0] == "better, not above the start"
    description = recorded.describe_training()
    assert description.startswith(
        "`none` of `kl_sweep_sokoban-tiny` is PPO with a critic under the preset `laptop`: 30 "
    )
    assert "8 groups of 16 episodes" in description
    assert "4 updates per step at a learning rate of 0.0003" in description


def test_the_table_of_a_transfer_has_a_row_per_study_and_place(frames: StudyFrames) -> None:
    trials = frames.trials.assign(late_val_success=1 - frames.trials["late_val_success"])
    here, mirror = pages.Recorded("here", frames), pages.Recorded("mirror", replace(frames, trials=trials))
    transfer = pages.Transfer({"filters": {"here": here, "there": here, "mirror": mirror}})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in transfer.table().splitlines()[2:]]
    assert [(row[0], row[1], row[2], row[4], row[6]) for row in rows] == [
        ("filters", "there", "3", "1 of 1", "0"),
        ("filters", "mirror", "3", "0 of 1", "1"),
    ]
    assert rows[0][3].startswith("+1.00")
    assert rows[1][3].startswith("−1.00")


def test_the_table_of_alarms_begins_with_the_one_that_announces_most(tmp_path: Path) -> None:
    recorded = pages.Recorded("collapse", load(write_collapse(tmp_path, (10, 12, 14, 9))))
    alarms = pages.Alarms([recorded], first_test_seed=2)
    new = pages.Recorded("new", load(write_collapse(tmp_path / "new", (10, 12, 13, 14))))
    rows = [line.split(" | ") for line in alarms.table(new).splitlines()[2:]]
    announced = [int(row[2].split(" of ")[0]) for row in rows]
    assert announced == sorted(announced, reverse=True)
    assert announced[0] == alarms.rows["reward_std", "ours"]["detected"] == 2
    assert alarms.count_ahead("reward_std") == 2, "a rule stops these runs before their evaluations are low"
    score = alarms.score_on(new)["reward_std", "ours"]
    assert (score["detected"], score["collapsed"]) == (2, 2), "seeds 0 and 1 repeat runs of the first study"
    assert rows[0][7:9] == ["2 of 2", "0 of 0"]
    assert alarms.count_ahead("reward_std", new) == 2
    assert ("EvalStop", "published") not in alarms.rows, "its number of declines is only tuned"
    with pytest.raises(ValueError, match="no collapse"):
        _ = pages.Alarms([recorded], first_test_seed=5).rows


def test_a_command_is_recorded_without_the_folders_of_its_machine() -> None:
    recorded = "python -m tune_study fork out/results/kl --arm 0 --remedy 'low: actor.lr=1'"
    command = recorded.replace("out/results/kl", "'/some where/results/kl'")
    for places in ("--wandb off", "--output 'my folder' --wandb=off", "'--output=my folder'", '--output="my folder"'):
        for typed in (f"{command} {places}", command.replace("--arm", f"{places} --arm")):
            assert make_portable(typed) == recorded


def test_a_page_has_the_numbers_of_its_recording(frames: StudyFrames, tmp_path: Path) -> None:
    write_recording(frames, tmp_path / "recorded")
    template = tmp_path / "filters.md"
    template.write_text(TEMPLATE.replace("FOLDER", repr(str(tmp_path / "recorded"))))
    finding = pages.make_finding(template)
    (row,) = to_records(compute_contrasts(frames).query("column == 'late_val_success'"))
    number = f"{row['difference']:+.3f} [{row['difference_low']:+.3f}, {row['difference_high']:+.3f}]"
    assert number in finding.verdict
    assert "\n" not in finding.verdict
    assert f"| a against b | {number} | 0.012 | better | 0 of 3 against 0 of 3 |" in finding.page
    assert finding.page.split("\n\n")[:3] == [
        "# Filters",
        f"**{finding.verdict}**",
        "When you see: updates are noisy; groups are dropped.",
    ]
    mean = frames.runs_by_arm["none"]["late_val_success"].mean()
    assert f"| none | {mean:.3f} [" in finding.page
    seconds = frames.steps["cpu_seconds_step"].sum() / 2
    assert f"9 runs, {seconds:,.0f} seconds of two cores (120 were expected)" in finding.page
    template = tmp_path / "index.md.jinja"
    template.write_text("{{ runs }} recorded runs\n{{ pages }}\n{{ advice }}\n{{ shared_arms }}")
    index = pages.make_index([finding], template)
    assert f"[Filters](filters.md) | {finding.verdict} |" in index
    assert "9 recorded runs" in index
    means = [frames.runs_by_arm[arm]["late_val_success"].mean() for arm in ("a-long", "b-long")]
    ends = f"{means[0]:.3f} (without {means[1]:.3f})"
    assert f"| Take the first. | holds | {ends} | {number} | [filters](filters.md) |" in index


def test_equal_arms_of_two_studies_are_listed(frames: StudyFrames) -> None:
    steps = frames.steps
    others = steps.assign(train_reward=steps["train_reward"].mask(steps["arm"] == "a-long", 0.5))
    records = [pages.Recorded("first", frames), pages.Recorded("second", replace(frames, steps=others))]
    assert pages.list_shared_arms(records) == [
        "`none` of first and `none` of second",
        "`b-long` of first and `b-long` of second",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(pages.TEMPLATES.glob("*.md")), ids=lambda path: path.stem)
def test_every_number_of_a_page_is_computed_from_its_recordings(path: Path) -> None:
    assert pages.make_finding(path).page == (DOCS / f"{path.stem}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_number_of_the_index_is_computed_from_recordings() -> None:
    assert pages.make_index(pages.read_findings()) == (DOCS / "index.md").read_text(encoding="utf-8")


def test_pages_recordings_and_figures_belong_together() -> None:
    names = {path.stem for path in pages.TEMPLATES.glob("*.md")}
    assert {path.stem for path in DOCS.glob("*.md")} == {*names, "index"}
    used = {
        name for path in pages.TEMPLATES.glob("*.md") for name in re.findall(r'record\("(.+?)"\)', path.read_text())
    }
    assert {path.name for path in RECORDINGS.iterdir()} == used
    shown = {name for path in DOCS.glob("*.md") for name in re.findall(r"\]\((.+?\.svg)\)", path.read_text())}
    assert {path.name for path in DOCS.glob("*.svg")} == shown
    assert sum(path.stat().st_size for path in RECORDINGS.glob("*/*")) <= MAX_BYTES
