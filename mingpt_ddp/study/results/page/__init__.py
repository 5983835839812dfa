"""Write the HTML page of a report."""
