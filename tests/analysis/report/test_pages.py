"""Tests of the report of every kind of study: complete, self-contained, accessible, and the same when rewritten."""

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
from pkgutil import resolve_name
from typing import Any

import pytest

from analysis.data.frames import StudyFrames
from analysis.data.load import load, read_study
from analysis.grid.layout import name_arms
from analysis.report import pages
from analysis.report.common import list_commands, make_settings_rows
from analysis.report.live import LivePage
from analysis.report.page import render_page, view_sections
from analysis.report.pages import conclude, draw_figures, write_frames_report, write_index, write_report
from analysis.report.section import Section, Table, name
from analysis.sweep import findings, tables
from analysis.sweep.collapse import count_collapses, find_run_ends
from tests.fakes.run_folders import FakeRun, FakeStudy, make_study_record, write_study
from tests.strategies.examples import thin_out
from trainable.config.run_config import RunConfig
from trainable.families import list_families
from trainable.files.json_values import write_object
from trainable.files.paths import LINE_CHARACTERS, is_printable
from trainable.runs.history import COLLAPSE_DEFINITION
from trainable.runs.study_record import SCHEMA

STOP = ("low_validation_success", 0.002, 0.01)
SMALL = FakeStudy(levels=40, total_steps=10)
TINY = FakeStudy(levels=10, total_steps=3)
VOID = {"meta", "br", "img", "link", "hr", "input", "path", "use", "rect", "circle", "line"}


class Page(HTMLParser):
    """Check that tags close in order and that a page is accessible, and collect ids, links and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.errors, self.ids, self.links, self.sections = (list[str]() for _ in range(5))
        self.tags: set[str] = set()
        self.text, self.last_tag = "", ""
        self.feed(text)
        self.close()
        self.errors += [f"<{tag}> never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names, values = [name for name, _ in attrs], dict(attrs)
        self.errors += [f"<{tag}> repeats {name}" for name in set(names) if names.count(name) > 1]
        self.errors += ["a table without a caption"] * (self.last_tag == "table" and tag != "caption")
        is_scrolled = tag == "figure" or values.get("class") == "scroll"
        self.errors += [f"<{tag}> cannot be scrolled by keys"] * (is_scrolled and values.get("tabindex") != "0")
        is_named = values.get("role") in ("img", "region") or (tag in ("svg", "nav") and "svg" not in self.open)
        self.errors += [f"<{tag}> without a name"] * (is_named and not values.get("aria-label"))
        self.tags.add(tag)
        self.ids += filter(None, [values.get("id")])
        self.sections += [str(values.get("id"))] * (tag in ("section", "aside"))
        self.links += filter(None, map(values.get, ("src", "href", "xlink:href", "data", "action")))
        self.text += " " * (tag in ("br", "span"))
        self.last_tag = tag

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

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join(self.text.split())


def parse_page(text: str) -> Page:
    """Return a page that is well-formed and accessible, and whose contents link to every section in order."""
    page = Page(text)
    assert page.errors == []
    assert len(page.ids) == len(set(page.ids))
    assert page.links[: len(page.sections)] == [f"#{name}" for name in page.sections]
    assert {"main", "nav", "h1"} <= page.tags
    assert page.tags.isdisjoint({"link", "iframe", "img", "object"})
    assert page.links[-1] == "#top"
    assert page.ids[0] == "top"
    return page


def write_study_of_arms(output: Path, arms: Sequence[str], reason: str = "", **extra: Any) -> Path:
    """A study whose arms have any names. extra: of study.json."""
    runs = [FakeRun(f"arm{index}", steps=10, reason=reason) for index in range(len(arms))]
    folder = write_study(output, runs, replace(SMALL, extra=extra))
    for path in (folder / "study.json", *folder.glob("runs/*/run.json")):
        text = path.read_text()
        for index, arm in enumerate(arms):
            text = text.replace(f'"arm{index}"', json.dumps(arm))
        write_object(path, {name: value for name, value in json.loads(text).items() if name != "checksum"})
    return folder


def render_frames(frames: StudyFrames, *, with_figures: bool = False) -> str:
    """Render the report of a study."""
    report = pages.find_report(frames)
    results = report.make_results(name_arms(frames))
    sections = report.sections if with_figures else [replace(section, figures=()) for section in report.sections]
    return render_page(pages.make_heading(report, results), view_sections(sections, results, with_figures))


def render_without_figures(folder: Path) -> Page:
    return parse_page(render_frames(load(folder)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of six arms and one seed, with one stopped arm, and its report."""
    runs = [FakeRun(arm) for arm in ("0", "0.01", "0.03", "0.1", "1")]
    runs.insert(4, FakeRun("0.3", 0, "early_stopped", 45, success=(0.35, 0.0), greedy=(0.6, 0.0), stop=STOP))
    defaults = {"defaults": RunConfig().model_dump(mode="json")}
    study_folder = write_study(tmp_path_factory.mktemp("report"), runs, FakeStudy(levels=200, extra=defaults))
    assert write_report(study_folder) == study_folder / "report.html"
    return study_folder


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return parse_page(text)


