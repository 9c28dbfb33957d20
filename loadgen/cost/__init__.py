"""What does it cost, how many machines does it take? `loadgen cost` and `loadgen size`, and the published figures.

Reads finished results and price files; runs a load only where `size` has to search for a capacity.
"""
