"""The training loop: `ClusterCoordinator.fit`, and its pieces for loops of one's own.

plan.py       where an epoch is cut into functions, and how many steps each takes: pure
fit.py        the loop
state.py      how far it is, kept with the variables
interrupts.py Ctrl-C and SIGTERM while it runs
callbacks/    what is called on the way: checkpoints, early stopping, learning rates, logs
history.py    what comes of it, and its picture
events.py     scalars for TensorBoard
"""
