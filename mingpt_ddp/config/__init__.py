"""Every key of the configuration: schema, validation, registry, Hydra helpers."""
