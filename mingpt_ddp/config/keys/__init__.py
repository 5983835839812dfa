"""The keys of the configuration, with types and bounds."""
