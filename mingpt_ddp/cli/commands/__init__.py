"""The modules of the commands. Each reads its arguments and returns an exit code."""
