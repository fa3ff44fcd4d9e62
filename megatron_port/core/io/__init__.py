"""Who this process is and how it talks to its peers: the only package that reads environment variables."""
