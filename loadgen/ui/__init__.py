"""What results are there, and how do they compare? A folder of results as a page, kept up to date by `loadgen ui`.

Lists by the table of result kinds; serves pages on this machine only, tells nobody else, and changes no result.
"""
