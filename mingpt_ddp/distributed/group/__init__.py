"""How the ranks find each other at each start of a run, exchange values, and notice a failure."""
