"""Read price files, and compute the cost of a unit of work and the budget of a load."""
