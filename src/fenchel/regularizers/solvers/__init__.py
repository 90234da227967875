"""Solvers in plain torch operations, for every device: thresholds, groups of equal entries, interior points."""
