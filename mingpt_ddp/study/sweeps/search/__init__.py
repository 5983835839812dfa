"""The search of a sweep: its space, and its trials in Optuna's study."""
