"""The search of a sweep: its search space, and its trials in a study of Optuna."""
