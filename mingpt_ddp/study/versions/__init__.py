"""Compare several versions of the code, which train with the same seeds."""
