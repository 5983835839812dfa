"""What a report says of its runs: comparisons, fronts, importance, laws."""
