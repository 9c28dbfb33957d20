"""Results held against each other: equal work first, then each difference with its interval.

A judgement: reads finished results, runs no load and renders nothing. Knows no other judgement.
"""
