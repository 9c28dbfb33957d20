"""Worker processes that send a load over HTTP, and the merging of their results."""
