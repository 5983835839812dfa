"""The statistics of a report."""
