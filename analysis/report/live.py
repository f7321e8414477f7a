"""The report of a study that may still run, with the state of its runs at the top."""

from collections.abc import Mapping, Sequence

from analysis.data.frames import StudyFrames, to_records
from analysis.grid.layout import name_arms
from analysis.report.common import STATUS
from analysis.report.page import SectionView, render_page, view_sections
from analysis.report.pages import find_report, make_heading
from analysis.report.section import Table, TableColumn, name, number
from analysis.sweep.verdicts import format_fraction
from trainable.runs.study_record import ENDED_STATUSES

MAX_OPEN_RUNS = 40
"""A table of more runs is folded, so that the report begins on the first screen."""


class LivePage:
    """A drawn page, of which `render` returns a version that reloads itself and one that does not.

    frames: of one study, read at `time` with `live` while a process runs it. metric: a column of `steps`, of which the
    last value of each run is shown, and its heading. problems: what was wrong with the files, as sentences. time_left:
    of each run, as text by run_id, and under the empty name of the study; empty if unknown. earlier: a page whose
    report is shown below the new state of the runs, since a report takes seconds to draw.
    """

    def __init__(
        self,
        frames: StudyFrames,
        metric: tuple[str, str],
        is_running: bool,
        time: str,
        problems: Sequence[str],
        time_left: Mapping[str, str] = {},
        earlier: "LivePage | None" = None,
    ) -> None:
        (study,) = frames.studies
        last_steps = frames.steps.groupby("run_id")["step"].max().to_dict() if len(frames.steps) else {}
        # `last` leaves out missing values.
        values = frames.steps.groupby("run_id")[metric[0]].last().to_dict() if metric[0] in frames.steps else {}
        runs = [
            {**row, "step": int(last_steps.get(row["run_id"], 0)), "value": values.get(row["run_id"], float("nan"))}
            for row in to_records(name_arms(frames).runs)
        ]
        num_ended = sum(run["status"] in (*ENDED_STATUSES, "failed") for run in runs)
        table = Table(
            [
                name("arm"),
                number("seed", "seed", str),
                STATUS,
                TableColumn("step", lambda run: f"{run['step']} of {run.get('steps_total') or '–'}", "number"),
                number(metric[1], "value", format_fraction),
                *(
                    [TableColumn("time left", lambda run: time_left.get(run["run_id"], ""), "number")]
                    if time_left
                    else []
                ),
            ],
            runs,
            fold="All runs" if len(runs) > MAX_OPEN_RUNS or num_ended == len(runs) else "",
        )
        state = "running" if is_running else "not running"
        title = f"{study.name} ({study.preset}): {state}, {num_ended} of {len(runs)} runs have ended"
        title += f", about {time_left['']} left" if time_left else ""
        self._banner = SectionView("live", title, tables=[table], is_warning=True)
        self._time, self._problems = time, tuple(problems)
        if earlier is None:
            report = find_report(frames)
            results = report.make_results(name_arms(frames))
            self._heading, self._drawn_at = make_heading(report, results), time
            self._sections = view_sections(report.sections, results, with_charts=False)
        else:
            self._heading, self._drawn_at, self._sections = earlier._heading, earlier._drawn_at, earlier._sections

    def render(self, refresh_seconds: int | None, problem: str = "") -> str:
        """Render the page as HTML.

        refresh_seconds: after which a browser reloads it; None: never. problem: a further one, why it is no newer.
        """
        reload = "It does not reload by itself ([continue](/))."
        if refresh_seconds:
            reload = f"This page reloads every {refresh_seconds} s ([pause](/?pause=1))."
        drawn = "" if self._drawn_at == self._time else f" The report below was made at {self._drawn_at}."
        sentences = [f"As of {self._time}.{drawn} {reload} It changes no file.", *self._problems]
        sentences += [problem] if problem else []
        sections = [self._banner._replace(sentences=sentences), *self._sections]
        return render_page(self._heading, sections, refresh_seconds=refresh_seconds)
