"""Tests of the report of every kind of study: complete, self-contained, well-formed, and the same when rewritten."""

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.data.load import load, read_study
from analysis.grid.layout import name_arms
from analysis.html.page import format_count, format_duration, list_commands
from analysis.report import pages
from analysis.report.live import LivePage
from analysis.report.pages import write_frames_report, write_index, write_report
from analysis.sweep import findings, tables
from analysis.sweep.collapse import COLLAPSE_DEFINITION, count_collapses, find_run_ends
from tests.fakes.run_folders import FakeRun, FakeStudy, make_study_record, write_study
from tests.strategies.examples import thin_out
from trainable.config.run_config import RunConfig
from trainable.files.control_characters import LINE_CHARACTERS, is_printable
from trainable.files.json_values import write_object
from trainable.runs.study_record import SCHEMA

STOP = ("low_validation_success", 0.002, 0.01)
STOPPED_RUN = FakeRun("0.3", status="early_stopped", steps=45, success=(0.35, 0.0), greedy=(0.6, 0.0), stop=STOP)
SMALL = FakeStudy(levels=40, total_steps=10)
VOID = {"meta", "br", "img", "link", "hr", "input", "path", "use", "rect", "circle", "line"}


class Page(HTMLParser):
    """Check that tags close in order, and collect ids, links and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.errors: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        self.errors += [f"<{tag}> never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = [name for name, _ in attrs]
        self.errors += [f"<{tag}> repeats {name}" for name in set(names) if names.count(name) > 1]
        for name, value in attrs:
            if name == "id" and value is not None:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "action") and value is not None:
                self.links.append(value)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        self.text += " " * (tag in ("td", "th", "li", "p"))
        if not self.open or self.open[-1] != tag:
            self.errors.append(f"</{tag}> closes {self.open[-1:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def write_study_of_arms(output: Path, arms: Sequence[str], **run: Any) -> Path:
    """A study whose arms have any names. run: of each `FakeRun`."""
    folder = write_study(output, [FakeRun(f"arm{index}", steps=10, **run) for index in range(len(arms))], SMALL)
    for path in (folder / "study.json", *folder.glob("runs/*/run.json")):
        text = path.read_text()
        for index, arm in enumerate(arms):
            text = text.replace(f'"arm{index}"', json.dumps(arm))
        write_object(path, {name: value for name, value in json.loads(text).items() if name != "checksum"})
    return folder


def parse_page(text: str) -> Page:
    page = Page(text)
    assert page.errors == []
    assert len(page.ids) == len(set(page.ids))
    return page


def render_without_figures(folder: Path, *, live: bool = False) -> Page:
    return parse_page(pages.render_page(load(folder, live=live), {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of six arms and one seed, with one stopped arm, and its report."""
    runs = [FakeRun(arm) for arm in ("0", "0.01", "0.03", "0.1", "1")]
    runs.insert(4, STOPPED_RUN)
    defaults = {"defaults": RunConfig().model_dump(mode="json")}
    study_folder = write_study(tmp_path_factory.mktemp("report"), runs, FakeStudy(levels=200, extra=defaults))
    assert write_report(study_folder) == study_folder / "report.html"
    return study_folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return parse_page((folder / "report.html").read_text())


@pytest.mark.long
def test_every_arm_status_and_verdict_is_on_the_page(folder: Path, page: Page) -> None:
    summary = tables.summarize_arms(name_arms(read_study(folder)))
    for row in summary.itertuples():
        assert row.arm.startswith("KL ")
        assert row.arm in page.text
        assert " ".join(row.verdict.split()) in " ".join(page.text.split())
    assert "Does a KL penalty to the initial policy prevent collapse" in page.text
    assert "6 runs: 5 completed, 1 early stopped" in page.text


@pytest.mark.long
def test_a_stop_has_its_rule_value_threshold_and_step(page: Page) -> None:
    words = " ".join(page.text.split())
    assert "low_validation_success stopped 1 of 1 runs (step 45: 0.002 < 0.01)" in words
    assert "arm03-seed0 KL 0.3 0 low_validation_success 45 0.002 0.01" in words


@pytest.mark.long
def test_a_study_of_one_seed_says_so(page: Page) -> None:
    assert "1 seed: nothing shows how much runs of one setting differ, so no difference has an interval." in page.text
    assert "the same 200 levels. 175 of them differ: levels that the game counts as equal, such as" in page.text


