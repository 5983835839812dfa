"""Read runs that others have made: tables, pages, tests, laws."""
