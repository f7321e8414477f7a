"""Tests of the report of every kind of sandbox study: complete, self-contained, and the same when rewritten."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.charts.chart import HUES, STOPPED_COLOR, make_spec
from analysis.data.frames import StudyFrames
from analysis.data.load import load
from analysis.report import pages
from sandboxes.toys.report.report import ToyResults
from sandboxes.toys.report.tables import compute_chance_error, make_notes
from tests.analysis.report.test_pages import parse_page, render_frames
from tests.fakes.run_folders import make_study_record
from tests.fakes.sandbox_folders import UNIFORM_STOP, FakeRun, FakeStudy, make_seed_runs, write_sandbox
from trainable.files.json_values import write_object
from trainable.runs.study_record import SCHEMA

DG, TPO = (0.30, 0.34, 0.35), (0.20, 0.26, 0.29)
SMALL = FakeStudy("some-study", total_steps=40)
ALL_RUNS = [
    *make_seed_runs("DG", DG),
    *make_seed_runs("TPO", TPO[:2], entropy=(1.0, 0.05)),
    FakeRun("TPO", 2, status="early_stopped", steps=107, error=(0.6, 0.29), stop=UNIFORM_STOP),
    *make_seed_runs("GRPO", (0.36, 1.0), final={"greedy_separator_rate": 0.99}),
    FakeRun("GRPO", 2, status="failed", steps=40, reason="RuntimeError: <x>"),
    *make_seed_runs("SameAsDG", DG),
]

CONTRASTS = {
    "contrasts": [
        {"name": "DG against <TPO>", "pairs": [["DG", "TPO"], ["SameAsDG", "TPO"], ["GRPO", "TPO"]]},
        {"name": "never run", "pairs": [["DG", "ASPO"]]},
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three published arms and a new one, with a stop, a collapse, a failure, contrasts, and its report."""
    study_folder = write_sandbox(tmp_path_factory.mktemp("sandbox"), ALL_RUNS, FakeStudy(extra=CONTRASTS))
    assert pages.write_report(study_folder) == study_folder / "report.html"
    return study_folder


@pytest.fixture(scope="module")
def words(folder: Path) -> str:
    return read_words((folder / "report.html").read_text())


def read_words(text: str) -> str:
    """Return the words of a page, without scripts and styles."""
    return parse_page(re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)).words


def get_words(frames: StudyFrames) -> str:
    return read_words(render_frames(frames))


@pytest.mark.long
def test_the_page_is_complete(words: str) -> None:
    assert (
        "Test error (fraction): 0.6 in every arm at first; between 0.25 (TPO) and 0.68 (GRPO) at the end. Entropy "
        "(nats): "
    ) in words
    for sentence in (
        "12 runs: 10 completed, 1 early stopped, 1 failed",
        "4 arms, baseline DG. Compared with DG over 2 to 3 seeds, test error at the end is not resolved (open) for "
        "arms TPO, GRPO, SameAsDG.",
        "TPO: uniform_groups stopped 1 of 3 runs (step 107: 10 ≥ 10); a stopped run counts with its last row.",
        "GRPO, not counted: seed 2 failed after 40 of 300 steps (RuntimeError: <x>).",
        "GRPO: in 2 of 2 runs (seed 0, 1) more than half of the greedily decoded tokens are separators",
        "Arms with a mean test error no better than random content tokens (0.50): GRPO 0.680.",
        "Of 3 published numbers, 3 can be tested: 1 equal, 2 open. Of 3 verdicts with an expectation, 3 are as "
        "expected. Our arms have at most 3 of 10 planned seeds.",
        "n never reached DG – – – 0 of 3 seed 0, 1, 2 TPO 180.0",
        "3 seeds: intervals are over seeds, and their noise is estimated from all arms",
    ):
        assert sentence in words, sentence


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ([], "No run is recorded."),
        ([FakeRun("DG", steps=None, status="")], "No run was completed or stopped by a rule, so nothing is compared."),
        ([FakeRun("TPO", steps=40)], "1 arm, no baseline among them."),
    ],
)
def test_every_kind_of_study_has_a_report(tmp_path: Path, runs: list[FakeRun], sentence: str) -> None:
    words = get_words(load(write_sandbox(tmp_path, runs, SMALL)))
    assert sentence in words
    assert "contrast" not in words.lower()