@pytest.mark.long
def test_every_setting_is_listed_and_changed_ones_are_marked(folder: Path, text: str, tmp_path: Path) -> None:
    rows = make_settings_rows(load(folder).studies[0])
    assert len(rows) > 80
    changed = {row["name"] for row in rows if row["changed"]}
    assert set(re.findall(r'<tr class="changed"><th scope="row"><code>([^<]*)</code>', text)) == changed
    assert {"model.path", "actor.lr", "trainer.total_training_steps"} <= changed
    assert not {"env.group_size"} & changed
    unknown = render_frames(load(write_study(tmp_path, [FakeRun("0", steps=10)], SMALL)))
    assert 'class="changed"' not in unknown
    assert "The defaults are not recorded in study.json" in unknown


def test_every_command_that_added_runs_is_listed_in_order() -> None:
    first, more = "python -m tune_study run kl --seeds 2", "python -m tune_study run kl --kl-values 0.3 --extend"
    commands = [first, "python -m tune_study resume out/results/kl", more, more, "tune-study resume out/results/kl"]
    starts = [{"command": command, "versions": {}} for command in commands]
    assert list_commands(make_study_record(command=more, starts=starts)) == [first, more]
    # A folder of an earlier version.
    assert list_commands(make_study_record(command=first)) == [first]
    assert list_commands(make_study_record(starts=[{"versions": {}}])) == []
    assert list_commands(make_study_record(command=first, starts=starts[1:2])) == [first]


SCRIPT = re.compile(r"<script( [^>]*)?>(.*?)</script>", re.DOTALL)


@pytest.mark.long
def test_the_page_needs_nothing_from_outside_and_runs_only_the_script_of_its_charts(text: str, page: Page) -> None:
    assert all(link.startswith(("#", "data:")) for link in page.links)
    static_text = SCRIPT.sub("", text)
    addresses = re.findall(r"https?://[^\s\"'<>)]+", static_text)
    assert {url for url in addresses if not url.startswith("http://www.w3.org/")} == set()
    assert re.findall(r"@import|url\((?!#)", static_text) == []
    assert all(style in text for style in ("prefers-color-scheme: dark", "@media print"))
    scripts = SCRIPT.findall(text)
    charts = {attributes.split('"')[3] for attributes, content in scripts if attributes and json.loads(content)}
    assert {"dose_response-chart", "survival-chart", "validation_curves-chart"} <= charts
    (code,) = (content for attributes, content in scripts if not attributes)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


