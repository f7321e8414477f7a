"""Commands that read what a study wrote: explanations, alarms, plots and comparisons."""
