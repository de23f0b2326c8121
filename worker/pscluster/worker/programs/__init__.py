"""Programs over global arrays: what they are made of, and how a worker runs them on the blocks that it holds.

`program` reads them, `operations` is the closed list of what they compute, `interpreter` runs them, `store` keeps
blocks from one program to the next, and `exchange` is how the tasks of a mesh send each other pieces.
"""
