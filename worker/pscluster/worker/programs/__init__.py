"""Programs over global arrays: what they are made of, and how a worker runs them on the blocks that it holds.

`reading` reads them, `operations` is the closed list of what they compute, `interpreter` runs them, `store` keeps
blocks from one program to the next, and `exchange` is how the tasks of a mesh send each other pieces. What a task does
for itself, `once` does function by function; `stretches` plans it for programs that run again, in the order that
`scheduling` decides, with the threads of `thread_pool`.
"""
