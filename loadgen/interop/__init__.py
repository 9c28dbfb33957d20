"""Result files of other tools: read under their own definitions, and our runs written in their formats.

A judgement: reads and writes files, runs no load, renders nothing. Knows no other judgement.
"""