def test_the_notes_say_what_a_single_seed_shows_and_how_runs_ended(tmp_path: Path) -> None:
    runs = [FakeRun("DG", steps=40), FakeRun("GRPO", steps=0, status="running")]
    runs += [FakeRun("TPO", steps=20, status="early_stopped", stop=UNIFORM_STOP)]
    notes = make_notes(load(write_sandbox(tmp_path, runs, SMALL)))
    for sentence in (
        "1 seed: there is no standard error. Another seed",
        "GRPO, not counted: seed 0 interrupted after 0 of 40 steps",
        "TPO: uniform_groups stopped 1 of 1 runs",
    ):
        assert any(note.startswith(sentence) for note in notes), sentence


@pytest.mark.parametrize(
    "missing", [("test_error",), ("entropy", "greedy_separator_rate", "loss", "seconds_total")], ids=" ".join
)
def test_a_missing_column_leaves_out_only_its_section(tmp_path: Path, missing: tuple[str, ...]) -> None:
    rows = dict.fromkeys(missing)
    runs = [FakeRun(arm, seed, steps=40, rows=rows) for arm in ("DG", "TPO") for seed in range(2)]
    words = get_words(load(write_sandbox(tmp_path, runs, SMALL)))
    assert "All runs" in words
    assert not any(f"final_{name}" in words for name in missing)


def test_a_study_json_with_the_fewest_keys_has_a_report_and_a_filter_that_keeps_nothing_a_note(tmp_path: Path) -> None:
    study_folder = write_sandbox(tmp_path, [FakeRun("DG", steps=40)], SMALL)
    write_object(study_folder / "study.json", asdict(make_study_record(schema=SCHEMA, family="update_rules")))
    words = get_words(load(study_folder))
    assert "The command is not recorded." in words
    assert "code not from a git checkout" in words
    runs = [FakeRun("FilteredDG", steps=40, rows={"kept_frac": 0.0}), FakeRun("DG", steps=40, rows={"kept_frac": 1.0})]
    notes = make_notes(load(write_sandbox(tmp_path / "filter", runs, SMALL)))
    assert [line for line in notes if "its filter" in line] == [
        "FilteredDG: its filter dropped all logged samples, so the policy may still have its initial weights."
    ]


def test_chance_error_is_that_of_content_tokens_where_single_tokens_count(tmp_path: Path) -> None:
    frames = load(write_sandbox(tmp_path, [FakeRun("DG", steps=40)], SMALL))
    for task, vocab_size, binary_reward, level in (
        ("token_reversal", 2, False, 0.5),
        ("masked_reversal", 4, False, 0.75),
        ("chain_reversal", 2, False, None),
        ("token_reversal", 2, True, None),
        ("mnist", 2, False, None),
    ):
        settings = {"task": task, "vocab_size": vocab_size, "binary_reward": binary_reward}
        trials = frames.trials.assign(**{f"config/{name}": value for name, value in settings.items()})
        assert compute_chance_error(replace(frames, trials=trials)) == level


@pytest.mark.long
def test_the_figure_shows_the_numbers_of_the_tables(folder: Path) -> None:
    frames = load(folder)
    results = ToyResults(frames)
    spec = make_spec(pages.draw_figures(frames, ("curves",))["curves"])
    error, entropy = spec["concat"]
    for panel, label in ((error, "test error (fraction)"), (entropy, "entropy (nats)")):
        encodings = [layer["encoding"] for layer in panel["layer"]]
        assert {entry["y"]["axis"]["title"] for entry in encodings if "axis" in entry["y"]} == {label}
        scales = [entry["color"]["scale"] for entry in encodings if "color" in entry]
        assert all(dict(zip(scale["domain"], scale["range"], strict=True)) == results.colors for scale in scales)
    (chance,) = (layer for layer in error["layer"] if layer["mark"]["type"] == "rule")
    assert spec["datasets"][chance["data"]["name"]] == [{"at": 0.5}]
    assert not [layer for layer in entropy["layer"] if layer["mark"]["type"] == "rule"]
    (data,) = {layer["data"]["name"] for layer in error["layer"] if layer is not chance}
    points = pd.DataFrame(spec["datasets"][data])
    curves = points.groupby("line")["run_id"].nunique()
    assert dict(curves) == {"thick": 4, "thin": 12}  # the means, and the runs
    means = points[points["line"] == "thick"]
    assert means.groupby("arm", sort=False)["value"].last().to_list()[:2] == pytest.approx([0.33, 0.25])
    table = pd.read_csv(folder / "figures" / "mean_test_error.csv")
    assert means["value"].to_numpy() == pytest.approx(table["value"].to_numpy())
    for above, below in (("high", "value"), ("value", "low")):
        assert (means[above] - means[below]).to_numpy() == pytest.approx(table["standard_error"].to_numpy())
    stopped = points[points["end"] == "early_stopped"]
    assert stopped[["arm", "seed", "step"]].to_numpy().tolist() == [["TPO", 2, 107]]
    marks = [layer["mark"] for layer in error["layer"]]
    assert [mark["color"] for mark in marks if mark.get("shape") == "cross"] == [STOPPED_COLOR]
    assert STOPPED_COLOR not in HUES


