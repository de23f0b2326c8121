"""What a parameter server keeps on disk, so that its death costs little or nothing.

    policy.py            the decisions: when to save, whether an update may be taken, when it may be acknowledged. Pure
    capture.py           a shard as it was at one moment, read while updates go on
    generations.py       generations: what is saved at one time, as a tensor file and a manifest
    log.py               the tail of updates after a generation
    manager.py           the shell: a thread that saves, and what the service calls
    replay.py            a store made of a generation and a log
    checkpoint_parts.py  what a server does for a checkpoint: mark, write, read beside, take the place
    tensor_files.py      the safetensors format of checkpoints, and where files lie (fsspec)
    roots.py             where checkpoints may lie

A server's state on disk is a row of generations. A generation is a manifest, which names for each shard the file and
the place where its values lie; shards that have not changed stay where an earlier generation put them. With a log, the
updates behind a generation are in segments that bear its number and later ones.

    directory of a server
      lock                       held by the process that serves
      state-000007.manifest      a manifest; the newest whole one counts, the one before is kept
      state-000007.data          what changed since generation 6
      log-000007.bin             the updates since generation 7 began
      losses                     what is known to be lost

What may be lost is the user's choice (`--durability`): see docs/guarantees.md.
"""
