"""When a run saves, what it has lost, and how it resumes."""
