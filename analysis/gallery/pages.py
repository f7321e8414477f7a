"""The pages of the gallery: each is a template whose every number comes from recorded studies.

A template in templates/ sets `order`, its place in the index; `title`, `symptoms`, `verdict`, `claims`, `reading` and
`limits`, in Markdown; `advice`, what people advise, each with a recording and the contrasts that follow it; and
`estimates`, the minutes of two cores that were expected of each study that was trained for the page. It reads a
recording with `record(NAME)`, a `Recorded`; `at_budgets` of one gives it at equal budgets, `Alarms` scores detectors on
several, and `Transfer` compares studies with themselves elsewhere. The page ends with commands and costs, the commands
in `preparation` first. It shows the contrasts of the studies that were trained for it, or the charts in `figures`, by
name, and explains its numbers by `METHOD`, or by the template's `method`. The index has a template of its own, which
also reads recordings.

`python -m analysis.gallery.pages docs/findings` writes all pages again.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import numpy as np
import pandas as pd

from analysis.charts import chart as charts
from analysis.charts.curves import draw_intervals
from analysis.data.frames import CONFIG_PREFIX, StudyFrames, list_differing_settings, to_records
from analysis.data.schemas import Row
from analysis.gallery.budgets import cut_at_budgets, read_curve
from analysis.gallery.recordings import read_recording
from analysis.gallery.transfer import compare_places
from analysis.report.pages import draw_figures
from analysis.sweep.alarms import (
    compare_alarms,
    compare_detectors,
    find_alarms,
    find_distinct_ends,
    format_score,
    list_rules,
    score_rules,
)
from analysis.sweep.collapse import count_collapses
from analysis.sweep.contrasts import compute_contrasts
from analysis.sweep.detectors import LOW_EVALUATION, Detector, list_variants
from analysis.sweep.findings import format_seeds
from analysis.sweep.tables import summarize_arms
from analysis.sweep.verdicts import count_nouns, format_fraction, format_interval, format_p_value, format_signed
from trainable.config.choices import ADVANTAGE_ESTIMATORS
from trainable.config.command_lines import format_command
from trainable.config.setting_types import AlarmRule, format_value, parse_alarm_rule
from trainable.files.paths import atomic_write

ANSWERS = {
    "better": "holds",
    "worse": "fails",
    "equal": "no difference",
    "no effect": "no difference",
    "open": "open",
}
"""What the verdict on a contrast says of the advice that it follows."""
METHOD = """
Differences are in success at the end, with 95 % intervals; verdicts follow Holm's p over the contrasts of a study.
[How to read these pages](index.md#how-to-read-these-pages) says what *equal*, *open* and *collapsed* mean.
"""
"""How numbers of a page are made, unless its template says so itself."""
TEMPLATES = Path(__file__).with_name("templates")
INDEX = TEMPLATES / "index.md.jinja"


@dataclass(frozen=True)
class Recorded:
    """A recorded study, as a template sees it. Differences are in success at the end, the primary outcome."""

    name: str
    frames: StudyFrames

    @cached_property
    def contrasts(self) -> dict[tuple[str, str], Row]:
        """The rows of `contrasts.compute_contrasts`, by contrast and outcome."""
        return {(row["contrast"], row["column"]): row for row in to_records(compute_contrasts(self.frames))}

    def get_contrast(self, contrast: str, column: str = "") -> Row:
        """Return the row of a contrast for an outcome, by default the primary one."""
        (family,) = self.frames.families
        return self.contrasts[contrast, column or family.primary_column]

    @cached_property
    def arms(self) -> dict[str, Row]:
        """The rows of `tables.summarize_arms`, by arm."""
        return {row["arm"]: row for row in to_records(summarize_arms(self.frames))}

    @cached_property
    def collapses(self) -> dict[str, Row]:
        """The rows of `collapse.count_collapses`, by arm."""
        return {row["arm"]: row for row in to_records(count_collapses(self.frames))}

    def success(self, arm: str) -> str:
        """Format the mean success of an arm at the end of its runs."""
        return format_fraction(self.arms[arm]["late_val_success"])

    @property
    def success_before(self) -> str:
        """Format the mean success before training, over all arms."""
        return format_fraction(float(self.frames.trials["base_val_success"].mean()))

    def collapsed(self, *arms: str) -> str:
        """Format how many runs of some arms collapsed: `4 of 5`."""
        rows = [self.collapses[arm] for arm in arms]
        return f"{sum(row['collapsed'] for row in rows)} of {sum(row['runs'] for row in rows)}"

    def gap(self, arm: str, other: str) -> str:
        """Format the success of an arm minus that of another one, which describes and does not test."""
        return format_signed(self.arms[arm]["late_val_success"] - self.arms[other]["late_val_success"])

    def difference(self, contrast: str, column: str = "") -> str:
        """Format the difference of a contrast with its interval: `+0.048 [−0.113, +0.209]`."""
        row = self.get_contrast(contrast, column)
        interval = format_interval(row["difference_low"], row["difference_high"])
        return f"{format_signed(row['difference'])} {interval}"

    def p(self, contrast: str) -> str:
        """Format the p-value of a contrast, corrected with Holm's method over all contrasts of the study."""
        return format_p_value(self.get_contrast(contrast)["p_holm"])

    def verdict(self, contrast: str) -> str:
        """Name the verdict on a contrast: better, worse, equal, no effect or open."""
        return str(self.get_contrast(contrast)["verdict"])

    def judge(self, contrasts: Sequence[str]) -> tuple[str, str, str]:
        """Say whether an advice holds that contrasts follow; format success with and without it, and differences."""
        answers, ends = [], []
        for name in contrasts:
            (pairs,) = (entry.pairs for entry in self.frames.studies[0].contrasts if entry.name == name)
            with_advice, without = (
                float(np.mean([self.arms[pair[side]]["late_val_success"] for pair in pairs])) for side in (0, 1)
            )
            answer = ANSWERS[self.verdict(name)]
            is_learning = with_advice > self.frames.trials["base_val_success"].mean()
            answers.append(answer if is_learning or answer != "holds" else "better, not above the start")
            ends.append(f"{format_fraction(with_advice)} (without {format_fraction(without)})")
        return ("; ".join(dict.fromkeys(answers)), "; ".join(ends), "; ".join(map(self.difference, contrasts)))

    def describe_training(self) -> str:
        """Describe the training of the baseline in one sentence."""
        study = self.frames.studies[0]
        trials = self.frames.trials
        baseline_run = trials[trials["arm"] == study.baseline].iloc[0]

        def get(name: str) -> Any:
            if (column := f"{CONFIG_PREFIX}{name}") in baseline_run:
                return baseline_run[column]
            section, key = name.split(".")
            return study.settings[section][key]

        groups, size = get("env.env_groups"), get("env.group_size")
        updates = get("actor.ppo_epochs") * groups * size // get("actor.ppo_mini_batch_size")
        name = get("algorithm.adv_estimator")
        return (
            f"`{study.baseline}` of `{study.run}` is "
            f"{'PPO with a critic' if ADVANTAGE_ESTIMATORS[name].needs_critic else name.upper()} under the preset "
            f"`{study.preset}`: {get('trainer.total_training_steps')} steps of {groups} groups of {size} episodes of "
            f"at most {get('env.max_turn')} turns, {count_nouns(updates, 'update')} per step at a learning rate of "
            f"{get('actor.lr'):g}, {get('env.val_env_groups')} validation levels every {get('trainer.test_freq')} "
            f"steps. Other arms change what the table says; seeds {format_seeds(study.seeds)}."
        )

    def table(self) -> str:
        """Make the Markdown table of all contrasts."""
        lines = [
            ("contrast", "difference in success", "Holm's p", "verdict", "collapsed runs"),
            *(
                (name, self.difference(name), self.p(name)[2:], self.verdict(name), self._compare_collapses(name))
                for name in dict.fromkeys(name for name, _ in self.contrasts)
            ),
        ]
        return make_table(lines)

    def _compare_collapses(self, contrast: str) -> str:
        (pairs,) = (entry.pairs for entry in self.frames.studies[0].contrasts if entry.name == contrast)
        sides = (dict.fromkeys(pair[side] for pair in pairs) for side in (0, 1))
        return " against ".join(self.collapsed(*arms) for arms in sides)

    def arm_table(self) -> str:
        """Make the Markdown table of arms: success at the end, collapsed runs, optimizer steps and sampled tokens."""
        lines = [
            ("arm", "success at the end", "collapsed runs", "optimizer steps", "tokens sampled", "settings"),
            *(
                (
                    arm,
                    f"{format_fraction(row['late_val_success'])} "
                    f"{format_interval(row['late_low'], row['late_high'], format_fraction)}",
                    self.collapsed(arm),
                    f"{row['total_optimizer_steps']:,.0f}",
                    f"{row['total_sampled_tokens']:,.0f}",
                    self._describe_settings(arm),
                )
                for arm, row in self.arms.items()
            ),
        ]
        return make_table(lines)

    def _describe_settings(self, arm: str) -> str:
        """Describe the settings in which an arm differs from the baseline, as typed after --set."""
        first_runs = self.frames.trials.drop_duplicates("arm").set_index("arm")
        columns = [f"{CONFIG_PREFIX}{name}" for name in list_differing_settings(self.frames.trials)]
        values, others = first_runs.loc[arm, columns], first_runs.loc[self.frames.studies[0].baseline, columns]
        return " ".join(
            f"`{column.removeprefix(CONFIG_PREFIX)}={format_value(values[column])}`"
            for column in columns
            if str(values[column]) != str(others[column])
        )

    def mean_column(self, column: str, arm: str, first: int = 0, last: int = 10) -> float:
        """Compute the mean of a column over the last steps of each run of an arm, or the `first`, and over its runs."""
        runs = self.frames.steps[self.frames.steps["arm"] == arm].groupby("run_id", observed=True)[column]
        return float(runs.apply(lambda values: (values.head(first) if first else values.tail(last)).mean()).mean())

    def by_seed(self, column: str, arm: str, step: int | None = None) -> dict[int, float]:
        """Return by seed a column of an arm's runs, or of a step of them. Seeds ascend."""
        rows = self.frames.trials if step is None else self.frames.steps[self.frames.steps["step"] == step]
        values = rows[rows["arm"] == arm].set_index("seed")[column].sort_index()
        return {int(seed): float(value) for seed, value in values.items()}

    def success_at(self, arm: str, place: float, column: str | None = None) -> float:
        """Compute the success of an arm where its runs have spent `place` (see `budgets.spend`), on average."""
        runs = self.frames.runs_by_arm[arm]
        curves = [
            read_curve(self.frames.get_run_steps(run["run_id"]), run["base_val_success"], np.array([place]), column)
            for run in to_records(runs)
        ]
        return float(np.mean(curves))

    def share_above(self, column: str, arm: str, threshold: float) -> float:
        """Compute the share of an arm's steps whose value in a column is above a threshold."""
        steps = self.frames.steps[self.frames.steps["arm"] == arm]
        return float((steps[column].dropna() > threshold).mean())

    @property
    def core_seconds(self) -> float:
        """Seconds that two cores computed in the steps of all runs, but for those that a fork copies."""
        steps, study = self.frames.steps, self.frames.studies[0]
        is_computed = steps["step"] > steps["arm"].astype(str).map(study.get_fork_step)
        return float(steps.loc[is_computed, "cpu_seconds_step"].sum()) / 2

    def draw_contrasts(self) -> alt.TopLevelMixin:
        """Draw the differences of all contrasts."""
        (figure,) = draw_figures(self.frames, ["contrasts"]).values()
        return figure


@dataclass(frozen=True)
class Alarms:
    """The scores of alarms, ours and those of others, on recorded studies."""

    records: Sequence[Recorded]
    first_test_seed: int
    """Thresholds are chosen on the runs of lower seeds, and scored on the others."""

    @property
    def ends(self) -> pd.DataFrame:
        """The rows of `alarms.find_distinct_ends` of the runs on which alarms are scored."""
        ends = pd.concat(find_distinct_ends([recorded.frames for recorded in self.records]))
        return ends[ends["seed"] >= self.first_test_seed]

    def find_alarms(self, rules: Sequence[AlarmRule | Detector], new: Recorded | None = None) -> pd.DataFrame:
        """Apply rules to the runs on which alarms are scored, or else to those of a `new` study (`alarms.find_alarms`).

        A run of the new study that repeats one of `records` is left out.
        """
        frames = [recorded.frames for recorded in self.records]
        if new is None:
            alarms = find_alarms(frames, rules)
            return alarms[alarms["seed"] >= self.first_test_seed]
        *_, ends = find_distinct_ends([*frames, new.frames])
        alarms = find_alarms([new.frames], rules)
        return alarms[alarms["run_id"].isin(ends["run_id"])]

    def count_ahead(self, measure: str, new: Recorded | None = None) -> int:
        """Count the collapses that our alarm on a measure announces before the first low evaluation, if any.

        new: as in `find_alarms`.
        """
        rules = (parse_alarm_rule(self.rows[measure, "ours"]["rule"]), LOW_EVALUATION)
        alarms = self.find_alarms(rules, new)
        rows = alarms[alarms["is_collapse"]].set_index("run_id")
        alarm, low = (rows[rows["rule"] == rule.text] for rule in rules)
        # A stop rule may end a run before an evaluation is low.
        return int((alarm["alarm_step"] < low["alarm_step"].fillna(low["end_step"])).sum())

    @cached_property
    def rows(self) -> dict[tuple[str, str], Row]:
        """Rows of `compare_alarms`, by measure and `ours`, and of `compare_detectors`, by detector and thresholds."""
        frames = [recorded.frames for recorded in self.records]
        table, is_fresh = compare_alarms(frames, self.first_test_seed)
        if not is_fresh:
            raise ValueError("The runs of lower or of other seeds have no collapse.")
        ours = [{"detector": row["rule"].split()[0], "thresholds": "ours", **row} for row in to_records(table)]
        others = to_records(compare_detectors(frames, self.first_test_seed))
        return {(row["detector"], row["thresholds"]): row for row in (*ours, *others)}

    def score_on(self, new: Recorded) -> dict[tuple[str, str], Row]:
        """Score the rules of `rows` on a study that had no part in choosing them, by the same keys."""
        texts = {
            key: row["rule"] if key[1] == "ours" else f"{row['detector']}: {row['rule']}"
            for key, row in self.rows.items()
        }
        known_rules: list[AlarmRule | Detector] = [*list_rules(), *list_variants()]
        rules = [rule for rule in known_rules if rule.text in texts.values()]
        scores = {row["rule"]: row for row in to_records(score_rules(self.find_alarms(rules, new)))}
        return {key: scores[text] for key, text in texts.items() if text in scores}

    def table(self, new: Recorded) -> str:
        """Make the Markdown table of the detectors that spoke, those with the most announced collapses first.

        new: a study that had no part in choosing thresholds, on which they are scored again.
        """
        scores = self.score_on(new)
        keys = sorted(
            (key for key, row in self.rows.items() if _has_spoken(row) or _has_spoken(scores[key])),
            key=lambda key: (-self.rows[key]["detected"], self.rows[key]["false_alarms"]),
        )
        headings = ("detector", "thresholds", "announces", "95 %", "lead (steps)", "false alarms", "95 %")
        lines: list[Sequence[str]] = [(*headings, "announces, new runs", "false alarms, new runs", "rule")]
        for key in keys:
            announced, _, _, false_alarms, _ = format_score(scores[key])
            # Its number is that of the definition of a collapse.
            name = ("first low evaluation", "by definition") if key == _LOW_EVALUATION else key
            lines.append((*name, *format_score(self.rows[key]), announced, false_alarms, f"`{self.rows[key]['rule']}`"))
        return make_table(lines)

    def draw(self) -> alt.TopLevelMixin:
        """Draw the share of announced collapses with its interval, and that of false alarms as rings.

        Detectors that are silent in all runs are left out.
        """
        rows = list(filter(_has_spoken, self.rows.values()))
        rows.sort(key=lambda row: -row["detected_fraction"])
        table = pd.DataFrame(rows).assign(name=[f"{row['detector']} ({row['thresholds']})" for row in rows])
        names = {f"detected_fraction{end}": f"difference{end}" for end in ("", "_low", "_high")}
        chart = draw_intervals(
            table.rename(columns=names),
            "share of collapses announced (dot, 95 %), and of other runs with a false alarm (ring)",
            pairs=table.rename(columns={"false_fraction": "difference"})[["name", "difference"]],
        )
        return charts.make_file_chart(chart)


_LOW_EVALUATION = ("first low evaluation", "published")


def _has_spoken(score: Row) -> bool:
    return bool(score["detected"] or score["false_alarms"])


@dataclass(frozen=True)
class Transfer:
    """How studies agree with themselves elsewhere."""

    places: Mapping[str, Mapping[str, Recorded]]
    """By the name of a study, its recording in each place; the first place is the one that others are compared with."""

    @cached_property
    def rows(self) -> dict[tuple[str, str], Row]:
        """The rows of `compare_places`, by study and place."""
        rows: dict[tuple[str, str], Row] = {}
        for study, (first, *others) in ((study, list(places.items())) for study, places in self.places.items()):
            table = compare_places(first[1].frames, {place: recorded.frames for place, recorded in others})
            rows |= {(study, row["place"]): row for row in to_records(table)}
        return rows

    def correlation(self, study: str, place: str) -> str:
        """Format the rank correlation of arms between a place and the first one: `+0.71 [+0.42, +0.86]`."""
        row = self.rows[study, place]
        return f"{row['rho']:+.2f} [{row['rho_low']:+.2f}, {row['rho_high']:+.2f}]".replace("-", "−")

    def table(self) -> str:
        """Make the Markdown table of all studies and places."""
        lines = [
            ("study", "place", "arms", "rank correlation", "resolved contrasts with the same sign", "95 %", "opposite"),
            *(
                (
                    study,
                    place,
                    str(row["arms"]),
                    self.correlation(study, place),
                    f"{row['same']} of {row['contrasts']}",
                    format_interval(row["same_fraction_low"], row["same_fraction_high"], format_fraction)
                    if row["contrasts"]
                    else "",
                    str(row["opposite"]),
                )
                for (study, place), row in self.rows.items()
            ),
        ]
        return make_table(lines)

    def draw(self) -> alt.TopLevelMixin:
        """Draw all rank correlations with their intervals."""
        table = pd.DataFrame(list(self.rows.values())).assign(name=[f"{study}, {place}" for study, place in self.rows])
        names = {f"rho{end}": f"difference{end}" for end in ("", "_low", "_high")}
        return charts.make_file_chart(draw_intervals(table.rename(columns=names), "rank correlation of arms"))


@dataclass(frozen=True)
class Finding:
    """A page of the gallery."""

    name: str
    order: int
    title: str
    symptoms: str
    """What a reader sees who needs the page, as phrases separated by semicolons."""
    verdict: str
    """One sentence."""
    advice: Sequence[tuple[str, str, str, str]]
    """What people advise, whether it holds here, success with and without it, and the differences if it is followed."""
    page: str
    """The whole page in Markdown."""
    trained: dict[str, Recorded] = field(repr=False)
    """The recordings of studies that were trained for it, by name."""
    figures: dict[str, Callable[[], alt.TopLevelMixin]] = field(repr=False)
    """Functions that draw its charts, by the names of their files."""


def make_table(lines: Sequence[Sequence[str]], alignment: str = "---:") -> str:
    """Make a Markdown table, whose first line has the headings. alignment: of all columns but the first."""
    rule = ("---", *[alignment] * (len(lines[0]) - 1))
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def read_findings() -> list[Finding]:
    """Make all pages from their templates and recordings, in their order."""
    return sorted(map(make_finding, TEMPLATES.glob("*.md")), key=lambda finding: finding.order)


def _compile_template(path: Path, records: dict[str, Recorded]) -> tuple[jinja2.Template, dict[str, Any]]:
    """Compile a template, and return it with the names that it may use; recordings that it reads enter `records`."""

    def record(name: str) -> Recorded:
        return records.setdefault(name, Recorded(name, read_recording(name)))

    def at_budgets(recorded: Recorded) -> Recorded:
        return Recorded(recorded.name, cut_at_budgets(recorded.frames))

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(path.read_text(encoding="utf-8"))
    return template, {"record": record, "at_budgets": at_budgets, "Alarms": Alarms, "Transfer": Transfer}


def make_finding(path: Path) -> Finding:
    """Make the page of a template from the recordings that it reads."""
    records: dict[str, Recorded] = {}
    template, names = _compile_template(path, records)
    module: Any = template.make_module(names)
    texts = {
        name: str(getattr(module, name)).strip()
        for name in ("title", "symptoms", "verdict", "claims", "reading", "limits")
    }
    texts["verdict"] = re.sub(r"\s+", " ", texts["verdict"])
    trained = {name: recorded for name, recorded in records.items() if name in module.estimates}
    figures = getattr(module, "figures", {name: recorded.draw_contrasts for name, recorded in trained.items()})
    texts |= {"preparation": getattr(module, "preparation", ""), "method": getattr(module, "method", METHOD).strip()}
    page = _compose_page(texts, records, list(figures), module.estimates)
    title, symptoms, verdict = (texts[name] for name in ("title", "symptoms", "verdict"))
    advice = [(text, *recorded.judge(contrasts)) for text, recorded, *contrasts in module.advice]
    return Finding(path.stem, module.order, title, symptoms, verdict, advice, page, trained, figures)


def _compose_page(
    texts: Mapping[str, str],
    records: Mapping[str, Recorded],
    figure_names: Sequence[str],
    estimates: Mapping[str, float],
) -> str:
    studies = {name: recorded.frames.studies[0] for name, recorded in records.items()}
    runs = [study.run for study in studies.values()]
    # Two studies of one name need folders of their own.
    typed = {
        name: f"{study.command} --output {name}" if runs.count(study.run) > 1 else study.command
        for name, study in studies.items()
    }
    commands = "\n".join(filter(None, (texts["preparation"], *typed.values())))
    costs = "\n".join(
        f"* `{typed[name]}`: {count_nouns(len(records[name].frames.trials), 'run')}, {records[name].core_seconds:,.0f} "
        f"seconds of two cores ({60 * minutes:,.0f} were expected)."
        for name, minutes in estimates.items()
    )
    questions = "".join(f"*{question}*\n\n" for question in dict.fromkeys(studies[name].question for name in estimates))
    settings = " ".join(records[name].describe_training() for name in estimates or records)
    figures = "\n\n".join(f"![{texts['title']}]({name}.svg)" for name in figure_names)
    names = ", ".join(f'"{name}"' for name in records)
    return f"""# {texts["title"]}

**{texts["verdict"]}**

When you see: {texts["symptoms"]}.

{questions}**Setting.** {settings}

## Who says what

{texts["claims"]}

## What the runs say

{texts["reading"]}

{figures}

{texts["method"]}

## What this does not show

{texts["limits"]}

## Again

```bash
{commands}
```

{costs}

The rows are recorded, and need no training:

```python
from analysis.gallery.recordings import read_recording

studies = [read_recording(name) for name in [{names}]]
```
"""


def make_index(findings: Sequence[Finding], path: Path = INDEX) -> str:
    """Make the index of all pages in Markdown: by title, with symptoms and verdicts, and by advice."""
    pages = [
        ("what you see", "page", "verdict"),
        *((finding.symptoms, f"[{finding.title}]({finding.name}.md)", finding.verdict) for finding in findings),
    ]
    advice = [
        ("advice", "here", "success ends at", "difference", "page"),
        *((*row, f"[{finding.name}]({finding.name}.md)") for finding in findings for row in finding.advice),
    ]
    trained = [recorded for finding in findings for recorded in finding.trained.values()]
    template, names = _compile_template(path, {})
    return template.render(
        names,
        pages=make_table(pages, "---"),
        advice=make_table(advice, "---"),
        runs=sum(len(recorded.frames.trials) for recorded in trained),
        hours=sum(recorded.core_seconds for recorded in trained) / 3600,
        search=format_command("findings", "collapse"),
        shared_arms=list_shared_arms(trained),
    )


def list_shared_arms(records: Sequence[Recorded]) -> list[str]:
    """List the arms that are the same runs in several studies: `` `none` of kl-form and `none` of filter-price ``."""
    names: dict[tuple[object, ...], dict[str, str]] = {}
    for recorded in records:
        steps = recorded.frames.steps.sort_values(["seed", "step"])
        for arm, rows in steps.groupby("arm", observed=True, sort=False):
            runs = (*rows["seed"], *rows["step"], *rows["train_reward"])
            names.setdefault(runs, {}).setdefault(recorded.name, f"`{arm}` of {recorded.name}")
    return [" and ".join(shared.values()) for shared in names.values() if len(shared) > 1]


def write_pages(folder: Path) -> None:
    """Write the index, all pages and their figures into a folder."""
    findings = read_findings()
    pages = {"index": make_index(findings), **{finding.name: finding.page for finding in findings}}
    for name, page in pages.items():
        with atomic_write(folder / f"{name}.md") as temp_path:
            temp_path.write_text(page, encoding="utf-8")
    for finding in findings:
        for name, draw in finding.figures.items():
            with atomic_write(folder / f"{name}.svg") as temp_path:
                temp_path.write_text(charts.make_svg_file(charts.draw_svg(charts.make_spec(draw()))), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
