"""Read and write the file formats of other tools: results, traces and data sets.

Imported results keep the definitions of the tool that wrote them.
"""
