from analysis.report.section import Section

GRADIENTS = Section("x", "x")
