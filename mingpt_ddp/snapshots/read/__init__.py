"""Find, check and read snapshots, and the weights in other files that `run.init_from` names."""
