"""The dry run: try the user's code for four steps before the run writes anything."""
