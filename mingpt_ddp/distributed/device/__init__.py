"""The device of a rank, whether the model is compiled for it, and the machine it is part of."""
