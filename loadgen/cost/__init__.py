"""What a unit of work costs: prices, measured rates, comparison of offers, capacity planning.

A judgement: reads finished results and price files, runs no load, renders nothing. Knows no other judgement.
"""
