"""What a stage keeps in memory, one technique a file."""