@pytest.mark.long
def test_every_setting_is_listed_and_changed_ones_are_marked(folder: Path, page: Page) -> None:
    rows = pages.make_settings_rows(load(folder).studies[0])
    text = (folder / "report.html").read_text()
    assert len(rows) > 80
    for row in rows:
        assert f"<code>{row['name']}</code>" in text
        assert html.escape(row["value"], quote=False).replace('"', "&#34;") in text
    changed = {row["name"] for row in rows if row["changed"]}
    marked = set(re.findall(r'<tr class="changed"><td><code>([^<]*)</code>', text))
    assert marked == changed
    assert {"model.path", "actor.lr", "trainer.total_training_steps"} <= changed
    assert "env.group_size" not in changed
    assert "actor.use_kl_loss" in page.text


@pytest.mark.long
def test_without_recorded_defaults_nothing_is_marked(tmp_path: Path) -> None:
    text = pages.render_page(load(write_study(tmp_path, [FakeRun("0", steps=10)], SMALL)), {})
    assert 'class="changed"' not in text
    assert "The defaults are not recorded in study.json" in text


@pytest.mark.long
def test_the_page_has_what_reproducing_it_needs(page: Page) -> None:
    for words in (
        "python -m tune_study run kl --preset laptop",
        "0123456789abcdef",
        "torch 2.13.0",
        "seeds 123 to 322",
    ):
        assert words in page.text


def test_every_command_that_added_runs_is_listed_in_order() -> None:
    first, more = "python -m tune_study run kl --seeds 2", "python -m tune_study run kl --kl-values 0.3 --extend"
    commands = [first, "python -m tune_study resume out/results/kl", more, more, "tune-study resume out/results/kl"]
    starts = [{"command": command, "versions": {}} for command in commands]
    assert list_commands(make_study_record(command=more, starts=starts)) == [first, more]
    # A folder of an earlier version.
    assert list_commands(make_study_record(command=first)) == [first]
    assert list_commands(make_study_record(starts=[{"versions": {}}])) == []
    assert list_commands(make_study_record(command=first, starts=starts[1:2])) == [first]


@pytest.mark.long
def test_the_page_needs_nothing_from_outside(folder: Path, page: Page) -> None:
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert page.tags.isdisjoint({"link", "iframe", "img", "object"})
    text = remove_scripts((folder / "report.html").read_text())
    outside = {url for url in re.findall(r"https?://[^\s\"'<>)]+", text) if not url.startswith("http://www.w3.org/")}
    assert outside == set()
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


SCRIPT = re.compile(r"<script( [^>]*)?>(.*?)</script>", re.DOTALL)


def remove_scripts(text: str) -> str:
    return SCRIPT.sub("", text)


@pytest.mark.long
def test_only_the_script_that_draws_charts_may_run(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    scripts = SCRIPT.findall(text)
    charts = {attributes.strip(): json.loads(content) for attributes, content in scripts if attributes}
    assert {'type="application/json" id="dose_response-chart"', 'type="application/json" id="survival-chart"'} <= set(
        charts
    )
    (code,) = (content for attributes, content in scripts if not attributes)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


@pytest.mark.long
def test_figures_are_inline_and_files_beside_the_page(folder: Path) -> None:
    names = {path.stem for path in (folder / "figures").glob("*.png")}
    expected = {"dose_response", "validation_curves", "reward_std", "entropy", "val_kl", "kept_groups"}
    expected |= {"survival", "onsets"}  # a run has collapsed
    expected |= {"val_reward", "val_children"}  # the rows have every column, also those of trees
    assert names == expected
    text = remove_scripts((folder / "report.html").read_text())
    assert text.count('<svg role="img"') == len(expected)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (folder / "figures").glob("*.png"))


@pytest.mark.long
def test_a_report_is_the_same_when_written_twice(tmp_path: Path) -> None:
    study_folder = write_study(tmp_path, [FakeRun("0", steps=3)], FakeStudy(levels=10, total_steps=3))
    first = write_report(study_folder).read_text()
    assert write_frames_report(load(study_folder), study_folder, with_pictures=False).read_text() == first
    assert remove_scripts(first).count("<svg") == 7


