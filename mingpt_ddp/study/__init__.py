"""Studies of many runs: sweeps, searches, reports, plans and versions of the code."""
