"""Try the user's code for four steps before a run writes anything."""