def test_only_studies_of_trees_have_figures_of_children(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [FakeRun("0", steps=3)], FakeStudy(levels=10, total_steps=3)))
    names = {"val_reward", "val_children"}
    assert pages.draw_figures(frames, names).keys() == names
    frames.steps["val_children"] = math.nan
    assert not pages.draw_figures(frames, names)


@pytest.mark.long
def test_the_page_has_styles_for_dark_mode_and_print(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "default-src 'none'" in text


FAILED_FIELDS = {"status": "failed", "steps": 4, "reason": "RuntimeError: <x>"}
STOPPED_FIELDS = {"status": "early_stopped", "steps": 10, "stop": STOP}
IN_VAIN = {"train_invalid_turns": 1.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], "No run is recorded."),
        ([FakeRun("0", status="", steps=0)], "no verdict: seed 0 never ran"),
        ([FakeRun("0", status="running", steps=0)], "No scored run: arm KL 0."),
        ([FakeRun("0", steps=10)], "No run collapsed, so nothing is said of protection from collapse."),
        ([FakeRun(arm, **FAILED_FIELDS) for arm in ("0", "0.1")], "(RuntimeError: <x>)"),  # type: ignore[arg-type]
        ([FakeRun(arm, **STOPPED_FIELDS) for arm in ("0", "0.1")], "Stopped in 1 of 1 run: arms KL 0, 0.1."),  # type: ignore[arg-type]
        ([FakeRun(arm, seed, steps=10) for arm in ("0", "nofilter") for seed in range(3)], "over 3 seeds"),
        ([FakeRun("0.1", steps=10)], "1 arm and no baseline arm, so nothing is compared."),
        ([FakeRun("0.1", steps=10, rows=IN_VAIN)], "No reply had a valid action: `transcripts` shows them."),
        (
            [FakeRun("0", **STOPPED_FIELDS, rows=IN_VAIN), FakeRun("0.1", steps=10, rows=IN_VAIN)],  # type: ignore[arg-type]
            "In all 2 runs, no reply had a valid action: `transcripts` shows them.",
        ),
    ],
)
def test_every_kind_of_study_has_a_report(tmp_path: Path, runs: list[FakeRun], words: str) -> None:
    page = render_without_figures(write_study(tmp_path, runs, SMALL))
    assert words in " ".join(page.text.split())


@pytest.mark.long
@pytest.mark.parametrize(
    "runs",
    [
        [FakeRun("0", status="", steps=0)],
        [FakeRun("0", steps=10), FakeRun("0.1", **FAILED_FIELDS)],  # type: ignore[arg-type]
        [FakeRun(arm, **STOPPED_FIELDS) for arm in ("0", "0.1")],  # type: ignore[arg-type]
    ],
    ids=["never ran", "failed", "stopped"],
)
def test_runs_that_have_not_ended_well_can_be_drawn(tmp_path: Path, runs: list[FakeRun]) -> None:
    frames = load(write_study(tmp_path, runs, SMALL))
    assert ("dose_response" in pages.draw_figures(frames)) == (runs[0].steps != 0)


@pytest.mark.long
def test_equal_levels_are_counted_only_where_runs_have_the_same_levels_and_some_are_equal(folder: Path) -> None:
    frames = load(folder)
    summary = tables.summarize_arms(frames)

    def find_caveat(levels: pd.DataFrame) -> str:
        caveats = findings.list_caveats(replace(frames, levels=levels), summary)
        return next(line for line in caveats if "were validated on" in line)

    levels = frames.levels
    assert "the same 200 levels. 175 of them differ: " in find_caveat(levels)
    assert "the same 200 levels. The results" in find_caveat(levels.assign(cluster=levels["level"]))
    is_first = levels["run_id"] == levels["run_id"].iloc[0]
    others = levels.assign(level=levels["level"] + 1_000 * is_first)
    assert "different sets of levels, 400 in all. The results" in find_caveat(others)


@pytest.mark.long
def test_a_study_far_shorter_than_its_preset_is_called_short(tmp_path: Path) -> None:
    runs = [FakeRun("0", steps=10), FakeRun("0.1", steps=10)]
    short, long = (
        write_study(tmp_path, runs, FakeStudy(run=f"study_{steps}", levels=40, total_steps=10, extra=extra))
        for steps, extra in ((21, {"preset_steps": 21}), (20, {"preset_steps": 20}))
    )
    sentence = (
        "A short study: 10 training steps instead of the 21 of preset laptop, so it may not show what longer runs"
    )
    assert sentence in render_without_figures(short).text
    assert pages.conclude(load(short)).headline.startswith(sentence)
    assert "A short study" not in render_without_figures(long).text
    assert "A short study" not in pages.conclude(load(long)).headline