@pytest.mark.long
def test_figures_are_inline_and_files_beside_the_page(folder: Path, text: str) -> None:
    expected = {"dose_response", "validation_curves", "reward_std", "entropy", "val_kl", "kept_groups"}
    expected |= {"survival", "onsets"}  # a run has collapsed
    expected |= {"val_reward", "val_children"}  # the rows have every column, also those of trees
    for suffix, beginning in ((".png", b"\x89PNG"), (".svg", b"<svg")):
        files = {path.stem: path.read_bytes() for path in (folder / "figures").glob(f"*{suffix}")}
        assert files.keys() == expected
        assert all(content.startswith(beginning) for content in files.values())
        assert not any(b"currentColor" in content for content in files.values())  # files are on white
    assert SCRIPT.sub("", text).count('<svg role="img"') == len(expected)


@pytest.mark.long
def test_a_report_is_the_same_when_written_twice_and_ends_with_own_sections(tmp_path: Path) -> None:
    study_folder = write_study(tmp_path, [FakeRun("0", steps=3)], TINY)
    own = Section[Any](
        "own",
        "Steps of <each> arm",
        tables=lambda results: [Table([name("arm")], results.frames.trials.to_dict("records"))],
        files=lambda results: {"own": results.frames.trials[["arm"]]},
    )
    first, second = (
        write_frames_report(load(study_folder), study_folder, with_pictures=False, own_sections=[own]).read_text()
        for _ in range(2)
    )
    assert first == second
    assert SCRIPT.sub("", first).count("<svg") == 7
    assert "What changed before a collapse" not in first
    assert not (study_folder / "figures" / "onsets.csv").exists()
    page = parse_page(first)
    assert page.sections[-1] == "own"
    assert "Steps of <each> arm arm KL 0 " in page.words
    # The page names arms by their setting; tables beside it have the arms of the frames.
    assert (study_folder / "figures" / "own.csv").read_text() == "arm\n0\n"


FAILED: dict[str, Any] = {"status": "failed", "steps": 4, "reason": "RuntimeError: <x>"}
STOPPED: dict[str, Any] = {"status": "early_stopped", "steps": 10, "stop": STOP}
IN_VAIN = {"train_invalid_turns": 1.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], "No run is recorded."),
        ([FakeRun("0", status="", steps=0)], "KL 0 no verdict – baseline – – 1 never ran not scored: seed 0 never ran"),
        ([FakeRun("0", status="running", steps=0)], "No scored run: arm KL 0."),
        (
            [FakeRun("0", steps=10)],
            "No run collapsed, so this study cannot tell whether an arm protects from collapse.",
        ),
        ([FakeRun(arm, **FAILED) for arm in ("0", "0.1")], "(RuntimeError: <x>)"),
        ([FakeRun(arm, **STOPPED) for arm in ("0", "0.1")], "Stopped in 1 of 1 run: arms KL 0, 0.1."),
        ([FakeRun(arm, seed, steps=10) for arm in ("0", "nofilter") for seed in range(3)], "over 3 seeds"),
        ([FakeRun("0.1", steps=10)], "1 arm and no baseline arm, so nothing is compared."),
        ([FakeRun("0.1", steps=10, rows=IN_VAIN)], "No reply had a valid action: transcripts shows them."),
        (
            [FakeRun("0", **STOPPED, rows=IN_VAIN), FakeRun("0.1", steps=10, rows=IN_VAIN)],
            "In all 2 runs, no reply had a valid action: transcripts shows them.",
        ),
        (
            [FakeRun("0", seed, settings={"env.name": "bandit.py:Bandit#0123456789abcdef"}) for seed in (0, 1)],
            "plays Bandit (bandit.py) ·",
        ),
    ],
)
def test_every_kind_of_study_has_a_report(tmp_path: Path, runs: list[FakeRun], words: str) -> None:
    assert words in render_without_figures(write_study(tmp_path, runs, SMALL)).words


