"""Find texts, read their records, and encode them into tokens once per machine."""
