"""Maps of rows: entmax and normmax, bounds and budgets, groups."""
