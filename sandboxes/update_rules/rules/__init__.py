"""The update rules, and the quantities that their formulas share."""
