"""A parameter server's state on disk, so that its death costs little or nothing.

    policy.py                the decisions, pure: when to save, whether to take an update, when to acknowledge it
    manager.py, saver.py     the shell: the methods that the service calls, and the thread that saves
    replay.py                restores a store from a generation and a log
    checkpoint_parts.py      a server's part of a checkpoint: mark, write, stage, commit
    log/                     the updates after a generation
    files/generations.py     generations: the state saved at one time, as a file of tensors and a manifest
    files/tensor_files.py    the safetensors format of both, on paths and URLs (fsspec)
    files/spill.py           the old bytes that snapshots still need
    files/roots.py           where checkpoints are allowed

A server's state on disk is a sequence of generations. A generation's manifest names the file and offset of each array;
shards that have not changed stay in the file of an earlier generation. With a log, the updates after a generation are
in segments with its number and later ones.

    directory of a server
      lock                       held by the serving process
      state-000007.manifest      a manifest; the newest whole one counts, the previous one is kept as well
      state-000007.safetensors   the shards that changed since generation 6
      log-000007.bin             the updates since generation 7 began
      losses                     the updates known to be lost

The user chooses what may be lost (`--durability`): see docs/guarantees.md.
"""