@pytest.mark.long
def test_a_running_study_can_be_reported(tmp_path: Path) -> None:
    study_folder = write_study(tmp_path, [FakeRun("0", steps=10), FakeRun("0.1", status="running", steps=6)], SMALL)
    assert "1 running" in render_without_figures(study_folder, live=True).text
    assert "1 interrupted" in render_without_figures(study_folder).text


@pytest.mark.long
@pytest.mark.parametrize(
    "missing", thin_out(["entropy", "reward_std", "val_greedy_success", "base_val_success", "kept_ratio"], 5)
)
def test_a_missing_column_leaves_out_only_its_section(tmp_path: Path, missing: str) -> None:
    runs = [FakeRun(arm, steps=10, rows={missing: None}) for arm in ("0", "0.1")]
    study_folder = write_study(tmp_path, runs, SMALL)
    page = render_without_figures(study_folder)
    pages.draw_figures(load(study_folder))
    assert "Verdict for each arm" in page.text


@pytest.mark.long
def test_missing_levels_and_a_study_json_with_the_fewest_keys(tmp_path: Path) -> None:
    run = FakeRun("0.1", steps=10)
    study_folder = write_study(tmp_path, [FakeRun("0", steps=10), run], SMALL)
    (study_folder / "runs" / run.run_id / "levels.jsonl").unlink()
    write_object(study_folder / "study.json", asdict(make_study_record(schema=SCHEMA, name="kl")))
    assert "The defaults are not recorded" in render_without_figures(study_folder).text


def test_text_from_a_run_is_escaped(tmp_path: Path) -> None:
    run = FakeRun("0", status="failed", steps=3, reason="<script>alert(1)</script>")
    text = pages.render_page(load(write_study(tmp_path, [run], SMALL)), {})
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text


def list_texts(value: Any) -> str:
    """All texts of a JSON value, one after another."""
    if isinstance(value, dict | list):
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        return "".join(map(list_texts, entries))
    return value if isinstance(value, str) else ""


CONTROLS = "\x1b[2J \u202egnp.exe \u2066 \u2028 \x85 \x00"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")  # a figure has a box for each
def test_no_control_character_of_a_text_reaches_a_page(tmp_path: Path) -> None:
    folder = write_study_of_arms(tmp_path, [f"a {CONTROLS}", f"b {CONTROLS}"], reason=CONTROLS)
    frames = load(folder)
    report = write_frames_report(frames, folder, with_pictures=False).read_text()
    live_page = LivePage(frames, ("val_success", "success"), True, "12:00:00", [CONTROLS]).render(10, CONTROLS)
    index = write_index(tmp_path).read_text()
    for page in (report, live_page, index):
        assert is_printable(page, LINE_CHARACTERS)
    shown = r"\x1b[2J \u202egnp.exe \u2066 \u2028 \x85 \x00"
    assert shown in report
    assert shown in live_page
    charts = [*map(json.loads, re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', report))]
    assert charts
    # As a string of Python: what a browser reads from the JSON has no control character either.
    assert is_printable("".join(map(list_texts, charts)), LINE_CHARACTERS)


@pytest.mark.long
def test_the_index_links_every_study_and_compares_equal_runs(tmp_path: Path) -> None:
    write_study(tmp_path, [FakeRun("0", steps=10), FakeRun("0.1", steps=10)], SMALL)
    entropy = FakeStudy("entropy", "entropy_sweep", "actor.entropy_coeff", levels=40, total_steps=10)
    entropy = replace(entropy, extra={"preset_steps": 60})
    write_study(tmp_path, [FakeRun("0", steps=10), FakeRun("0.03", steps=10)], entropy)
    index_page = parse_page(write_index(tmp_path).read_text())
    assert index_page.links == ["results/entropy_sweep/report.html", "results/kl_sweep_sokoban-tiny/report.html"]
    assert all((tmp_path / link).parent.is_dir() for link in index_page.links)
    words = " ".join(index_page.text.split())
    assert "entropy/arm0-seed0 and kl/arm0-seed0 have equal rows" in words
    assert "2 studies" in words
    assert words.count("A short study: 10 training steps instead of the 60 of preset laptop") == 1


def test_arms_that_failed_in_part_are_in_the_headline(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=10) for arm in ("0", "0.1") for seed in range(3)]
    runs[5] = FakeRun("0.1", 2, status="early_stopped", steps=5, stop=STOP)
    runs[2] = FakeRun("0", 2, status="failed", steps=5)
    frames = load(write_study(tmp_path, runs, SMALL))
    sentence = "Arm 0.1 collapsed in 1 of 3 runs, at step 5 (seed 2); no run of arm 0 collapsed."
    assert findings.describe_collapses(count_collapses(frames)) == sentence
    assert pages.conclude(frames).collapse == f"{sentence} {COLLAPSE_DEFINITION}"
    assert findings.describe_interval_basis(tables.make_dose_response(frames)) == (
        "0: over 2 seeds, with the noise of these runs alone; 0.1: over 3 seeds, with the noise of all arms"
    )


def test_a_run_is_summarized_with_the_verdict_of_its_arm(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=10) for arm in ("0", "0.1") for seed in range(3)]
    runs[5] = FakeRun("0.1", 2, status="early_stopped", steps=5, stop=STOP, reason="the rule fired")
    summaries = pages.summarize_runs(load(write_study(tmp_path, runs, SMALL)))
    assert list(summaries) == [run.run_id for run in runs]
    assert [summary["collapsed"] for summary in summaries.values()] == [False] * 5 + [True]
    assert [summary["verdict"] for summary in summaries.values()] == ["baseline"] * 3 + ["open"] * 3
    assert (summaries[runs[5].run_id]["status"], summaries[runs[5].run_id]["reason"]) == (
        "early_stopped",
        "the rule fired",
    )
    never_started = FakeRun("0.3", steps=0, status="never_ran")
    summary = pages.summarize_runs(load(write_study(tmp_path / "more", [*runs, never_started], SMALL)))["arm03-seed0"]
    assert (summary["status"], "collapsed" in summary) == ("never_ran", False)