@pytest.mark.long
def test_pooled_cells_are_listed_apart(tmp_path: Path) -> None:
    fake_study = FakeStudy("replay", settings={"task": "token_reversal", "batch_size": 96, "delay": 4})
    runs = [FakeRun("ReplayDG-5", seed, rows={"replay_age": 4.0}, error=(0.6, 0.5)) for seed in range(3)]
    frames = load(write_sandbox(tmp_path, runs, fake_study))
    words = get_words(frames)
    assert "ReplayDG-5 replay_age replay 4.00 SD 0.00, rows 45 4.00 SD 0.00, rows 48" in words
    assert "All 5 pooled cells" in words
    tested = words.partition("All 5 pooled cells")[0].partition("Comparison with published numbers The")[2]
    assert "replay_age" not in tested


def test_the_index_has_every_study_with_its_verdicts_and_how_many_published_numbers_agree(tmp_path: Path) -> None:
    ends = {"DG": DG, "GRPO": (0.5, 0.52, 0.51), "TPO": (0.31, 0.33, 0.36)}
    write_sandbox(tmp_path, [run for arm, errors in ends.items() for run in make_seed_runs(arm, errors)])
    write_sandbox(tmp_path, make_seed_runs("DG", DG), FakeStudy("some-study"))
    text = pages.write_index(tmp_path).read_text()
    words = read_words(text)
    links = [link for link in parse_page(text).links if not link.startswith("#")]
    assert links == [f"results/sandbox_{name}/report.html" for name in ("influence", "some-study")]
    assert "Study influence · update-rule sandbox · 9 runs: 9 completed" in words
    grpo = r"GRPO worse 0\.5100 \+0\.1800 \[\+0\.1.*\] < 0\.001 3 3 completed over 3 seeds"
    assert re.search(rf"DG baseline 0\.3300 – .*{grpo}", words)
    tpo = r"TPO equal within 0\.05, p 0\.\d+ 0\.3333 \+0\.0033 \[−0\.0.*\] 0\.\d+ 3 3 completed over 3 seeds"
    assert re.search(tpo, words)
    assert "Of 3 published numbers, 3 can be tested: 1 equal, 1 differs, 1 open." in words


@pytest.mark.long
def test_declared_contrasts_have_a_section_a_figure_and_files(folder: Path, words: str) -> None:
    for sentence in (
        "Declared contrasts",
        "DG against <TPO> open +0.1600 [−0.1503, +0.4703] 0.16 3 3 GRPO failed: seed 2; stopped by a rule, "
        "counted with the last row: TPO: seed 2 at step 107",
        "never run no comparison –",
        "ASPO not run: seeds 0, 1, 2",
        "Chosen because it is the outcome that a rule should improve.",
    ):
        assert sentence in words, sentence
    names = {path.name for path in (folder / "figures").iterdir()}
    pictures = {f"{name}.{suffix}" for name in ("contrasts", "curves") for suffix in ("png", "svg")}
    assert pictures | {"contrasts.csv", "contrast_pairs.csv"} <= names
    table = pd.read_csv(folder / "figures" / "contrasts.csv")
    assert table["contrast"].to_list() == ["DG against <TPO>", "never run"] * 3
    row = table.iloc[0]
    assert row["difference"] == pytest.approx(((0.10 + 0.10 + 0.16) / 3 + (0.08 + 0.08 + 0.74) / 3 + 0.06) / 3)
    assert len(pd.read_csv(folder / "figures" / "contrast_pairs.csv")) == 3 * 4


def test_contrasts_without_a_number_and_pairs_of_different_lengths_have_a_sentence(tmp_path: Path) -> None:
    runs = [FakeRun("DG", steps=None, status="")]
    words = get_words(load(write_sandbox(tmp_path, runs, FakeStudy("some-study", extra=CONTRASTS))))
    assert "2 contrasts; no run has a number for them yet." in words
    runs = [FakeRun("DG", 0, steps=40), FakeRun("TPO", 0, steps=80, settings={"trainer.total_training_steps": 80})]
    fake_study = FakeStudy("some-study", total_steps=40, extra={"contrasts": [{"name": "x", "pairs": [["TPO", "DG"]]}]})
    words = get_words(load(write_sandbox(tmp_path / "lengths", runs, fake_study)))
    assert "means over their runs cover different stretches of training: TPO (80 steps) and DG (40)." in words