@pytest.mark.long
@pytest.mark.parametrize(
    "runs",
    [
        [FakeRun("0", status="", steps=0)],
        [FakeRun("0", **STOPPED), FakeRun("0.1", **FAILED)],
        [],
    ],
)
def test_runs_that_have_not_ended_well_can_be_drawn(tmp_path: Path, runs: list[FakeRun]) -> None:
    page = render_frames(load(write_study(tmp_path, runs, SMALL)), with_figures=True)
    assert ('id="dose_response-chart"' in page) == any(run.steps for run in runs)


@pytest.mark.long
def test_equal_levels_are_counted_only_where_runs_have_the_same_levels_and_some_are_equal(folder: Path) -> None:
    frames = load(folder)
    summary = tables.summarize_arms(frames)
    levels = frames.levels
    others = levels.assign(level=levels["level"] + 1_000 * (levels["run_id"] == levels["run_id"].iloc[0]))
    for changed_levels, words in (
        (levels, "the same 200 levels. 175 of them are distinct: "),
        (levels.assign(cluster=levels["level"]), "the same 200 levels. The results"),
        (others, "different sets of levels, 400 in all. The results"),
    ):
        assert words in "".join(findings.list_caveats(replace(frames, levels=changed_levels), summary))


def test_a_study_far_shorter_than_its_preset_is_called_short(tmp_path: Path) -> None:
    runs = [FakeRun("0", steps=10), FakeRun("0.1", steps=10)]
    frames = load(write_study(tmp_path, runs, SMALL))
    sentence = "A short study: 10 training steps instead of the 21 of preset laptop, so it may not show what longer"
    for preset_steps, is_short in ((21, True), (20, False)):
        short = replace(frames, study=replace(frames.studies[0], preset_steps=preset_steps))
        assert conclude(short).sentences[0].startswith(sentence) == is_short


@pytest.mark.long
@pytest.mark.parametrize(
    "missing", thin_out(["entropy", "reward_std", "val_greedy_success", "base_val_success", "kept_ratio"], 5)
)
def test_a_missing_column_leaves_out_only_its_section(tmp_path: Path, missing: str) -> None:
    runs = [FakeRun(arm, steps=10, rows={missing: None}) for arm in ("0", "0.1")]
    page = render_frames(load(write_study(tmp_path, runs, SMALL)), with_figures=True)
    assert "Verdict for each arm" in parse_page(page).text


@pytest.mark.long
def test_missing_levels_and_a_study_json_with_the_fewest_keys(tmp_path: Path) -> None:
    run = FakeRun("0.1", steps=10)
    study_folder = write_study(tmp_path, [FakeRun("0", steps=10), run], SMALL)
    (study_folder / "runs" / run.run_id / "levels.jsonl").unlink()
    write_object(study_folder / "study.json", asdict(make_study_record(schema=SCHEMA, name="kl")))
    assert "Settings in which arms differ: 2" in render_without_figures(study_folder).words


@pytest.mark.parametrize("report", dict.fromkeys(family.report for family in list_families()))
def test_sections_and_figures_of_a_report_have_names_of_their_own(report: str) -> None:
    sections = resolve_name(report).sections
    names = [section.name for section in sections]
    figures = [figure.name for section in sections for figure in section.figures]
    assert len(set(names)) == len(names)
    assert len(set(figures)) == len(figures) > 0
    assert all(re.fullmatch("[a-z][a-z0-9-]*", name) for name in names)


def test_only_studies_of_trees_have_figures_of_children(tmp_path: Path) -> None:
    frames = read_study(write_study(tmp_path, [FakeRun("0", steps=3)], TINY))
    names = {"val_reward", "val_children"}
    assert draw_figures(frames, names).keys() == names
    frames.steps["val_children"] = math.nan
    assert not draw_figures(frames, names)
    for names in (("dose_responses",), ("dose_response", "curve"), "dose_response"):
        with pytest.raises(ValueError, match=r"names is .*, and may have .*dose_response, "):
            draw_figures(frames, names)


CONTROLS = "\x1b[2J \u202egnp.exe \u2066 \u2028 \x85 \x00"