EQUAL_GROUPS = {"zero_std_groups": 8, "groups_kept": 0}
UNIFORM_STOP = ("empty_filtered_steps", 5.0, 5.0)


def test_a_run_that_never_could_learn_says_why_and_has_not_collapsed(tmp_path: Path) -> None:
    in_vain = FakeRun("0", status="early_stopped", steps=5, stop=UNIFORM_STOP, rows=EQUAL_GROUPS)
    conclusion = pages.conclude(load(write_study(tmp_path / "stopped", [in_vain], SMALL)))
    clause = "every group had equal scores, so the rewards taught nothing."
    assert conclusion.headline.startswith(f"E{clause[1:]} ")
    assert conclusion.collapse == ""
    in_vain = FakeRun("0", steps=10, rows=IN_VAIN)
    conclusion = pages.conclude(load(write_study(tmp_path / "invalid", [in_vain], SMALL)))
    assert conclusion.headline == "No reply had a valid action: `transcripts` shows them."
    assert conclusion.collapse == ""
    # Beside runs that learn, it is not one of those that may collapse.
    runs = [
        *(FakeRun("0", seed, status="early_stopped", steps=5, stop=UNIFORM_STOP, rows=EQUAL_GROUPS) for seed in (0, 1)),
        *(FakeRun("0.1", seed, status="early_stopped", steps=5, stop=STOP) for seed in (0, 1)),
    ]
    frames = load(write_study(tmp_path / "both", runs, SMALL))
    conclusion = pages.conclude(frames)
    assert conclusion.headline.startswith(f"In 2 of 4 runs (arm 0), {clause} ")
    assert conclusion.collapse == (
        f"Arm 0.1 collapsed in 2 of 2 runs, at steps 5 and 5 (seeds 0, 1). {COLLAPSE_DEFINITION}"
    )
    assert find_run_ends(frames)["is_collapse"].tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("gain", "greedy", "words"),
    [
        ((0.2, 0.1, 0.3), (0.1, 0.05, 0.15), "Both rise"),
        ((0.2, 0.1, 0.3), (0.0, -0.05, 0.05), "greedy success does not clearly rise"),
        ((0.02, -0.1, 0.1), (0.1, 0.05, 0.15), "Sampled success does not clearly rise"),
        ((0.2, 0.1, 0.3), (float("nan"),) * 3, "Greedy success was not measured, so it is open"),
    ],
)
def test_sentences_on_learning_name_what_they_do_not_show(
    gain: tuple[float, ...], greedy: tuple[float, ...], words: str
) -> None:
    names = ("", "_low", "_high")
    row = {"arm": "0", "gain_basis": "over 3 seeds", "base_val_greedy_success": 0.6, "late_val_success": 0.65}
    row |= {f"gain{name}": value for name, value in zip(names, gain, strict=True)}
    row |= {f"gain_greedy{name}": value for name, value in zip(names, greedy, strict=True)}
    sentences = findings.describe_learning(row)
    assert any(words in sentence for sentence in sentences)
    assert "Sampled success at the end (0.650) is above the greedy success of the base policy (0.600)." in sentences


