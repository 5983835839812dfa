"""What a search draws, records and prunes."""