@pytest.mark.long
def test_no_control_character_of_a_text_reaches_a_page(tmp_path: Path) -> None:
    extra = {"question": CONTROLS, "model": CONTROLS, "declaration": {"path": CONTROLS, "sha256": "", "text": CONTROLS}}
    folder = write_study_of_arms(tmp_path, [f"a {CONTROLS}", f"b {CONTROLS}"], CONTROLS, **extra)
    frames = load(folder)
    report = write_frames_report(frames, folder, with_pictures=False).read_text()
    live_page = LivePage(frames, ("val_success", "success"), True, "12:00:00", [CONTROLS]).render(10, CONTROLS)
    index = write_index(tmp_path).read_text()
    for page in (report, live_page, index):
        assert is_printable(page, LINE_CHARACTERS)
        assert r"\x1b[2J \u202egnp.exe \u2066 \u2028 \x85 \x00" in page
        parse_page(page)
    # What a browser reads from the JSON of a chart has no control character either.
    (chart,) = re.findall(r'<script type="application/json" id="dose_response-chart">(.*?)</script>', report)
    texts = {row["arm"] for rows in json.loads(chart)["datasets"].values() for row in rows if "arm" in row}
    assert len(texts) == 2
    assert is_printable("".join(texts), LINE_CHARACTERS)


@pytest.mark.long
def test_the_index_links_every_study_and_compares_equal_runs(tmp_path: Path) -> None:
    write_study(tmp_path, [FakeRun("0", steps=10), FakeRun("0.1", steps=10)], SMALL)
    entropy = FakeStudy("entropy", "entropy_sweep", "actor.entropy_coeff", levels=40, total_steps=10)
    entropy = replace(entropy, extra={"preset_steps": 60})
    write_study(tmp_path, [FakeRun("0", steps=10), FakeRun("0.03", steps=10)], entropy)
    page = parse_page(write_index(tmp_path).read_text())
    links = [link for link in page.links if not link.startswith("#")]
    assert links == ["results/entropy_sweep/report.html", "results/kl_sweep_sokoban-tiny/report.html"]
    assert all((tmp_path / link).parent.is_dir() for link in links)
    assert page.sections == ["study-entropy_sweep", "study-kl_sweep_sokoban-tiny", "consistency"]
    assert "entropy/arm0-seed0 and kl/arm0-seed0 have equal rows" in page.words
    assert "2 studies" in page.words
    assert page.words.count("A short study: 10 training steps instead of the 60 of preset laptop") == 1


def test_the_conclusion_counts_collapses_and_a_run_is_summarized_with_the_verdict_of_its_arm(tmp_path: Path) -> None:
    runs = [FakeRun(arm, seed, steps=10) for arm in ("0", "0.1") for seed in range(3)]
    runs[5] = FakeRun("0.1", 2, status="early_stopped", steps=5, stop=STOP)
    runs[2] = FakeRun("0", 2, status="failed", steps=5)
    frames = load(write_study(tmp_path, runs, SMALL))
    sentence = "Arm 0.1 collapsed in 1 of 3 runs, at step 5 (seed 2); no run of arm 0 collapsed."
    assert findings.describe_collapses(count_collapses(frames)) == sentence
    conclusion = conclude(frames)
    assert conclusion.sentences[-1] == f"{sentence} {COLLAPSE_DEFINITION}"
    assert conclusion.verdicts[2][6] == "2 completed, 1 early stopped"
    assert findings.describe_interval_basis(tables.make_dose_response(frames, tables.summarize_arms(frames))) == (
        "Intervals are over 2 seeds, with the noise of these runs alone; or over 3 seeds, with the noise of all arms."
    )
    runs[2] = FakeRun("0", 2, steps=10)
    runs[5] = FakeRun("0.1", 2, status="early_stopped", steps=5, stop=STOP, reason="the rule fired")
    summaries = pages.summarize_runs(load(write_study(tmp_path / "all", runs, SMALL)))
    assert list(summaries) == [run.run_id for run in runs]
    assert [summary["collapsed"] for summary in summaries.values()] == [False] * 5 + [True]
    assert [summary["verdict"] for summary in summaries.values()] == ["baseline"] * 3 + ["open"] * 3
    stopped = summaries[runs[5].run_id]
    assert (stopped["status"], stopped["reason"]) == ("early_stopped", "the rule fired")
    never_started = FakeRun("0.3", steps=0, status="never_ran")
    summary = pages.summarize_runs(load(write_study(tmp_path / "more", [*runs, never_started], SMALL)))["arm03-seed0"]
    assert (summary["status"], "collapsed" in summary) == ("never_ran", False)


