"""Prices and what a unit of work costs under one: the price file, unit cost, the limit of money of a load.

Pure but for reading the price file. Renders nothing; whoever names money takes it from here.
"""
