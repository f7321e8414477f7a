"""Sentences made from the tables of gradient analyses."""

import pandas as pd

from analysis.gradients.plots import FILTER_LABELS
from analysis.sweep.findings import describe_span


def describe_buckets(table: pd.DataFrame, name: str) -> str:
    """Between which buckets the values of a figure lie, and how many of them are clearly above 0, by filter state.

    A value is clearly above 0 if its whole interval is. table: from `tables.make_signal_lines` or `make_share_lines`.
    name: what the values are, such as `the ratio`.
    """
    return " ".join(
        _describe_filter_state(table[table["prefilter"] == prefilter], FILTER_LABELS[bool(prefilter)], name)
        for prefilter in sorted(set(table["prefilter"]), reverse=True)
    )


def _describe_filter_state(rows: pd.DataFrame, label: str, name: str) -> str:
    names = rows["line"] + ", " + rows["bucket"].str.replace("_", " ")
    span = describe_span(pd.Series(rows["value"].to_numpy(), index=names), "bucket")
    bounded = rows.dropna(subset=["low", "high"])
    num_above = int((bounded["low"] > 0).sum())
    interval_text = (
        f"the 95 % interval is above 0 in {num_above} of {len(bounded)} that have one"
        if len(bounded)
        else "no bucket has an interval"
    )
    buckets_text = "1 bucket" if len(rows) == 1 else f"{len(rows)} buckets"
    return f"{label[0].upper()}{label[1:]}, {name} is {span}, over {buckets_text}; {interval_text}."
