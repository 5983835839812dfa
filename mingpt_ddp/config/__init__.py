"""The configuration: the schema of its keys, validation, registered user code, and Hydra."""
