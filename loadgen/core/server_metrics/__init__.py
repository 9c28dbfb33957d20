"""Read and interpret the metrics pages of servers and the sensors of their hardware."""
