"""The section of a report on a fork: until which step each remedy was in time."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from analysis.data.frames import to_records
from analysis.data.schemas import Row
from analysis.report.common import format_p
from analysis.report.results import SweepResults
from analysis.report.section import Section, Table, TableColumn, count_of, name, number
from analysis.sweep.findings import join_words
from analysis.sweep.verdicts import explain_open, format_signed
from trainable.runs.study_record import AS_BEFORE, name_fork_arm


def summarize_remedies(results: SweepResults) -> dict[str, list[Row]]:
    """Summarize each remedy, by its name, in a row per step from which it was tried, in ascending order.

    Keys: step, remedy, the columns of its contrast with the runs that continued as before from that step, and how many
    of its `runs` and of these `before_runs` collapsed after it (`collapsed`, `before_collapsed`). A remedy without a
    scored run has none.
    """
    (family,), forks = results.frames.families, results.study.forks
    assert forks is not None, "the section is about a fork"
    contrasts = results.contrasts[results.contrasts["column"] == family.primary_column]
    rows_by_contrast = {row["contrast"]: row for row in to_records(contrasts)}
    counts = {row["arm"]: row for row in to_records(results.collapses)}
    remedies: dict[str, list[Row]] = {}
    for arm, step in sorted(forks.steps.items(), key=lambda item: item[1]):
        remedy, before = forks.get_remedy(arm), name_fork_arm(AS_BEFORE, step)
        contrast = rows_by_contrast.get(f"{remedy} from step {step}")
        if contrast is None or not {arm, before} <= counts.keys():
            continue
        collapsed = {name: counts[arm][name] for name in ("runs", "collapsed")}
        collapsed |= {f"before_{name}": counts[before][name] for name in ("runs", "collapsed")}
        remedies.setdefault(remedy, []).append({"step": step, "remedy": remedy, **contrast, **collapsed})
    return remedies


def describe_remedy(rows: Sequence[Row]) -> str:
    """Describe until which step a remedy was in time. rows: of `summarize_remedies`, for one remedy.

    It is in time until the last of the first steps from which it ended better than as before.

    Example: `Remedy kl was in time until step 20: it ended better than as before from steps 10 and 20; open from step
    30. No run of it collapsed from step 10; from step 20 1 of 3 and from step 30 3 of 3 did (as before 3 of 3).`
    """
    remedy, better = rows[0]["remedy"], list(takewhile(lambda row: row["verdict"] == "better", rows))
    steps_by_verdict: dict[str, list[Row]] = {}
    for row in rows[len(better) :]:
        steps_by_verdict.setdefault(row["verdict"], []).append(row)
    others = "".join(f"; {verdict} {_from_steps(other_rows)}" for verdict, other_rows in steps_by_verdict.items())
    if better:
        sentence = (
            f"Remedy {remedy} was in time until step {better[-1]['step']}: it ended better than as before "
            f"{_from_steps(better)}{others}."
        )
    else:
        sentence = f"Remedy {remedy} is not shown to be in time from any step{others.replace(';', ':', 1)}."
    if not any(row["before_collapsed"] for row in rows):
        return sentence
    safe, unsafe = ([row for row in rows if bool(row["collapsed"]) == is_unsafe] for is_unsafe in (False, True))
    clauses = [f"no run of it collapsed {_from_steps(safe)}"] if safe else []
    counts = [f"from step {row['step']} {row['collapsed']} of {row['runs']}" for row in unsafe]
    clauses += [f"{join_words(counts)} {'did' if safe else 'of its runs collapsed'}"] if unsafe else []
    before = dict.fromkeys(f"{row['before_collapsed']} of {row['before_runs']}" for row in rows)
    text = "; ".join(clauses)
    return f"{sentence} {text[0].upper()}{text[1:]} (as before {', '.join(before)})."


def _from_steps(rows: Sequence[Row]) -> str:
    return f"from step{'s' * (len(rows) > 1)} {join_words([str(row['step']) for row in rows])}"


def _make_tables(results: SweepResults) -> Iterator[Table]:
    rows = [row for rows in summarize_remedies(results).values() for row in rows]
    yield Table(
        [
            name("remedy", "remedy"),
            number("from step", "step", str),
            TableColumn("verdict", lambda row: str(row["verdict"]), "verdict"),
            number("minus\nas before", "difference", format_signed),
            number("Holm p", "p_holm", format_p),
            count_of("collapsed", "collapsed", "runs"),
            count_of("collapsed\nas before", "before_collapsed", "before_runs"),
        ],
        rows,
        note=explain_open(rows, "arms"),
    )


FORK: Section[SweepResults] = Section(
    "fork",
    "Until when a remedy is in time",
    sentences=lambda results: map(describe_remedy, summarize_remedies(results).values()),
    tables=_make_tables,
    explanation="All arms begin with the rows and the state of the same runs, and draw the same random numbers after "
    "that, so they differ only by the remedy. A remedy is compared with the runs that continued as before from the "
    "same step, and is in time until the last of the first steps from which it ended better. A collapse before the "
    "step of an arm is that of the forked run and does not count: a run that had collapsed collapses again only from "
    "the success that it reaches after this step.",
    when=lambda results: results.study.forks is not None,
    concludes=True,
)
