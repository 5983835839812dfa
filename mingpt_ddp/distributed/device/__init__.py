"""Set up the device of a rank, compile the model for it, and measure the machine."""
