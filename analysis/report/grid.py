"""stub"""

from analysis.report.section import Section

FACTORS = EDGE = Section("x", "x")
GRID_SECTIONS = ()


def describe_factors(grid):
    return []


def describe_panel_curves(grid, table, label):
    return ""
