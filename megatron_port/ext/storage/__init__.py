"""Objects in S3-compatible and HTTP stores: read in ranges through a cache on disk, written in parts."""
