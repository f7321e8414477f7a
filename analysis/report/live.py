"""The report of a study that may still run: the page of `pages`, with the state of its runs at the top."""

from collections.abc import Sequence

from analysis.data.frames import StudyFrames, to_records
from analysis.grid.layout import name_arms
from analysis.html.page import make_environment
from analysis.report.pages import draw_figures, render_page
from trainable.runs.study_record import ENDED_STATUSES

_HEAD = '<meta name="viewport"'


class LivePage:
    """A rendered page, of which `render` returns a version that reloads itself and one that does not.

    Args:
        frames: of one study, read with `live` while a process runs it.
        metric: a column of `steps` and its heading. Its last value is shown for each run.
        is_running: whether a process runs it.
        time: when the frames were read, as text.
        problems: what was wrong with the files, as sentences.
    """

    def __init__(
        self, frames: StudyFrames, metric: tuple[str, str], is_running: bool, time: str, problems: Sequence[str]
    ) -> None:
        (study,) = frames.studies
        last_steps = frames.steps.groupby("run_id")["step"].max().to_dict() if len(frames.steps) else {}
        values = {}
        if metric[0] in frames.steps:
            measured = frames.steps.dropna(subset=metric[0])
            values = measured.groupby("run_id", sort=False)[metric[0]].last().astype(float).to_dict()
        runs = [
            {
                **{name: row[name] for name in ("arm", "seed", "status")},
                "step": int(last_steps.get(row["run_id"], 0)),
                "steps_total": row.get("steps_total"),
                "value": values.get(row["run_id"], float("nan")),
            }
            for row in to_records(name_arms(frames).runs)
        ]
        self._context = {
            "metric": metric[1],
            "title": f"{study.name} ({study.preset})",
            "is_running": is_running,
            "runs": runs,
            "ended": sum(run["status"] in (*ENDED_STATUSES, "failed") for run in runs),
            "time": time,
        }
        self._problems = tuple(problems)
        self._report = render_page(frames, draw_figures(frames), with_charts=False)

    def render(self, refresh_seconds: int | None, problem: str = "") -> str:
        """The page as HTML.

        refresh_seconds: after which a browser reloads it; None: never. problem: a further one, why it is no newer.
        """
        problems = [*self._problems, *([problem] if problem else [])]
        banner = (
            make_environment()
            .get_template("live.html.j2")
            .render(**self._context, refresh=refresh_seconds, problems=problems)
        )
        head = f'<meta http-equiv="refresh" content="{refresh_seconds}">\n{_HEAD}' if refresh_seconds else _HEAD
        return self._report.replace(_HEAD, head, 1).replace("<body>", f"<body>\n{banner}", 1)