def test_one_sentence_says_where_the_noise_comes_from(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=2) for arm in ("0", "0.1") for seed in range(5)]
    frames = load(write_study(tmp_path, runs, FakeStudy(levels=10, total_steps=2)))
    values = frames.trials.pivot(index="arm", columns="seed", values="late_val_success")
    unpaired = math.sqrt(values.var(axis=1).mean())
    paired = (values - values.mean()).sub(values.mean(axis=1) - values.mean(axis=None), axis=0)
    assert findings.list_caveats(frames, tables.summarize_arms(frames))[0] == (
        "5 seeds: the noise of a run is estimated from all arms together, and no arm counts as less noisy than its own "
        f"runs or than its evaluation. The standard deviation of a run is {unpaired:.3g}, and "
        f"{math.sqrt((paired**2).sum(axis=None) / 4):.3g} without what its seed does to all arms."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (240, "240"),
        (5400, "5 400"),
        (9_996, "9 996"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_500, "1 M"),  # the unit of the rounded value
        (-999_999, "-1 M"),
        (1_230_000, "1.23 M"),
        (999_700_000, "1 G"),
        (1.2e12, "1.2 T"),
        (float("nan"), "–"),
    ],
)
def test_format_count(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12.4, "12 s"), (185, "3 min 05 s"), (3720, "1 h 02 min"), (59.7, "1 min 00 s")]
)
def test_format_duration(value: float, text: str) -> None:
    assert format_duration(value) == text


BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def open_in_browser(page: Path, profile: Path) -> str:
    """Open a page in Chromium, give its script time, and return the document that it shows."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    command = [str(BROWSER), *flags, "--virtual-time-budget=20000", f"--user-data-dir={profile}", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_report(folder: Path, tmp_path: Path) -> None:
    dom = open_in_browser(folder / "report.html", tmp_path)
    page_text = Page(dom).text
    assert "Verdict for each arm" in page_text
    for arm in read_study(folder).trials["arm"]:
        assert re.search(rf'<th scope="row">KL {re.escape(arm)}</th>', dom)
    static_dom = remove_scripts(dom)
    assert static_dom.count('<svg role="img"') == len(list((folder / "figures").glob("*.png"))) > 0
    # Every chart is drawn, under a policy that allows no `eval`.
    assert static_dom.count('<figure class="interactive">') == static_dom.count("data-chart=") >= 3
    assert static_dom.count('<svg xmlns="http://www.w3.org/2000/svg"') >= 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param({}, "plays sokoban ·", marks=pytest.mark.slow),
        ({"env.name": "bandit.py:Bandit#0123456789abcdef"}, "plays Bandit (bandit.py) ·"),
    ],
)
def test_the_page_says_which_game_is_played(tmp_path: Path, settings: dict[str, str], text: str) -> None:
    folder = write_study(tmp_path, [FakeRun("0", seed, settings=settings) for seed in (0, 1)])
    assert text in " ".join(render_without_figures(folder).text.split())


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_texts_of_a_study_stay_texts_in_its_charts(tmp_path: Path) -> None:
    script = "document.title = 'attacked'"
    arms = (f"</script><script>{script}</script>", f'<img src=x onerror="{script}">', f"{{{{datum}}}}'];{script};//")
    folder = write_study_of_arms(tmp_path / "study", arms)
    assert set(load(folder).trials["arm"]) == set(arms)
    dom = open_in_browser(write_report(folder), tmp_path / "profile")
    assert "<title>kl: kl_sweep_sokoban-tiny</title>" in dom
    assert '<figure class="interactive">' in dom
    assert "<img" not in remove_scripts(dom)
