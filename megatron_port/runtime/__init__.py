"""Who this process is and how it talks to its peers: the only room that reads environment variables."""