def test_a_run_that_never_could_learn_says_why_and_has_not_collapsed(tmp_path: Path) -> None:
    equal_groups: dict[str, Any] = {**STOPPED, "stop": ("empty_filtered_steps", 5.0, 5.0), "steps": 5}
    equal_groups |= {"rows": {"zero_std_groups": 8, "groups_kept": 0}}
    conclusion = conclude(load(write_study(tmp_path / "stopped", [FakeRun("0", **equal_groups)], SMALL)))
    clause = "every group had equal scores, so the rewards taught nothing."
    assert conclusion.sentences[0].startswith(f"E{clause[1:]} ")
    assert len(conclusion.sentences) == 1
    conclusion = conclude(load(write_study(tmp_path / "invalid", [FakeRun("0", steps=10, rows=IN_VAIN)], SMALL)))
    assert conclusion.sentences == ("No reply had a valid action: transcripts shows them.",)
    # Beside runs that learn, it is not one of those that may collapse.
    runs = [FakeRun("0", seed, **equal_groups) for seed in (0, 1)]
    runs += [FakeRun("0.1", seed, status="early_stopped", steps=5, stop=STOP) for seed in (0, 1)]
    frames = load(write_study(tmp_path / "both", runs, SMALL))
    headline, collapse = conclude(frames).sentences
    assert headline.startswith(f"In 2 of 4 runs (arm 0), {clause} ")
    assert collapse == f"Arm 0.1 collapsed in 2 of 2 runs, at steps 5 and 5 (seeds 0, 1). {COLLAPSE_DEFINITION}"
    assert find_run_ends(frames)["is_collapse"].tolist() == [False, False, True, True]


BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("hostile", [False, True])
def test_a_browser_draws_every_chart_and_shows_texts_as_texts(folder: Path, tmp_path: Path, hostile: bool) -> None:
    script = "document.title = 'attacked'"
    arms = (f"</script><script>{script}</script>", f'<img src=x onerror="{script}">', f"{{{{datum}}}}'];{script};//")
    shown = folder
    if hostile:
        shown = write_study_of_arms(tmp_path / "study", arms)
        assert set(load(shown).trials["arm"]) == set(arms)
        write_report(shown)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    flags += ["--virtual-time-budget=20000", f"--user-data-dir={tmp_path / 'profile'}"]  # time for its script
    command = [str(BROWSER), *flags, (shown / "report.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    static_dom = SCRIPT.sub("", dom)
    assert "<title>Does a KL penalty to the initial policy prevent collapse" in dom
    assert static_dom.count('<svg role="img"') == len(list((shown / "figures").glob("*.png"))) > 0
    # Every chart is drawn, under a policy that allows no `eval`.
    assert static_dom.count('<figure tabindex="0" class="interactive">') == static_dom.count("data-chart=") >= 3
    assert static_dom.count('<svg xmlns="http://www.w3.org/2000/svg"') >= 3
    assert "<img" not in static_dom
    names = arms if hostile else [f"KL {arm}" for arm in load(shown).trials["arm"]]
    assert all(f'<th scope="row">{html.escape(arm, quote=False)}</th>' in dom for arm in names)
