"""Commands: one module each. Arguments in, exit code out."""
