"""How the ranks of an attempt find each other, exchange values, and notice a failure."""
