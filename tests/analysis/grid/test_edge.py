"""Tests of the edges of a study with a dose: lines, collapses, safe bands, declared shifts, and the report."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.charts import chart as charts
from analysis.charts.grid import draw_edges
from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.grid import edge, layout
from analysis.report import pages
from analysis.report.grid import EDGE
from analysis.report.results import SweepResults
from analysis.stats.dose_response import DoseCounts, estimate_edge, estimate_shift
from tests.analysis.charts.specs import read_layers
from tests.analysis.report.test_pages import parse_page
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from tests.strategies.examples import thin_out
from trainable.runs.study_record import DeclaredContrast

RATES = (1e-4, 3e-4, 1e-3, 1.7e-3, 3e-3)
STOP = ("low_validation_success", 0.0, 0.01)
LINES = {"a": (0.0, "gae"), "b": (0.1, "gae"), "c": (0.0, "grpo"), "d": (0.1, "grpo")}
"""KL coefficient and advantage estimator of each line of arms, whose names say nothing."""

NAMES = {line: f"KL {kl:g}, advantage {estimator}" for line, (kl, estimator) in LINES.items()}
CONTRASTS = {"KL, with a critic": ("b", "a"), "KL, without": ("d", "c"), "algorithm": ("c", "a")}
Counts = Mapping[str, tuple[int, ...]]
COUNTS: Counts = {"a": (0, 0, 1, 3, 3), "b": (0, 0, 0, 1, 3), "c": (0, 0, 0, 3, 3), "d": (0, 0, 0, 0, 0)}


def make_study(dose: str = "actor.lr") -> FakeStudy:
    axis = {"setting": "rate x others", "option": "--arms", "values": [], "dose": dose}
    contrasts = [
        {"name": name, "pairs": [[f"{side}{index}" for side in pair] for index in range(len(RATES))]}
        for name, pair in CONTRASTS.items()
    ]
    return FakeStudy(baseline="a1", levels=40, total_steps=10, extra={"axis": axis, "contrasts": contrasts})


def make_runs(counts: Counts, num_seeds: int = 3) -> list[FakeRun]:
    """Runs of each line, of which the first `counts` seeds at each rate are stopped by a rule."""
    ends: tuple[dict[str, Any], ...] = ({"steps": 10}, {"status": "early_stopped", "steps": 5, "stop": STOP})
    runs = []
    for line, numbers in counts.items():
        kl, estimator = LINES[line]
        settings = {"actor.use_kl_loss": kl > 0, "actor.kl_loss_coef": kl, "algorithm.adv_estimator": estimator}
        for index, (rate, num_collapsed) in enumerate(zip(RATES, numbers, strict=True)):
            fields = {"success": (0.4, 0.6), "settings": {"actor.lr": rate, **settings}}
            runs += [FakeRun(f"{line}{index}", n, **fields, **ends[n < num_collapsed]) for n in range(num_seeds)]
    return runs


def make_frames(folder: Path, counts: Counts, num_seeds: int = 3, dose: str = "actor.lr") -> StudyFrames:
    return load(write_study(folder, make_runs(counts, num_seeds), make_study(dose)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("edge"), make_runs(COUNTS), make_study())


@pytest.fixture(scope="module")
def frames(folder: Path) -> StudyFrames:
    return load(folder)


@pytest.fixture(scope="module")
def doses(frames: StudyFrames) -> pd.DataFrame:
    return edge.summarize_doses(edge.make_run_table(frames))


@pytest.fixture(scope="module")
def edges(frames: StudyFrames) -> pd.DataFrame:
    return edge.summarize_edges(frames)


def index_edges(frames: StudyFrames) -> dict[str, dict[str, Any]]:
    return {row["line"]: row for row in to_records(edge.summarize_edges(frames))}


def compare(frames: StudyFrames) -> dict[str, dict[str, Any]]:
    return {row["contrast"]: row for row in to_records(edge.compare_edges(frames, np.random.default_rng(0)))}


def make_counts(numbers: tuple[int, ...], num_seeds: int = 3) -> DoseCounts:
    return DoseCounts(np.log10(RATES), np.array(numbers, dtype=float), np.full(len(RATES), float(num_seeds)))


def test_lines_are_the_settings_other_than_the_dose_whose_fractions_are_in_order(
    frames: StudyFrames, doses: pd.DataFrame
) -> None:
    runs = edge.make_run_table(frames)
    assert dict(zip(runs["arm"].str[0], runs["line"], strict=True)) == NAMES
    assert sorted(runs["dose"].unique()) == sorted(RATES)
    counts = runs.groupby(["line", "dose"], sort=False)["collapsed"].sum()
    assert {line: tuple(counts[name]) for line, name in NAMES.items()} == COUNTS
    doses = doses.set_index(["line", "dose"])
    assert doses.loc[NAMES["b"], "fraction"].to_list() == pytest.approx([0, 0, 0, 1 / 3, 1])
    assert (doses["fraction_low"] <= doses["fraction"]).all()
    assert (doses["fraction_high"] >= doses["fraction"]).all()


def test_a_loss_of_half_the_success_counts_as_a_collapse_and_a_failed_run_not_at_all(tmp_path: Path) -> None:
    runs = make_runs({"a": (0, 0, 0, 0, 0)})
    runs[-1] = replace(runs[-1], steps=60, success=(0.6, 0.0))
    runs[-2] = replace(runs[-2], status="failed")
    table = edge.make_run_table(load(write_study(tmp_path, runs, replace(make_study(), total_steps=60))))
    assert table.loc[table["collapsed"], "run_id"].to_list() == [runs[-1].run_id]
    assert runs[-2].run_id not in set(table["run_id"])


def test_the_edges_are_those_of_the_counts_and_separated_runs_say_so(edges: pd.DataFrame) -> None:
    rows = {row["line"]: row for row in to_records(edges)}
    for line in "abc":
        row, estimate = rows[NAMES[line]], estimate_edge(make_counts(COUNTS[line])).edge
        expected = [10**value for value in estimate[:3]]
        assert [row["edge"], row["edge_low"], row["edge_high"]] == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert (row["runs"], row["collapsed"], row["seeds"]) == (15, sum(COUNTS[line]), 3)
    assert [rows[NAMES[line]]["method"] for line in "abcd"] == ["profile", "profile", "exact", "exact"]
    assert (rows[NAMES["c"]]["bracket_low"], rows[NAMES["c"]]["bracket_high"]) == (1e-3, 1.7e-3)
    assert rows[NAMES["c"]]["note"].startswith("separated: no run collapsed up to 0.001, and all did from 0.0017 on")
    assert rows[NAMES["d"]]["note"].startswith("no run collapsed, so the edge is above 0.003")
    assert math.isnan(rows[NAMES["d"]]["edge"])
    assert rows[NAMES["d"]]["edge_low"] == 1.7e-3


def test_every_run_collapsed_and_a_hole_in_the_safe_band_is_named(tmp_path: Path) -> None:
    (row,) = index_edges(make_frames(tmp_path, {"a": (3,) * 5})).values()
    assert row["note"].startswith("every run collapsed, so the edge is below 0.0001; no dose without a collapse")
    assert np.isnan([row["edge"], row["safe_low"], row["edge_low"]]).all()
    assert row["edge_high"] == 3e-4
    frames = make_frames(tmp_path / "hole", {"a": (0, 1, 0, 3, 3)})
    (row,) = index_edges(set_success(frames, (0.6, 0.6, 0.6, 0.0, 0.0))).values()
    assert (row["safe_low"], row["safe_high"]) == (1e-4, 1e-3)
    assert "within the band, 0.0003 is not safe" in row["note"]


@pytest.mark.long
def test_one_seed_has_edges_without_intervals(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, {"a": (0, 0, 0, 1, 1), "b": (0, 0, 1, 0, 1)}, num_seeds=1)
    rows = index_edges(frames)
    for row in rows.values():
        assert row["edge"] > 0
        assert np.isnan([row["edge_low"], row["edge_high"]]).all()
        assert "an interval needs 2 seeds" in row["note"]
        assert row["method"] == ""
    shift = compare(frames)["KL, with a critic"]
    assert np.isnan([shift["shift_low"], shift["shift_high"]]).all()
    assert "an interval needs 2 seeds" in shift["note"]


def set_success(frames: StudyFrames, successes: tuple[float, ...]) -> StudyFrames:
    """Replace the success at the end by one number per rate."""
    by_rate = dict(zip(RATES, successes, strict=True))
    return replace(frames, trials=frames.trials.assign(late_val_success=frames.trials["config/actor.lr"].map(by_rate)))


@pytest.mark.parametrize(
    ("numbers", "successes", "band"),
    [
        ((0, 0, 0, 1, 3), (0.50, 0.56, 0.60, 0.61, 0.0), (3e-4, 1e-3)),  # 1.7e-3 is the best, and one run collapsed
        ((0, 0, 0, 3, 3), (0.56, 0.58, 0.60, 0.0, 0.0), (1e-4, 1e-3)),
        ((0, 0, 0, 0, 0), (0.40, 0.52, 0.54, 0.60, 0.54), (1.7e-3, 1.7e-3)),
    ],
)
def test_the_safe_band_by_hand(
    tmp_path: Path, numbers: tuple[int, ...], successes: tuple[float, ...], band: tuple[float, float]
) -> None:
    (row,) = index_edges(set_success(make_frames(tmp_path, {"a": numbers}), successes)).values()
    assert (row["safe_low"], row["safe_high"]) == band
    assert row["safe_decades"] == pytest.approx(math.log10(band[1] / band[0]))
    is_enclosed = RATES[0] < band[0] and band[1] < RATES[-1]
    outside = [RATES[RATES.index(band[0]) - 1], RATES[(RATES.index(band[1]) + 1) % len(RATES)]]
    expected = math.log10(outside[1] / outside[0]) if is_enclosed else math.nan
    assert row["safe_decades_max"] == pytest.approx(expected, nan_ok=True)
    # At this probability of collapse, three runs without one are seen in 5 % of studies.
    assert (1 - row["collapse_bound"]) ** 3 == pytest.approx(0.05)


@pytest.mark.long
def test_shifts_are_those_of_the_declared_contrasts(frames: StudyFrames) -> None:
    rows = compare(frames)
    assert list(rows) == list(CONTRASTS)
    for name, (line, reference) in CONTRASTS.items():
        expected = estimate_shift(make_counts(COUNTS[line]), make_counts(COUNTS[reference]))
        row = rows[name]
        assert (row["line"], row["reference"]) == (NAMES[line], NAMES[reference])
        assert [row["shift"], row["shift_low"], row["shift_high"]] == pytest.approx(list(expected[:3]), nan_ok=True)
        assert (row["doses"], row["seeds"]) == (5, 3)
        assert (row["collapsed"], row["reference_collapsed"]) == (sum(COUNTS[line]), sum(COUNTS[reference]))
    assert rows["KL, with a critic"]["shift"] > 0  # the line with a KL term collapses at higher rates
    assert rows["KL, without"]["note"] == ("the runs do not bound the shift from above; no run of the line collapsed")


@pytest.mark.long
def test_p_of_a_shift_counts_all_exchanges_within_seeds(tmp_path: Path) -> None:
    # All three seeds have two collapses more without the KL term: 2 of 8 exchanges are as far from 0. Where seeds 0
    # and 1 differ by two and seed 2 by none, half of the exchanges are as far.
    for numbers, p in (((0, 0, 3, 3, 3), 2 / 8), ((0, 0, 2, 2, 3), 4 / 8)):
        frames = make_frames(tmp_path / str(p), {"a": numbers, "b": (0, 0, 0, 0, 3)})
        assert compare(frames)["KL, with a critic"]["p"] == p


def test_a_contrast_of_several_lines_or_without_arms_has_no_shift(frames: StudyFrames) -> None:
    contrasts = (
        DeclaredContrast("mixed", (("b0", "a0"), ("d1", "c1"))),
        DeclaredContrast("absent", (("x0", "a0"),)),
        DeclaredContrast("other doses", (("b0", "a1"),)),
    )
    rows = compare(replace(frames, study=replace(frames.studies[0], contrasts=contrasts)))
    assert {name: row["note"] for name, row in rows.items()} == {
        "mixed": "the pairs of this contrast belong to several lines",
        "other doses": "no seed and dose in common",
    }
    assert all(math.isnan(row["shift"]) for row in rows.values())


@pytest.mark.long
@pytest.mark.parametrize("dose", thin_out(["", "algorithm.adv_estimator", "actor.no_such_setting"]))
def test_without_a_numeric_dose_there_is_no_section(tmp_path: Path, dose: str) -> None:
    folder = write_study(tmp_path, make_runs({"a": (0,) * 5, "c": (0,) * 5}, 1), make_study(dose))
    frames = load(folder)
    assert edge.make_run_table(frames).empty
    assert edge.summarize_edges(frames).empty
    assert edge.compare_edges(frames, np.random.default_rng(0)).empty
    assert not pages.draw_figures(frames, ("edge",))
    assert not EDGE.when(SweepResults(frames))


def test_the_dose_is_the_horizontal_axis_of_the_grid(frames: StudyFrames) -> None:
    grid = layout.find_grid(frames)
    assert (grid.x, grid.y, grid.panels) == ("actor.lr", "actor.kl_loss_coef", ("algorithm.adv_estimator",))
    study = frames.studies[0]
    other_study = replace(study, axis=replace(study.axis, dose="actor.kl_loss_coef"))
    other_grid = layout.find_grid(replace(frames, study=other_study))
    assert (other_grid.x, other_grid.y) == ("actor.kl_loss_coef", "actor.lr")


@pytest.mark.long
def test_a_study_of_one_axis_has_one_line(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=10) for arm in ("0.001", "0.01") for seed in range(2)]
    runs += [FakeRun("0.1", seed, steps=5, status="early_stopped", stop=STOP) for seed in range(2)]
    study = FakeStudy(levels=20, total_steps=10, baseline="0.001")
    axis = {"setting": study.setting, "option": "--values", "values": [], "dose": study.setting}
    folder = write_study(tmp_path, runs, replace(study, extra={"axis": axis}))
    frames = load(folder)
    (row,) = index_edges(frames).values()
    assert (row["line"], row["bracket_low"], row["bracket_high"]) == ("all arms", 0.01, 0.1)
    assert EDGE.when(SweepResults(frames))


def test_the_figure_draws_its_tables(doses: pd.DataFrame, edges: pd.DataFrame) -> None:
    chart = draw_edges(doses, edges, "learning rate")
    line, interval, _, band, bar, *ends, point, success, other_success = read_layers(chart)
    assert line.list("line", "fraction") == doses[["line", "fraction"]].to_numpy().tolist()
    assert [layer.get_field("y") for layer in (line, interval, success)] == ["fraction", "fraction_low", "success"]
    assert [layer.get_field("x") for layer in (success, other_success, point)] == ["dose", "dose", "edge"]
    bounds = ["line", "fraction_low", "fraction_high"]
    assert interval.list(*bounds) == doses[bounds].to_numpy().tolist()
    assert interval.get_field("y2") == "fraction_high"
    assert line.encoding["y"]["scale"]["domain"] == [0, 1]
    for layer in (success, other_success):
        assert layer.list("line", "dose", "success") == doses[["line", "dose", "success"]].to_numpy().tolist()
    assert point.list("line", "edge") == edges.dropna(subset="edge")[["line", "edge"]].to_numpy().tolist()
    bounds = ["line", "safe_low", "safe_high"]
    assert band.list(*bounds) == edges.dropna(subset="safe_low")[bounds].to_numpy().tolist()
    assert [band.get_field(name) for name in ("x", "x2")] == bounds[1:]
    # An open end is an arrow beyond the doses of the study.
    fields = [mark.get_field("x") for mark in ends]
    marks = {
        (field, mark.mark["shape"]): mark.rows.get(field, pd.Series()).to_list()
        for field, mark in zip(fields, ends, strict=True)
    }
    assert len(marks) == 4
    bounded = edges.dropna(subset=["edge_low", "edge_high"], how="all")
    for name, place, arrow in (("edge_low", "start", "triangle-left"), ("edge_high", "end", "triangle-right")):
        assert marks[place, "stroke"] == bounded[name].dropna().to_list()
        assert len(marks[place, arrow]) == bounded[name].isna().sum()
        assert all(value < RATES[0] if place == "start" else value > RATES[-1] for value in marks[place, arrow])
    assert sum(map(len, marks.values())) == 2 * len(bar.rows)
    assert point.encoding["color"]["scale"]["domain"] == list(NAMES.values())
    assert {layer.encoding["x"]["scale"]["type"] for layer in (line, band, success)} == {"log"}
    assert success.encoding["x"]["axis"]["title"] == "learning rate"
    assert [choice["bind"] for choice in charts.make_spec(chart)["params"]] == ["legend"]


@pytest.mark.slow
def test_the_report_has_the_edges_and_their_files(folder: Path, edges: pd.DataFrame) -> None:
    pages.write_report(folder)
    words = parse_page((folder / "report.html").read_text()).words
    assert "Where training breaks" in words
    assert "separated: no run collapsed up to 0.001, and all did from 0.0017 on" in words
    assert "How far the edge moves KL, with a critic" not in words  # the head of the table is between them
    assert all(name in words for name in (*NAMES.values(), *CONTRASTS))
    written = {name: pd.read_csv(folder / "figures" / f"{name}.csv") for name in ("edge", "edge_shifts", "edge_doses")}
    assert all(len(table) for table in written.values())
    assert written["edge"]["edge"].to_list() == pytest.approx(edges["edge"].to_list(), nan_ok=True)


def test_an_edge_beyond_the_axis_has_no_point(doses: pd.DataFrame, edges: pd.DataFrame) -> None:
    for place, points in ((doses["dose"].max(), 1), (doses["dose"].max() * 100, 0)):
        layers = read_layers(draw_edges(doses, edges.head(1).assign(edge=place), "learning rate"))
        assert [len(layer.rows) for layer in layers if layer.get_field("x") == "edge"] == [points]
