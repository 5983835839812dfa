"""Reading of event files."""
