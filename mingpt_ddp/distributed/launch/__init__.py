"""Start the workers of this machine, watch them, and exchange messages with them."""
