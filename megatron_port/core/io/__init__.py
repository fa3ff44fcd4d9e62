"""Files that are whole or absent, typed JSON, lines by rank."""
