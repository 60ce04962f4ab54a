"""A test of saving and loading on this machine or cluster: ``selftest --dir DIR``.

Its own processes play the user: they make small DeepSpeed engines, save them and load them on
other numbers of devices, and one of them is killed. ``run`` is the story, told by whoever started
the verb: this process alone, or each rank of torchrun, which all start their part of every
world. Engines live in these *workers* only: DeepSpeed has one world in a process, a resume is one
of new processes, and a rank that torchrun started must not be the one that is killed.
"""
