"""Call the user's hooks during a run."""
