"""Read runs and report them: tables, pages, verdicts."""
