"""Read the results of runs, and report them as tables, pages and verdicts."""
