"""The device of a rank, its compiler, and the machine that it is in."""
